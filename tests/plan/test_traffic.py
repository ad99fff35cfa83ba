"""Predicted collectives are those of real steps of one to eight ranks, to the call and the byte, in any layout.

Compared are kinds, groups, calls and bytes of a step after the first, on every rank. Routing is given, so that it is
known.
"""

import dataclasses
import os
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

from composable.data.loader import accumulation
from composable.dryrun.run import dry_run
from composable.mesh import Mesh
from composable.models.config import DecoderConfig, LatentConfig
from composable.moe.capacity import limit
from composable.moe.config import Balance, Capacity, MoEConfig
from composable.moe.given import Load, give_routing
from composable.moe.layer import MoE
from composable.moe.router import Routing
from composable.observe.traffic import Collective, Traffic
from composable.optim.optimizers import build_optimizer
from composable.parallel.tensor import given_heads
from composable.plan.traffic import EVEN, PURPOSES, Flow, traffic
from composable.recipe import Recipe
from composable.step import train_step
from composable.train import build_model
from composable.verify import micro_batch
from tests.plan.test_memory import ALL as MEASURED
from tests.plan.test_memory import layout

TINY = DecoderConfig(vocab_size=65, dim=32, layers=4, heads=4, kv_heads=2, head_dim=8, ffn=64)
LATENT = LatentConfig(q_rank=16, kv_rank=16, nope_dim=8, rope_dim=4, value_dim=8)
SWITCH = Balance(switch=0.01, z=0.001, bias_rate=0.001)
GLOBAL = Balance(switch=0.01, scope="global")


def tiny(world: int, count: int = 1, **rest: Any) -> Recipe:
    """A layout of a tiny model; fields of its configuration are taken from `rest`."""
    names = DecoderConfig.__dataclass_fields__
    model = dataclasses.replace(TINY, **{name: rest.pop(name) for name in list(rest) if name in names})
    return layout(world, model, count=count, micro_batch=2, **rest)


def moe(**fields: Any) -> MoEConfig:
    return MoEConfig(8, 2, 16, **fields)


@dataclass(frozen=True)
class Case:
    recipe: Recipe
    load: Load = EVEN
    ranks_per_node: int = 8


