"""The time model: what can be said of it without a clock."""

import dataclasses

import pytest

from composable.data.loader import DataConfig
from composable.mesh import Mesh
from composable.models.config import DecoderConfig
from composable.models.count import flops_per_token
from composable.moe.config import MoEConfig
from composable.parallel.config import Parallel, Pipeline
from composable.plan.devices import cluster
from composable.plan.timing import KERNELS, least_compute, step_time
from composable.recipe import Recipe

MODEL = DecoderConfig(vocab_size=4096, dim=1024, layers=8, heads=16, kv_heads=16, head_dim=64, ffn=2816)
WIDE = cluster("H100", ["memory_bandwidth=1000000TB", "inside=1000000TB", "across=1000000TB"])
FREE = dataclasses.replace(WIDE, inside_latency=0.0, across_latency=0.0)


def recipe(world: int, mesh: Mesh, **more) -> Recipe:
    parallel = Parallel(data=more.pop("data", "zero3"), precision="bfloat16", recompute=more.pop("recompute", "none"))
    data = DataConfig(seq_len=512, global_batch=64, micro_batch=more.pop("micro_batch", 1))
    return Recipe("time", MODEL, mesh=mesh, parallel=parallel, data=data, pipeline=Pipeline(**more)).resolve(world)[0]


def test_with_links_and_memory_that_take_nothing_a_step_is_its_flops():
    found = step_time(recipe(1, Mesh()), FREE)
    tokens = 64 * 512
    rate = FREE.device.bfloat16 * FREE.device.achievable * KERNELS
    products = 6 * (8 * (4 * 1024 * 1024 + 3 * 1024 * 2816) + 4096 * 1024) * tokens / rate
    assert found.ideal == pytest.approx(flops_per_token(MODEL, 512) * tokens / FREE.device.bfloat16)
    assert products < found.compute < 1.1 * products  # attention is small
    assert found.total == pytest.approx(found.compute, rel=1e-6)
    assert found.mfu == pytest.approx(found.ideal / found.total)
    assert found.tokens_per_second == pytest.approx(tokens / found.total)


def test_ranks_share_the_computation():
    one = step_time(recipe(1, Mesh()), FREE)
    for mesh in (Mesh(), Mesh(tp=8), Mesh(cp=2, tp=2), Mesh(dp_shard=1, dp_replicate=8)):
        found = step_time(recipe(8, mesh, data="ddp" if mesh.dp_replicate > 1 else "zero3"), FREE)
        assert found.compute == pytest.approx(one.compute / 8, rel=0.01), mesh


def test_recomputation_adds_a_third_of_what_there_is():
    plain, full = (step_time(recipe(8, Mesh(), recompute=kind), FREE).compute for kind in ("none", "full"))
    assert 1.25 < full / plain < 4 / 3


def test_a_pipeline_of_equal_stages_waits_by_the_closed_form():
    model = dataclasses.replace(MODEL, vocab_size=64)  # a head that costs next to nothing
    for pp, count in ((2, 64), (4, 64), (8, 64)):
        given = dataclasses.replace(recipe(pp, Mesh(pp=pp)), model=model)
        found = step_time(given, FREE)
        assert found.bubble / found.total == pytest.approx((pp - 1) / (count + pp - 1), rel=0.02)


def test_exchanges_between_nodes_cost_more_and_hide_behind_computation_where_they_may():
    node = step_time(recipe(16, Mesh(tp=2)), cluster("H100", ["per_node=16"]))
    apart = step_time(recipe(16, Mesh(tp=2)), cluster("H100", ["per_node=1"]))
    assert apart.waited["sequence"] > 5 * node.waited["sequence"]
    with_streams = step_time(recipe(16, Mesh()), cluster("H100", ["across=5GB"]))
    without = step_time(recipe(16, Mesh()), cluster("H100", ["across=5GB", "overlap=0"]))
    assert without.hidden == 0
    assert without.waited["gather parameters"] > with_streams.waited["gather parameters"]
    assert without.total == pytest.approx(with_streams.total + with_streams.hidden)


def test_a_fuller_rank_of_experts_takes_longer():
    model = dataclasses.replace(MODEL, moe=MoEConfig(experts=8, top_k=2, ffn=1408))
    given = dataclasses.replace(recipe(8, Mesh()), model=model, mesh=Mesh(dp_shard=8, ep=8))
    assert step_time(given, FREE, load=2.0).compute > 1.2 * step_time(given, FREE).compute
    assert "experts" in step_time(given, cluster("H100")).waited


def test_no_layout_takes_less_than_the_least():
    for mesh in (Mesh(), Mesh(tp=2), Mesh(pp=4), Mesh(tp=2, pp=2)):
        for recompute in ("none", "full"):
            given = recipe(8, mesh, recompute=recompute)
            nodes = cluster("H100")
            count = 64 // given.mesh.data_ranks
            assert count * least_compute(given, nodes) / mesh.pp <= step_time(given, nodes).total * (1 + 1e-9)


def test_offload_updates_at_the_speed_of_the_link_to_the_host():
    given = recipe(8, Mesh())
    away = dataclasses.replace(given, parallel=dataclasses.replace(given.parallel, offload=True))
    nodes = cluster("H100")
    assert step_time(away, nodes).update > 20 * step_time(given, nodes).update
