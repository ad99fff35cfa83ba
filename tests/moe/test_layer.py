from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.utils.checkpoint import checkpoint

from composable.moe.balance import update_bias
from composable.moe.config import Balance, Capacity, Exploration, MoEConfig, deepseek_v3, gpt_oss, mixtral, qwen3_moe
from composable.moe.dispatch import ExpertRanks
from composable.moe.layer import MoE, TokenInfo
from tests.moe import slow

D = 8
LOSSES = Balance(switch=0.1, kl=0.1, sequence=0.1, z=0.01)


def shared(width):
    return nn.Sequential(nn.Linear(D, width), nn.SiLU(), nn.Linear(width, D)) if width else None


def moe_of(config, seed=0, dtype=torch.float64):
    torch.manual_seed(seed)
    moe = MoE(D, config, layer=3, shared=shared(config.shared_ffn))
    if config.correction:
        moe.gate.e_score_correction_bias.copy_(torch.linspace(0.2, -0.2, config.experts))
    if config.router_bias:
        nn.init.normal_(moe.gate.bias)
    return moe.to(dtype)


def inputs(b=2, s=6, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(b, s, D, generator=generator, dtype=torch.float64) for _ in range(2))


FAMILIES = {
    "mixtral": mixtral(8, 2, 12),
    "not_normalised": qwen3_moe(8, 3, 12, normalise=False),
    "deepseek_v3": deepseek_v3(8, 2, 12, shared_ffn=10, groups=4, groups_kept=2),
    "gpt_oss": gpt_oss(8, 3, 12),
    "gated_shared": replace(qwen3_moe(8, 2, 12), shared_ffn=10, shared_gate=True),
    "one_of_one": MoEConfig(1, 1, 12),
    "all_of_them": MoEConfig(4, 4, 12),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_the_layer_equals_a_loop_over_tokens_with_gradients(family):
    moe = moe_of(FAMILIES[family])
    x, g = inputs()
    results = []
    for forward in (moe, lambda x: slow.layer(moe, x)):
        leaf = x.clone().requires_grad_()
        out = forward(leaf)
        results.append([out, *torch.autograd.grad(out, [leaf, *moe.parameters()], g)])
    for got, wanted in zip(*results, strict=True):
        assert (got - wanted).abs().max() <= 1e-12 * max(1.0, wanted.abs().max().item())


def test_recomputation_and_a_second_pass_give_the_same_bits():
    exploration = Exploration(jitter=0.1, noise="gaussian", temperature=2.0, temperature_steps=10, expert_dropout=0.2)
    moe = moe_of(replace(mixtral(8, 2, 12), exploration=exploration, capacity=Capacity(0.6, "next"), balance=LOSSES))
    x, g = inputs()
    records = []
    index, scale = torch.arange(12).view(2, 6) + 100, torch.tensor(0.5)
    info = TokenInfo(index, scale=scale, seed=1, step=4, record=records.append)
    results = []

    def block(x):
        return moe(x, info).sin()  # something follows, or recomputation would stop short of the layer's end

    for recompute in (False, False, True):
        leaf = x.clone().requires_grad_()
        out = checkpoint(block, leaf, use_reentrant=False) if recompute else block(leaf)
        results.append([out, *torch.autograd.grad(out, [leaf, *moe.parameters()], g)])
    for others in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], others, strict=True))
    assert len(records) == 3
    assert all(torch.equal(record.executed, records[0].executed) for record in records)
    assert records[0].chosen.sum() == 24
    assert records[0].executed.max() <= 2
    later = moe(x, replace(info, step=5, record=None))
    assert not torch.equal(later.sin(), results[0][0])
    with pytest.raises(ValueError, match="index"):
        moe(x, replace(info, index=None))


def test_evaluation_neither_explores_nor_balances():
    plain = mixtral(8, 2, 12)
    noisy = replace(plain, exploration=Exploration(jitter=0.5, noise="gumbel"), balance=LOSSES)
    x, _ = inputs()
    assert torch.equal(moe_of(plain)(x), moe_of(noisy)(x))


def test_bfloat16_chooses_and_computes_as_float64_does():
    moe = moe_of(mixtral(8, 2, 12)).to(torch.bfloat16)
    x = next(inputs()).bfloat16()
    out = moe(x)
    wanted = moe.double()(x.double())  # of the same rounded weights
    assert out.dtype == torch.bfloat16
    assert (out - wanted).abs().max() < 0.02 * wanted.abs().max()


def test_the_correction_bias_has_its_value_where_parameters_have_no_memory_yet():
    with torch.device("meta"):
        moe = MoE(D, replace(mixtral(4, 2, 8), correction=True))
    assert moe.gate.weight.is_meta
    assert moe.gate.e_score_correction_bias.tolist() == [0.0] * 4
    assert "gate.e_score_correction_bias" in moe.state_dict()


def test_the_bias_update_balances_a_skewed_router():
    moe = moe_of(MoEConfig(8, 2, 12, score="sigmoid", correction=True, router_bias=True))
    with torch.no_grad():
        moe.gate.bias[:2] = 4.0
    x, records, loads = torch.randn(4, 64, D, dtype=torch.float64), [], []
    for _ in range(200):
        with torch.no_grad():
            moe(x, TokenInfo(record=records.append))
        load = records.pop().chosen
        loads.append((load.max() / load.double().mean()).item())
        update_bias(moe.gate.e_score_correction_bias, load, 0.005)
    assert loads[0] > 3.5
    assert max(loads[-20:]) < 1.5