SKEWED = Load((3.0, 2.0, 1.0, 1.0, 0.5, 0.5, 0.25, 0.25), {2: (0.0, 0.0, 1.0, 1.0, 1.0, 4.0, 1.0, 1.0)})
QUICK = {
    "zero3 accumulated": Case(tiny(2, 3)),
    "ddp in bfloat16": Case(tiny(2, 2, data="ddp", precision="bfloat16")),
    "copies of shards, tensor": Case(tiny(8, 2, dp_replicate=2, tp=2, data="zero2")),
    "heads shared, gathered keys, documents": Case(
        tiny(4, heads=12, kv_heads=3, tp=2, cp=2, document_mask=True, recompute="full", loss_chunk=48)
    ),
    "ring, every other block": Case(tiny(2, cp=2, context="ring", recompute="every:2")),
    "1F1B in two passes, tied": Case(tiny(4, 8, pp=2, tied=True, micro_batches=4)),
    "ZBV, sinks, context": Case(tiny(4, 4, pp=2, cp=2, sinks=True, schedule="ZBVZeroBubble")),
    "experts, skewed": Case(tiny(4, 2, moe=moe(), ep=2), SKEWED),
    "experts cut in width, balanced": Case(
        tiny(4, moe=moe(balance=SWITCH, correction=True), tp=2, etp=2, ep=2, recompute="full")
    ),
    "experts across nodes": Case(tiny(8, moe=moe(dispatcher="hierarchical"), ep=8, data="zero1"), SKEWED, 4),
}
TENSOR = {
    "latents, gathered": Case(tiny(4, latent=LATENT, head_dim=12, kv_heads=4, tp=2, cp=2)),
    "latents, ring": Case(
        tiny(4, latent=LATENT, head_dim=12, kv_heads=4, tp=2, cp=2, context="ring", recompute="full")
    ),
    "latents, ulysses": Case(
        tiny(4, latent=LATENT, head_dim=12, kv_heads=4, tp=2, cp=2, context="ulysses", recompute="selective")
    ),
    "heads shared, ring": Case(tiny(8, kv_heads=2, tp=4, cp=2, context="ring")),
    "heads shared, ulysses": Case(tiny(4, heads=12, kv_heads=3, tp=2, cp=2, context="ulysses")),
    "wide norm of shared heads": Case(tiny(4, kv_heads=1, qk_norm=True, qk_norm_wide=True, tp=2, recompute="full")),
    "post-norm, full": Case(tiny(2, norm_place="post", tp=2, recompute="full")),
    "post-norm, selective": Case(tiny(2, norm_place="post", tp=2, recompute="selective")),
    "biases, full": Case(tiny(2, mlp_bias=True, output_bias=True, qkv_bias=True, tp=2, recompute="full")),
    "tensor, selective": Case(tiny(2, tp=2, recompute="selective")),
    "ring, selective": Case(tiny(2, cp=2, context="ring", recompute="selective")),
    "a rank without vocabulary": Case(tiny(4, vocab_size=9, tied=True, tp=4, dtype="float64")),
    "float64": Case(tiny(4, dtype="float64", tp=2, cp=2)),
}
DATA = {
    "one unit, zero3": Case(tiny(2, 2, unit=0)),
    "three blocks a unit": Case(tiny(2, 2, unit=3)),
    "ddp with context": Case(tiny(4, cp=2, data="ddp")),
    "ddp of one": Case(tiny(1, data="ddp", precision="bfloat16")),
    "copies with context": Case(tiny(8, 2, dp_replicate=2, cp=2)),
    "copies without shards": Case(tiny(4, 2, dp_replicate=2, dp_shard=1, tp=2)),
}
PIPELINES = {
    "four stages a rank, zero3": Case(tiny(4, 4, layers=8, pp=2, schedule="Interleaved1F1B", virtual=4)),
    "four stages a rank, two passes of zero1": Case(
        tiny(4, 8, layers=8, pp=2, micro_batches=4, schedule="Interleaved1F1B", virtual=4, data="zero1")
    ),
    "LoopedBFS": Case(tiny(4, 4, pp=2, schedule="LoopedBFS")),
    "two passes of zero1": Case(tiny(4, 8, pp=2, micro_batches=4, data="zero1")),
    "two passes of two stages a rank": Case(
        tiny(4, 8, pp=2, micro_batches=4, schedule="Interleaved1F1B", data="zero1")
    ),
    "two passes of ddp": Case(tiny(4, 8, pp=2, micro_batches=4, data="ddp")),
    "two passes of GPipe": Case(tiny(4, 8, pp=2, micro_batches=4, schedule="GPipe")),
    "two passes with copies": Case(tiny(8, 8, pp=2, dp_replicate=2, micro_batches=4)),
    "one unit": Case(tiny(4, 4, pp=2, unit=0)),
    "two blocks a unit, tied shards": Case(tiny(8, 2, pp=2, tp=2, unit=2, tied=True)),
    "ZBV, tied": Case(tiny(4, 4, pp=2, tp=2, tied=True, schedule="ZBVZeroBubble")),
    "ZBV, sinks, ring": Case(tiny(4, 4, pp=2, cp=2, sinks=True, context="ring", schedule="ZBVZeroBubble")),
    "ZBV, sinks, ulysses": Case(tiny(4, 4, pp=2, cp=2, sinks=True, context="ulysses", schedule="ZBVZeroBubble")),
    "ZBV, sinks, whole blocks": Case(tiny(4, 4, pp=2, cp=2, sinks=True, recompute="full", schedule="ZBVZeroBubble")),
    "DualPipeV, tensor": Case(tiny(4, 4, pp=2, tp=2, schedule="DualPipeV")),
    "zero bubble, wide norm": Case(
        tiny(4, 4, pp=2, tp=2, kv_heads=1, qk_norm=True, qk_norm_wide=True, schedule="InterleavedZeroBubble")
    ),
    "documents, ring": Case(tiny(4, 4, pp=2, cp=2, document_mask=True, context="ring")),
    "cut by hand": Case(tiny(4, 4, pp=4, split="E | t*2 | t*2 | H")),
}
EXPERTS = {
    "capacity": Case(tiny(4, moe=moe(capacity=Capacity(1.5)), tp=2, ep=2)),
    "capacity, cut in width": Case(tiny(4, moe=moe(capacity=Capacity(1.5)), tp=2, etp=2, ep=2)),
    "capacity that drops": Case(tiny(2, moe=moe(capacity=Capacity(1.25)), ep=2), SKEWED),
    "blocks, cut in width": Case(tiny(4, moe=moe(dispatcher="static", capacity=Capacity(1.25)), tp=2, etp=2, ep=2)),
    "blocks, full": Case(tiny(4, moe=moe(dispatcher="static", capacity=Capacity(1.25)), tp=2, ep=4, recompute="full")),
    "across nodes, cut in width": Case(tiny(8, moe=moe(dispatcher="hierarchical"), tp=2, etp=2, ep=4), SKEWED, 4),
    "one node": Case(tiny(4, moe=moe(dispatcher="hierarchical"), ep=4)),
    "balanced, context": Case(tiny(4, moe=moe(balance=SWITCH, correction=True), tp=2, cp=2, recompute="selective")),
    "choices of the step": Case(tiny(4, moe=moe(balance=GLOBAL), tp=2, ep=2, recompute="full")),
    "choices counted before, zero3": Case(tiny(4, 2, moe=moe(balance=GLOBAL), tp=2, ep=2)),
    "choices counted before, zero1": Case(tiny(4, 2, moe=moe(balance=GLOBAL), tp=2, ep=2, data="zero1", loss_chunk=16)),
    "choices counted before, pipeline": Case(
        tiny(4, 4, moe=moe(balance=GLOBAL), pp=2, ep=2, schedule="Interleaved1F1B")
    ),
    "choices counted before, ZBV, capacity": Case(
        tiny(4, 4, moe=moe(balance=GLOBAL, capacity=Capacity(2.0)), pp=2, tp=2, ep=2, schedule="ZBVZeroBubble")
    ),
    "post-norm, full": Case(tiny(4, moe=moe(), norm_place="post", tp=2, etp=2, ep=2, recompute="full")),
    "dense first, shared": Case(
        tiny(4, moe=moe(first_dense=1, shared_ffn=16, shared_gate=True), tp=2, ep=2, recompute="full")
    ),
    "widths that do not divide": Case(tiny(8, moe=MoEConfig(8, 2, 18, expert_bias=True, fused=True), tp=2, ep=2)),
    "experts with copies": Case(tiny(8, 2, moe=moe(), ep=2, dp_replicate=2, data="zero2")),
    "ddp, cut in width": Case(tiny(8, 2, moe=moe(), tp=2, etp=2, data="ddp")),
    "ddp over tensor ranks": Case(tiny(4, moe=moe(), tp=2, ep=2, data="ddp")),
    "all experts on each tensor rank": Case(tiny(4, moe=moe(), tp=2)),
    "ZBV": Case(tiny(4, 4, moe=moe(), ep=2, pp=2, schedule="ZBVZeroBubble"), SKEWED),
    "DualPipeV, cut in width": Case(tiny(8, 4, moe=moe(shared_ffn=16), tp=2, etp=2, ep=2, pp=2, schedule="DualPipeV")),
    "experts, selective": Case(tiny(4, moe=moe(), tp=2, ep=2, recompute="selective")),
    "documents": Case(tiny(4, moe=moe(balance=Balance(sequence=0.01)), cp=2, ep=2, document_mask=True)),
}
SLOW = {
    f"{kind}: {name}": case
    for kind, cases in (
        ("tensor", TENSOR),
        ("data", DATA),
        ("pipeline", PIPELINES),
        ("experts", EXPERTS),
        ("measured", {name: Case(recipe) for name, recipe in MEASURED.items()}),
    )
    for name, case in cases.items()
}
CASES = [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow]) for name in QUICK | SLOW]


