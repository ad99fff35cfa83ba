"""Which experts tokens go to, where that is given: the same share of choices for every expert, or others."""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from composable.moe.capacity import limit, room_in
from composable.moe.config import MoEConfig
from composable.moe.layer import MoE
from composable.moe.router import Router, Routing, choose, count, score, weigh


@dataclass(frozen=True)
class Load:
    """Choices of each expert, in any unit, by layer; every rank's tokens choose alike."""

    every: tuple[float, ...] = ()
    """of layers that `layers` does not name; empty: even"""
    layers: Mapping[int, tuple[float, ...]] | None = None
    """global index of a layer -> [E]"""
    executed: Mapping[int, Sequence[Sequence[float]]] | None = None
    """global index of a layer -> [ranks of the mesh][E]: choices of each rank's own tokens that a capacity left, where
    they are known; of a micro-batch, or the mean over those of a step"""

    @staticmethod
    def parse(text: str, config: MoEConfig | None) -> Load:
        """`even`; a factor, largest over mean, of which expert 0 has the largest; or a JSON file of counts.

        The file holds a list of E numbers, or an object of such lists by the layer's global index.

        Raises:
            ValueError: what is none of these, or does not fit the experts.
        """
        if text == "even":
            return Load()
        if config is None:
            raise ValueError(f"load={text}: the model has no experts; write load=even, or leave it out")
        try:
            factor = float(text)
        except ValueError:
            return Load._read(Path(text), config)
        experts, most = config.experts, config.experts / config.top_k
        if not 1 <= factor <= most:
            raise ValueError(
                f"load={text}: the largest load over the mean of {experts} experts, of which a token chooses "
                f"{config.top_k}, is between 1 and {most:g}"
            )
        others = (experts - factor) / max(experts - 1, 1)
        return Load((factor, *[others] * (experts - 1)))

    @staticmethod
    def _read(path: Path, config: MoEConfig) -> Load:
        try:
            value = json.loads(path.read_text())
        except (OSError, ValueError) as error:
            raise ValueError(
                f"load={path}: write even, a number (largest over mean) or a JSON file: {error}"
            ) from error
        by_layer = value if isinstance(value, dict) else {"-1": value}
        counts: dict[int, tuple[float, ...]] = {}
        for layer, row in by_layer.items():
            numbers = isinstance(row, list) and all(isinstance(n, (int, float)) and n >= 0 for n in row)
            if not numbers or len(row) != config.experts or not sum(row) or not layer.lstrip("-").isdecimal():
                raise ValueError(
                    f"load={path}: layer {layer} has no list of {config.experts} counts, one of each expert; a file "
                    "holds one such list, or an object of them by layer"
                )
            counts[int(layer)] = tuple(row)
        return Load(counts.pop(-1, ()), counts)

    def of(self, layer: int, experts: int) -> tuple[float, ...]:
        """Choices of each expert of a layer."""
        return (self.layers or {}).get(layer, self.every) or (1.0,) * experts


def give_routing(part: nn.Module, load: Load, *, limits: bool = False) -> None:
    """Let the layers with experts of a model, or of a part of one, choose as `load` has it, in place.

    Args:
        limits: what a capacity leaves of the choices is given too, as `left_by_capacity` has it: for scores that have
            no values.
    """
    for module in part.modules():
        if isinstance(module, MoE):
            shares = load.of(module.layer, module.config.experts)
            module.route = given(shares)
            if limits:
                module.limit = given_limit(shares)


def given(shares: Sequence[float]) -> Router:
    """A router that scores tokens and weighs choices as always, but chooses so that each expert gets its share.

    A token's experts differ. Choices are rounded to whole ones, and an expert takes a token once at most.
    """

    @functools.cache
    def ids(tokens: int, top_k: int) -> Tensor:
        return _ids(whole_choices(shares, tokens, top_k), tokens, top_k)

    def route(logits: Tensor, config: MoEConfig, bias: Tensor | None = None) -> Routing:
        scores = score(logits, config)
        choose(scores, config, bias)  # takes memory as always
        chosen = ids(len(logits), config.top_k).to(logits.device)
        return Routing(chosen, weigh(scores, chosen, config), count(chosen, config.experts))

    return route


def given_limit(shares: Sequence[float]) -> Callable[..., Routing]:
    """What stands for `capacity.limit` where scores have no values: it takes memory and exchanges as that does, but
    executes so many choices of each expert as `left_by_capacity` says."""

    def limited(routing: Routing, logits: Tensor, config: MoEConfig, **rest: Any) -> Routing:
        found = limit(routing, logits, config, **rest)
        if not config.capacity.factor:
            return found
        group, size = rest.get("group"), len(logits)
        counts = left_by_capacity(shares, size, 1 if group is None else dist.get_world_size(group), config)
        ids = _ids(counts, size, config.top_k).to(logits.device)
        return Routing(ids, found.weights, count(ids, config.experts))

    return limited


def left_by_capacity(shares: Sequence[float], tokens: int, ranks: int, config: MoEConfig) -> list[int]:
    """How many choices of each expert by one rank's tokens are executed [E].

    A capacity that several ranks share is taken to cut their choices alike. Where what it refuses asks the next best
    expert, which the scores decide, choices are taken to stay where they are, and the refused to fill all others alike.
    """
    rule = config.capacity
    chosen = whole_choices(shares, tokens, config.top_k)
    if not rule.factor:
        return chosen
    whole = room_in(rule.factor, tokens * ranks, config.top_k, config.experts)
    room = min(whole // ranks, tokens) if max(chosen) * ranks > whole else tokens
    kept = [min(number, room) for number in chosen]
    if rule.overflow != "next":
        return kept
    free = [room - number for number in kept]
    left = min(sum(chosen) - sum(kept), sum(free))
    filled = list(itertools.accumulate(free, initial=0))
    ends = [left * each // max(filled[-1], 1) for each in filled]
    return [number + end - start for number, start, end in zip(kept, ends, ends[1:], strict=False)]


def whole_choices(shares: Sequence[float], tokens: int, top_k: int) -> list[int]:
    """How many of tokens x top_k choices each expert gets, by largest remainders; `tokens` at most."""
    left, counts = tokens * top_k, [0] * len(shares)
    open_ = [e for e, share in enumerate(shares) if share > 0]
    while left and open_:
        total = sum(shares[e] for e in open_)
        wanted = {e: left * shares[e] / total for e in open_}
        full = [e for e in open_ if counts[e] + wanted[e] >= tokens]
        if full:
            for e in full:
                left -= tokens - counts[e]
                counts[e] = tokens
            open_ = [e for e in open_ if e not in full]
            continue
        for e in open_:
            counts[e] += int(wanted[e])
        left -= sum(int(each) for each in wanted.values())
        for e in sorted(open_, key=lambda e: (int(wanted[e]) - wanted[e], e))[:left]:
            counts[e] += 1
        left = 0
    for e in range(len(counts)):  # fewer experts have a share than a token chooses
        more = min(left, tokens - counts[e])
        counts[e] += more
        left -= more
    return counts


def _ids(counts: Sequence[int], tokens: int, top_k: int) -> Tensor:
    """[tokens, top_k] int64 with so many choices of each expert, -1 for what is left."""
    experts = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    experts = F.pad(experts, (0, tokens * top_k - len(experts)), value=-1)
    # Choice j is of token j % tokens: those of one expert follow each other, and are of different tokens.
    return experts.view(top_k, tokens).t().contiguous()
