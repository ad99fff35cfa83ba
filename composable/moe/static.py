"""Dispatch and combine with a fixed number of rows, for accelerators: the host never waits for the routing.

Every rank sends every expert a block of `room` rows, the rest of it zeros. No shape depends on what the router chose:
kernels are queued ahead of the device, and the whole is one graph to a compiler or a CUDA graph.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from composable.moe.capacity import room_in
from composable.moe.dispatch import ExpertRanks, alone, check_parts, expert_order, sum_choices
from composable.moe.router import Routing


@dataclass(frozen=True)
class Packed:
    """How the rows of this rank's experts lie without the padding between them."""

    ends: Tensor
    """[E_local] int32: where the rows of each expert end"""
    order: Tensor
    """[ranks * E_local * room] int64: arrived row at each place, the padding last"""
    inverse: Tensor
    """[ranks * E_local * room] int64"""


@dataclass(frozen=True)
class Blocks:
    """How to bring rows back."""

    choices: Tensor
    """[E * room] int64: choice (token * K + column) of each sent row; T * K: padding"""
    slots: Tensor
    """[T, K] int64: sent row of each choice; E * room: it was dropped; one more: its block is too small"""
    ranks: ExpertRanks | None
    """None: the experts are all here"""
    packed: Packed | None
    """None: rows lie in [E_local, ranks * room], padding included"""


def room_for(factor: float, tokens: int, batch_ranks: int, top_k: int, experts: int) -> int:
    """Rows that a rank may send to one expert, from shapes alone.

    After `limit` an expert takes at most ceil(factor x tokens x K / E) tokens of a micro-batch. A rank holds tokens of
    one micro-batch only, and a token goes to an expert once at most: a rank never sends an expert more than that, nor
    more than its tokens.

    Args:
        factor: `moe.capacity.factor`.
        tokens: of this rank, as many on every rank.
        batch_ranks: ranks that hold a part of the same micro-batch.

    Raises:
        ValueError: no factor.
    """
    if factor <= 0:
        raise ValueError(f"capacity factor {factor}: blocks of fixed size need a positive one, for example 1.25")
    return min(room_in(factor, tokens * batch_ranks, top_k, experts), tokens)


