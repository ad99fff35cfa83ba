"""Latent attention with every parallelism has the numbers of one process, in float64."""

import dataclasses
import json

import pytest
import torch
import torch.distributed as dist

from composable.checkpoint.shards import Box, local_box
from composable.mesh import Mesh
from composable.models.config import LatentConfig, RopeConfig
from composable.models.decoder import Decoder
from composable.models.families import family_of
from composable.moe.config import Balance, deepseek_v3
from composable.parallel.for_ranks import Layout, held_boxes
from composable.parallel.tensor import check_tensor
from composable.recipe import CheckpointConfig, Recipe
from composable.shrink import shrink
from composable.train import build_model, train
from composable.verify import compare, record
from tests import test_compositions as dense
from tests.covering import Row
from tests.test_train import recipe_of as run_of
from tests.test_train import text  # noqa: F401

LATENT = LatentConfig(q_rank=10, kv_rank=6, nope_dim=4, rope_dim=4, value_dim=5)
ROPE = RopeConfig(1e3, "yarn", 4.0, 8, mscale=0.5, mscale_all_dim=0.8)
ROUTER = deepseek_v3(8, 2, 8, 16, groups=4, groups_kept=2, first_dense=1)
KINDS = {
    "dense": {"latent": LATENT},
    "direct": {"latent": dataclasses.replace(LATENT, q_rank=0)},
    "biased": {"latent": LATENT, "qkv_bias": True, "output_bias": True},
    "experts": {
        "latent": LATENT,
        "moe": dataclasses.replace(ROUTER, balance=Balance(sequence=0.1, bias_rate=0.01)),
    },
}
PLAIN = dict(dp_replicate=1, dp_shard=1, cp=1, tp=1, pp=1, ep=1, etp=1, data="zero3", kind="dense", schedule=None)
PLAIN |= dict(context=None, accumulate=1)


def recipe_of(row: Row) -> Recipe:
    """The recipe of dense compositions, with latent attention."""
    row = PLAIN | row
    recipe = dense.recipe_of(row)
    model = dataclasses.replace(recipe.model, heads=8, kv_heads=8, head_dim=8, rope=ROPE, **KINDS[row["kind"]])
    mesh = dataclasses.replace(recipe.mesh, ep=row["ep"], etp=row["etp"])
    return dataclasses.replace(recipe, model=model, mesh=mesh)


SMALL = [
    dict(tp=4, kind="dense"),
    dict(tp=2, dp_shard=2, kind="direct", recompute="selective"),
    dict(tp=2, pp=2, kind="biased", schedule="1F1B"),
    dict(cp=2, tp=2, kind="dense", context="all_gather"),
    dict(cp=4, kind="direct", context="ring"),
    dict(cp=2, tp=2, kind="biased", context="ulysses", data="zero1", recompute="full"),
    dict(dp_shard=2, tp=2, ep=4, kind="experts", data="zero2"),
    dict(tp=2, pp=2, ep=2, kind="experts", schedule="ZBVZeroBubble"),
]
SLOW = [
    dict(cp=2, tp=2, kind="dense", context="all_gather", compile=True),
    dict(cp=2, tp=2, pp=2, ep=4, kind="experts", schedule="1F1B", context="ring", data="zero3"),
    dict(dp_shard=2, cp=2, tp=2, ep=2, etp=2, kind="experts", context="ulysses", data="zero1", accumulate=2),
]


@pytest.mark.parametrize(
    "row",
    [
        *(pytest.param(row, id=dense.name(row)) for row in SMALL),
        *(pytest.param(row, id=dense.name(row), marks=pytest.mark.slow) for row in SLOW),
    ],
)
def test_latent_attention_on_many_ranks_has_the_numbers_of_one_process(row, ranks, reference):
    recipe = recipe_of(row)
    numbers = ranks(recipe.mesh.world, record, recipe, 2, 3, timeout=280)[0]
    result = compare(numbers, reference(recipe), 1e-9)
    assert not result.first, f"{result.first}; {result.errors}"


@pytest.mark.parametrize("kind", KINDS)
def test_a_shrunk_model_has_latents_of_the_same_kind(kind):
    recipe = recipe_of(dict(kind=kind))
    wide = dataclasses.replace(
        recipe.model,
        heads=128,
        kv_heads=128,
        head_dim=192,
        latent=dataclasses.replace(LatentConfig(), q_rank=1536 if recipe.model.latent.q_rank else 0),
    )
    for mesh in (Mesh(dp_shard=1), Mesh(dp_shard=1, tp=4, cp=2)):
        tiny = shrink(dataclasses.replace(recipe, model=wide), mesh).model
        check_tensor(tiny, mesh.tp, 16)
        assert tiny.kv_heads == tiny.heads < 16
        assert bool(tiny.latent.q_rank) == bool(wide.latent.q_rank)


def boxes_of(recipe: Recipe) -> dict[str, Box]:
    """What this rank holds of each weight."""
    recipe, _ = recipe.resolve(dist.get_world_size())
    return {name: local_box(tensor) for name, tensor in build_model(recipe, torch.device("cpu")).saved.items()}


@pytest.mark.parametrize("kind", ["direct", "biased"])
def test_files_for_ranks_hold_what_tensor_ranks_hold(kind, ranks):
    recipe = recipe_of(dict(tp=2, kind=kind))
    shapes = {name: tuple(parameter.shape) for name, parameter in Decoder(recipe.model).named_parameters()}
    held = held_boxes(recipe.model, shapes, Layout(tp=2))
    cut = [name for name, box in held["pp0-tp1"].items() if box.sizes != shapes[name]]
    assert sum("self_attn" in name for name in cut) == 3 * recipe.model.layers
    assert ranks(2, boxes_of, recipe) == [held["pp0-tp0"], held["pp0-tp1"]]


def test_a_run_of_a_published_model_goes_on_and_saves_what_it_has(ranks, text, tmp_path):  # noqa: F811
    model = dataclasses.replace(recipe_of(dict(kind="experts")).model, vocab_size=256, mtp=1, norm_eps=1e-6)
    assert family_of(model) == "deepseek_v3"

    def run(steps: int, mesh: Mesh) -> Recipe:
        checkpoint = CheckpointConfig(every=0)
        return run_of(text, tmp_path / "run", steps, model=model, mesh=mesh, checkpoint=checkpoint)

    ranks(2, train, run(1, Mesh(tp=2, ep=2)))
    assert ranks(2, train, run(2, Mesh(cp=2)))[0].step == 2
    told = json.loads((tmp_path / "run" / "checkpoints" / "step-00000002" / "config.json").read_text())
    assert (told["model_type"], told["num_nextn_predict_layers"]) == ("deepseek_v3", 0)