def counted(
    case: Case, watch: Callable[[MoE], None] = lambda module: None, before: Callable[[], None] = lambda: None
) -> list[Collective]:
    """The collectives of the second step on this rank of the default process group.

    Args:
        watch: is given each layer with experts.
        before: is called before a step.
    """
    os.environ["LOCAL_WORLD_SIZE"] = str(case.ranks_per_node)
    recipe, _ = case.recipe.resolve(dist.get_world_size())
    data, mesh, rank = recipe.data, recipe.mesh, dist.get_rank()
    model = build_model(recipe, torch.device("cpu"))
    for part in model.parts:
        give_routing(part, case.load)
        for module in part.modules():
            if isinstance(module, MoE):
                watch(module)
    optimizer = build_optimizer(model.parts, recipe.optimizer, only=model.named)
    count = accumulation(data, mesh.data_ranks)
    chosen = range(mesh.data_rank(rank), mesh.data_ranks * count, mesh.data_ranks)
    for step in (1, 2):
        batches = [micro_batch(step, number, data, recipe.model.vocab_size) for number in chosen]
        before()
        with Traffic() as seen:
            train_step(model, optimizer, batches, step=step, lr=1e-3, max_norm=1.0)
    return seen.collectives(mesh, rank)


def summed(flows: Iterable[Flow]) -> list[Collective]:
    """Flows as collectives, over all purposes."""
    sums: Counter[tuple[str, str, int]] = Counter()
    sizes: Counter[tuple[str, str, int]] = Counter()
    for flow in flows:
        key = flow.kind, flow.group, flow.ranks
        sums[key] += flow.count
        sizes[key] += flow.bytes
    return sorted(Collective(*key, count, sizes[key]) for key, count in sums.items())


