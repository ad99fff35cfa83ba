"""Predicted memory is what tensors hold on real runs of one to eight ranks, dense and with experts, in any layout.

Measured are live bytes of tensors (tests.plan.measure.py) at their most in the step after the first.
"""

import dataclasses
from typing import Any

import pytest

import composable.plan.memory as planned
from composable.data.loader import DataConfig
from composable.mesh import Mesh
from composable.models.config import DecoderConfig, LatentConfig
from composable.moe.config import Capacity, MoEConfig
from composable.optim.optimizers import OptimizerConfig
from composable.parallel.config import Parallel, Pipeline
from composable.plan.memory import memory, worst
from composable.recipe import Recipe
from tests.plan.measure import measure

DENSE = DecoderConfig(vocab_size=1024, dim=128, layers=4, heads=8, kv_heads=4, head_dim=16, ffn=352)
SMALL = dataclasses.replace(DENSE, vocab_size=512, ffn=256)
UNEVEN = dataclasses.replace(DENSE, vocab_size=515, dim=120, ffn=250, qk_norm=True, tied=True)
MOE = MoEConfig(experts=8, top_k=2, ffn=128)
ROUTED = dataclasses.replace(SMALL, moe=MOE)
BLOCKS = dataclasses.replace(MOE, dispatcher="static", capacity=Capacity(1.25))
SHARED = dataclasses.replace(MOE, shared_ffn=128, shared_gate=True)
LATENT = LatentConfig(q_rank=48, kv_rank=32, nope_dim=16, rope_dim=8, value_dim=16)
SGD = OptimizerConfig(kind="sgd", momentum=0.9)


def layout(world: int, model: DecoderConfig = SMALL, *, count: int = 1, micro_batch: int = 4, **rest: Any) -> Recipe:
    """A recipe of `world` ranks; `rest` are fields of Mesh, Parallel, Pipeline, DataConfig and Recipe, by name."""

    def take(kind: type) -> dict[str, Any]:
        return {name: rest.pop(name) for name in kind.__dataclass_fields__ if name in rest}  # type: ignore[attr-defined]

    parallel = Parallel(**take(Parallel))
    mesh = Mesh(**take(Mesh)).resolve(world, replicate=parallel.data == "ddp")
    pipeline = Pipeline(**take(Pipeline))
    batch = micro_batch * mesh.data_ranks * count
    data = DataConfig(seq_len=128, micro_batch=micro_batch, global_batch=batch, **take(DataConfig))
    recipe = Recipe("memory", model, mesh=mesh, parallel=parallel, pipeline=pipeline, data=data, **rest)
    return recipe.resolve(world)[0]


def with_moe(moe: MoEConfig) -> DecoderConfig:
    return dataclasses.replace(SMALL, moe=moe)


