"""Ring attention (Liu, Zaharia & Abbeel 2023, arXiv:2310.01889): keys and values travel, queries stay.

Each rank meets every other rank's keys in turn, and sends them on while it computes. In head-and-tail order each
meeting is half a square: of an earlier rank's keys all queries see the early chunk and none the late one; a later
rank's keys are seen by the late queries alone, all of them. So no rank waits for another, and without documents
nothing is computed that a mask would hide.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup, Work

from composable.models.attention import Method, sink_gradient
from composable.parallel.collectives import stack_ranks
from composable.parallel.head_tail import places
from composable.parallel.online_softmax import Finished, Partial, Piece, Window, piece_mask


def ring(group: ProcessGroup) -> Method:
    """Attention over a sequence in head-and-tail order on the ranks of `group`."""

    def mask(documents: Tensor | None) -> Tensor | None:
        return None if documents is None else stack_ranks(documents, group)  # [cp, B, S / cp]

    @torch.compiler.disable  # a graph cannot hold requests in flight
    def attend(
        q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *, window: int = 0, sinks: Tensor | None = None
    ) -> Tensor:
        return _Ring.apply(q, k, v, mask, sinks, window, group)

    return Method(mask, attend)


def meeting(rank: int, owner: int, length: int) -> Piece:
    """What queries of `rank` see of the keys of `owner`, each with `length` tokens."""
    everything, half = slice(0, length), length // 2
    if owner == rank:
        return Piece(everything, everything, causal=True)
    if owner < rank:
        return Piece(everything, slice(0, half), causal=False)
    return Piece(slice(half, length), everything, causal=False)


class _Ring(torch.autograd.Function):
    """The loop over the ring, forward and backward. Ranks send and receive in one and the same order."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        documents: Tensor | None,
        sinks: Tensor | None,
        window: int,
        group: ProcessGroup,
    ) -> Tensor:
        rank, cp = group.rank(), group.size()
        partial, pair = Partial.empty(q, sinks), torch.stack((k, v))
        works: list[Work] = []
        for step in range(cp):
            here, owner = pair, (rank - step) % cp
            if step < cp - 1:
                pair, works = _pass_on(here, group)
            piece = meeting(rank, owner, q.size(2))
            near = _window(window, q, rank, owner, cp)
            if near is None or not near.hides(piece):
                partial.add(q, here[0], here[1], piece, _mask(piece, documents, rank, owner, near))
            _wait(works)
        out = partial.out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, partial.lse, documents, sinks)
        ctx.window, ctx.group = window, group
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of keys and values travel one step behind them, and arrive at home after the last."""
        q, k, v, out, lse, documents, sinks = ctx.saved_tensors
        rank, cp = ctx.group.rank(), ctx.group.size()
        row, for_q = Finished(q, out, lse, grad.contiguous()), torch.zeros_like(q, dtype=lse.dtype)
        pair = torch.stack((k, v))
        travelling = torch.zeros_like(pair, dtype=lse.dtype)
        works: list[Work] = []
        travels: list[Work] = []
        for step in range(cp):
            here, owner = pair, (rank - step) % cp
            if step < cp - 1:
                pair, works = _pass_on(here, ctx.group)
            piece = meeting(rank, owner, q.size(2))
            for_pair = torch.zeros_like(travelling)
            to = for_q, for_pair[0], for_pair[1]
            near = _window(ctx.window, q, rank, owner, cp)
            if near is None or not near.hides(piece):
                row.gradients(here[0], here[1], piece, _mask(piece, documents, rank, owner, near), to)
            _wait(travels)
            for_pair += travelling
            if cp > 1:
                travelling, travels = _pass_on(for_pair, ctx.group)
            else:
                travelling = for_pair
            _wait(works)
        _wait(travels)
        for_k, for_v = travelling
        for_sinks = None if sinks is None else sink_gradient(sinks, grad, out, lse)
        return for_q.to(q.dtype), for_k.to(k.dtype), for_v.to(v.dtype), None, for_sinks, None, None


def _window(size: int, q: Tensor, rank: int, owner: int, cp: int) -> Window | None:
    length = q.size(2)
    return Window(size, places(rank, cp, length), places(owner, cp, length), q.device) if size else None


def _mask(piece: Piece, documents: Tensor | None, rank: int, owner: int, window: Window | None) -> Tensor | None:
    queries, keys = (None, None) if documents is None else (documents[rank], documents[owner])
    return piece_mask(piece, queries, keys, window)


def _pass_on(x: Tensor, group: ProcessGroup) -> tuple[Tensor, list[Work]]:
    """Send x to the next rank; the tensor that the previous one sends, which is there when the requests are done."""
    received, rank, cp = torch.empty_like(x), group.rank(), group.size()
    send = dist.P2POp(dist.isend, x, group=group, group_peer=(rank + 1) % cp)
    receive = dist.P2POp(dist.irecv, received, group=group, group_peer=(rank - 1) % cp)
    return received, dist.batch_isend_irecv([send, receive])


def _wait(works: list[Work]) -> None:
    """On CUDA the stream waits, not the host. Emptied: a request is waited for once."""
    while works:
        works.pop().wait()
