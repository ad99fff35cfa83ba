"""Biases of experts, the clamped SwiGLU and fused stacks: what a plain loop over tokens gives, gradients included."""

import itertools
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from composable._torch import fake_tensor_mode
from composable.moe.config import Capacity, MoEConfig, gpt_oss
from composable.moe.experts import Experts, grouped_swiglu, swiglu
from composable.moe.glu import Form, glu
from composable.moe.layer import MoE
from composable.moe.router import route
from tests.moe import slow

D = 16
FORMS = list(itertools.product((False, True), (False, True), (0.0, 0.7)))  # fused, bias, limit


def moe_of(config, dtype=torch.float64):
    """A layer with weights large enough that many values meet the limit."""
    torch.manual_seed(5)
    moe = MoE(D, config)
    for parameter in moe.parameters():
        nn.init.normal_(parameter, std=0.5)
    return moe.to(dtype)


def values_of(moe, forward, scale=1.0):
    x, g = torch.randn(2, 2, 6, D, generator=torch.Generator().manual_seed(1), dtype=torch.float64).unbind(0)
    leaf = (x * scale).to(moe.gate.weight.dtype).requires_grad_()
    out = forward(leaf)
    return [out, *torch.autograd.grad(out, [leaf, *moe.parameters()], g.to(out.dtype))]


@pytest.mark.parametrize(("fused", "bias", "limit"), FORMS)
@pytest.mark.parametrize("dispatcher", ["all_to_all", "static"])
def test_experts_of_every_form_equal_a_loop_over_tokens_with_gradients(fused, bias, limit, dispatcher):
    factor = 8.0 if dispatcher == "static" else 0.0  # nothing is dropped
    moe = moe_of(
        MoEConfig(
            8,
            2,
            12,
            expert_bias=bias,
            swiglu_limit=limit,
            fused=fused,
            dispatcher=dispatcher,
            capacity=Capacity(factor),
        )
    )
    for got, wanted in zip(values_of(moe, moe), values_of(moe, lambda x: slow.layer(moe, x)), strict=True):
        assert (got - wanted).abs().max() <= 1e-12 * max(1.0, wanted.abs().max().item())


def test_the_layer_of_gpt_oss_equals_a_loop_and_its_limit_is_met_on_both_sides():
    moe = moe_of(gpt_oss(8, 3, 12))
    results = values_of(moe, moe, 6.0), values_of(moe, lambda x: slow.layer(moe, x), 6.0)
    for got, wanted in zip(*results, strict=True):
        assert (got - wanted).abs().max() <= 1e-12 * max(1.0, wanted.abs().max().item())
    x = 6 * torch.randn(2, 2, 6, D, generator=torch.Generator().manual_seed(1), dtype=torch.float64)[0].flatten(0, 1)
    inner = torch.einsum("td,efd->tef", x, moe.experts.gate_up_proj) + moe.experts.gate_up_bias
    gate, up = inner[..., 0::2], inner[..., 1::2]
    assert (gate > 7).any()
    assert (up > 7).any()
    assert (up < -7).any()


def test_the_clamped_form_has_the_values_of_its_formula_and_no_slope_beyond_the_limit():
    gate = torch.tensor([-9.0, 1.0, 9.0], dtype=torch.float64, requires_grad=True)
    up = torch.tensor([2.0, 9.0, -9.0], dtype=torch.float64, requires_grad=True)
    out = glu(gate, up, 7.0)
    sigmoid = torch.tensor([-9.0, 1.0, 7.0], dtype=torch.float64).mul(1.702).sigmoid()
    assert torch.allclose(out, torch.tensor([-9.0 * 3, 1.0 * 8, 7.0 * -6], dtype=torch.float64) * sigmoid, rtol=1e-15)
    for_gate, for_up = torch.autograd.grad(out.sum(), (gate, up))
    assert for_gate[2] == 0
    assert for_gate[:2].ne(0).all()
    assert for_up.ne(0).tolist() == [True, False, False]


def rows_and_experts(fused, dtype):
    torch.manual_seed(2)
    experts = Experts(4, D, 24, fused=fused, bias=True, limit=0.7).to(dtype)
    for parameter in experts.parameters():
        nn.init.normal_(parameter, std=0.4)
    counts = [5, 0, 7, 2]
    return torch.randn(sum(counts), D, dtype=dtype), experts, counts