def test_a_compiled_layer_equals_the_eager_one_and_stops_compiling():
    torch.compiler.reset()
    graphs, counts, records = [], [], []

    def counting(graph, example_inputs):
        graphs.append(graph)
        return graph.forward

    capacity, noise = Capacity(1.0, "next"), Exploration(noise="gumbel")
    config = replace(FAMILIES["deepseek_v3"], router_bias=True, capacity=capacity, exploration=noise, balance=LOSSES)
    layers = [moe_of(config, dtype=torch.float32) for _ in range(3)]
    for moe, backend in zip(layers, (counting, "aot_eager"), strict=False):
        moe.compile(backend=backend)
    x, scale, index = next(inputs()).float(), torch.tensor(0.5), torch.arange(12).view(2, 6)
    for step in range(8):
        results = []
        lift = torch.linspace(-90, 90, 8) * (0, 1, -1)[step % 3]  # all to the last experts, then to the first
        for moe in layers:
            with torch.no_grad():
                moe.gate.bias.copy_(lift)
            info = TokenInfo(index, scale=scale, step=torch.tensor(step), record=lambda r: records.append(r))
            out = moe(x, info)
            results.append([out, *torch.autograd.grad(out.square().sum(), list(moe.parameters()))])
        for others in results[:2]:
            assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(others, results[2], strict=True))
        counts.append(len(graphs))
    assert len(records) == 24
    assert counts[-1] == counts[3] <= 10


def test_a_shared_network_and_its_width_come_together():
    for width, network in ((8, None), (0, shared(8))):
        with pytest.raises(ValueError, match=f"moe.shared_ffn={width}"):
            MoE(D, replace(mixtral(4, 2, 8), shared_ffn=width), shared=network)


def of_ranks(config, cases):
    """Each rank has its rows of the batch and its experts; gradients of the rest are summed."""
    world, rank, shared_by = dist.get_world_size(), dist.get_rank(), ExpertRanks(dist.group.WORLD)
    results = []
    for push, recompute, batch in cases:
        moe = pushed(moe_of(config), push)
        mine = slice(rank * config.experts // world, (rank + 1) * config.experts // world)
        for name, weight in list(moe.experts.named_parameters()):
            setattr(moe.experts, name, nn.Parameter(weight.detach()[mine].clone()))
        x, g = (t[rank * batch // world : (rank + 1) * batch // world] for t in inputs(*shape(batch)))
        leaf = x.clone().requires_grad_()
        for _ in range(2):  # accumulated
            forward = partial(moe, ranks=shared_by)
            out = checkpoint(forward, leaf, use_reentrant=False) if recompute else forward(leaf)
            out.backward(g)
        for name, weight in moe.named_parameters():
            if not name.startswith("experts"):
                dist.all_reduce(weight.grad)
        results.append({"out": out.detach(), "x": leaf.grad} | {n: p.grad for n, p in moe.named_parameters()})
    return results


def shape(batch):
    return (batch, 1) if batch <= 4 else (batch, 3)


def pushed(moe, push):
    """All tokens to the first experts, to the last ones, or as the router likes."""
    lift = torch.linspace(0, 100, moe.config.experts, dtype=torch.float64)
    moe.gate.bias = nn.Parameter({"none": 0 * lift, "last": lift, "first": -lift}[push])
    return moe


CASES = [
    ("none", False, 8),
    ("first", False, 8),
    ("last", True, 8),
    ("none", True, 4),  # a token on each of four ranks
    ("first", False, 4),
]


@pytest.mark.parametrize("k", [1, 2, 8])
@pytest.mark.parametrize("world", [2, 4])
def test_experts_on_several_ranks_equal_one_process(ranks, world, k):
    config = MoEConfig(8, k, 12, normalise=k > 1)
    results = ranks(world, of_ranks, config, CASES)
    for case, (push, _, batch) in enumerate(CASES):
        moe = pushed(moe_of(config), push)
        x, g = inputs(*shape(batch))
        leaf = x.clone().requires_grad_()
        for _ in range(2):
            out = moe(leaf)
            out.backward(g)
        wanted = {"out": out.detach(), "x": leaf.grad} | {n: p.grad for n, p in moe.named_parameters()}
        for name, value in wanted.items():
            parts = [rank[case][name] for rank in results]
            whole = name in ("out", "x") or name.startswith("experts")
            for part in [torch.cat(parts)] if whole else parts:
                assert (part - value).abs().max() <= 1e-12 * max(1.0, value.abs().max().item()), (case, name)
        if push != "none" and k < 8:
            unused = moe.experts.up_proj.grad[k:] if push == "first" else moe.experts.up_proj.grad[:-k]
            assert unused.eq(0).all()
            got = torch.cat([rank[case]["experts.up_proj"] for rank in results])
            assert (got[k:] if push == "first" else got[:-k]).eq(0).all()


def with_stacks_spread_over_a_mesh():
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    moe = moe_of(mixtral(8, 2, 12))
    for name, weight in list(moe.experts.named_parameters()):
        setattr(moe.experts, name, nn.Parameter(distribute_tensor(weight.detach(), mesh, [Shard(0)])))
    x, g = (t.chunk(2)[dist.get_rank()] for t in inputs())
    moe(x, ranks=ExpertRanks(mesh.get_group())).backward(g)
    return {name: weight.grad.full_tensor() for name, weight in moe.experts.named_parameters()}


def test_stacks_of_experts_may_be_dtensors(ranks):
    moe = moe_of(mixtral(8, 2, 12))
    x, g = inputs()
    moe(x).backward(g)
    for part in ranks(2, with_stacks_spread_over_a_mesh):
        for name, weight in moe.experts.named_parameters():
            assert torch.allclose(part[name], weight.grad, rtol=1e-12, atol=1e-14), name
