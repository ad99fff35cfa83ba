"""Context parallelism by gathering keys and values (Llama 3, Dubey et al. 2024, arXiv:2407.21783, section 3.3.2).

One collective each way in a layer, at the price of holding the whole row's keys and values while a layer computes; the
backward pass gathers them again instead of keeping them.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from composable.models.attention import Method, sink_gradient
from composable.parallel.collectives import stack_ranks, sum_ranks
from composable.parallel.head_tail import from_row, places, to_row
from composable.parallel.online_softmax import Finished, Partial, Piece, Window, piece_mask


def all_gather(group: ProcessGroup) -> Method:
    """Attention over a sequence in head-and-tail order on the ranks of `group`."""

    def mask(documents: Tensor | None) -> tuple[Tensor, Tensor] | None:
        """Documents of this rank's queries [B, S / cp] and of the row's keys [B, S]."""
        return None if documents is None else (documents, to_row(stack_ranks(documents, group), -1))

    @torch.compiler.disable  # kernels with a log-sum-exp, and a collective in the backward pass
    def attend(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: tuple[Tensor, Tensor] | None,
        *,
        window: int = 0,
        sinks: Tensor | None = None,
    ) -> Tensor:
        return _Gathered.apply(q, k, v, *(mask or (None, None)), sinks, window, group)

    return Method(mask, attend)


def pieces(rank: int, cp: int, length: int, window: int = 0) -> list[Piece]:
    """What the two chunks of `rank`, `length` tokens together, see of the row: their diagonal and all before it that a
    window reaches from the chunk's first token."""
    half = length // 2
    found = []
    for start, chunk in ((0, rank), (half, 2 * cp - 1 - rank)):
        rows = slice(start, start + half)
        found.append(Piece(rows, slice(chunk * half, (chunk + 1) * half), causal=True))
        first = max(0, chunk * half - window + 1) if window else 0
        if first < chunk * half:
            found.append(Piece(rows, slice(first, chunk * half), causal=False))
    return found


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        queries: Tensor | None,
        keys: Tensor | None,
        sinks: Tensor | None,
        window: int,
        group: ProcessGroup,
    ) -> Tensor:
        partial, near = Partial.empty(q, sinks), _window(window, q, group)
        row_k, row_v = to_row(stack_ranks(torch.stack((k, v)), group), -2)  # [B, H_kv, S, hd]
        for piece in pieces(group.rank(), group.size(), q.size(2), window):
            partial.add(q, row_k, row_v, piece, piece_mask(piece, queries, keys, near))
        out = partial.out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, partial.lse, queries, keys, sinks)
        ctx.window, ctx.group = window, group
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, queries, keys, sinks = ctx.saved_tensors
        row_k, row_v = to_row(stack_ranks(torch.stack((k, v)), ctx.group), -2)
        # Gradients are added in float32 or wider, over pieces and over ranks.
        for_q, for_row = torch.zeros_like(q, dtype=lse.dtype), row_k.new_zeros(2, *row_k.shape, dtype=lse.dtype)
        finished, near = Finished(q, out, lse, grad.contiguous()), _window(ctx.window, q, ctx.group)
        for piece in pieces(ctx.group.rank(), ctx.group.size(), q.size(2), ctx.window):
            mask = piece_mask(piece, queries, keys, near)
            finished.gradients(row_k, row_v, piece, mask, (for_q, for_row[0], for_row[1]))
        for_k, for_v = sum_ranks(from_row(for_row, ctx.group.size(), -2), ctx.group)
        for_sinks = None if sinks is None else sink_gradient(sinks, grad, out, lse)
        return for_q.to(q.dtype), for_k.to(k.dtype), for_v.to(v.dtype), None, None, for_sinks, None, None


def _window(size: int, q: Tensor, group: ProcessGroup) -> Window | None:
    """Queries are in the places of this rank, keys in those of the row."""
    cp, length = group.size(), q.size(2)
    return Window(size, places(group.rank(), cp, length), (range(cp * length),), q.device) if size else None