@pytest.mark.parametrize("name", CASES)
def test_predicted_collectives_are_those_of_a_real_step_on_every_rank(name, ranks):
    case = (QUICK | SLOW)[name]
    measured = ranks(case.recipe.mesh.world, counted, case)
    for rank, seen in enumerate(measured):
        flows = traffic(case.recipe, rank, load=case.load, accelerator=False, ranks_per_node=case.ranks_per_node)
        assert summed(flows) == seen, f"rank {rank}"


NEXT = Capacity(1.25, "next")
REFUSING = {
    "refused choices ask the next": Case(tiny(4, moe=moe(capacity=NEXT), tp=2, cp=2, ep=4), SKEWED),
    "next, accumulated, full": Case(tiny(4, 3, moe=moe(capacity=NEXT), tp=2, ep=2, recompute="full"), SKEWED),
    "next, cut in width": Case(tiny(4, moe=moe(capacity=NEXT), tp=2, etp=2, ep=2), SKEWED),
    "next, counted before, pipeline": Case(
        tiny(4, 4, moe=moe(capacity=NEXT, balance=GLOBAL), pp=2, ep=2, schedule="ZBVZeroBubble"), SKEWED
    ),
    "next, across nodes": Case(tiny(8, moe=moe(dispatcher="hierarchical", capacity=NEXT), cp=2, ep=8), SKEWED, 4),
    "the lightest of several ranks": Case(tiny(4, moe=moe(capacity=Capacity(1.1)), tp=2, cp=2, ep=4), SKEWED),
    "the last of several ranks": Case(
        tiny(4, moe=moe(capacity=Capacity(1.1, "drop_position")), tp=2, cp=2, ep=4), SKEWED
    ),
}


def counted_with_choices(case: Case) -> tuple[list[Collective], dict[int, list[float]]]:
    """The same, and by layer what its tokens had executed in a micro-batch [E], a mean."""
    kept: dict[int, list[list[int]]] = {}

    def keep(module: MoE, *args: Any, **rest: Any) -> Routing:
        found = limit(*args, **rest)
        kept.setdefault(module.layer, []).append(found.counts.tolist())
        return found

    def watch(module: MoE) -> None:
        module.limit = partial(keep, module)

    seen = counted(case, watch, kept.clear)
    means = {layer: [sum(each) / len(rows) for each in zip(*rows, strict=True)] for layer, rows in kept.items()}
    return seen, means


