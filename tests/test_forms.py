"""Windows, sinks, post-norm and a norm over all heads have, in every layout, the numbers of one process in float64."""

import dataclasses

import pytest
import torch
import torch.distributed as dist

from composable.checkpoint.shards import Box, local_box
from composable.mesh import Mesh
from composable.models.decoder import Decoder
from composable.parallel.for_ranks import Layout, held_boxes
from composable.recipe import Recipe, command_line
from composable.shrink import shrink
from composable.train import build_model
from composable.verify import compare, record
from tests import test_compositions as dense
from tests.covering import Row

GPT = dict(window=5, window_layers=(0, 2), sinks=True, qkv_bias=True, output_bias=True)
OLMO = dict(norm_place="post", qk_norm=True, qk_norm_wide=True)
ONE = dict.fromkeys(dense.DIMENSIONS, 1) | dict(data="zero3", accumulate=1, schedule=None, context=None)
ROWS = {
    "window, sinks: all_gather": (GPT, dict(cp=2, tp=2, context="all_gather")),
    "window, sinks: ring": (GPT, dict(cp=2, tp=2, context="ring")),
    "window, sinks: ulysses": (GPT, dict(cp=2, tp=2, context="ulysses")),
    "window, sinks: ring of 4, recomputed": (GPT, dict(cp=4, context="ring", recompute="full")),
    "narrow window: all_gather of 4": (dict(window=2), dict(cp=4, context="all_gather", recompute="selective")),
    "window, sinks: shared heads, stages": (GPT, dict(tp=4, pp=2, schedule="1F1B")),
    "all of them: compiled": (GPT | OLMO, dict(dp_shard=2, tp=2, compile=True, layers=4, recompute="selective")),
    "post-norm, wide norm: shared heads": (OLMO, dict(tp=4, dp_shard=2)),
    "post-norm, wide norm: stages": (OLMO, dict(tp=2, pp=2, schedule="ZBVZeroBubble")),
    "wide norm: three heads of keys for six": (
        OLMO | dict(norm_place="pre", heads=6, kv_heads=3),
        dict(tp=2, dp_shard=2, recompute="selective"),
    ),
    "all of them: ring": (GPT | OLMO, dict(tp=2, cp=2, context="ring")),
}


def recipe_of(form: dict, row: Row) -> Recipe:
    """The recipe of dense compositions, with the form."""
    recipe = dense.recipe_of(ONE | row)
    return dataclasses.replace(recipe, model=dataclasses.replace(recipe.model, **form))


@pytest.mark.parametrize("name", ROWS)
def test_a_form_of_attention_has_the_numbers_of_one_process(name, ranks, reference):
    recipe = recipe_of(*ROWS[name])
    numbers = ranks(recipe.mesh.world, record, recipe, 2, 3, timeout=280)[0]
    result = compare(numbers, reference(recipe), 1e-9)
    assert not result.first, f"{result.first}; {result.errors}"


def boxes_of(recipe: Recipe) -> dict[str, Box]:
    """What this rank holds of each weight."""
    recipe, _ = recipe.resolve(dist.get_world_size())
    return {name: local_box(tensor) for name, tensor in build_model(recipe, torch.device("cpu")).saved.items()}


@pytest.mark.parametrize(("form", "tp"), [(GPT, 2), (OLMO, 2), (GPT | OLMO, 4)], ids=["sinks", "wide", "shared heads"])
def test_files_for_ranks_hold_what_tensor_ranks_hold(form, tp, ranks):
    recipe = recipe_of(form, dict(tp=tp))
    shapes = {name: tuple(parameter.shape) for name, parameter in Decoder(recipe.model).named_parameters()}
    held = held_boxes(recipe.model, shapes, Layout(tp=tp))
    assert ranks(tp, boxes_of, recipe) == [held[f"pp0-tp{rank}"] for rank in range(tp)]


def test_a_shrunk_recipe_keeps_its_forms():
    recipe = recipe_of(GPT | OLMO, dict(tp=2))
    for layers in ((0, 2), (30, 31)):  # of the lower layers, and of the upper ones alone
        model = dataclasses.replace(recipe.model, layers=32, window=128, window_layers=layers)
        tiny = shrink(dataclasses.replace(recipe, model=model), Mesh(dp_shard=1, tp=2)).model
        assert 0 < tiny.window < 16
        assert 0 < len(tiny.window_layers) < tiny.layers < 32
        assert tiny.sinks
        assert tiny.norm_place == "post"


def test_layers_with_a_window_are_an_option_of_the_command_line():
    options = ["--model.window", "4", "--model.window-layers", "0", "2"]
    assert command_line(recipe_of({}, {}), options).model.window_layers == (0, 2)
