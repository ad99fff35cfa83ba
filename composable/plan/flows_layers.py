"""What a micro-batch exchanges on its way through a stage: tensor and context parallelism, the loss."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from composable.parallel.config import recompute_every
from composable.parallel.split import Stage
from composable.parallel.tensor import given_heads
from composable.plan.calls import INDEX, Call, Micro, Operator, gathered, scattered
from composable.plan.flows_experts import experts


@dataclass(frozen=True)
class Activations:
    """Of a stage and one micro-batch."""

    forward: tuple[Call, ...]
    backward: tuple[Call, ...]
    """recomputation included"""
    weights: tuple[Call, ...]
    """what is done once more where gradients of weights come in a second half of the backward pass"""


def activations(micro: Micro, stage: Stage) -> Activations:
    """What a stage exchanges for one micro-batch."""
    forward: list[Call] = []
    backward: list[Call] = []
    weights: list[Call] = []

    def add(operators: Sequence[Operator]) -> None:
        for operator in operators:
            forward.extend(operator.forward)
            backward.extend(operator.backward)

    if stage.first:
        add(_embedding(micro))
    add(_documents(micro))
    every = recompute_every(micro.recompute)
    for index, layer in enumerate(stage.layers):
        routed = micro.sizes.config.moe is not None and layer in micro.sizes.config.expert_layers
        within, rest = _attention(micro), experts(micro, layer) if routed else _mlp(micro)
        add([*within, *rest])
        if every and index % every == 0:
            for operator in _again(micro, within, rest, routed):
                backward.extend(operator.forward)
        if micro.sizes.config.sinks and not stage.first and micro.sizes.context != "ulysses":
            weights.extend(call for operator in _context(micro) for call in operator.backward)
    if stage.last:
        add(_head(micro))
    return Activations(tuple(forward), tuple(backward), tuple(weights))


def _again(micro: Micro, within: list[Operator], rest: list[Operator], routed: bool) -> list[Operator]:
    """Operators that are run again: recomputation ends with the last tensor that is kept for the backward pass.

    Behind the last sum over ranks nothing is kept, unless there is a norm or a loss.
    """
    config, tp = micro.sizes.config, micro.sizes.mesh.tp
    if micro.recompute == "selective" and routed:  # of layers with experts it takes the attention
        return within[:-1] if tp > 1 else within
    kept = config.norm_place == "post" or (routed and micro.balances)
    ends = micro.sizes.mesh.etp > 1 if routed else tp > 1
    return within + (rest if kept or not ends else rest[:-1])


def _embedding(micro: Micro) -> list[Operator]:
    sizes = micro.sizes
    if sizes.mesh.tp == 1:
        return []
    return [scattered("sequence", micro.groups.tp, sizes.hidden * sizes.mesh.tp, reduce=micro.reduce)]


def _documents(micro: Micro) -> list[Operator]:
    """Context ranks see each other's documents, once for all layers."""
    sizes = micro.sizes
    if sizes.mesh.cp == 1 or not sizes.masked:
        return []
    return [Operator((Call("context", "all_gather", micro.groups.cp, sizes.mesh.cp * sizes.seen * INDEX),))]


def _attention(micro: Micro) -> list[Operator]:
    """The last operator is the sum over tensor ranks, if there are several."""
    sizes, tp = micro.sizes, micro.groups.tp
    if tp.ranks == 1:
        return _context(micro)
    config, whole = sizes.config, sizes.hidden * tp.ranks
    width = config.dim
    if config.latent is not None:
        width = (config.latent.q_rank or config.dim) + config.latent.kv_rank + config.latent.rope_dim
    found = [gathered("sequence", tp, sizes.seen * width * sizes.item, reduce=micro.reduce)]
    if config.qk_norm and config.qk_norm_wide and config.latent is None:
        call = Call("sequence", "all_reduce", tp, 2 * sizes.seen * sizes.wide, count=2)
        found.append(Operator((call,), (call,)))
    return [*found, *_context(micro), scattered("sequence", tp, whole, reduce=micro.reduce)]


def _mlp(micro: Micro) -> list[Operator]:
    sizes, tp = micro.sizes, micro.groups.tp
    if tp.ranks == 1:
        return []
    whole = sizes.hidden * tp.ranks
    return [
        gathered("sequence", tp, whole, reduce=micro.reduce),
        scattered("sequence", tp, whole, reduce=micro.reduce),
    ]


def _context(micro: Micro) -> list[Operator]:
    """Attention over the tokens of all context ranks (`parallel.context`)."""
    sizes, cp = micro.sizes, micro.groups.cp
    if cp.ranks == 1:
        return []
    config, tp = sizes.config, sizes.mesh.tp
    queries = config.heads // tp
    keys, width = len(given_heads(config, tp, micro.rank % tp)), config.head_dim
    if config.latent is not None:
        keys, width = queries, config.latent.head_dim
    head = sizes.seen * width  # elements of one
    if sizes.context == "ulysses":
        repeated = math.lcm(keys, cp.ranks)
        size = 2 * (queries + repeated) * head * sizes.item  # of q, k and v; then of the output
        call = Call("context", "all_to_all", cp, size, count=2)
        return [Operator((call,), (call,))]
    pair, wide = 2 * keys * head * sizes.item, 2 * keys * head * sizes.wide
    if sizes.context == "all_gather":
        row = Call("context", "all_gather", cp, cp.ranks * pair)
        return [Operator((row,), (row, Call("context", micro.reduce, cp, cp.ranks * wide)))]
    hops = cp.ranks - 1
    there, back = hops * pair, hops * pair + cp.ranks * wide
    return [
        Operator(
            tuple(Call("context", kind, cp, there, count=hops) for kind in ("send", "receive")),
            tuple(Call("context", kind, cp, back, count=hops + cp.ranks) for kind in ("send", "receive")),
        )
    ]


def _head(micro: Micro) -> list[Operator]:
    """Hidden states of all tokens, and three numbers of each from every vocabulary shard."""
    sizes, tp = micro.sizes, micro.groups.tp
    if tp.ranks == 1:
        return []
    chunks = math.ceil(sizes.seen / micro.loss_chunk) if micro.loss_chunk else 1
    loss = Call("loss", "all_gather", tp, tp.ranks * 3 * sizes.seen * sizes.wide, count=chunks)
    return [gathered("sequence", tp, sizes.hidden * tp.ranks, reduce=micro.reduce), Operator((loss,))]
