from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from composable._torch import fake_tensor_mode
from composable.moe.capacity import limit, room_of
from composable.moe.config import Capacity, MoEConfig
from composable.moe.dispatch import ExpertRanks
from composable.moe.experts import Experts, swiglu_in_blocks
from composable.moe.layer import MoE
from composable.moe.router import Routing, count, route
from composable.moe.static import combine_blocks, dispatch_blocks, room_for
from tests.moe.test_dispatch import tokens_of

D = 8
OVERFLOWS = ["drop_weight", "drop_position", "next"]


def config_of(experts, k, factor, overflow="drop_weight"):
    return MoEConfig(experts, k, 12, capacity=Capacity(factor, overflow), dispatcher="static")


def within_capacity(x, config, seed, skew=0.0, index=None, group=None):
    """The routing of tokens x that is executed, with weights that take gradients."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(len(x), config.experts, generator=generator, dtype=torch.float64)
    logits = logits - skew * torch.arange(config.experts)
    routing = limit(route(logits, config), logits, config, index=index, group=group)
    return replace(routing, weights=routing.weights.detach().requires_grad_())


def results(x, routing, compute, parameters, seed=9):
    x = x.clone().requires_grad_()
    out = compute(x, routing)
    g = tokens_of(*x.shape, seed).to(x.dtype)
    return [out, *torch.autograd.grad(out, [x, routing.weights, *parameters], g)]


def agree(got, wanted, error=1e-12):
    for a, b in zip(got, wanted, strict=True):
        assert a.shape == b.shape
        assert torch.allclose(a.to(b.dtype), b, rtol=error, atol=error)


@settings(max_examples=60, deadline=None)
@given(
    tokens=st.integers(0, 20),
    experts=st.integers(1, 8),
    factor=st.sampled_from([0.3, 1.0, 1.25, 3.0]),
    overflow=st.sampled_from(OVERFLOWS),
    skew=st.sampled_from([0.0, 0.5, 20.0, -20.0]),
    data=st.data(),
)
def test_one_process_computes_what_it_does_with_uneven_rows(tokens, experts, factor, overflow, skew, data):
    config = config_of(experts, data.draw(st.integers(1, experts)), factor, overflow)
    x = tokens_of(tokens, D, 1)
    routing = within_capacity(x, config, tokens, skew)
    torch.manual_seed(0)
    static, uneven = Experts(experts, D, 12, "static", factor).double(), Experts(experts, D, 12).double()
    uneven.load_state_dict(static.state_dict())
    got, wanted = (results(x, routing, each, each.parameters()) for each in (static, uneven))
    agree(got, wanted)


@settings(max_examples=60, deadline=None)
@given(
    tokens=st.integers(0, 30), experts=st.integers(1, 8), room=st.integers(1, 30), pack=st.booleans(), data=st.data()
)
def test_every_token_comes_back_in_place_and_weights_are_conserved(tokens, experts, room, pack, data):
    k = data.draw(st.integers(1, experts))
    generator = torch.Generator().manual_seed(tokens)
    ids = torch.rand(tokens, experts, generator=generator).topk(k).indices
    for expert in range(experts):  # the first `room` choices of an expert stay
        mine = ids == expert
        ids = ids.masked_fill(mine & (mine.flatten().cumsum(0).view_as(ids) > room), -1)
    weights = torch.rand(tokens, k, generator=generator, dtype=torch.float64).masked_fill(ids < 0, 0).requires_grad_()
    x = tokens_of(tokens, 3, 1)

    def identity(x, routing):
        rows, blocks = dispatch_blocks(x, routing, room, pack=pack)
        return combine_blocks(rows, blocks, routing.weights)

    out, by_x, by_weights = results(x, Routing(ids, weights, count(ids, experts)), identity, [])
    g, total = tokens_of(tokens, 3, 9), weights.detach().sum(1, keepdim=True)
    agree([out, by_x], [x * total, g * total])
    agree([by_weights], [(x * g).sum(1, keepdim=True).expand_as(ids).masked_fill(ids < 0, 0)])


@settings(max_examples=200, deadline=None)
@given(
    tokens=st.integers(0, 200),
    batch_ranks=st.integers(1, 4),
    factor=st.floats(0.01, 8),
    experts=st.integers(1, 64),
    data=st.data(),
)
def test_a_block_holds_what_the_capacity_lets_through(tokens, batch_ranks, factor, experts, data):
    k = data.draw(st.integers(1, experts))
    room = room_for(factor, tokens, batch_ranks, k, experts)
    config = config_of(experts, k, factor)
    real = data.draw(st.integers(0, tokens * batch_ranks))  # the others are padding
    assert room >= min(room_of(factor, torch.tensor(real), config).item(), tokens)
    assert room == min(room_of(factor, torch.tensor(tokens * batch_ranks), config).item(), tokens)


def across_ranks(parts, cases):
    """A micro-batch lies on `parts` ranks, T tokens on each: static, packed or not, against uneven rows."""
    world, rank, shared_by = dist.get_world_size(), dist.get_rank(), ExpertRanks(dist.group.WORLD)
    groups = [dist.new_group(list(range(first, first + parts))) for first in range(0, world, parts)]
    batch = groups[rank // parts]
    for seed, (tokens, local, k, factor, overflow, skew) in enumerate(cases):
        config = config_of(local * world, min(k, local * world), factor, overflow)
        x, index = tokens_of(tokens, D, 100 * seed + rank), torch.arange(tokens) + rank % parts * tokens
        routing = within_capacity(x, config, 100 * seed + rank, skew, index, batch)
        torch.manual_seed(rank)
        static, uneven = Experts(local, D, 12, "static", factor).double(), Experts(local, D, 12).double()
        uneven.load_state_dict(static.state_dict())
        wanted = results(x, routing, partial(uneven, ranks=shared_by), uneven.parameters())
        whole = partial(static, ranks=shared_by, batch_ranks=parts)
        agree(results(x, routing, whole, static.parameters()), wanted)
        room = room_for(factor, tokens, parts, config.top_k, config.experts)
        static = static.float()
        packed = partial(packed_blocks, parameters=list(static.parameters()), room=room, shared_by=shared_by)
        agree(results(x.float(), routing, packed, static.parameters()), wanted, 1e-4)


def packed_blocks(x, routing, parameters, room, shared_by=None):
    return swiglu_in_blocks(x, routing, *parameters, room, shared_by, pack=True)


CASES = [
    *((6, 2, 2, 1.0, overflow, skew) for overflow in OVERFLOWS for skew in (0.0, 20.0)),
    (5, 1, 1, 0.4, "drop_weight", -20.0),  # all ask the last expert
    (1, 1, 1, 1.0, "drop_weight", 0.0),
    (0, 1, 1, 1.0, "drop_weight", 0.0),
    (7, 2, 8, 1.25, "drop_position", 0.0),
    (4, 2, 2, 9.0, "drop_weight", 20.0),  # nothing is dropped
]


@pytest.mark.parametrize(("world", "parts"), [(1, 1), (2, 1), (2, 2), (4, 1), (4, 2)])
def test_several_ranks_compute_what_they_do_with_uneven_rows(ranks, world, parts):
    ranks(world, across_ranks, parts, CASES)


@pytest.mark.parametrize("pack", [False, True])
def test_what_is_in_the_padding_is_never_read(pack):
    ids = torch.tensor([[2, 0], [2, -1], [0, 2]])
    weights = torch.rand(3, 2, dtype=torch.float64).masked_fill(ids < 0, 0).requires_grad_()
    routing, x = Routing(ids, weights, count(ids, 4)), tokens_of(3, D, 1)

    def spoilt(x, routing):
        rows, blocks = dispatch_blocks(x, routing, 3, pack=pack)
        return combine_blocks(rows.where(rows != 0, torch.nan), blocks, routing.weights)

    total = weights.detach().sum(1, keepdim=True)
    out, by_x, by_weights = results(x, routing, spoilt, [])
    agree([out, by_x], [x * total, tokens_of(3, D, 9) * total])
    assert by_weights.isfinite().all()


def test_a_choice_beyond_its_block_is_not_lost_in_silence():
    ids = torch.tensor([[0, 1], [0, -1], [0, 2]])
    routing = Routing(ids, torch.ones(3, 2, dtype=torch.float64), count(ids, 3))
    rows, blocks = dispatch_blocks(tokens_of(3, D, 1), routing, 2, pack=False)
    out = combine_blocks(rows, blocks, routing.weights)
    assert out[:2].isfinite().all()
    assert out[2].isnan().all()
    with pytest.raises(ValueError, match="capacity factor 0"):
        Experts(3, D, 12, "static").double()(tokens_of(3, D, 1), routing)


def layers(dtype=torch.float64, **changes):
    """The same layer, static and not."""
    config = replace(config_of(4, 2, 1.0), **changes)
    out = []
    for dispatcher in ("static", "all_to_all"):
        torch.manual_seed(0)
        out.append(MoE(D, replace(config, dispatcher=dispatcher)).to(dtype))
    return out


def test_a_layer_is_the_same_with_blocks_of_fixed_size():
    x, g = (tokens_of(12, D, seed).view(2, 6, D) for seed in (1, 2))
    both = []
    for moe in layers():
        leaf = x.clone().requires_grad_()
        out = moe(leaf)
        both.append([out, *torch.autograd.grad(out, [leaf, *moe.parameters()], g)])
    agree(*both)


def counted(graphs):
    from torch._dynamo.backends.debugging import aot_eager

    def backend(graph, example_inputs):
        graphs.append(graph)
        return aot_eager(graph, example_inputs)

    return backend


@pytest.mark.parametrize("pack", [False, True])
def test_it_is_one_graph_whatever_the_routing(pack):
    torch.compiler.reset()
    config, graphs = config_of(4, 2, 1.0), []
    torch.manual_seed(0)
    parameters = list(Experts(4, D, 16).to(torch.bfloat16 if pack else torch.float32).parameters())
    room = room_for(1.0, 12, 1, 2, 4)

    def compute(x, ids, weights, counts):
        return swiglu_in_blocks(x, Routing(ids, weights, counts), *parameters, room, None, pack=pack)

    compiled = torch.compile(compute, fullgraph=True, backend=counted(graphs))
    x = tokens_of(12, D, 1).to(parameters[0].dtype)
    for seed, skew in enumerate((0.0, 20.0, -20.0)):
        routing = within_capacity(x, config, seed, skew)
        got, wanted = (
            results(x, routing, lambda x, r, f=f: f(x, r.ids, r.weights, r.counts), parameters)
            for f in (compiled, compute)
        )
        agree(got, wanted, 0.05 if pack else 1e-5)
    assert len(graphs) == 1


def compiled_with_a_group():
    torch.compiler.reset()
    config, graphs, shared_by = config_of(4, 2, 1.0), [], ExpertRanks(dist.group.WORLD)
    torch.manual_seed(dist.get_rank())
    experts = Experts(2, D, 12, "static", 1.0).double()
    both = (torch.compile(experts, fullgraph=True, backend=counted(graphs)), experts)
    for seed, skew in enumerate((0.0, 20.0)):
        x = tokens_of(12, D, dist.get_rank())
        routing = within_capacity(x, config, 2 * seed + dist.get_rank(), skew)
        agree(*(results(x, routing, partial(each, ranks=shared_by), experts.parameters()) for each in both))
    return len(graphs)


def test_it_is_one_graph_with_its_collectives(ranks):
    assert ranks(2, compiled_with_a_group) == [1, 1]


@pytest.mark.parametrize("pack", [False, True])
def test_it_needs_no_value_of_the_routing(pack):
    with fake_tensor_mode():  # tensors have no values there: whoever asks for one raises
        sizes = ((8, 24, 16), (8, 24, 16), (8, 16, 24))
        parameters = [torch.empty(size, dtype=torch.bfloat16, requires_grad=True) for size in sizes]
        x = torch.empty(32, 16, dtype=torch.bfloat16, requires_grad=True)
        weights = torch.empty(32, 2, requires_grad=True)
        routing = Routing(torch.empty(32, 2, dtype=torch.int64), weights, torch.empty(8, dtype=torch.int64))
        out = swiglu_in_blocks(x, routing, *parameters, 10, None, pack=pack)
        assert out.shape == x.shape
        inputs = [x, weights, *parameters]
        for value, grad in zip(inputs, torch.autograd.grad(out.square().sum(), inputs), strict=True):
            assert grad.shape == value.shape


def test_it_needs_a_capacity_and_a_known_name():
    with pytest.raises(ValueError, match=r"write moe.capacity.factor 1.25"):
        MoEConfig(dispatcher="static")
    with pytest.raises(ValueError, match="one of all_to_all, hierarchical, static"):
        MoEConfig(dispatcher="ring")
