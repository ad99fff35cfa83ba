"""Biased, clamped and fused experts have the numbers of one process with every parallelism, in float64."""

import dataclasses

import pytest

from composable.moe.config import Balance, Capacity, MoEConfig, gpt_oss
from composable.recipe import Recipe
from composable.verify import compare, record
from tests import test_compositions as dense
from tests import test_experts as experts

LIMIT = 0.05  # hidden values of these tiny models meet it
OSS = gpt_oss(8, 2, 8, LIMIT)
SPLIT = MoEConfig(8, 2, 8, expert_bias=True, swiglu_limit=LIMIT)
KINDS = {
    "gpt_oss": OSS,
    "split": dataclasses.replace(SPLIT, balance=Balance(switch=0.1, z=0.01), first_dense=1),
    "static": dataclasses.replace(OSS, dispatcher="static", capacity=Capacity(0.8)),
    "across nodes": dataclasses.replace(OSS, dispatcher="hierarchical"),
    "static split": dataclasses.replace(SPLIT, dispatcher="static", capacity=Capacity(0.8)),
}
ONE = dict(dp_replicate=1, dp_shard=1, cp=1, tp=1, pp=1, ep=1, etp=1, data="zero3", schedule=None, context=None)
ROWS = [
    dict(dp_shard=2, ep=2, kind="gpt_oss"),
    dict(dp_shard=2, tp=2, ep=2, etp=2, kind="gpt_oss", recompute="full"),
    dict(dp_shard=2, tp=2, ep=1, etp=2, kind="split", data="zero1"),
    dict(dp_shard=4, ep=2, kind="static"),
    dict(dp_shard=2, tp=2, ep=1, etp=2, kind="static split"),
    dict(dp_shard=4, ep=4, kind="across nodes", data="zero2"),
    dict(dp_replicate=2, dp_shard=2, ep=2, kind="split"),
    dict(pp=2, tp=2, ep=2, kind="gpt_oss", schedule="1F1B"),
]


def recipe_of(row: dict) -> Recipe:
    """The recipe of other experts, with these."""
    recipe = experts.recipe_of(ONE | row | {"kind": "no aux"})
    return dataclasses.replace(recipe, model=dataclasses.replace(recipe.model, moe=KINDS[row["kind"]]))


@pytest.mark.parametrize("row", ROWS, ids=lambda row: dense.name(ONE | row))
def test_expert_forms_on_many_ranks_have_the_numbers_of_one_process(row, ranks, reference):
    recipe = recipe_of(row)
    numbers = ranks(recipe.mesh.world, record, recipe, 2, 3, timeout=280)[0]
    result = compare(numbers, reference(recipe), 1e-9)
    assert not result.first, f"{result.first}; {result.errors}"
    moved = [name for name, gradient in numbers.gradients[0].items() if "experts" in name and gradient.any()]
    assert {name.rpartition(".")[2] for name in moved} >= {"down_proj", "down_bias"}