QUICK = {
    "accumulated": layout(1, DENSE, count=2, micro_batch=2),
    "experts, full recomputation": layout(1, ROUTED, recompute="full"),
    "zero2 accumulated": layout(2, DENSE, data="zero2", count=2, micro_batch=2),
    "bfloat16 zero1 accumulated": layout(2, precision="bfloat16", data="zero1", count=3),
    "tensor, chunked loss": layout(2, tp=2, loss_chunk=64),
    "ep with efsdp": layout(4, ROUTED, ep=2),
    "1F1B with fsdp": layout(4, pp=2, count=4),
    "ZBV": layout(2, DENSE, pp=2, count=4, micro_batch=2, schedule="ZBVZeroBubble"),
}
SLOW = {
    "one": layout(1),
    "selective": layout(1, DENSE, recompute="selective", micro_batch=2),
    "every other, tied": layout(1, dataclasses.replace(SMALL, tied=True), recompute="every:2"),
    "chunked loss": layout(1, DENSE, loss_chunk=64, micro_batch=2),
    "post-norm": layout(1, dataclasses.replace(SMALL, norm_place="post", qk_norm=True, qk_norm_wide=True)),
    "window and sinks": layout(1, dataclasses.replace(SMALL, window=32, sinks=True, qkv_bias=True)),
    "documents": layout(1, document_mask=True),
    "latent": layout(1, dataclasses.replace(SMALL, kv_heads=8, head_dim=24, latent=LATENT)),
    "float64 with momentum": layout(1, dtype="float64", optimizer=SGD, micro_batch=2),
    "offload": layout(1, offload=True),
    "experts, selective": layout(1, ROUTED, recompute="selective"),
    "ddp": layout(2, DENSE, data="ddp", micro_batch=2),
    "bfloat16 reductions": layout(2, precision="bfloat16", reduce="bfloat16", count=2),
    "two blocks a unit": layout(2, unit=2),
    "one unit, zero1": layout(2, unit=0, data="zero1", count=2),
    "tensor, full recomputation": layout(2, tp=2, recompute="full"),
    "gathered keys, documents": layout(2, cp=2, document_mask=True),
    "ulysses": layout(2, DENSE, cp=2, context="ulysses", micro_batch=2),
    "shared experts": layout(2, with_moe(SHARED), ep=2),
    "blocks of fixed size": layout(2, with_moe(BLOCKS), ep=2, micro_batch=2),
    "experts cut in width": layout(2, ROUTED, tp=2, etp=2),
    "experts in bfloat16": layout(2, ROUTED, ep=2, precision="bfloat16"),
    "GPipe": layout(2, DENSE, pp=2, count=4, micro_batch=2, schedule="GPipe"),
    "Interleaved1F1B": layout(2, pp=2, count=4, schedule="Interleaved1F1B"),
    "tied ends, full recomputation": layout(2, dataclasses.replace(SMALL, tied=True), pp=2, count=4, recompute="full"),
    "zero bubble": layout(2, pp=2, count=4, micro_batch=2, schedule="InterleavedZeroBubble"),
    "hybrid zero2": layout(4, dp_replicate=2, dp_shard=2, data="zero2", count=2),
    "ddp in bfloat16": layout(4, data="ddp", precision="bfloat16", count=2),
    "tensor with fsdp": layout(4, tp=2),
    "ring with tensor": layout(4, cp=2, tp=2, context="ring"),
    "tensor and experts": layout(4, ROUTED, ep=2, tp=2, recompute="full"),
    "experts in a pipeline": layout(4, ROUTED, pp=2, ep=2, count=4),
    "two passes, zero2": layout(4, pp=2, count=8, micro_batch=2, micro_batches=4, data="zero2"),
    "bfloat16 in a pipeline": layout(4, pp=2, count=4, precision="bfloat16"),
    "DualPipeV in bfloat16": layout(4, pp=2, count=4, schedule="DualPipeV", precision="bfloat16", data="zero1"),
    "three dimensions": layout(8, pp=2, tp=2, count=4),
    "uneven shards": layout(8, UNEVEN, tp=2),
    "experts on eight ranks": layout(8, ROUTED, ep=4, tp=2, precision="bfloat16", recompute="full"),
    "four stages of experts": layout(
        8,
        dataclasses.replace(ROUTED, layers=8),
        pp=4,
        ep=2,
        count=8,
        schedule="Interleaved1F1B",
        recompute="full",
    ),
}
ALL = QUICK | SLOW
CASES = [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow]) for name in ALL]


@pytest.mark.parametrize("name", CASES)
def test_predicted_memory_is_what_tensors_hold_at_most(name, ranks):
    recipe = ALL[name]
    measured = ranks(recipe.mesh.world, measure, recipe)
    errors = []
    for stage in range(recipe.mesh.pp):
        of_stage = measured[stage * recipe.mesh.stage_ranks : (stage + 1) * recipe.mesh.stage_ranks]
        fullest = max(of_stage, key=lambda each: each["peak"])
        (predicted,) = memory(recipe, accelerator=False, load=fullest["load"] or 1.0, ranks=[stage])
        for part in ("parameters", "gradients", "optimizer"):  # exactly, of the first shard: none is larger
            assert getattr(predicted, part) == of_stage[0][part] == max(each[part] for each in of_stage)
        errors.append(predicted.peak / fullest["peak"] - 1)
    assert max(map(abs, errors)) <= 0.05, errors


