"""Experts one after the other, in one autograd function: on a CPU, and where there is no grouped product."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from composable._torch import onednn_product
from composable.moe.glu import ALPHA, Form, factors

Product = Callable[[Tensor, Tensor], Tensor]
"""(x [N, I], weight [O, I]) -> x @ weight^T [N, O]"""


def expert_by_expert(
    x: Tensor,
    gate: Tensor,
    up: Tensor,
    down: Tensor,
    counts: list[int],
    form: Form,
    tokens: Tensor | None = None,
    weights: Tensor | None = None,
) -> Tensor:
    """x through experts gate, up [E, F, D], down [E, D, F], counts[e] rows each; an expert without rows gets zeros.

    Args:
        x: the rows [R, D] in the order of experts, -> [R, D]; or all tokens [T, D], -> [T, D].
        tokens: [R] int64, token of each row, none twice for an expert; None: x are the rows.
        weights: [R] with which a token's rows are added up, float32 or wider; None without `tokens`.
    """
    return _Loop.apply(x, gate, up, down, *form.biases, form.limit, counts, tokens, weights)


def _product_of(x: Tensor) -> Product:
    fast = x.device.type == "cpu" and x.dtype == torch.float32 and torch.backends.mkldnn.is_available()
    return onednn_product if fast else F.linear


def _take(x: Tensor, tokens: Tensor | None, part: slice) -> Tensor:
    return x[part] if tokens is None else x.index_select(0, tokens[part])


def _shifted(x: Tensor, bias: Tensor | None, expert: int) -> Tensor:
    return x if bias is None else x.add_(bias[expert])


def _gradients(by_h: Tensor, gate: Tensor, up: Tensor, limit: float, activated: Tensor) -> tuple[Tensor, Tensor]:
    """by_h [N, F] of `glu` -> by gate, by up, in the memory of by_h and activated; the factors are those of `glu`."""
    silu_backward = torch.ops.aten.silu_backward
    if not limit:
        by_up = activated.mul_(by_h)
        return silu_backward(by_h.mul_(up), gate), by_up
    by_up = activated.mul_(by_h).masked_fill_(up.abs() > limit, 0.0)
    by_h.mul_(up.clamp(-limit, limit).add_(1))
    # x sigmoid(a x) is silu(a x) / a: the derivative is silu's at a x.
    return silu_backward(by_h, gate.clamp(max=limit) * ALPHA).masked_fill_(gate > limit, 0.0), by_up


class _Loop(torch.autograd.Function):
    """As `expert_by_expert`. Experts follow one another: the order of every sum is fixed."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        gate: Tensor,
        up: Tensor,
        down: Tensor,
        gate_bias: Tensor | None,
        up_bias: Tensor | None,
        down_bias: Tensor | None,
        limit: float,
        counts: list[int],
        tokens: Tensor | None,
        weights: Tensor | None,
    ) -> Tensor:
        product = _product_of(x)
        kept, first = [], 0
        out = torch.empty_like(x) if weights is None else x.new_zeros(x.shape, dtype=weights.dtype)
        for expert, size in enumerate(counts):
            if size:
                part = slice(first, first + size)
                rows = _take(x, tokens, part)
                g = _shifted(product(rows, gate[expert]), gate_bias, expert)
                u = _shifted(product(rows, up[expert]), up_bias, expert)
                activated, factor = factors(g, u, limit)
                y = _shifted(product(activated.mul_(factor), down[expert]), down_bias, expert)
                if tokens is None or weights is None:
                    out[part] = y
                else:
                    out.index_add_(0, tokens[part], y.to(out.dtype).mul_(weights[part, None]))
                kept += [g, u]
                first += size
        ctx.counts, ctx.limit = counts, limit
        ctx.save_for_backward(x, gate, up, down, gate_bias, up_bias, down_bias, tokens, weights, *kept)
        return out.to(x.dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, gate, up, down, gate_bias, up_bias, down_bias, tokens, weights, *kept = ctx.saved_tensors
        product, needs = _product_of(x), ctx.needs_input_grad
        for_x = torch.zeros_like(x, dtype=None if weights is None else weights.dtype) if needs[0] else None
        parameters = (gate, up, down, gate_bias, up_bias, down_bias)
        totals = [
            torch.empty_like(parameter) if need else None
            for parameter, need in zip(parameters, needs[1:7], strict=True)
        ]
        for_gate, for_up, for_down, for_gate_bias, for_up_bias, for_down_bias = totals
        for_weights = None if weights is None else torch.empty_like(weights)
        first = 0
        for expert, size in enumerate(ctx.counts):
            if size == 0:
                for total in totals:
                    if total is not None:
                        total[expert].zero_()
                continue
            part = slice(first, first + size)
            first += size
            g, u = kept[:2]
            kept = kept[2:]
            rows, by = _take(x, tokens, part), _take(grad, tokens, part)
            a, factor = factors(g, u, ctx.limit)
            h, by_h = a * factor, product(by, down[expert].t())
            if weights is not None and for_weights is not None:
                for_weights[part] = (h * by_h).sum(-1, dtype=weights.dtype)
                if down_bias is not None:
                    for_weights[part] += (by * down_bias[expert]).sum(-1, dtype=weights.dtype)
                h, by_h = h.mul_(weights[part, None]), by_h.mul_(weights[part, None])
            if for_down is not None:
                for_down[expert] = product(by.t(), h.t())
            if for_down_bias is not None:
                for_down_bias[expert] = (by if weights is None else by * weights[part, None]).sum(0)
            by_g, by_u = _gradients(by_h, g, u, ctx.limit, a)
            for bias, of_rows in ((for_gate_bias, by_g), (for_up_bias, by_u)):
                if bias is not None:
                    bias[expert] = of_rows.sum(0)
            if for_gate is not None:
                for_gate[expert] = product(by_g.t(), rows.t())
            if for_up is not None:
                for_up[expert] = product(by_u.t(), rows.t())
            if for_x is not None:
                total = product(by_g, gate[expert].t()).add_(product(by_u, up[expert].t()))
                if tokens is None:
                    for_x[part] = total
                else:
                    for_x.index_add_(0, tokens[part], total.to(for_x.dtype))
        return None if for_x is None else for_x.to(x.dtype), *totals, None, None, None, for_weights
