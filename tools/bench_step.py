"""Tokens per second of a recipe's optimizer steps, alone or in turn with another command.

    torchrun --standalone --nproc-per-node 2 tools/bench_step.py recipes/dense_debug.py --parallel.data ddp
    python tools/bench_step.py recipes/dense_debug.py --ranks 2 --versus 'torchrun --standalone ... other.py'

Started by torchrun it measures and prints a line `BENCH {json}`. Started alone it starts itself by torchrun, in turn
with the other command (which prints such lines with "tok_s"), round after round, and prints medians and their ratio.
Options that are not listed are the recipe's.
"""

import json
import os
import shlex
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Annotated

import torch.distributed as dist
import tyro

from composable.data.loader import accumulation, build_loader
from composable.mesh import distributed
from composable.models.count import flops_per_token
from composable.optim.optimizers import build_optimizer
from composable.recipe import Recipe, command_line, recipe_of
from composable.report import device_peak
from composable.state import Corpus
from composable.step import train_step
from composable.train import build_model


@dataclass(frozen=True)
class Options:
    """What is measured, and how often."""

    recipe: Annotated[Path, tyro.conf.Positional]
    """recipe script"""
    ranks: int = 1
    """processes, when started alone"""
    rounds: int = 5
    """rounds of each side, when started alone"""
    steps: int = 20
    """measured steps of a round"""
    warmup: int = 4
    """steps before them"""
    versus: str = ""
    """command to measure in turn with"""


def measure(options: Options, recipe: Recipe) -> dict[str, object]:
    """The steps of one process group, timed one by one; every rank gets rank 0's numbers."""
    with distributed() as device:
        recipe, _ = recipe.resolve(dist.get_world_size())
        data, mesh, rank = recipe.data, recipe.mesh, dist.get_rank()
        corpus = Corpus.open(data, recipe.model.vocab_size)
        model = build_model(recipe, device)
        optimizer = build_optimizer(model.parts, recipe.optimizer, only=model.named)
        ranks = {"data_rank": mesh.data_rank(rank), "data_ranks": mesh.data_ranks}
        batches, count = (
            build_loader(corpus.train, data, seed=recipe.seed, **ranks),
            accumulation(data, mesh.data_ranks),
        )
        seconds = []
        for step in range(1, options.warmup + options.steps + 1):
            began = time.perf_counter()
            result = train_step(
                model,
                optimizer,
                list(islice(batches, count)),
                step=step,
                lr=recipe.peak_lr,
                max_norm=recipe.optimizer.max_norm,
            )
            seconds.append(time.perf_counter() - began)
        timed = seconds[options.warmup :]
        rate = result.tokens * len(timed) / sum(timed)
        out: dict[str, object] = {
            "name": recipe.name,
            "layout": f"{recipe.parallel.data}: {mesh}",
            "tok_s": rate,
            "step_ms": 1e3 * statistics.median(timed),
            "last_loss": result.loss,
            "rank": rank,
        }
        peak = device_peak(recipe, device)
        if peak is not None:
            out["mfu"] = rate * flops_per_token(recipe.model, data.seq_len) / (peak * dist.get_world_size())
        return out


def tokens_per_second(command: list[str]) -> float:
    """Run a command and read the rate of its last BENCH line, whatever comes after it.

    Raises:
        ValueError: it printed no such line, with the end of what it printed.
    """
    done = subprocess.run(command, capture_output=True, text=True)
    found = done.stdout.rpartition("BENCH ")[2] if "BENCH " in done.stdout else ""
    if not found:
        raise ValueError(f"{shlex.join(command)} gave {done.returncode} and no BENCH line:\n{done.stderr[-2000:]}")
    return float(json.JSONDecoder().raw_decode(found)[0]["tok_s"])


def in_turn(options: Options, ours: list[str]) -> None:
    """Round after round, ours and theirs; medians, and ours over theirs."""
    sides = {"ours": ours} | ({"versus": shlex.split(options.versus)} if options.versus else {})
    rates: dict[str, list[float]] = {side: [] for side in sides}
    for number in range(1, options.rounds + 1):
        for side, command in sides.items():
            rates[side].append(tokens_per_second(command))
        print(f"round {number}: " + ", ".join(f"{side} {rate[-1]:,.0f} tokens/s" for side, rate in rates.items()))
    medians = {side: statistics.median(rate) for side, rate in rates.items()}
    print("medians: " + ", ".join(f"{side} {rate:,.0f} tokens/s" for side, rate in medians.items()))
    if options.versus:
        print(f"ratio of medians: {medians['ours'] / medians['versus']:.3f}")


def main() -> None:
    options, rest = tyro.cli(Options, description=__doc__, return_unknown_args=True)
    try:
        recipe = command_line(recipe_of(options.recipe), rest)
        if "RANK" in os.environ:
            print(f"BENCH {json.dumps(measure(options, recipe))}", flush=True)
        else:
            launch = [
                sys.executable,
                "-m",
                "torch.distributed.run",
                "--standalone",
                f"--nproc-per-node={options.ranks}",
            ]
            in_turn(options, [*launch, *sys.argv])
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from error


if __name__ == "__main__":
    main()