def dispatch_blocks(
    x: Tensor, routing: Routing, room: int, ranks: ExpertRanks | None = None, *, pack: bool
) -> tuple[Tensor, Blocks]:
    """Bring tokens to the ranks of their experts in blocks of fixed size; collective over `ranks`.

    Args:
        x: [T, D]; T is the same on all ranks.
        routing: of those tokens, within the capacity that `room` comes from. A choice beyond the room of its block
            makes its token's result NaN: a token is never lost in silence.
        room: rows of a block, the same on all ranks.
        ranks: that share the experts; None: all are here.
        pack: leave out the padding between experts.

    Returns:
        rows: [E_local, ranks * room, D], zeros where nothing came; packed: [E_local * ranks * room, D], the rows of
            each expert up to `blocks.packed.ends`, then zeros.
        blocks: for `combine_blocks`.

    Raises:
        ValueError: the ranks do not divide the experts.
    """
    experts = routing.counts.numel()
    size = 1 if ranks is None else dist.get_world_size(ranks.group)
    if ranks is not None:
        check_parts(experts, ranks)
    if alone(ranks):
        ranks = None
    choices, slots = _places(routing, room)
    rows = _Send.apply(x, choices, slots)
    if ranks is not None:
        rows = _Swap.apply(rows, ranks)
    packed = _pack(routing.counts.clamp(max=room), room, ranks) if pack else None
    if packed is None:
        rows = rows.view(size, experts // size, room, x.size(1)).transpose(0, 1).flatten(1, 2)
    else:
        rows = _Reorder.apply(rows, packed.order, packed.inverse)
    return rows, Blocks(choices, slots, ranks, packed)


def combine_blocks(rows: Tensor, blocks: Blocks, weights: Tensor) -> Tensor:
    """Bring rows back to their tokens and add them up with weights, in float32 or wider; collective as dispatch.

    Args:
        rows: as `dispatch_blocks` gave them; what is in the padding is not read.
        blocks: its.
        weights: [T, K] float32 or wider.

    Returns:
        [T, D] in the dtype of `rows`.
    """
    ranks, packed = blocks.ranks, blocks.packed
    size = 1 if ranks is None else dist.get_world_size(ranks.group)
    if packed is None:
        rows = rows.unflatten(1, (size, rows.size(1) // size)).transpose(0, 1).flatten(0, 2)
    else:
        rows = _Reorder.apply(rows, packed.inverse, packed.order)
    if ranks is not None:
        rows = _Swap.apply(rows, ranks)
    return _Gather.apply(rows, weights, blocks.choices, blocks.slots)


def _places(routing: Routing, room: int) -> tuple[Tensor, Tensor]:
    """Choice of each row [E * room] and row of each choice [T, K]."""
    ids, counts = routing.ids, routing.counts
    size, blocks = ids.numel(), counts.numel() * room
    order = expert_order(routing)
    start = counts.cumsum(0) - counts  # [E] in that order
    within = torch.arange(room, device=ids.device)
    filled = within < counts[:, None]  # [E, room]
    # One more entry than there are choices: the padding's, and where an index past the end is sent.
    ordered = torch.cat([order, order.new_full((1,), size)])
    choices = ordered[torch.where(filled, start[:, None] + within, size)].flatten()
    places = torch.empty_like(order).scatter(0, order, torch.arange(size, device=ids.device)).view_as(ids)
    kept = ids.clamp(min=0)
    place = places - start[kept]
    slots = torch.where(place < room, kept * room + place, blocks + 1)
    return choices, slots.masked_fill(ids < 0, blocks)


def _pack(counts: Tensor, room: int, ranks: ExpertRanks | None) -> Packed:
    """counts [E]: rows in each block that this rank sends."""
    size = 1 if ranks is None else dist.get_world_size(ranks.group)
    arriving = counts
    if ranks is not None:
        arriving = torch.empty_like(counts)
        dist.all_to_all_single(arriving, counts, group=ranks.group)
    lengths = arriving.view(size, -1).t()  # [E_local, ranks]
    within = torch.arange(room, device=counts.device)
    filled = (within < lengths[..., None]).flatten()  # [E_local * ranks * room], by expert, rank and place
    lies = torch.arange(filled.numel(), device=counts.device)
    lies = lies.view(size, counts.numel() // size, room).transpose(0, 1).flatten()
    full, empty = filled.cumsum(0), (~filled).cumsum(0)
    goes = torch.where(filled, full, lengths.sum() + empty) - 1
    order = torch.empty_like(lies).scatter(0, goes, lies)
    inverse = torch.empty_like(lies).scatter(0, lies, goes)
    return Packed(lengths.sum(1).cumsum(0).to(torch.int32), order, inverse)


class _Send(torch.autograd.Function):
    """x [T, D] -> the row of each choice [E * room, D], zeros for padding."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, choices: Tensor, slots: Tensor) -> Tensor:
        ctx.save_for_backward(slots)
        return _of_tokens(x, choices, slots.size(1))

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None]:
        (slots,) = ctx.saved_tensors
        return sum_choices(_extended(g), slots, None), None, None


class _Gather(torch.autograd.Function):
    """Rows [E * room, D] -> the weighted sum of each token's [T, D]."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weights: Tensor, choices: Tensor, slots: Tensor) -> Tensor:
        ctx.save_for_backward(rows, weights, choices, slots)
        return sum_choices(_extended(rows), slots, weights)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor, None, None]:
        rows, weights, choices, slots = ctx.saved_tensors
        wide = _of_tokens(g, choices, slots.size(1)).to(weights.dtype)  # [E * room, D], of each row's token
        factors = torch.cat([weights.flatten(), weights.new_zeros(1)])[choices]
        # Padding may hold anything: its products are left out by index, never multiplied by zero.
        products = torch.bmm(rows.to(weights.dtype)[:, None], wide[..., None]).flatten()
        for_weights = _extended(products[:, None]).flatten()[slots]
        return (wide * factors[:, None]).to(rows.dtype), for_weights, None, None


class _Swap(torch.autograd.Function):
    """Blocks of one size to every rank."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: ExpertRanks) -> Tensor:
        ctx.ranks = ranks
        return _swap(x, ranks)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        return _swap(g, ctx.ranks), None


class _Reorder(torch.autograd.Function):
    """Rows in another order; the gradient is a gather too, as the inverse order is known."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        return x.index_select(0, order)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None]:
        (inverse,) = ctx.saved_tensors
        return g.index_select(0, inverse), None, None


def _swap(x: Tensor, ranks: ExpertRanks) -> Tensor:
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    dist.all_to_all_single(out, x.contiguous(), group=ranks.group)
    return out


def _of_tokens(x: Tensor, choices: Tensor, k: int) -> Tensor:
    """x [T, D] -> [E * room, D], the token of each choice; zeros for padding, whose choice is T * K."""
    return torch.cat([x, x.new_zeros(1, x.size(1))]).index_select(0, choices // k)


def _extended(rows: Tensor) -> Tensor:
    """rows [N, D] with the row of what was dropped, zeros, and that of what found no room, NaN."""
    return torch.cat([rows, rows.new_zeros(1, rows.size(1)), rows.new_full((1, rows.size(1)), torch.nan)])
