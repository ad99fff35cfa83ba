"""A run that was saved on any layout goes on on any other with the numbers of an unbroken run on one process."""

import dataclasses
import itertools
import shutil
from pathlib import Path

import numpy as np
import pytest

from composable.data.loader import DataConfig
from composable.data.token_writer import TokenWriter
from composable.mesh import Mesh
from composable.models.config import DecoderConfig
from composable.moe.config import Balance, MoEConfig
from composable.optim.optimizers import OptimizerConfig
from composable.optim.schedules import ScheduleConfig
from composable.parallel.config import Parallel, Pipeline
from composable.recipe import CheckpointConfig, Recipe
from composable.train import train
from tests.test_train import lines, same

MODEL = DecoderConfig(
    vocab_size=37,
    dim=16,
    layers=4,
    heads=4,
    kv_heads=2,
    head_dim=4,
    ffn=24,
    tied=True,
    qk_norm=True,
    init_std=0.2,
    moe=MoEConfig(
        8, 2, 8, score="sigmoid", correction=True, balance=Balance(switch=0.05, bias_rate=0.02), first_dense=1
    ),
)
Layout = tuple[Mesh, Parallel, Pipeline, CheckpointConfig]
SAVE = CheckpointConfig(every=6, keep=0)


def layout(data: str = "zero3", schedule: str = "1F1B", checkpoint: CheckpointConfig = SAVE, **mesh: int) -> Layout:
    return Mesh(**{"dp_shard": 1} | mesh), Parallel(data=data), Pipeline(schedule), checkpoint


PER_RANK = dataclasses.replace(SAVE, writer="per_rank")
BACKGROUND = dataclasses.replace(SAVE, asynchronous=True)
LAYOUTS = {
    "one process": layout(),
    "ddp 2": layout("ddp", dp_replicate=2),
    "zero1 2x2": layout("zero1", dp_replicate=2, dp_shard=2, checkpoint=BACKGROUND),
    "zero2 4": layout("zero2", dp_shard=4, checkpoint=PER_RANK),
    "zero3 2, experts 2": layout(dp_shard=2, ep=2, checkpoint=PER_RANK),
    "experts 4": layout(dp_shard=4, ep=4),
    "tensor 4": layout(tp=4, ep=2),
    "context 2, tensor 2, experts cut": layout(cp=2, tp=2, ep=2, etp=2, checkpoint=BACKGROUND),
    "pipeline 2": layout(pp=2, dp_shard=2, ep=2),
    "pipeline 2, virtual stages": layout("zero1", "Interleaved1F1B", pp=2, tp=2, checkpoint=PER_RANK),
    "pipeline 2, V": layout("zero2", "ZBVZeroBubble", pp=2, dp_shard=2),
    "pipeline 4": layout(pp=4),
}
PAIRS = list(itertools.product(LAYOUTS, LAYOUTS))
DEFAULT = [(a, list(LAYOUTS)[(5 * n + 3) % len(LAYOUTS)]) for n, a in enumerate(LAYOUTS) if n % 2 == 0]


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("text") / "text.safetensors"
    with TokenWriter(path, 37) as writer:
        writer.add(np.random.default_rng(3).integers(0, 37, 1200).astype(np.uint8))
    return str(path)


def recipe_of(text: str, out: Path, chosen: Layout, steps: int) -> Recipe:
    mesh, parallel, pipeline, checkpoint = chosen
    return Recipe(
        "any",
        MODEL,
        steps=steps,
        out=str(out),
        dtype="float64",
        mesh=mesh,
        parallel=parallel,
        pipeline=pipeline,
        data=DataConfig(path=text, seq_len=8, global_batch=8, micro_batch=1, holdout=0.1),
        optimizer=OptimizerConfig(lr=0.01),
        schedule=ScheduleConfig(kind="constant", warmup=4),
        checkpoint=checkpoint,
    )


@pytest.fixture(scope="module")
def unbroken(pool, text, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("unbroken")
    pool.run(1, train, recipe_of(text, out, LAYOUTS["one process"], 12))
    return out


@pytest.fixture(scope="module")
def saved(pool, text, tmp_path_factory):
    """Name of a layout -> a run folder with a checkpoint after 6 steps on it."""
    folders: dict[str, Path] = {}

    def run(name: str) -> Path:
        if name not in folders:
            folders[name] = tmp_path_factory.mktemp("saved")
            recipe = recipe_of(text, folders[name], LAYOUTS[name], 6)
            pool.run(recipe.mesh.world, train, recipe)
        return folders[name]

    return run


@pytest.mark.parametrize(
    ("before", "after"),
    [pytest.param(*pair, id=" -> ".join(pair), marks=[] if pair in DEFAULT else [pytest.mark.slow]) for pair in PAIRS],
)
def test_a_run_goes_on_on_another_layout(before, after, ranks, text, saved, unbroken, tmp_path):
    out = tmp_path / "run"
    shutil.copytree(saved(before), out)
    recipe = recipe_of(text, out, LAYOUTS[after], 12)
    ranks(recipe.mesh.world, train, recipe)
    same(lines(out), lines(unbroken), 1e-9)
