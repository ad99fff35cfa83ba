"""Run a recipe's real code as chosen ranks of any world, on a CPU without peers: what it would hold and exchange.

    python tools/dryrun.py recipes/dense_1b.py --world 64 --rank 0,7 --mesh.tp 8

Each rank builds and composes its part of the model and makes one step, on tensors that have a shape and no memory.
Shown are the bytes of tensors by part when most is held, each collective of the step, what the rank would write of a
checkpoint, and the error it would end with. Options that are not listed are the recipe's.

Exit code 0: all ranks ran; 1: one needs more memory than --memory; 2: one would end with an error when it is set up, or
an option is wrong.
"""

import dataclasses
import json
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from composable.checkpoint.budget import parse_size, size_text
from composable.dryrun.run import RankReport, Report, dry_run
from composable.recipe import command_line, recipe_of


@dataclass(frozen=True)
class Options:
    """What is run."""

    recipe: Annotated[Path, tyro.conf.Positional]
    """recipe script"""
    world: int
    """number of ranks"""
    rank: str = ""
    """ranks to run, such as 0,7,8-11; empty: the first of each part of a pipeline of up to 4; of a longer one, of the
    part that is predicted to hold most and of the last"""
    load: str = "even"
    """choices of experts: even, largest load over mean (expert 0 has the largest), or a JSON file of counts by expert,
    or by layer and expert"""
    ranks_per_node: int = 8
    """consecutive ranks of a node"""
    memory: str = ""
    """of a device, such as 80GB: exit code 1 if a rank holds more; what torch's allocator wastes comes on top"""
    checkpoint: bool = True
    """also plan a checkpoint, for which a rank of every pipeline stage is built"""
    jobs: int = os.cpu_count() or 1
    """processes that run ranks beside each other"""
    json: Path | None = None
    """file to which everything is written too"""


def main() -> None:
    options, rest = tyro.cli(Options, description=__doc__, return_unknown_args=True)
    began = time.perf_counter()
    try:
        limit = parse_size(options.memory) if options.memory else 0
        recipe = command_line(recipe_of(options.recipe), rest)
        report = dry_run(
            recipe,
            options.world,
            parse_ranks(options.rank) if options.rank else None,
            load=options.load,
            ranks_per_node=options.ranks_per_node,
            checkpoint=options.checkpoint,
            jobs=options.jobs,
            say=lambda text: print(f"  {text}", file=sys.stderr, flush=True),
        )
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from error
    if options.json is not None:
        options.json.write_text(json.dumps(as_values(report), indent=2) + "\n")
    print("\n".join([*lines(report), f"{time.perf_counter() - began:.0f} s"]))
    for rank in report.ranks:
        if rank.error:
            print(f"[rank {rank.rank}] error: {rank.error}", file=sys.stderr)
    if any(rank.error for rank in report.ranks):
        raise SystemExit(2)
    most = max(report.ranks, key=lambda rank: rank.peak)
    if limit and most.peak > limit:
        print(f"rank {most.rank} holds {size_text(most.peak)}, and a device {size_text(limit)}", file=sys.stderr)
        raise SystemExit(1)


def parse_ranks(text: str) -> list[int]:
    """`0,7,8-11` -> [0, 7, 8, 9, 10, 11]; ValueError for what is no such list."""
    ranks: list[int] = []
    for word in text.split(","):
        first, dash, last = word.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise ValueError(f"--rank {text}: write numbers and ranges, as 0,7,8-11")
        ranks += range(int(first), int(last if dash else first) + 1)
    return ranks


def as_values(report: Report) -> dict[str, object]:
    """All of a report, as JSON has it."""
    values = dataclasses.asdict(report)
    for rank, values_of_rank in zip(report.ranks, values["ranks"], strict=True):
        values_of_rank["peak"] = rank.peak
    return values


def lines(report: Report) -> list[str]:
    """A report as a table."""
    out = [f"{report.name} on {report.world} ranks: {report.mesh}"]
    out += [f"  note: {remark}" for remark in report.remarks]
    for rank in report.ranks:
        out += of_rank(rank)
    if report.checkpoint_files:
        out.append(f"a checkpoint has {size_text(report.checkpoint_bytes)} in {report.checkpoint_files} files")
    return out


def of_rank(rank: RankReport) -> list[str]:
    """The table of one rank."""
    place = ", ".join(f"{name} {index}" for name, index in rank.place.items())
    out = ["", f"rank {rank.rank}" + (f" ({place})" if place else "")]
    if rank.error:
        return [*out, f"  error: {rank.error}"]
    out.append(f"  {'memory':<16}{'at the peak':>14}{'between steps':>16}")
    for part, size in rank.at_peak.items():
        if size or rank.held[part]:
            out.append(f"  {part:<16}{size_text(size):>14}{size_text(rank.held[part]):>16}")
    out.append(f"  {'all':<16}{size_text(rank.peak):>14}{size_text(sum(rank.held.values())):>16}")
    out.append(f"  {'collective':<16}{'group':<24}{'ranks':>6}{'calls':>8}{'bytes':>12}")
    for each in rank.collectives:
        out.append(f"  {each.kind:<16}{each.group:<24}{each.ranks:>6}{each.count:>8}{size_text(each.bytes):>12}")
    if rank.saved is not None:
        out.append(f"  writes {size_text(rank.saved.bytes)} of a checkpoint into {rank.saved.files} files")
    return out


if __name__ == "__main__":
    main()
