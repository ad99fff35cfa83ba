"""How many tokens an expert takes: exact and deterministic on every layout, without a loop over tokens.

The choices of all ranks that hold tokens of a micro-batch are brought together (a few numbers a token), every rank
decides alike, and each takes its own tokens' part of the decision.
"""

import math
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from composable._torch import all_gather_single
from composable.moe.config import MoEConfig
from composable.moe.router import Routing, count, preference, probabilities, score, weigh


@dataclass(frozen=True)
class Tokens:
    """The tokens of one rank, or of one micro-batch."""

    ids: Tensor
    """[T, K] int64: experts they chose"""
    weights: Tensor
    """[T, K]"""
    index: Tensor
    """[T] int64: their order in the micro-batch"""
    real: Tensor
    """[T] bool: padding takes no room"""


def room_of(factor: float, tokens: Tensor, config: MoEConfig) -> Tensor:
    """[] int64: tokens an expert takes of a micro-batch with that many ([] int64): ceil(factor x tokens x K / E)."""
    share = tokens.to(torch.float64) * (factor * config.top_k / config.experts)
    return (share - 1e-9).ceil().to(torch.int64).clamp(min=0)  # 1.1 x 10 is 11.000000000000002


def room_in(factor: float, tokens: int, top_k: int, experts: int) -> int:
    """The same for a number of tokens that is known without looking at them."""
    return math.ceil(tokens * (factor * top_k / experts) - 1e-9)


def limit(
    routing: Routing,
    logits: Tensor,
    config: MoEConfig,
    *,
    index: Tensor | None = None,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    group: dist.ProcessGroup | None = None,
) -> Routing:
    """The routing that is executed once every expert takes at most its share; `routing` itself if dropless.

    Collective over `group` unless dropless. Padding is dropped wholly.

    Args:
        routing: of this rank's tokens.
        logits: [T, E] that it came from.
        index: [T] int64, order of the tokens in the micro-batch, distinct over the group; 0, 1, 2... if None (only
            without a group).
        mask: [T] bool, False: padding; or None.
        bias: [E] for choosing, or None.
        group: ranks that hold tokens of the same micro-batch, as many on each; None: this one alone.

    Raises:
        ValueError: a group of several ranks without `index`.
    """
    if not config.capacity.factor:
        return routing
    return _limit(routing, logits, config, index, mask, bias, group)


@torch.compiler.disable
def _limit(
    routing: Routing,
    logits: Tensor,
    config: MoEConfig,
    index: Tensor | None,
    mask: Tensor | None,
    bias: Tensor | None,
    group: dist.ProcessGroup | None,
) -> Routing:
    rule = config.capacity
    ranks = 1 if group is None else dist.get_world_size(group)
    if index is None and ranks > 1:
        raise ValueError("capacity over several ranks needs the tokens' order in the micro-batch: give `index`")
    size = len(logits)
    if index is None:
        index = torch.arange(size, device=logits.device)
    real = torch.ones_like(index, dtype=torch.bool) if mask is None else mask
    gather = partial(_gather, group=group)
    tokens = Tokens(gather(routing.ids), gather(routing.weights.detach()), gather(index), gather(real))
    room = room_of(rule.factor, tokens.real.sum(), config)
    if rule.overflow == "next":
        scores = gather(probabilities(logits, config).detach())
        order = gather(preference(score(logits, config), config, bias))
        ids = place_next(tokens, scores, order, room)
    else:
        ids = drop(tokens, config.experts, room, by_weight=rule.overflow == "drop_weight")
    start = 0 if ranks == 1 else dist.get_rank(group) * size
    return _executed(routing, ids[start : start + size], logits, config)


def drop(tokens: Tokens, experts: int, room: Tensor, *, by_weight: bool) -> Tensor:
    """ids [T, K] with -1 where an expert has more than `room` choices: the lowest weights go first, or the last tokens.

    Of weights that are equal in float32 the later token goes.
    """
    asked = tokens.ids.masked_fill(~tokens.real[:, None], -1)
    place = _places(asked, tokens.weights if by_weight else None, tokens.index, experts)
    return asked.masked_fill(place >= room, -1)


