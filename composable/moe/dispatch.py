"""Tokens to their experts and back: dropless, with uneven splits, deterministic in both directions.

Choices are sorted by expert, which is also by rank, as a rank holds consecutive experts. Every movement is a gather by
an index, and so is its gradient, as the inverse order is known: nothing is scattered or added atomically.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from composable.moe.router import Routing


@dataclass(frozen=True)
class ExpertRanks:
    """The ranks that share the experts of a layer."""

    group: dist.ProcessGroup
    """rank r of it holds the r-th part of the experts"""
    inside: dist.ProcessGroup | None = None
    """those of the group on this rank's node, by their place in it; for the hierarchical exchange alone"""
    across: dist.ProcessGroup | None = None
    """those of the group with this rank's place, by node: rank r of the group is at r % places on node r // places"""

    def __post_init__(self) -> None:
        if self.inside is None and self.across is None:
            return
        if self.inside is None or self.across is None:
            raise ValueError("the groups inside and across nodes come together: give ExpertRanks both, or neither")
        ranks, inside, across = (dist.get_process_group_ranks(g) for g in (self.group, self.inside, self.across))
        places = len(inside)
        node, place = divmod(dist.get_rank(self.group), places)
        if inside != ranks[node * places : (node + 1) * places] or across != ranks[place::places]:
            raise ValueError(
                f"ranks {ranks} share the experts, {inside} inside the node of rank {ranks[node * places + place]} and "
                f"{across} across: its node is {ranks[node * places : (node + 1) * places]}, its place "
                f"{ranks[place::places]}; give groups that lie node by node"
            )


class Exchange(Protocol):
    """What several ranks send each other in one dispatch: collective, both ways, without gradient."""

    @property
    def sent(self) -> int:
        """N: rows that this rank sends."""

    def to_experts(self, x: Tensor) -> Tensor:
        """Rows [N, D] in the order of all experts, of this rank's tokens -> [R, D] in the order of its experts."""

    def to_tokens(self, x: Tensor) -> Tensor:
        """The way back: [R, D] -> [N, D]."""


Plan = Callable[[Tensor, ExpertRanks], tuple[list[int], Exchange]]
"""(choices [E] int64 of each expert by this rank's tokens, ranks) -> (rows of each expert of this rank, exchange)"""


@dataclass(frozen=True)
class AllToAll:
    """Every rank sends every other its rows."""

    group: dist.ProcessGroup
    sizes: list[int]
    """rows to each rank"""
    arriving: list[int]
    """rows from each rank"""
    by_expert: Tensor
    """[R] int64: received row of each row in expert order"""
    by_rank: Tensor
    """[R] int64: its inverse"""

    @property
    def sent(self) -> int:
        return sum(self.sizes)

    def to_experts(self, x: Tensor) -> Tensor:
        return swap(x, self.sizes, self.arriving, self.group).index_select(0, self.by_expert)

    def to_tokens(self, x: Tensor) -> Tensor:
        return swap(x.index_select(0, self.by_rank), self.arriving, self.sizes, self.group)


