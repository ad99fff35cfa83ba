"""Which layout of a recipe fits a cluster, and which is the fastest: arithmetic, before a machine is rented.

    python tools/plan.py recipes/dense_70b.py --gpus 64 --device H100
    python tools/plan.py recipes/dense_70b.py --gpus 64 --device H100 --explain tp=8,data=zero3,recompute=full
    python tools/plan.py recipes/moe_8x7b.py --gpus 64 --device H100 --cluster across=25GB --png plan.png

All legal layouts are looked at; of those that fit, the fastest are shown with memory, bubble, traffic and time of a
step, the options to paste, and why: what led to the first, and what stands against those next to it. `--explain` works
out one layout (`own`: the recipe's). Options that are not listed are the recipe's.

Exit code 0: something fits; 1: nothing does, and what would help is said; 2: an option is wrong.
"""

import dataclasses
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from tqdm import tqdm

from composable.plan import advice, picture, report
from composable.plan.devices import Cluster, cluster
from composable.plan.layout import Layout
from composable.plan.search import Candidate, Space, search, work_out
from composable.recipe import Recipe, command_line, recipe_of


@dataclass(frozen=True)
class Options:
    """What is planned."""

    recipe: Annotated[Path, tyro.conf.Positional]
    """recipe script"""
    gpus: int
    """number of devices"""
    device: str = "H100"
    """A100-80G, H100, H200, B200, MI300X or cpu"""
    cluster: tuple[str, ...] = ()
    """changes to device and links, such as across=25GB memory=40GiB achievable=0.6"""
    gpus_per_node: int = 0
    """devices of a node; 0: as many as are usual for the device"""
    global_batch: int = 0
    """rows of a step; 0: the recipe's"""
    load: float = 1.0
    """rows that the experts of the fullest rank get, over an even share"""
    top: int = 5
    """layouts that are shown"""
    micro_batch: tuple[int, ...] = Space.micro_batch
    """rows that pass the model together: those that are tried"""
    schedule: tuple[str, ...] = Space.schedule
    """pipeline schedules that are tried"""
    offload: bool = False
    """parameters, gradients and optimizer state in host memory"""
    explain: str = ""
    """one layout to work out, such as tp=8,pp=4,data=zero1,recompute=full,micro_batch=2; own: the recipe's"""
    png: Path | None = None
    """picture of the first layout: memory of each rank of the pipeline, and the timeline of a step"""
    json: Path | None = None
    """file to which everything is written too"""


def main() -> None:
    options, rest = tyro.cli(Options, description=__doc__, return_unknown_args=True)
    try:
        code = plan(options, rest)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from error
    raise SystemExit(code)


def plan(options: Options, rest: list[str]) -> int:
    """Print what is asked for; gives the exit code."""
    if options.gpus < 1:
        raise ValueError(f"--gpus {options.gpus}: a number of devices is 1 or more")
    words = ["--data.global-batch", str(options.global_batch)] if options.global_batch else []
    recipe = command_line(recipe_of(options.recipe), [*rest, *words])
    nodes = cluster(options.device, options.cluster)
    if options.gpus_per_node:
        nodes = dataclasses.replace(nodes, per_node=options.gpus_per_node)
    print(report.headline(recipe, options.gpus, nodes))
    if options.explain:
        text = "" if options.explain == "own" else options.explain
        one = work_out(Layout.parse(text, recipe), recipe, options.gpus, nodes, options.load)
        print("\n".join(report.explained(one, recipe, nodes)))
        return _finish(options, recipe, nodes, [one], [], int(one.worst.total > nodes.device.usable))
    space = Space(options.micro_batch, schedule=options.schedule, offload=options.offload)
    with tqdm(desc="layouts", disable=None, leave=False) as bar:

        def advance(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        found = search(recipe, options.gpus, nodes, space=space, top=options.top, load=options.load, advance=advance)
    print("\n".join(report.counted(found)))
    why = advice.way(recipe, options.gpus, nodes, options.load)
    if not found.best:
        help_ = advice.remedies(recipe, options.gpus, nodes, space, options.load)
        print("\n".join(["nothing fits", *report.listed("why", why), *report.listed("what would help", help_)]))
        return _finish(options, recipe, nodes, [], [*why, *help_], 1)
    first = found.best[0]
    beside = advice.neighbours(first, recipe, options.gpus, nodes, options.load)
    print(
        "\n".join(
            ["", *report.table(found.best), "", f"options of the first: {report.said_options(first.layout, recipe)}"]
        )
    )
    print("\n".join([*report.listed("why", why), *report.beside(beside)]))
    return _finish(options, recipe, nodes, list(found.best), why, 0)


def _finish(options: Options, recipe: Recipe, nodes: Cluster, found: list[Candidate], why: list[str], code: int) -> int:
    if options.json is not None:
        facts = {"layouts": [report.as_values(each, recipe, nodes) for each in found], "why": why}
        options.json.write_text(json.dumps(facts, indent=2) + "\n")
    if options.png is not None and found:
        picture.draw(found[0], options.png)
        print(f"picture: {options.png}")
    return code


if __name__ == "__main__":
    main()