def place_next(tokens: Tokens, scores: Tensor, order: Tensor, room: Tensor) -> Tensor:
    """ids [T, K] in rounds: the open choices of a token ask its best experts that have room and do not hold it yet.

    An expert admits by score (in float32), then by the tokens' order, and never lets go. A choice is refused only by an
    expert that is then full, so that there are at most as many rounds as experts. A choice that finds no expert is -1.

    Args:
        scores: [T, E]: by which experts admit.
        order: [T, E]: by which tokens ask; -inf: never.
        room: [] int64 tokens of each expert.
    """
    ids, (size, experts) = tokens.ids, scores.shape
    k = ids.size(1)
    held = torch.zeros(size, experts, dtype=torch.bool, device=ids.device)
    open_ = tokens.real.to(torch.int64) * k  # [T] choices that are not placed
    left = room.expand(experts)  # [E]
    placed = torch.full_like(ids, -1)
    columns = torch.arange(k, device=ids.device)
    for _ in range(experts + 1):
        wish = order.masked_fill(held | (left == 0), -torch.inf)
        best = wish.sort(dim=-1, descending=True, stable=True)
        asks = (columns < open_[:, None]) & (best.values[:, :k] > -torch.inf)
        if not asks.any():
            break
        asked = best.indices[:, :k].masked_fill(~asks, -1)
        place = _places(asked, scores.gather(1, asked.clamp(min=0)), tokens.index, experts)
        admitted = asks & (place < torch.cat([left, left.new_zeros(1)])[asked])
        # The n-th admission of a token takes the n-th of its free columns, which are the last ones.
        column = k - open_[:, None] + admitted.cumsum(1) - 1
        shown = torch.cat([placed, placed.new_empty(size, 1)], 1)
        placed = shown.scatter(1, column.masked_fill(~admitted, k), asked)[:, :k]
        won = asked.masked_fill(~admitted, experts)
        held = held | torch.zeros(size, experts + 1, dtype=torch.bool, device=ids.device).scatter(1, won, True)[:, :-1]
        open_ = open_ - admitted.sum(1)
        left = left - count(asked.masked_fill(~admitted, -1), experts)
    return placed


def _places(asked: Tensor, weights: Tensor | None, index: Tensor, experts: int) -> Tensor:
    """asked [T, K] (-1: nobody) -> [T, K] int64: the place of each in its expert's queue, from 0."""
    k = asked.size(1)
    flat = asked.flatten()
    order = index.sort(stable=True).indices  # tokens, first to last
    order = (order[:, None] * k + torch.arange(k, device=asked.device)).flatten()
    if weights is not None:
        compared = weights.flatten()[order].to(torch.float32)
        order = order[compared.sort(descending=True, stable=True).indices]
    expert = flat[order].masked_fill(flat[order] < 0, experts)
    by_expert = expert.sort(stable=True)
    order = order[by_expert.indices]
    counts = count(asked, experts)
    starts = torch.cat([counts.new_zeros(1), counts.cumsum(0)])  # [E + 1]; the last: where those begin that ask nobody
    places = torch.arange(len(flat), device=asked.device) - starts[by_expert.values]
    return torch.empty_like(flat).scatter(0, order, places).view_as(asked)


def _executed(routing: Routing, ids: Tensor, logits: Tensor, config: MoEConfig) -> Routing:
    """Weights of what is executed: of drops those that are left, of new experts those that their scores give."""
    if config.capacity.overflow == "next":
        weights = weigh(score(logits, config), ids, config)
    else:
        weights = routing.weights.masked_fill(ids < 0, 0.0)
    return Routing(ids, weights, count(ids, config.experts))


def _gather(x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """x [T, ...] of every rank -> [ranks * T, ...]."""
    ranks = 1 if group is None else dist.get_world_size(group)
    if ranks == 1:
        return x
    sent = x.to(torch.uint8) if x.dtype == torch.bool else x
    out = sent.new_empty(ranks * sent.numel())
    all_gather_single(out, sent.reshape(-1), group=group)
    return out.view(ranks * len(x), *x.shape[1:]).to(x.dtype)
