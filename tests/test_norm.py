"""The gradient norm counts every element of the model once, whatever rank or stage holds it."""

import dataclasses
import math

import pytest
import torch
import torch.distributed as dist

from composable.mesh import Mesh
from composable.models.config import DecoderConfig
from composable.optim.clip import clip_by_global_norm
from composable.optim.local import local
from composable.parallel.config import Parallel, Pipeline
from composable.train import build_model
from tests.parity import recipe_of

DENSE = DecoderConfig(vocab_size=256, dim=64, layers=4, heads=4, kv_heads=2, head_dim=16, ffn=128)
TIED = dataclasses.replace(DENSE, layers=2, tied=True)


def clipped_ones(recipe) -> tuple[float, set[float]]:
    """Norm of a gradient of ones, and the values of its elements after clipping to 1."""
    recipe, _ = recipe.resolve(dist.get_world_size())
    model = build_model(recipe, torch.device("cpu"))
    for parameter in model.parameters:
        parameter.grad = torch.ones_like(parameter)
    norm = clip_by_global_norm(model.parameters, 1.0, ranks_per_stage=recipe.mesh.stage_ranks, counted=model.counted)
    values = {round(v, 8) for p in model.parameters for v in local(p.grad).unique().tolist()}
    return norm.item(), values


@pytest.mark.parametrize(
    ("mesh", "pipeline", "data", "model", "elements"),
    [
        (Mesh(dp_shard=1, pp=2), Pipeline(), "zero3", DENSE, 180800),
        (Mesh(dp_shard=1, pp=4), Pipeline(), "zero3", DENSE, 180800),
        (Mesh(dp_shard=1, pp=2), Pipeline("Interleaved1F1B"), "zero3", DENSE, 180800),
        (Mesh(dp_shard=2, pp=2), Pipeline("ZBVZeroBubble"), "zero1", DENSE, 180800),
        (Mesh(dp_shard=1, tp=2), Pipeline(), "zero3", DENSE, 180800),
        (Mesh(dp_shard=1, tp=4), Pipeline(), "zero3", DENSE, 180800),
        (Mesh(dp_shard=2, tp=2), Pipeline(), "zero3", DENSE, 180800),
        (Mesh(dp_replicate=2, dp_shard=1, cp=2), Pipeline(), "ddp", DENSE, 180800),
        (Mesh(dp_replicate=2, dp_shard=2), Pipeline(), "zero2", DENSE, 180800),
        (Mesh(dp_shard=1, pp=2), Pipeline(), "zero3", TIED, 90432),
        (Mesh(dp_shard=1, tp=2, pp=2), Pipeline(), "zero3", TIED, 90432),
        (Mesh(dp_shard=1), Pipeline(), "zero3", TIED, 90432),
    ],
)
def test_a_gradient_of_ones_has_the_square_root_of_the_parameter_count(mesh, pipeline, data, model, elements, ranks):
    recipe = recipe_of(mesh.data_ranks, 4, mesh=mesh, model=model, parallel=Parallel(data))
    recipe = dataclasses.replace(recipe, pipeline=pipeline)
    for norm, values in ranks(mesh.world, clipped_ones, recipe):
        assert norm == pytest.approx(math.sqrt(elements), rel=1e-12)
        assert values == {round(1 / math.sqrt(elements), 8)}
