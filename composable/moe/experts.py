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


@torch.compiler.disable
def swiglu(rows: Tensor, gate: Tensor, up: Tensor, down: Tensor, counts: list[int]) -> Tensor:
    """rows [R, D] through experts gate, up [E, F, D], down [E, D, F], counts[e] rows each -> [R, D]."""
    aligned = all(w.size(-1) * w.element_size() % 16 == 0 for w in (gate, down))
    if rows.device.type == "cpu" or rows.dtype == torch.float64 or not aligned or len(rows) == 0:
        return _Loop.apply(rows, gate, up, down, counts)
    ends = torch.tensor(counts, device=rows.device).cumsum(0).to(torch.int32)
    hidden = F.silu(F.grouped_mm(rows, gate.mT, offs=ends)) * F.grouped_mm(rows, up.mT, offs=ends)
    return F.grouped_mm(hidden, down.mT, offs=ends)


def _local(weight: Tensor) -> Tensor:
    return weight.to_local() if isinstance(weight, DTensor) else weight


def _product_of(x: Tensor) -> Product:
    fast = x.device.type == "cpu" and x.dtype == torch.float32 and torch.backends.mkldnn.is_available()
    return onednn_product if fast else F.linear


class _Loop(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, gate: Tensor, up: Tensor, down: Tensor, counts: list[int]) -> Tensor:
        product = _product_of(rows)
        kept, out, first = [], torch.empty_like(rows), 0
        for expert, size in enumerate(counts):
            if size:
                part = slice(first, first + size)
                g, u = product(rows[part], gate[expert]), product(rows[part], up[expert])
                out[part] = product(F.silu(g).mul_(u), down[expert])
                kept += [g, u]
                first += size
        ctx.counts = counts
        ctx.save_for_backward(rows, gate, up, down, *kept)
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        rows, gate, up, down, *kept = ctx.saved_tensors
        needs = ctx.needs_input_grad
        product, silu_backward = _product_of(rows), torch.ops.aten.silu_backward
        for_rows = torch.empty_like(rows) if needs[0] else None
        for_gate, for_up, for_down = (
            torch.empty_like(weight) if need else None
            for weight, need in zip((gate, up, down), needs[1:4], strict=True)
        )
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
            x, by = rows[part], grad[part]
            a = F.silu(g)
            if for_down is not None:
                for_down[expert] = product(by.t(), (a * u).t())
            h = product(by, down[expert].t())
            by_u, by_g = a.mul_(h), silu_backward(h.mul_(u), g)
            if for_gate is not None:
                for_gate[expert] = product(by_g.t(), x.t())
            if for_up is not None:
                for_up[expert] = product(by_u.t(), x.t())
            if for_rows is not None:
                torch.add(product(by_g, gate[expert].t()), product(by_u, up[expert].t()), out=for_rows[part])
        return for_rows, for_gate, for_up, for_down, None