def swap(x: Tensor, sizes: list[int], arriving: list[int], group: dist.ProcessGroup) -> Tensor:
    """x [N, D], sizes[r] rows for rank r -> [R, D], arriving[r] rows of rank r; without gradient."""
    out = x.new_empty(sum(arriving), x.size(1))
    dist.all_to_all_single(out, x.contiguous(), arriving, sizes, group=group)
    return out


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
def dispatch(
    x: Tensor, routing: Routing, ranks: ExpertRanks | None = None, plan: Plan | None = None
) -> tuple[Tensor, list[int], Record]:
    """Bring tokens to the ranks of their experts; collective over `ranks`, with one host synchronisation.

    Args:
        x: [T, D]; T may differ between ranks, and be 0.
        routing: of those tokens.
        ranks: that share the experts; None: all are here.
        plan: how rows travel; `all_to_all` if None.

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
    exchange: Exchange | None = None
    if ranks is None or alone(ranks):
        counts = routing.counts.tolist()
        sent = sum(counts)
    else:
        check_parts(routing.counts.numel(), ranks)
        counts, exchange = (plan or all_to_all)(routing.counts, ranks)
        sent = exchange.sent
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


def alone(ranks: ExpertRanks | None) -> bool:
    """Whether all experts are here."""
    return ranks is None or dist.get_world_size(ranks.group) == 1


def check_parts(experts: int, ranks: ExpertRanks) -> None:
    """Refuse ranks that do not divide the experts."""
    size = dist.get_world_size(ranks.group)
    if experts % size:
        raise ValueError(f"{experts} experts on {size} ranks: a rank holds equally many; ranks divide experts")


def expert_order(routing: Routing) -> Tensor:
    """[T * K] int64: the choices (token * K + column) by expert, within one by token; dropped ones last."""
    flat = routing.ids.flatten()
    return flat.masked_fill(flat < 0, routing.counts.numel()).sort(stable=True).indices


def all_to_all(counts: Tensor, ranks: ExpertRanks) -> tuple[list[int], Exchange]:
    """The `Plan` of one all-to-all; collective, with one exchange of counts and one host synchronisation."""
    group, size = ranks.group, dist.get_world_size(ranks.group)
    arriving = torch.empty_like(counts)
    dist.all_to_all_single(arriving, counts, group=group)
    matrix = arriving.view(size, -1)  # [ranks, E_local]
    host = torch.cat([counts.view(size, -1).sum(1), matrix.sum(1), matrix.sum(0)]).tolist()
    sizes, received, own = host[:size], host[size : 2 * size], host[2 * size :]
    # Blocks (rank, expert) lie one after the other as they arrive; they are wanted by (expert, rank).
    by_expert, by_rank = reorder(matrix, sum(own))
    return own, AllToAll(group, sizes, received, by_expert, by_rank)


def reorder(lengths: Tensor, total: int) -> tuple[Tensor, Tensor]:
    """Rows lie in blocks (i, j) of lengths [I, J] int64, and are wanted by (j, i): where each lies, and the inverse.

    Args:
        total: the sum of lengths, known to the host.
    """
    flat, wanted = lengths.flatten(), lengths.t().flatten()
    start = (flat.cumsum(0) - flat).view_as(lengths).t().flatten()  # first row of each wanted block
    rows = torch.arange(total, device=lengths.device)
    source = rows + (start - (wanted.cumsum(0) - wanted)).repeat_interleave(wanted, output_size=total)
    return source, torch.empty_like(source).scatter_(0, source, rows)


def sum_choices(rows: Tensor, places: Tensor, weights: Tensor | None) -> Tensor:
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
    return (wide if weights is None else wide.mul_(weights[..., None])).sum(1).to(rows.dtype)


def _to_experts(x: Tensor, exchange: Exchange | None) -> Tensor:
    return x if exchange is None else exchange.to_experts(x)


def _to_tokens(x: Tensor, exchange: Exchange | None) -> Tensor:
    return x if exchange is None else exchange.to_tokens(x)


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, record: Record) -> Tensor:
        ctx.record = record
        k = record.places.size(1)
        return _to_experts(x.index_select(0, record.choices // k), record.exchange)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        return sum_choices(_to_tokens(g, ctx.record.exchange), ctx.record.places, None), None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, weights: Tensor, record: Record) -> Tensor:
        rows = _to_tokens(rows, record.exchange)
        ctx.record = record
        ctx.save_for_backward(rows, weights)
        return sum_choices(rows, record.places, weights)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor, None]:
        rows, weights = ctx.saved_tensors
        choices, places = ctx.record.choices, ctx.record.places
        wide = g.index_select(0, choices // places.size(1)).to(weights.dtype)  # [N, D], of each row's token
        products = torch.bmm(rows.to(weights.dtype)[:, None], wide[..., None]).flatten()  # [N]
        for_weights = weights.new_zeros(weights.numel()).scatter(0, choices, products).view_as(weights)
        scaled = wide.mul_(weights.flatten().index_select(0, choices)[:, None]).to(rows.dtype)
        del wide  # float32 beside bfloat16: twice the rows
        return _to_experts(scaled, ctx.record.exchange), for_weights, None
