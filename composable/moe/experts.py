"""The experts of a layer: SwiGLU networks (Shazeer 2020, arXiv:2002.05202) with stacked weights, multiplied in groups.

On an accelerator by grouped matrix products. On a CPU by a loop over the experts within one autograd function: torch's
grouped product in float32 goes to MKL there and reached half the speed of oneDNN's on an AMD EPYC core (63 against 33
ms forward and backward, 4,096 rows, 8 experts of 256 x 344); in bfloat16 it was level, and float64 it does not have.
Between its products an expert's activations stay in the core's cache.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from composable._torch import onednn_product
from composable.moe.config import Dispatcher
from composable.moe.dispatch import ExpertRanks, all_to_all, alone, combine, dispatch, expert_order
from composable.moe.hierarchical import hierarchical
from composable.moe.router import Routing
from composable.moe.static import combine_blocks, dispatch_blocks, room_for

Product = Callable[[Tensor, Tensor], Tensor]
"""(x [N, I], weight [O, I]) -> x @ weight^T [N, O]"""


class Experts(nn.Module):
    """down(silu(gate(x)) * up(x)) for each expert; gate_proj and up_proj [E, F, D], down_proj [E, D, F].

    The experts of this rank alone, once a parameter is a part of the stack, or a DTensor of which it has a part; and a
    part of the hidden width F, where that is shared out: the outputs are then to be added up over its ranks.

    Args:
        experts: of all ranks together.
        dispatcher: how tokens come to the ranks of their experts.
        factor: capacity factor that the routing keeps; only `static` needs it.
    """

    def __init__(
        self, experts: int, dim: int, ffn: int, dispatcher: Dispatcher = "all_to_all", factor: float = 0.0
    ) -> None:
        super().__init__()
        self.dispatcher = dispatcher
        self.factor = factor
        self.gate_proj = nn.Parameter(torch.empty(experts, ffn, dim))
        self.up_proj = nn.Parameter(torch.empty(experts, ffn, dim))
        self.down_proj = nn.Parameter(torch.empty(experts, dim, ffn))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Uniform within 1 / sqrt(inputs), as `nn.Linear`."""
        for weight in (self.gate_proj, self.up_proj, self.down_proj):
            nn.init.uniform_(weight, -(weight.size(-1) ** -0.5), weight.size(-1) ** -0.5)

    def forward(self, x: Tensor, routing: Routing, ranks: ExpertRanks | None = None, batch_ranks: int = 1) -> Tensor:
        """x [T, D] -> [T, D]: the experts' outputs, added up with their weights; collective over `ranks`.

        An expert without rows gets a gradient of zeros.

        Args:
            routing: of those tokens.
            ranks: that share the experts; None: all are here.
            batch_ranks: ranks that hold a part of the same micro-batch, as many tokens each; only `static` asks.

        Raises:
            ValueError: this rank has another number of experts than its part; or ranks without the groups that the
                dispatcher needs.
        """
        gate, up, down = (_local(weight) for weight in (self.gate_proj, self.up_proj, self.down_proj))
        experts = routing.counts.numel()
        part = experts // (1 if ranks is None else dist.get_world_size(ranks.group))
        if part != len(gate):
            raise ValueError(
                f"{part} experts are this rank's part of the layer's, and it holds {len(gate)}: give the ranks that "
                "share the experts"
            )
        if self.dispatcher == "static":
            room = room_for(self.factor, len(x), batch_ranks, routing.ids.size(1), experts)
            return swiglu_in_blocks(x, routing, gate, up, down, room, ranks, pack=room > 0 and _packs(x, gate, down))
        if x.device.type == "cpu" and alone(ranks):
            return swiglu_in_place(x, routing, gate, up, down)
        plan = hierarchical if self.dispatcher == "hierarchical" else all_to_all
        rows, counts, record = dispatch(x, routing, ranks, plan)
        return combine(swiglu(rows, gate, up, down, counts), record, routing.weights)


@torch.compiler.disable
def swiglu(rows: Tensor, gate: Tensor, up: Tensor, down: Tensor, counts: list[int]) -> Tensor:
    """rows [R, D] through experts gate, up [E, F, D], down [E, D, F], counts[e] rows each -> [R, D]."""
    if len(rows) == 0 or not _groups(rows, gate, down):
        return _Loop.apply(rows, gate, up, down, counts, None, None)
    return grouped_swiglu(rows, gate, up, down, torch.tensor(counts, device=rows.device).cumsum(0).to(torch.int32))


def grouped_swiglu(rows: Tensor, gate: Tensor, up: Tensor, down: Tensor, ends: Tensor) -> Tensor:
    """rows [R, D], those of each expert up to ends [E] int32 -> [R, D], anything after the last end."""
    hidden = F.silu(F.grouped_mm(rows, gate.mT, offs=ends)) * F.grouped_mm(rows, up.mT, offs=ends)
    return F.grouped_mm(hidden, down.mT, offs=ends)


def swiglu_in_blocks(
    x: Tensor,
    routing: Routing,
    gate: Tensor,
    up: Tensor,
    down: Tensor,
    room: int,
    ranks: ExpertRanks | None,
    *,
    pack: bool,
) -> Tensor:
    """x [T, D] through experts that get blocks of `room` rows from every rank -> [T, D]; no shape depends on routing.

    Args:
        pack: multiply the rows that came alone, by grouped products; or the padding too, by batched ones.
    """
    rows, blocks = dispatch_blocks(x, routing, room, ranks, pack=pack)
    if blocks.packed is not None:
        out = grouped_swiglu(rows, gate, up, down, blocks.packed.ends)
    else:
        out = (F.silu(rows @ gate.mT) * (rows @ up.mT)) @ down.mT
    return combine_blocks(out, blocks, routing.weights)


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


def _groups(x: Tensor, gate: Tensor, down: Tensor) -> bool:
    """Whether torch's grouped product is to be used: an accelerator, not float64, rows of multiples of 16 bytes."""
    aligned = all(w.size(-1) * w.element_size() % 16 == 0 for w in (gate, down))
    return x.device.type != "cpu" and x.dtype != torch.float64 and aligned


def _packs(x: Tensor, gate: Tensor, down: Tensor) -> bool:
    """Whether torch's grouped product leaves its offsets on the device: elsewhere it is a loop that reads them."""
    if not _groups(x, gate, down) or x.dtype != torch.bfloat16 or x.device.type != "cuda":
        return False
    return torch.cuda.get_device_properties(x.device).major in (9, 10)


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
