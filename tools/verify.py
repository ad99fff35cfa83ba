"""The proof as a command: does a recipe's layout compute what one process computes?

    torchrun --standalone --nproc-per-node 8 tools/verify.py recipes/dense_1b.py --mesh.tp 2 --mesh.dp-shard 4

The recipe is shrunk to a size that runs anywhere (`--full` keeps it), trained on the layout and on one process, and
every number is compared: loss, gradient norm, each gradient, each weight. On disagreement the first step and tensor are
named, and the dimension of the mesh that is to blame; the exit code is 1. Options that are not listed are the recipe's.
"""

import dataclasses
import json
import os
import pickle
import sys
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Annotated, TypeVar

import torch.distributed as dist
import tyro
from torch.distributed.rendezvous import rendezvous

from composable._torch import forget_process_groups
from composable.recipe import Recipe, command_line, recipe_of
from composable.shrink import shrink
from composable.verify import Comparison, compare, model_of, record, reference_of, suspects

T = TypeVar("T")
EXACT = ("--dtype", "float64", "--parallel.precision", "none", "--parallel.reduce", "float32")
"""a layout is proved without the rounding that mixed precision would hide behind"""


@dataclass(frozen=True)
class Options:
    """What is verified, and how closely."""

    recipe: Annotated[Path, tyro.conf.Positional]
    """recipe script"""
    steps: int = 3
    """optimizer steps that are compared"""
    tolerance: float = 0.0
    """largest error that passes; 0: 1e-9 in float64, 1e-5 otherwise"""
    full: bool = False
    """keep the recipe's size"""
    report: Path = Path("verify.json")
    """where the result is written"""


class Worlds:
    """Process groups of any size over the first ranks of the job, one after another, while the other ranks wait."""

    def __init__(self) -> None:
        if "RANK" in os.environ:
            self.store, self.rank, self.size = next(iter(rendezvous("env://", timeout=timedelta(minutes=30))))
        else:
            self.store, self.rank, self.size = dist.HashStore(), 0, 1
        self.count = 0

    def run(self, size: int, function: Callable[[], T]) -> T:
        """Call `function` on the ranks below `size` with a default process group of them; rank 0's result for all.

        Raises:
            RuntimeError: on the ranks that waited, if rank 0 failed.
        """
        self.count += 1
        key, result = f"result-{self.count}", None
        if self.rank < size:
            group = dist.PrefixStore(f"world-{self.count}", self.store)
            dist.init_process_group("gloo", store=group, rank=self.rank, world_size=size)
            try:
                result = function()
            except Exception as error:
                if self.rank == 0:
                    self.store.set(key, pickle.dumps((False, f"{type(error).__name__}: {error}")))
                raise
            finally:
                dist.destroy_process_group()
                forget_process_groups()
            if self.rank == 0:
                self.store.set(key, pickle.dumps((True, result)))
        self.store.wait([key], timedelta(minutes=60))
        fine, value = pickle.loads(self.store.get(key))
        if not fine:
            raise RuntimeError(f"rank 0: {value}")
        return value


def verify(recipe: Recipe, options: Options, worlds: Worlds) -> tuple[Comparison, list[str]]:
    """The comparison, and the dimensions to blame if it fails; the same on every rank."""
    tolerance = options.tolerance or (1e-9 if recipe.dtype == "float64" else 1e-5)
    kept: dict[str, object] = {}

    def measured(changed: Recipe, size: int) -> Comparison:
        ours = worlds.run(size, lambda: _keep(kept, "ours", record(changed, options.steps)))
        del ours
        worlds.run(1, lambda: _keep(kept, "reference", record(reference_of(changed), options.steps)))
        return worlds.run(1, lambda: compare(kept["ours"], kept["reference"], tolerance))  # type: ignore[arg-type]

    result = measured(recipe, worlds.size)
    blamed = suspects(recipe, lambda changed, size: bool(measured(changed, size).first)) if result.first else []
    return result, blamed


def _keep(kept: dict[str, object], name: str, value: object) -> None:
    kept[name] = value  # stays on its rank: the numbers of a whole model do not belong in a store


def main() -> None:
    options, rest = tyro.cli(Options, description=__doc__, return_unknown_args=True)
    worlds = Worlds()
    say = print if worlds.rank == 0 else lambda *_: None
    try:
        recipe = command_line(recipe_of(options.recipe), [*EXACT, *rest])
        mesh = recipe.mesh.resolve(worlds.size, replicate=recipe.parallel.data == "ddp")
        recipe = dataclasses.replace(recipe, mesh=mesh)
        recipe = recipe if options.full else shrink(recipe, mesh)
        recipe, _ = recipe.resolve(worlds.size)
    except ValueError as error:
        print(f"[rank {worlds.rank}] error: {error}", file=sys.stderr)
        raise SystemExit(2) from error
    say(f"verify {recipe.name} ({model_of(recipe.model)}) on {mesh}, {recipe.parallel.data}, against one process")
    result, blamed = verify(recipe, options, worlds)
    for group, error in result.errors.items():
        say(f"  {group:<22} {error:.2e}")
    if worlds.rank == 0:
        facts = {"recipe": recipe.options(), **dataclasses.asdict(result), "suspects": blamed}
        options.report.write_text(json.dumps(facts, indent=2) + "\n")
    if not result.first:
        say(f"agrees: worst error {result.worst:.2e} ({options.report})")
        return
    say(f"DISAGREES, first at {result.first}\nto blame: {', '.join(blamed)} ({options.report})")
    raise SystemExit(1)


if __name__ == "__main__":
    main()
