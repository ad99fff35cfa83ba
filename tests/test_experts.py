"""Experts with every parallelism have the numbers of one process, in float64: the correction bias included."""

import dataclasses
import functools
import itertools
import os

import pytest

from composable.moe.config import Balance, Capacity, Exploration, MoEConfig
from composable.recipe import Recipe
from composable.verify import Numbers, compare, record
from tests import test_compositions as dense
from tests.covering import Row, covering

DIMENSIONS = (*dense.DIMENSIONS, "ep", "etp")
LOSSES = Balance(switch=0.1, kl=0.05, sequence=0.05, z=0.01, bias_rate=0.01)
PLAIN = MoEConfig(8, 2, 8)
BIASED = dataclasses.replace(PLAIN, score="sigmoid", correction=True)
KINDS = {
    "no aux": PLAIN,
    "balanced": dataclasses.replace(BIASED, balance=LOSSES, shared_ffn=12, shared_gate=True, first_dense=1),
    "capacity": dataclasses.replace(PLAIN, capacity=Capacity(0.8, "drop_position"), balance=Balance(switch=0.1)),
    "next": dataclasses.replace(PLAIN, capacity=Capacity(0.8, "next"), router_bias=True),
    "global": dataclasses.replace(
        BIASED,
        balance=dataclasses.replace(LOSSES, scope="global"),
        exploration=Exploration(jitter=0.1, noise="gumbel", expert_dropout=0.1),
    ),
    "across nodes": dataclasses.replace(PLAIN, dispatcher="hierarchical", balance=Balance(switch=0.1)),
    "static": dataclasses.replace(PLAIN, dispatcher="static", capacity=Capacity(0.8), balance=Balance(switch=0.1)),
}


def expert_degrees(mesh: dict) -> list[tuple[int, int]]:
    """All (ep, etp) that a mesh and 8 experts allow."""
    ranks = mesh["dp_shard"] * mesh["cp"] * mesh["tp"]
    return [(ep, etp) for etp in sorted({1, mesh["tp"]}) for ep in (1, 2, 4, 8) if ranks % (ep * etp) == 0]


def rows_of(world: int, **factors: tuple) -> list[Row]:
    """All rows over a world, with every share of the experts."""
    rows = dense.rows_of(world, **factors)
    return [row | {"ep": ep, "etp": etp} for row in rows for ep, etp in expert_degrees(row)]


def small_rows() -> list[Row]:
    """Every mesh of up to 4 ranks, with every balance and recomputation; schedules take turns."""
    rows, turn = [], itertools.cycle(dense.SCHEDULES)
    for world in (2, 4):
        for row in rows_of(world, data=("zero3",), kind=("no aux", "balanced", "capacity"), recompute=("none", "full")):
            if row["schedule"] in (None, dense.SCHEDULES[0]):
                rows.append(row | {"schedule": row["schedule"] and next(turn)})
    return rows


@functools.cache
def large_rows() -> list[Row]:
    """8 ranks."""
    return rows_of(8, data=("zero1", "zero3"), kind=("no aux", "balanced", "capacity"), recompute=("none", "full"))


def recipe_of(row: Row) -> Recipe:
    """The recipe of dense compositions, with experts."""
    recipe = dense.recipe_of({"accumulate": 1} | row)
    model = dataclasses.replace(recipe.model, moe=KINDS[row["kind"]], qk_norm=True)
    mesh = dataclasses.replace(recipe.mesh, ep=row["ep"], etp=row["etp"])
    return dataclasses.replace(recipe, model=model, mesh=mesh)


def check(recipe: Recipe, ranks, reference) -> None:
    numbers = ranks(recipe.mesh.world, record, recipe, 2, 3, timeout=280)[0]
    result = compare(numbers, reference(recipe), 1e-9)
    assert not result.first, f"{result.first}; {result.errors}"


SMALL = small_rows()
DEFAULT = covering(SMALL, 2)


@pytest.mark.parametrize(
    "row",
    [pytest.param(row, id=dense.name(row), marks=[] if row in DEFAULT else [pytest.mark.slow]) for row in SMALL],
)
def test_experts_on_up_to_four_ranks_have_the_numbers_of_one_process(row, ranks, reference):
    check(recipe_of(row), ranks, reference)


def pytest_generate_tests(metafunc) -> None:
    """The large matrix takes seconds to choose: only when slow tests are asked for."""
    if "large" in metafunc.fixturenames:
        fast = "not slow" in metafunc.config.option.markexpr
        chosen = [] if fast else covering(large_rows(), 3)
        metafunc.parametrize("large", [pytest.param(row, id=dense.name(row)) for row in chosen])


@pytest.mark.slow
def test_experts_on_eight_ranks_have_the_numbers_of_one_process(large, ranks, reference):
    check(recipe_of(large), ranks, reference)


EIGHT = [
    dict(dp_replicate=1, dp_shard=2, cp=1, tp=2, pp=2, ep=2, etp=2, data="zero3", kind="global", schedule="1F1B"),
    dict(dp_replicate=1, dp_shard=1, cp=2, tp=2, pp=2, ep=4, etp=1, data="zero2", kind="next", schedule="ZBVZeroBubble")
    | dict(context="ring"),
    dict(dp_replicate=2, dp_shard=2, cp=2, tp=1, pp=1, ep=4, etp=1, data="zero1", kind="global", recompute="selective")
    | dict(context="ulysses"),
    dict(dp_replicate=2, dp_shard=1, cp=1, tp=4, pp=1, ep=2, etp=1, data="ddp", kind="next", recompute="full"),
    dict(dp_replicate=1, dp_shard=8, cp=1, tp=1, pp=1, ep=8, etp=1, data="zero3", kind="balanced"),
    dict(dp_replicate=1, dp_shard=2, cp=1, tp=2, pp=2, ep=2, etp=1, data="zero2", kind="capacity")
    | dict(schedule="InterleavedZeroBubble", recompute="selective"),
    dict(
        dp_replicate=1, dp_shard=1, cp=1, tp=2, pp=4, ep=2, etp=1, data="zero3", kind="balanced", schedule="DualPipeV"
    ),
    dict(dp_replicate=1, dp_shard=2, cp=2, tp=2, pp=1, ep=2, etp=2, data="zero3", kind="static", context="all_gather"),
]


@pytest.mark.parametrize("row", EIGHT, ids=dense.name)
def test_experts_with_everything_at_once_have_the_numbers_of_one_process(row, ranks, reference):
    check(recipe_of({"schedule": None, "context": None} | row), ranks, reference)


def record_on_nodes(recipe: Recipe, ranks_per_node: int) -> Numbers | None:
    """`record` on machines of so many ranks."""
    os.environ["LOCAL_WORLD_SIZE"] = str(ranks_per_node)
    return record(recipe, 2, 3)


@pytest.mark.parametrize(
    "row",
    [
        dict(dp_replicate=1, dp_shard=8, cp=1, tp=1, pp=1, ep=8, etp=1, data="zero3", recompute="full"),
        dict(dp_replicate=1, dp_shard=4, cp=1, tp=2, pp=1, ep=4, etp=2, data="zero2"),
    ],
    ids=dense.name,
)
def test_tokens_that_cross_two_nodes_of_four_once_give_the_same_numbers(row, ranks, reference):
    recipe = recipe_of({"schedule": None, "context": None, "kind": "across nodes"} | row)
    numbers = ranks(8, record_on_nodes, recipe, 4)[0]
    result = compare(numbers, reference(recipe), 1e-9)
    assert not result.first, f"{result.first}; {result.errors}"
