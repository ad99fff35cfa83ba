import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard

from composable.moe.dispatch import ExpertRanks, combine, dispatch
from composable.moe.experts import Experts, swiglu
from composable.moe.router import Routing, count


def routing_of(tokens, experts, k, seed, load="random", dropped=0.0, grad=True):
    """A random routing; `load`: random, skewed, first (all tokens to the first experts) or last."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(tokens, experts, generator=generator)
    lift = torch.arange(experts).double()
    scores = scores + {"random": 0 * lift, "skewed": -lift / 4, "first": -10 * lift, "last": 10 * lift}[load]
    ids = scores.topk(k).indices
    ids = ids.masked_fill(torch.rand(ids.shape, generator=generator) < dropped, -1)
    weights = torch.rand(tokens, k, generator=generator, dtype=torch.float64).masked_fill(ids < 0, 0)
    return Routing(ids, weights.requires_grad_(grad), count(ids, experts))


def tokens_of(tokens, dim, seed):
    return torch.randn(tokens, dim, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def moved(x, routing, shared_by=None, plan=None):
    """Expert e multiplies by e + 1, beside the identity: (output, output of the identity, rows of each expert here)."""
    rows, counts, record = dispatch(x, routing, shared_by, plan)
    first = 0 if shared_by is None else dist.get_rank(shared_by.group) * len(counts)
    factors = torch.arange(first, first + len(counts)).double().repeat_interleave(torch.tensor(counts)) + 1
    scaled = combine(rows * factors[:, None], record, routing.weights)
    return scaled, combine(rows, record, routing.weights), counts


def check(x, routing, shared_by=None, plan=None):
    """Tokens come back, with weights, forward and backward; returns the rows of each expert here."""
    x = x.clone().requires_grad_()
    scaled, same, counts = moved(x, routing, shared_by, plan)
    factors = (routing.ids + 1).double()
    weights = routing.weights.detach()
    wanted = x.detach() * (weights * factors).sum(1)[:, None]
    assert torch.allclose(scaled, wanted, rtol=1e-12, atol=1e-14)
    assert torch.allclose(same, x.detach() * weights.sum(1)[:, None], rtol=1e-12, atol=1e-14)
    g = tokens_of(*x.shape, 5)
    by_x, by_weights = torch.autograd.grad(scaled, [x, routing.weights], g)
    assert torch.allclose(by_x, g * (weights * factors).sum(1)[:, None], rtol=1e-12, atol=1e-14)
    wanted = ((g * x.detach()).sum(1)[:, None] * factors).masked_fill(routing.ids < 0, 0)
    assert torch.allclose(by_weights, wanted, rtol=1e-12, atol=1e-14)
    return counts


@settings(max_examples=100, deadline=None)
@given(
    tokens=st.integers(0, 30),
    experts=st.integers(1, 12),
    load=st.sampled_from(["random", "skewed", "first", "last"]),
    dropped=st.sampled_from([0.0, 0.3, 1.0]),
    data=st.data(),
)
def test_every_token_comes_back_in_place_and_weights_are_conserved(tokens, experts, load, dropped, data):
    routing = routing_of(tokens, experts, data.draw(st.integers(1, experts)), tokens, load, dropped)
    counts = check(tokens_of(tokens, 3, 1), routing)
    assert counts == routing.counts.tolist()


def test_rows_are_in_expert_order_and_stable():
    ids = torch.tensor([[1, 0], [2, 1], [0, -1]])
    routing = Routing(ids, torch.ones(3, 2), count(ids, 3))
    rows, counts, _ = dispatch(torch.tensor([[10.0], [20.0], [30.0]]), routing)
    assert rows.flatten().tolist() == [10, 30, 10, 20, 20]
    assert counts == [2, 2, 1]


def several_loads(cases):
    """Tokens differ between ranks: none on some, one on others."""
    shared_by, world = ExpertRanks(dist.group.WORLD), dist.get_world_size()
    for seed, (tokens, k, load, dropped) in enumerate(cases):
        mine = tokens[dist.get_rank() % len(tokens)]
        routing = routing_of(mine, 2 * world, k, seed * world + dist.get_rank(), load, dropped)
        counts = check(tokens_of(mine, 3, dist.get_rank()), routing, shared_by)
        total = routing.counts.clone()
        dist.all_reduce(total)
        assert counts == total.view(world, -1)[dist.get_rank()].tolist()


CASES = [
    ((5, 0, 1, 7), 2, "random", 0.0),
    ((4, 9), 1, "first", 0.0),  # the other ranks get no row
    ((4, 9), 2, "last", 0.0),
    ((1,), 1, "random", 0.0),
    ((0,), 2, "random", 0.0),  # nobody has a token
    ((0, 1), 1, "first", 0.0),  # one token in all, or one for every second rank
    ((6, 3), 2, "skewed", 0.4),
    ((6, 3), 2, "random", 1.0),  # everything is dropped
]


@pytest.mark.parametrize("world", [1, 2, 4])
def test_tokens_come_back_from_other_ranks(ranks, world):
    ranks(world, several_loads, [*CASES, ((3, 2), 2 * world, "random", 0.0)])  # the last: K = E


def two_in_flight():
    shared_by = ExpertRanks(dist.group.WORLD)
    routings = [routing_of(4 + 3 * i, 4, 2, 10 * i + dist.get_rank()) for i in range(2)]
    xs = [tokens_of(4 + 3 * i, 3, i).requires_grad_() for i in range(2)]
    sent = [dispatch(x, routing, shared_by) for x, routing in zip(xs, routings, strict=True)]
    outs = [
        combine(rows, record, r.weights) for (rows, _, record), r in reversed(list(zip(sent, routings, strict=True)))
    ]
    for x, routing, out in zip(xs, routings, outs[::-1], strict=True):
        out.sum().backward()
        assert torch.allclose(out, x * routing.weights.sum(1, keepdim=True), rtol=1e-12)
        assert torch.allclose(x.grad, routing.weights.detach().sum(1, keepdim=True).expand_as(x), rtol=1e-12)
    with pytest.raises(ValueError, match="3 experts on 2 ranks"):
        dispatch(xs[0], routing_of(4, 3, 2, 0), shared_by)


def test_two_micro_batches_may_be_in_flight(ranks):
    ranks(2, two_in_flight)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_weights_are_applied_in_float32(dtype):
    ids = torch.tensor([[0, 1, 2]])
    weights = torch.tensor([[1.0, 1 / 512, 1 / 512]], requires_grad=True)
    x = torch.ones(1, 8, dtype=dtype, requires_grad=True)
    rows, _, record = dispatch(x, Routing(ids, weights, count(ids, 3)))
    out = combine(rows, record, weights)
    assert out.dtype == dtype
    assert torch.equal(out, torch.full((1, 8), 1 + 1 / 256).to(dtype))  # step by step in bfloat16 it would stay 1
    out.sum().backward()
    assert weights.grad.tolist() == [[8.0, 8.0, 8.0]]
    assert torch.equal(x.grad, torch.full((1, 8), 1 + 1 / 256).to(dtype))


@pytest.mark.parametrize(("dtype", "error"), [(torch.float64, 1e-13), (torch.float32, 1e-5), (torch.bfloat16, 0.05)])
@pytest.mark.parametrize("counts", [[3, 0, 5, 1], [0, 0, 9, 0], [0, 0, 0, 0]])
def test_experts_equal_a_loop_with_gradients_of_zero_where_unused(counts, dtype, error):
    torch.manual_seed(0)
    model = Experts(4, 16, 24).double()
    rows = torch.randn(sum(counts), 16, dtype=torch.float64, requires_grad=True)
    g = torch.randn_like(rows)
    silu, weights = torch.nn.functional.silu, zip(*model.parameters(), strict=True)
    parts = zip(rows.split(counts), weights, strict=True)
    out = torch.cat([(silu(x @ gate.T) * (x @ up.T)) @ down.T for x, (gate, up, down) in parts])
    wanted = [out, *torch.autograd.grad(out, [rows, *model.parameters()], g)]
    model, rows = model.to(dtype), rows.detach().to(dtype).requires_grad_()
    out = swiglu(rows, *model.parameters(), counts)
    got = [out, *torch.autograd.grad(out, [rows, *model.parameters()], g.to(dtype))]
    for a, b in zip(got, wanted, strict=True):
        assert a.shape == b.shape
        assert a.numel() == 0 or (a - b).abs().max() <= error * max(1.0, b.abs().max().item())
    for weight in got[2:]:
        assert all(weight[e].eq(0).all() for e, size in enumerate(counts) if size == 0)


@pytest.mark.parametrize(
    ("tokens", "k", "load", "dropped"), [(9, 2, "random", 0.3), (9, 1, "last", 0.0), (0, 2, "random", 0)]
)
def test_experts_that_are_all_here_equal_dispatch_and_combine(tokens, k, load, dropped):
    torch.manual_seed(0)
    experts, routing = Experts(4, 16, 24).double(), routing_of(tokens, 4, k, 3, load, dropped)
    x, g = (tokens_of(tokens, 16, seed) for seed in (1, 2))
    x.requires_grad_()

    def around():
        rows, counts, record = dispatch(x, routing)
        return combine(swiglu(rows, *experts.parameters(), counts), record, routing.weights)

    results = []
    for out in (around(), experts(x, routing)):
        results.append([out, *torch.autograd.grad(out, [x, routing.weights, *experts.parameters()], g)])
    for a, b in zip(*results, strict=True):
        assert torch.allclose(a, b, rtol=1e-12, atol=1e-14)


def more_experts_than_its_part():
    with pytest.raises(ValueError, match="2 experts are this rank's part of the layer's, and it holds 4"):
        Experts(4, 8, 8)(torch.zeros(3, 8), routing_of(3, 4, 2, 0), ExpertRanks(dist.group.WORLD))


def test_a_rank_with_another_number_of_experts_than_its_part_is_refused(ranks):
    ranks(2, more_experts_than_its_part)
    with pytest.raises(ValueError, match="6 experts are this rank's part of the layer's, and it holds 4"):
        Experts(4, 8, 8)(torch.zeros(3, 8), routing_of(3, 6, 2, 0))


def parts_of(experts, parts):
    """The same experts, each with a part of the hidden width."""
    gate, up, down = (weight.detach() for weight in experts.parameters())
    for g, u, d in zip(gate.chunk(parts, 1), up.chunk(parts, 1), down.chunk(parts, 2), strict=True):
        part = Experts(4, 16, 24, experts.dispatcher, experts.factor)
        part.gate_proj, part.up_proj, part.down_proj = (torch.nn.Parameter(weight.clone()) for weight in (g, u, d))
        yield part


@pytest.mark.parametrize("dispatcher", ["all_to_all", "static"])
def test_parts_of_the_hidden_width_add_up(dispatcher):
    torch.manual_seed(0)
    experts, routing = Experts(4, 16, 24, dispatcher, 4.0).double(), routing_of(9, 4, 2, 3)
    x = tokens_of(9, 16, 1).requires_grad_()
    parts = list(parts_of(experts, 3))
    whole, total = experts(x, routing), sum(part(x, routing) for part in parts)
    assert torch.allclose(whole, total, rtol=1e-12, atol=1e-14)
    wanted = torch.autograd.grad(whole.sum(), [x, routing.weights, *experts.parameters()])
    got = torch.autograd.grad(total.sum(), [x, routing.weights, *(p for part in parts for p in part.parameters())])
    gate, up, down = (torch.cat(got[2 + i :: 3], dim) for i, dim in enumerate((1, 1, 2)))
    for a, b in zip((*got[:2], gate, up, down), wanted, strict=True):
        assert torch.allclose(a, b, rtol=1e-12, atol=1e-14)


def gathered_around_their_forward():
    """Experts over two ranks, each of them sharded over two more; every rank has tokens of its own."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("efsdp", "ep"))
    rank, shared_by = dist.get_rank(), ExpertRanks(mesh.get_group("ep"))
    part = slice(2 * mesh.get_local_rank("ep"), 2 * mesh.get_local_rank("ep") + 2)
    torch.manual_seed(0)
    whole = Experts(4, 16, 24).double()
    experts = Experts(2, 16, 24).double()
    experts.load_state_dict({name: weight[part] for name, weight in whole.state_dict().items()})
    fully_shard(experts, mesh=mesh["efsdp"], shard_placement_fn=lambda weight: Shard(1))
    experts.set_gradient_divide_factor(1.0)
    experts.set_force_sum_reduction_for_comms(True)
    x, routing = tokens_of(5, 16, rank).requires_grad_(), routing_of(5, 4, 2, rank)
    wanted = whole(x, routing)
    inputs = torch.autograd.grad(wanted.sum(), [x, routing.weights], retain_graph=True)
    wanted.sum().backward(inputs=list(whole.parameters()))
    got = experts(x, routing, shared_by)
    got.sum().backward()
    assert torch.allclose(got, wanted, rtol=1e-12, atol=1e-14)
    for value, grad in zip((x, routing.weights), inputs, strict=True):
        assert torch.allclose(value.grad, grad, rtol=1e-12, atol=1e-14)
    for name, weight in experts.named_parameters():
        total = whole.get_parameter(name).grad
        dist.all_reduce(total)
        assert torch.allclose(weight.grad.full_tensor(), total[part], rtol=1e-12, atol=1e-14)


def test_experts_may_be_gathered_around_their_forward(ranks):
    ranks(4, gathered_around_their_forward)