@pytest.mark.parametrize(
    "name", [next(iter(REFUSING)), *(pytest.param(n, marks=pytest.mark.slow) for n in list(REFUSING)[1:])]
)
def test_where_scores_decide_what_a_capacity_leaves_rows_are_exact_once_choices_are_known(name, ranks):
    case = REFUSING[name]
    measured = ranks(case.recipe.mesh.world, counted_with_choices, case)
    layers = {layer for _, found in measured for layer in found}
    unknown = [0.0] * 8  # of ranks of other stages
    known = Load(executed={layer: [found.get(layer, unknown) for _, found in measured] for layer in layers})
    for rank, (seen, _) in enumerate(measured):
        told = {"accelerator": False, "ranks_per_node": case.ranks_per_node}
        assert summed(traffic(case.recipe, rank, load=known, **told)) == seen, f"rank {rank}"
        guessed = {
            (flow.kind, flow.group): flow.bytes for flow in summed(traffic(case.recipe, rank, load=case.load, **told))
        }
        assert guessed == {(each.kind, each.group): pytest.approx(each.bytes, rel=0.25) for each in seen}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "load"),
    [
        (tiny(512, 2, heads=16, kv_heads=4, tp=8, cp=4, dp_replicate=2, recompute="full"), "even"),
        (tiny(256, moe=MoEConfig(64, 4, 16, dispatcher="hierarchical"), tp=2, ep=64, data="zero2"), "even"),
        (tiny(64, moe=moe(capacity=Capacity(1.25)), tp=2, ep=8), "3"),
        (tiny(64, moe=moe(capacity=NEXT), cp=2, ep=4), "3"),
    ],
    ids=["dense on 512", "experts on 256", "the lightest are dropped", "refused choices ask the next"],
)
def test_predicted_collectives_are_those_of_a_dry_run_of_hundreds_of_ranks(recipe, load):
    world = recipe.mesh.world
    for report in dry_run(recipe, world, [0, world // 2 + 1, world - 1], load=load, checkpoint=False).ranks:
        assert not report.error
        given = Load.parse(load, recipe.model.moe)
        flows = traffic(recipe, report.rank, load=given, accelerator=False, ranks_per_node=8)
        assert summed(flows) == list(report.collectives)


def bytes_of(recipe: Recipe, *purposes: str, **rest: Any) -> int:
    return sum(flow.bytes for flow in traffic(recipe, **rest) if flow.purpose in purposes)


def test_zero3_gathers_blocks_twice_for_each_micro_batch_and_zero1_once_a_step():
    root = 2 * 64 * 32 + 32
    blocks = 4 * (2 * 32 + 2 * 32 * 32 + 2 * 16 * 32 + 3 * 64 * 32)
    recipes = {kind: tiny(2, 4, vocab_size=64, data=kind) for kind in ("ddp", "zero1", "zero3")}
    assert {kind: bytes_of(recipe, "gather parameters") for kind, recipe in recipes.items()} == {
        "ddp": 0,
        "zero1": 4 * (root + blocks),
        "zero3": 4 * (4 * root + 8 * blocks),
    }


def test_what_runs_beside_computation_is_parameters_gradients_and_sends_between_stages():
    hides = {(flow.purpose, flow.hides) for flow in traffic(tiny(8, 4, pp=2, tp=2))}
    assert hides == {
        ("gather parameters", True),
        ("gather parameters", False),  # of the root
        ("reduce gradients", True),
        ("reduce gradients", False),
        ("replicated gradients", False),
        ("sequence", False),
        ("pipeline", True),
        ("sums", False),
    }


def test_an_accelerator_sums_activations_by_reduce_scatter_of_as_many_bytes():
    recipe = tiny(4, tp=2, cp=2)
    there, here = traffic(recipe), traffic(recipe, accelerator=False)
    assert sum(flow.bytes for flow in there) == sum(flow.bytes for flow in here)
    assert {flow.kind for flow in here if flow.purpose == "sequence"} == {"all_gather", "all_to_all"}
    assert {flow.kind for flow in there if flow.purpose == "sequence"} == {"all_gather", "reduce_scatter"}


def test_every_purpose_is_documented_and_flows_are_merged():
    for case in (QUICK | SLOW).values():
        flows = traffic(case.recipe, case.recipe.mesh.world - 1, ranks_per_node=case.ranks_per_node)
        assert {flow.purpose for flow in flows} <= set(PURPOSES)
        assert len({dataclasses.replace(flow, count=0, bytes=0) for flow in flows}) == len(flows)


def test_a_rank_with_the_chosen_experts_gets_more_rows():
    recipe = tiny(4, moe=moe(), ep=4)
    first, last = (bytes_of(recipe, "experts", rank=rank, load=Load((4.0, *[1.0] * 7))) for rank in (0, 3))
    assert first > bytes_of(recipe, "experts") > last


@pytest.mark.parametrize(
    ("heads", "kv_heads", "tp", "found"),
    [(8, 4, 2, [2, 2]), (4, 1, 2, [1, 1]), (12, 3, 2, [6, 6]), (6, 3, 2, [3, 3]), (8, 2, 4, [1] * 4)],
)
def test_a_tensor_rank_is_given_the_key_heads_that_its_query_heads_need(heads, kv_heads, tp, found):
    config = DecoderConfig(heads=heads, kv_heads=kv_heads)
    assert [len(given_heads(config, tp, rank)) for rank in range(tp)] == found


@pytest.mark.parametrize(
    ("recipe", "rank", "message"),
    [
        (dataclasses.replace(tiny(2), mesh=Mesh()), 0, r"-1.*Recipe\.resolve"),
        (tiny(2), 2, "rank 2: the ranks of a world of 2 are 0 to 1"),
    ],
)
def test_what_has_no_traffic_is_refused(recipe, rank, message):
    with pytest.raises(ValueError, match=message):
        traffic(recipe, rank)


def test_experts_that_do_not_fill_whole_nodes_are_refused():
    with pytest.raises(ValueError, match="fill whole nodes"):
        traffic(tiny(8, moe=moe(dispatcher="hierarchical"), ep=8), ranks_per_node=3)
