"""Every dense parallelism with every other has the numbers of one process, in float64."""

import dataclasses
import functools
import itertools

import pytest

from composable.data.loader import DataConfig
from composable.mesh import Mesh
from composable.models.config import DecoderConfig
from composable.parallel.config import Parallel, Pipeline
from composable.parallel.split import V_SCHEDULES
from composable.recipe import Recipe
from composable.verify import compare, record
from tests.covering import Row, combinations, covering
from tests.parity import ADAMW

DIMENSIONS = ("dp_replicate", "dp_shard", "cp", "tp", "pp")
SCHEDULES = ("GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
MODEL = DecoderConfig(vocab_size=37, dim=16, layers=4, heads=8, kv_heads=2, head_dim=4, ffn=24, init_std=0.2)


def meshes(world: int) -> list[tuple[int, ...]]:
    """All degrees whose product is the world, a power of two."""
    powers = [1 << n for n in range(world.bit_length())]
    chosen = itertools.product(powers, repeat=5)
    return [d for d in chosen if functools.reduce(lambda a, b: a * b, d) == world]


def legal(row: Row) -> bool:
    return not (row["data"] == "ddp" and row["dp_shard"] != 1)


def rows_of(world: int, **factors: tuple) -> list[Row]:
    """All rows over a world; a schedule is a factor only of pipelines, a context method only of shared sequences."""
    rows = []
    for degrees in meshes(world):
        mesh = dict(zip(DIMENSIONS, degrees, strict=True))
        own = {
            "schedule": SCHEDULES if mesh["pp"] > 1 else (None,),
            "context": factors.get("context", ("all_gather",)) if mesh["cp"] > 1 else (None,),
        }
        free = {name: values for name, values in factors.items() if name != "context"} | own
        rows += [mesh | dict(zip(free, values, strict=True)) for values in itertools.product(*free.values())]
    return [row for row in rows if legal(row)]


def small_rows() -> list[Row]:
    """Every layout of up to 4 ranks, with every schedule."""
    return [row for world in (2, 4) for row in rows_of(world, data=("zero1", "zero3"), accumulate=(1, 2))]


@functools.cache
def large_rows() -> list[Row]:
    """8 ranks and all factors."""
    return rows_of(
        8,
        data=("ddp", "zero1", "zero2", "zero3"),
        accumulate=(1, 2),
        tied=(False, True),
        recompute=("none", "full", "selective"),
        compile=(False, True),
        context=("all_gather", "ring", "ulysses"),
    )


def name(row: Row) -> str:
    return "-".join(
        f"{key}={value}" for key, value in row.items() if value is True or value not in (None, False, 1, "none")
    )


def recipe_of(row: Row) -> Recipe:
    mesh = Mesh(**{name: row[name] for name in DIMENSIONS})
    pipeline = Pipeline()
    fewest = row.get("layers") or (2 if row.get("compile") else 4)  # each block takes seconds to compile
    count, layers = 2 * row["accumulate"], fewest
    if mesh.pp > 1:
        # passes through the pipeline of 2 * pp micro-batches
        pipeline = Pipeline(schedule=row["schedule"], micro_batches=2 * mesh.pp)
        count, layers = 2 * mesh.pp * row["accumulate"], max(fewest, mesh.pp * pipeline.stages_per_rank)
    parallel = Parallel(
        data=row["data"],
        recompute=row.get("recompute", "none"),
        compile=row.get("compile", False),
        context=row["context"] or "all_gather",
        loss_chunk=row.get("loss_chunk", 0),
    )
    data = DataConfig(seq_len=16, micro_batch=1, global_batch=mesh.data_ranks * count, document_mask=mesh.cp > 1)
    vocab = row.get("vocab", MODEL.vocab_size)
    model = dataclasses.replace(MODEL, layers=layers, tied=row.get("tied", False), vocab_size=vocab)
    return Recipe(
        "composition",
        model,
        dtype="float64",
        mesh=mesh,
        parallel=parallel,
        pipeline=pipeline,
        data=data,
        optimizer=ADAMW,
    )


def pytest_generate_tests(metafunc) -> None:
    """The large matrix takes seconds to choose: only when slow tests are asked for."""
    if "large" in metafunc.fixturenames:
        fast = "not slow" in metafunc.config.option.markexpr
        chosen = [] if fast else covering(large_rows(), 3)
        metafunc.parametrize("large", [pytest.param(row, id=name(row)) for row in chosen])


def check(row: Row, ranks, reference) -> None:
    recipe = recipe_of(row)
    world = recipe.mesh.world
    numbers = ranks(world, record, recipe, 2, 3, timeout=280)[0]
    result = compare(numbers, reference(recipe), 1e-9)
    assert not result.first, f"{result.first}; {result.errors}"


SMALL = small_rows()
DEFAULT = covering(SMALL, 2)


@pytest.mark.parametrize(
    "row", [pytest.param(row, id=name(row), marks=[] if row in DEFAULT else [pytest.mark.slow]) for row in SMALL]
)
def test_a_layout_of_up_to_four_ranks_has_the_numbers_of_one_process(row, ranks, reference):
    check(row, ranks, reference)


@pytest.mark.slow
def test_a_layout_of_eight_ranks_has_the_numbers_of_one_process(large, ranks, reference):
    check(large, ranks, reference)


EIGHT = [
    dict(dp_replicate=1, dp_shard=2, cp=1, tp=2, pp=2, data="zero3", accumulate=2, schedule="1F1B", context=None),
    dict(dp_replicate=1, dp_shard=1, cp=2, tp=2, pp=2, data="zero2", accumulate=1, schedule="ZBVZeroBubble")
    | dict(context="ring", tied=True, loss_chunk=5),
    dict(dp_replicate=2, dp_shard=2, cp=2, tp=1, pp=1, data="zero1", accumulate=2, schedule=None)
    | dict(context="ulysses", recompute="selective"),
    dict(dp_replicate=2, dp_shard=1, cp=1, tp=4, pp=1, data="ddp", accumulate=2, schedule=None, context=None)
    | dict(tied=True, vocab=9),  # of which the last tensor rank has no row
    dict(dp_replicate=1, dp_shard=1, cp=4, tp=2, pp=1, data="ddp", accumulate=1, schedule=None)
    | dict(context="all_gather", recompute="full", loss_chunk=3),
    dict(dp_replicate=1, dp_shard=2, cp=1, tp=1, pp=4, data="zero2", accumulate=1, schedule="InterleavedZeroBubble")
    | dict(context=None, recompute="full"),
    dict(dp_replicate=1, dp_shard=1, cp=1, tp=2, pp=4, data="zero3", accumulate=1, schedule="DualPipeV")
    | dict(context=None, tied=True),
]


@pytest.mark.parametrize("row", EIGHT, ids=name)
def test_three_dimensions_at_once_have_the_numbers_of_one_process(row, ranks, reference):
    check(row, ranks, reference)


@pytest.mark.slow
def test_code_compiled_for_a_group_that_is_gone_is_not_used_for_another(ranks, reference):
    base = dict(dp_replicate=1, dp_shard=1, cp=1, tp=1, pp=1, data="zero1", accumulate=1, schedule=None, context=None)
    for degrees in (dict(tp=4), dict(tp=2, dp_shard=2)):
        check(base | degrees | dict(compile=True, layers=1), ranks, reference)


def test_the_default_choice_has_every_pair_of_values_that_any_row_has():
    assert {c for row in DEFAULT for c in combinations(row, 2)} == {c for row in SMALL for c in combinations(row, 2)}
    assert len(DEFAULT) < len(SMALL) / 3
    assert {row["schedule"] for row in DEFAULT} >= V_SCHEDULES