@pytest.mark.parametrize("fused", [False, True])
def test_grouped_products_equal_the_loop_and_an_expert_without_rows_has_gradients_of_zero(fused):
    rows, experts, counts = rows_and_experts(fused, torch.float32)
    ends = torch.tensor(counts).cumsum(0).to(torch.int32)
    results = []
    for grouped in (True, False):
        leaf = rows.clone().requires_grad_()
        gate, up = experts._gate_and_up("proj")
        form = experts._form(D)
        if grouped:
            out = grouped_swiglu(leaf, gate, up, experts.down_proj, ends, form)
        else:
            out = swiglu(leaf, gate, up, experts.down_proj, counts, form)
        results.append([out, *torch.autograd.grad(out.square().sum(), [leaf, *experts.parameters()])])
    for got, wanted in zip(*results, strict=True):
        assert (got - wanted).abs().max() <= 1e-5 * wanted.abs().max()
        if len(wanted) == 4:
            assert got[1].eq(0).all()
            assert wanted[1].eq(0).all()


def test_rows_after_the_last_end_take_no_part_in_the_gradients_of_biases():
    rows, experts, counts = rows_and_experts(False, torch.float32)
    ends = torch.tensor(counts).cumsum(0).to(torch.int32)
    leaf = torch.cat([rows, torch.full((3, D), 1e3)])
    form = experts._form(D)
    out = grouped_swiglu(leaf, experts.gate_proj, experts.up_proj, experts.down_proj, ends, form)[: len(rows)]
    assert form.biases[0] is not None
    got = torch.autograd.grad(out.sum(), [experts.gate_bias, experts.down_bias])
    assert torch.allclose(got[1], torch.tensor(counts, dtype=torch.float32)[:, None].expand(4, D))
    assert got[0].isfinite().all()


def test_fused_and_biased_experts_in_blocks_are_one_graph_whatever_the_routing():
    torch.compiler.reset()
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    torch.manual_seed(2)
    experts = Experts(4, D, 24, "static", 4.0, fused=True, bias=True, limit=0.7).double()
    for bias in (experts.gate_up_bias, experts.down_bias):
        nn.init.normal_(bias)
    compiled = torch.compile(experts, fullgraph=True, backend=backend)
    for seed in (0, 1):
        x = torch.randn(6, D, dtype=torch.float64, generator=torch.Generator().manual_seed(seed), requires_grad=True)
        config = MoEConfig(4, 2, 24)
        routing = route(torch.randn(6, 4, generator=torch.Generator().manual_seed(seed)).double(), config)
        wanted, got = (
            torch.autograd.grad(f(x, routing).sum(), [x, *experts.parameters()]) for f in (experts, compiled)
        )
        assert all(torch.allclose(a, b, rtol=1e-12, atol=1e-12) for a, b in zip(got, wanted, strict=True))
    assert len(graphs) == 1


def test_grouped_products_with_biases_need_no_value_of_the_routing():
    with fake_tensor_mode():  # tensors have no values there: whoever asks for one raises
        weights = [torch.empty(shape, dtype=torch.bfloat16) for shape in ((8, 24, 16), (8, 24, 16), (8, 16, 24))]
        form = Form(*(torch.empty(8, width, dtype=torch.bfloat16) for width in (24, 24, 16)), 7.0)
        rows = torch.empty(40, 16, dtype=torch.bfloat16)
        assert grouped_swiglu(rows, *weights, torch.empty(8, dtype=torch.int32), form).shape == (40, 16)


def test_a_rank_with_some_columns_of_the_bias_adds_those_alone():
    experts = Experts(2, 8, 4, bias=True).double()
    nn.init.normal_(experts.down_bias)
    whole = experts.down_bias.detach()
    experts.down_bias, experts.first_column = nn.Parameter(whole[:, 2:6]), 2
    down = experts._form(8).biases[2]
    assert down is not None
    assert torch.equal(down, F.pad(whole[:, 2:6], (2, 2)))


def test_a_limit_below_zero_is_refused():
    with pytest.raises(ValueError, match=r"swiglu_limit=-1.0: it is 0 \(plain SwiGLU\) or positive"):
        replace(gpt_oss(8), swiglu_limit=-1.0)


def test_biases_come_together():
    assert Form().biases == (None, None, None)
    names = [name for name, _ in Experts(2, 8, 4, fused=True, bias=True).named_parameters()]
    assert names == ["gate_up_proj", "down_proj", "gate_up_bias", "down_bias"]
