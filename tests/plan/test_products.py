"""The matrix products of all ranks together are those that the model has."""

import dataclasses

import pytest

from composable.mesh import Mesh
from composable.models.config import DecoderConfig, LatentConfig
from composable.models.count import attention_flops, flops_per_token
from composable.moe.config import MoEConfig
from composable.parallel.split import Stage
from composable.plan.layers import Sizes
from composable.plan.products import Product, block_work, stage_work

PLAIN = DecoderConfig(vocab_size=512, dim=64, layers=4, heads=8, kv_heads=4, head_dim=16, ffn=96)
EXPERTS = dataclasses.replace(PLAIN, moe=MoEConfig(experts=8, top_k=2, ffn=48, shared_ffn=32, first_dense=1))
LATENT = dataclasses.replace(
    PLAIN, kv_heads=8, head_dim=24, latent=LatentConfig(q_rank=32, kv_rank=16, nope_dim=16, rope_dim=8, value_dim=16)
)
BATCH, LENGTH = 2, 128


def sizes(config: DecoderConfig, mesh: Mesh, load: float = 1.0) -> Sizes:
    return Sizes(config, mesh, BATCH, LENGTH, 2, False, True, "all_gather", load)


def below_the_diagonal(config: DecoderConfig, mesh: Mesh) -> float:
    """Training FLOPs of scores that are not computed, over all ranks: `flops_per_token` counts them."""
    tokens = BATCH * LENGTH * mesh.data_ranks
    found = 0.0
    for layer in range(config.layers):
        window = min(config.window_of(layer) or LENGTH, LENGTH)
        seen = sum(min(place + 1, window) for place in range(LENGTH)) / LENGTH
        found += tokens * attention_flops(config, LENGTH, layer) * (1 - seen / window)
    return found


@pytest.mark.parametrize("config", [PLAIN, EXPERTS, LATENT, dataclasses.replace(PLAIN, window=32, window_layers=(1,))])
@pytest.mark.parametrize(
    "mesh",
    [
        Mesh(dp_shard=1),
        Mesh(dp_shard=2),
        Mesh(dp_shard=1, cp=2),
        Mesh(dp_shard=1, tp=4),
        Mesh(dp_shard=2, tp=2, cp=2),
        Mesh(dp_shard=2, tp=2, ep=4),
        Mesh(dp_shard=2, tp=2, ep=2, etp=2),
    ],
)
def test_all_ranks_together_compute_the_models_flops(config, mesh):
    if config.moe is None:
        mesh = dataclasses.replace(mesh, ep=1, etp=1)
    whole = stage_work(sizes(config, mesh), Stage(True, range(config.layers), True))
    expected = flops_per_token(config, LENGTH) * BATCH * LENGTH * mesh.data_ranks - below_the_diagonal(config, mesh)
    # Of what each tensor rank does for its own tokens alone nothing is left out, and nothing is done twice.
    assert 3 * whole.flops * mesh.world == pytest.approx(expected, rel=1e-12)


def test_stages_together_are_the_model():
    mesh = Mesh(dp_shard=1)
    parts = [Stage(True, range(0, 1), False), Stage(False, range(1, 3), False), Stage(False, range(3, 4), True)]
    found = sum(stage_work(sizes(EXPERTS, mesh), part).flops for part in parts)
    assert found == pytest.approx(stage_work(sizes(EXPERTS, mesh), Stage(True, range(4), True)).flops)


def test_more_rows_come_to_a_rank_whose_experts_have_more_load():
    mesh = Mesh(dp_shard=4, ep=4)
    even, full = (block_work(sizes(EXPERTS, mesh, load), 2) for load in (1.0, 2.5))
    here = [product for product in even.products if product.count == 2 and product.columns == 32]
    assert here
    more = 2 * 3 * 64 * 48 * (BATCH * LENGTH * 2 * 1.5)
    assert full.flops - even.flops == pytest.approx(more)


def test_a_product_reads_both_operands_and_writes_its_result():
    product = Product(100, 20, 30, count=3)
    assert product.flops == 3 * 2 * 100 * 20 * 30
    assert product.bytes(2) == 3 * 2 * (100 * 20 + 20 * 30 + 100 * 30)
