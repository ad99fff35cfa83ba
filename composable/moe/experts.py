"""The experts of a layer: SwiGLU networks (Shazeer 2020, arXiv:2002.05202) with stacked weights, multiplied in groups.

On an accelerator by grouped matrix products. On a CPU by a loop over the experts within one autograd function: torch's
grouped product in float32 goes to MKL there and reached half the speed of oneDNN's on an AMD EPYC core (63 against 33
ms forward and backward, 4,096 rows, 8 experts of 256 x 344); in bfloat16 it was level, and float64 it does not have.
Between its products an expert's activations stay in the core's cache.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from composable._torch import onednn_product
from composable.moe.dispatch import expert_order
from composable.moe.router import Routing

Product = Callable[[Tensor, Tensor], Tensor]
"""(x [N, I], weight [O, I]) -> x @ weight^T [N, O]"""


class Experts(nn.Module):
    """down(silu(gate(x)) * up(x)) for each expert; gate_proj and up_proj [E, F, D], down_proj [E, D, F].

    The experts of this rank alone, once a parameter is a part of the stack, or a DTensor of which it has a part.
    """

    def __init__(self, experts: int, dim: int, ffn: int) -> None:
        super().__init__()
        self.gate_proj = nn.Parameter(torch.empty(experts, ffn, dim))
        self.up_proj = nn.Parameter(torch.empty(experts, ffn, dim))
        self.down_proj = nn.Parameter(torch.empty(experts, dim, ffn))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Uniform within 1 / sqrt(inputs), as `nn.Linear`."""
        for weight in (self.gate_proj, self.up_proj, self.down_proj):
            nn.init.uniform_(weight, -(weight.size(-1) ** -0.5), weight.size(-1) ** -0.5)

    def forward(self, rows: Tensor, counts: list[int]) -> Tensor:
        """rows [R, D] -> [R, D]; the first counts[0] rows pass the first expert, and so on.

        An expert without rows gets a gradient of zeros.

        Raises:
            ValueError: counts of another number of experts than this rank has, or of other rows.
        """
        gate, up, down = (_local(weight) for weight in (self.gate_proj, self.up_proj, self.down_proj))
        if len(counts) != len(gate) or sum(counts) != len(rows):
            raise ValueError(
                f"counts of {len(counts)} experts and {sum(counts)} rows, for {len(gate)} experts here and {len(rows)} "
                "rows: give those that `dispatch` returned, over the group that shares the experts"
            )
        return swiglu(rows, gate, up, down, counts)

    def here(self, x: Tensor, routing: Routing) -> Tensor:
        """x [T, D] -> [T, D]: dispatch, experts and combine in one, where all experts are on this CPU."""
        return swiglu_in_place(
            x, routing, *(_local(weight) for weight in (self.gate_proj, self.up_proj, self.down_proj))
        )


@torch.compiler.disable
def swiglu(rows: Tensor, gate: Tensor, up: Tensor, down: Tensor, counts: list[int]) -> Tensor:
    """rows [R, D] through experts gate, up [E, F, D], down [E, D, F], counts[e] rows each -> [R, D]."""
    aligned = all(w.size(-1) * w.element_size() % 16 == 0 for w in (gate, down))
    if rows.device.type == "cpu" or rows.dtype == torch.float64 or not aligned or len(rows) == 0:
        return _Loop.apply(rows, gate, up, down, counts, None, None)
    ends = torch.tensor(counts, device=rows.device).cumsum(0).to(torch.int32)
    hidden = F.silu(F.grouped_mm(rows, gate.mT, offs=ends)) * F.grouped_mm(rows, up.mT, offs=ends)
    return F.grouped_mm(hidden, down.mT, offs=ends)


@torch.compiler.disable
def swiglu_in_place(x: Tensor, routing: Routing, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """x [T, D] through the experts of each token, added up with weights in float32 or wider -> [T, D]; on a CPU.

    What `dispatch`, `swiglu` and `combine` give without a group, up to rounding, while the rows of one expert alone
    exist at a time: on a CPU, new memory costs as much as the arithmetic on it.
    """
    counts = routing.counts.tolist()
    choices = expert_order(routing)[: sum(counts)]
    weights = routing.weights.flatten().index_select(0, choices)
    return _Loop.apply(x, gate, up, down, counts, choices // routing.ids.size(1), weights)


def _local(weight: Tensor) -> Tensor:
    return weight.to_local() if isinstance(weight, DTensor) else weight


def _product_of(x: Tensor) -> Product:
    fast = x.device.type == "cpu" and x.dtype == torch.float32 and torch.backends.mkldnn.is_available()
    return onednn_product if fast else F.linear


def _take(x: Tensor, tokens: Tensor | None, part: slice) -> Tensor:
    return x[part] if tokens is None else x.index_select(0, tokens[part])


class _Loop(torch.autograd.Function):
    """Expert by expert. Rows are those of x; or `tokens` [R] of it, whose results are added up with `weights` [R].

    No expert has a token twice, and experts follow one another: the order of every sum is fixed.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        gate: Tensor,
        up: Tensor,
        down: Tensor,
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
                g, u = product(rows, gate[expert]), product(rows, up[expert])
                y = product(F.silu(g).mul_(u), down[expert])
                if tokens is None or weights is None:
                    out[part] = y
                else:
                    out.index_add_(0, tokens[part], y.to(out.dtype).mul_(weights[part, None]))
                kept += [g, u]
                first += size
        ctx.counts = counts
        ctx.save_for_backward(x, gate, up, down, tokens, weights, *kept)
        return out.to(x.dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, gate, up, down, tokens, weights, *kept = ctx.saved_tensors
        product, silu_backward = _product_of(x), torch.ops.aten.silu_backward
        needs = ctx.needs_input_grad
        for_x = torch.zeros_like(x, dtype=None if weights is None else weights.dtype) if needs[0] else None
        for_gate, for_up, for_down = (
            torch.empty_like(weight) if need else None
            for weight, need in zip((gate, up, down), needs[1:4], strict=True)
        )
        for_weights = None if weights is None else torch.empty_like(weights)
        first = 0
        for expert, size in enumerate(ctx.counts):
            if size == 0:
                for total in (for_gate, for_up, for_down):
                    if total is not None:
                        total[expert].zero_()
                continue
            part = slice(first, first + size)
            first += size
            g, u = kept[:2]
            kept = kept[2:]
            rows, by = _take(x, tokens, part), _take(grad, tokens, part)
            a = F.silu(g)
            h, by_h = a * u, product(by, down[expert].t())
            if weights is not None and for_weights is not None:
                for_weights[part] = (h * by_h).sum(-1, dtype=weights.dtype)
                h, by_h = h.mul_(weights[part, None]), by_h.mul_(weights[part, None])
            if for_down is not None:
                for_down[expert] = product(by.t(), h.t())
            by_u, by_g = a.mul_(by_h), silu_backward(by_h.mul_(u), g)
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
        return None if for_x is None else for_x.to(x.dtype), for_gate, for_up, for_down, None, None, for_weights
