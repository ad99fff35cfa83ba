"""Tokens to their experts and back: dropless, with uneven splits, deterministic in both directions.

Choices are sorted by expert, which is also by rank, as a rank holds consecutive experts. Every movement is a gather by
an index, and so is its gradient, as the inverse order is known: nothing is scattered or added atomically.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from composable.moe.router import Routing


@dataclass(frozen=True)
class Exchange:
    """What several ranks send each other."""

    group: dist.ProcessGroup
    sent: list[int]
    """rows to each rank"""
    received: list[int]
    """rows from each rank"""
    by_expert: Tensor
    """[R] int64: received row of each row in expert order"""
    by_rank: Tensor
    """[R] int64: its inverse"""


@dataclass(frozen=True)
class Record:
    """How to bring rows back; a value of one dispatch, so that several may be in flight."""

    choices: Tensor
    """[N] int64: choice (token * K + column) of each sent row; N = T * K less what was dropped"""
    places: Tensor
    """[T, K] int64: sent row of each choice; N: dropped"""
    exchange: Exchange | None
    """None: the experts are all here"""


@torch.compiler.disable
def dispatch(x: Tensor, routing: Routing, group: dist.ProcessGroup | None = None) -> tuple[Tensor, list[int], Record]:
    """Bring tokens to the ranks of their experts; collective over `group`, with one host synchronisation.

    Args:
        x: [T, D]; T may differ between ranks, and be 0.
        routing: of those tokens.
        group: rank r of it holds the r-th part of the experts; None: all are here.

    Returns:
        rows: [R, D] in the order of this rank's experts; within one by rank, token and choice.
        counts: rows of each of this rank's experts.
        record: for `combine`.

    Raises:
        ValueError: the ranks do not divide the experts.
    """
    size = routing.ids.numel()
    order = expert_order(routing)
    places = torch.empty_like(order).scatter_(0, order, torch.arange(size, device=order.device))
    places = places.view_as(routing.ids)
    if group is None or dist.get_world_size(group) == 1:
        counts = routing.counts.tolist()
        exchange = None
        sent = sum(counts)
    else:
        counts, exchange = _exchange(routing.counts, group)
        sent = sum(exchange.sent)
    if sent < size:
        order, places = order[:sent], places.clamp(max=sent)
    record = Record(order, places, exchange)
    return _Dispatch.apply(x, record), counts, record


@torch.compiler.disable
def combine(rows: Tensor, record: Record, weights: Tensor) -> Tensor:
    """Bring rows back to their tokens and add them up with weights, in float32 or wider; collective as `dispatch`.

    Args:
        rows: [R, D], in the order of `dispatch`.
        record: its.
        weights: [T, K] float32 or wider.

    Returns:
        [T, D] in the dtype of `rows`; 0 for a token of which every choice was dropped.
    """
    return _Combine.apply(rows, weights, record)


def expert_order(routing: Routing) -> Tensor:
    """[T * K] int64: the choices (token * K + column) by expert, within one by token; dropped ones last."""
    flat = routing.ids.flatten()
    return flat.masked_fill(flat < 0, routing.counts.numel()).sort(stable=True).indices


def _exchange(counts: Tensor, group: dist.ProcessGroup) -> tuple[list[int], Exchange]:
    """counts [E] of what this rank sends -> rows of each of its own experts, and the exchange."""
    ranks = dist.get_world_size(group)
    if counts.numel() % ranks:
        raise ValueError(f"{counts.numel()} experts on {ranks} ranks: a rank holds equally many; ranks divide experts")
    arriving = torch.empty_like(counts)
    dist.all_to_all_single(arriving, counts, group=group)
    matrix = arriving.view(ranks, -1)  # [ranks, E_local]
    host = torch.cat([counts.view(ranks, -1).sum(1), matrix.sum(1), matrix.sum(0)]).tolist()
    sent, received, own = host[:ranks], host[ranks : 2 * ranks], host[2 * ranks :]
    # Blocks (rank, expert) lie one after the other as they arrive; they are wanted by (expert, rank).
    lengths = matrix.t().flatten()
    arrived = (arriving.cumsum(0) - arriving).view(ranks, -1).t().flatten()  # first row of each block
    shift = arrived - (lengths.cumsum(0) - lengths)
    total = sum(own)
    rows = torch.arange(total, device=counts.device)
    by_expert = rows + shift.repeat_interleave(lengths, output_size=total)
    by_rank = torch.empty_like(rows).scatter_(0, by_expert, rows)
    return own, Exchange(group, sent, received, by_expert, by_rank)


def _to_experts(x: Tensor, record: Record) -> Tensor:
    """Sent rows [N, D] -> rows in expert order [R, D]."""
    exchange = record.exchange
    if exchange is None:
        return x
    out = x.new_empty(sum(exchange.received), x.size(1))
    dist.all_to_all_single(out, x.contiguous(), exchange.received, exchange.sent, group=exchange.group)
    return out.index_select(0, exchange.by_expert)


def _to_tokens(x: Tensor, record: Record) -> Tensor:
    """Rows in expert order [R, D] -> the rows that were sent [N, D]."""
    exchange = record.exchange
    if exchange is None:
        return x
    out = x.new_empty(sum(exchange.sent), x.size(1))
    dist.all_to_all_single(
        out, x.index_select(0, exchange.by_rank), exchange.sent, exchange.received, group=exchange.group
    )
    return out


def _sum_choices(rows: Tensor, places: Tensor, weights: Tensor | None) -> Tensor:
    """[T, D] in the dtype of rows: the sum over a token's choices of its rows [N, D], times weights [T, K] if given."""
    if len(rows) < places.numel():  # some were dropped: their place is a row of zeros
        rows = torch.cat([rows, rows.new_zeros(1, rows.size(1))])
    if len(places) == 0:
        return rows.new_zeros(0, rows.size(1))
    if rows.dtype in (torch.float32, torch.float64):
        # One pass over memory: no [T, K, D] in between.
        weights = None if weights is None else weights.to(rows.dtype)
        return F.embedding_bag(places, rows, mode="sum", per_sample_weights=weights)
    wide = rows[places].to(torch.float32)  # [T, K, D]
    return (wide if weights is None else wide * weights[..., None]).sum(1).to(rows.dtype)


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, record: Record) -> Tensor:
        ctx.record = record
        k = record.places.size(1)
        return _to_experts(x.index_select(0, record.choices // k), record)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        return _sum_choices(_to_tokens(g, ctx.record), ctx.record.places, None), None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, weights: Tensor, record: Record) -> Tensor:
        rows = _to_tokens(rows, record)
        ctx.record = record
        ctx.save_for_backward(rows, weights)
        return _sum_choices(rows, record.places, weights)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor, None]:
        rows, weights = ctx.saved_tensors
        choices, places = ctx.record.choices, ctx.record.places
        wide = g.index_select(0, choices // places.size(1)).to(weights.dtype)  # [N, D], of each row's token
        products = torch.bmm(rows.to(weights.dtype)[:, None], wide[..., None]).flatten()  # [N]
        for_weights = weights.new_zeros(weights.numel()).scatter(0, choices, products).view_as(weights)
        scaled = wide.mul_(weights.flatten().index_select(0, choices)[:, None]).to(rows.dtype)
        return _to_experts(scaled, ctx.record), for_weights, None