@pytest.mark.parametrize(
    "recipe",
    [
        layout(2, UNEVEN, micro_batch=1),
        layout(4, UNEVEN, ep=1, tp=2, micro_batch=1, precision="bfloat16"),
        layout(4, dataclasses.replace(UNEVEN, moe=dataclasses.replace(MOE, ffn=50, expert_bias=True)), ep=2),
        layout(2, dataclasses.replace(UNEVEN, kv_heads=1, output_bias=True, qkv_bias=True, mlp_bias=True), tp=2),
    ],
    ids=["rows that do not divide", "of tensor shards too", "experts", "shared heads and biases"],
)
def test_shards_of_uneven_shapes_are_counted_to_the_byte(recipe, ranks):
    measured = ranks(recipe.mesh.world, measure, recipe, 1)
    (predicted,) = memory(recipe)
    for part in ("parameters", "gradients", "optimizer"):
        assert getattr(predicted, part) == max(each[part] for each in measured)


def peak(recipe: Recipe, **rest: Any) -> int:
    return worst(memory(recipe, **rest)).peak


def test_what_is_kept_shrinks_from_no_recomputation_over_selective_to_full():
    kept = [peak(layout(8, recompute=kind)) for kind in ("none", "selective", "full")]
    assert kept == sorted(kept, reverse=True)
    assert kept[0] > 1.3 * kept[2]
    assert kept[2] < peak(layout(8, recompute="every:2")) < kept[0]


def test_the_more_is_sharded_the_less_a_rank_holds():
    held = [peak(layout(8, data=kind, count=2)) for kind in ("ddp", "zero1", "zero2", "zero3")]
    assert held[0] > held[1] > held[2] > held[3]


def test_offload_on_an_accelerator_moves_parameters_gradients_and_state_to_the_host():
    here, away = (memory(layout(2, offload=offload))[0] for offload in (False, True))
    assert away.host == here.parameters + here.gradients + here.optimizer
    assert here.host == 0
    assert not {"parameters", "optimizer"} & set(away.parts)
    assert away.peak < here.peak


def test_the_first_stage_of_1f1b_holds_more_micro_batches_than_the_last():
    found = memory(layout(4, dataclasses.replace(SMALL, layers=8), pp=4, count=8))
    activations = [sum(each.parts[part] for part in ("attention", "mlp")) for each in found]
    assert [each.rank for each in found] == [0, 1, 2, 3]
    assert activations[0] > activations[1] > activations[2]


def test_experts_with_more_than_their_share_of_rows_need_more():
    recipe = layout(4, ROUTED, ep=4)
    assert peak(recipe, load=2.0) > peak(recipe, load=1.0)


def test_slack_is_a_share_of_the_peak_and_of_accelerators_alone():
    recipe = layout(1)
    (found,) = memory(recipe, slack=0.1)
    assert found.total == found.peak + int(0.1 * found.peak)
    assert memory(recipe, accelerator=False)[0].slack == 0


def test_a_mesh_that_is_not_resolved_is_refused():
    recipe = dataclasses.replace(layout(1), mesh=Mesh())
    with pytest.raises(ValueError, match=r"-1.*Recipe\.resolve"):
        memory(recipe)


@pytest.mark.parametrize("pp", [2, 4])
@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize(
    "schedule",
    ["GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"],
)
def test_a_long_pass_holds_what_its_beginning_does(monkeypatch, schedule, recompute, pp):
    """Only some of the micro-batches of a long pass are played through."""
    model = dataclasses.replace(SMALL, layers=8)
    given = layout(pp, model, pp=pp, count=8 * pp, micro_batch=1, schedule=schedule, recompute=recompute)
    short = memory(given)
    monkeypatch.setattr(planned, "_played", lambda pipeline, pp, micro_batches: micro_batches)
    for mine, all_of_it in zip(short, memory(given), strict=True):
        assert mine.peak == pytest.approx(all_of_it.peak, rel=0.01)
