"""What a micro-batch exchanges in a layer of experts: rows by one of three dispatchers, capacity, statistics."""

from __future__ import annotations

from collections.abc import Sequence

from composable.moe.config import MoEConfig
from composable.moe.given import left_by_capacity
from composable.moe.static import room_for
from composable.plan.calls import INDEX, Call, Micro, Operator, gathered, nodes_of, scattered

INSIDE, ACROSS = "experts inside nodes", "experts across nodes"


def experts(micro: Micro, layer: int) -> list[Operator]:
    """Of one layer; the sum over the ranks that cut experts in width, if there are several, comes last but for what
    losses of balance want to know."""
    sizes, moe, etp = micro.sizes, _config(micro), micro.groups.etp
    tokens = sizes.tokens
    found = _capacity(micro, moe) if moe.capacity.factor else []
    if etp.ranks > 1:
        tokens *= etp.ranks
        choices = tokens * moe.top_k
        found.append(Operator((Call("experts", "all_gather", etp, choices * INDEX),)))
        found.append(gathered("experts", etp, choices * sizes.wide, reduce=micro.reduce))
        found.append(gathered("experts", etp, tokens * sizes.config.dim * sizes.item, reduce=micro.reduce))
    if micro.groups.ep.ranks > 1:
        if moe.dispatcher == "static":
            found += _in_blocks(micro, moe, tokens)
        elif moe.dispatcher == "hierarchical":
            found += _by_nodes(micro, moe, layer)
        else:
            found += _all_to_all(micro, moe, layer)
    if etp.ranks > 1:
        found.append(scattered("experts", etp, tokens * sizes.config.dim * sizes.item, reduce=micro.reduce))
    return found + (_balance(micro, moe) if micro.balances else [])


def _config(micro: Micro) -> MoEConfig:
    moe = micro.sizes.config.moe
    assert moe is not None
    return moe


def _capacity(micro: Micro, moe: MoEConfig) -> list[Operator]:
    """What every rank that holds tokens of the micro-batch tells the others of its choices (`moe.capacity`)."""
    batch, tokens = micro.groups.batch, micro.sizes.tokens
    if batch.ranks == 1:
        return []
    choices, scores = tokens * moe.top_k, tokens * moe.experts * micro.sizes.wide
    sizes = [choices * INDEX, choices * micro.sizes.wide, tokens * INDEX, tokens]
    if moe.capacity.overflow == "next":
        sizes += [scores, scores]
    return [Operator((Call("routing", "all_gather", batch, batch.ranks * sum(sizes), count=len(sizes)),))]


def _balance(micro: Micro, moe: MoEConfig) -> list[Operator]:
    """Sums over the tokens of the micro-batch, and choices of the step."""
    sizes, batch = micro.sizes, micro.groups.batch
    calls = []
    if batch.ranks > 1:
        numbers = 2 * sizes.batch * moe.experts + sizes.batch + 1
        calls.append(Call("routing", "all_reduce", batch, numbers * sizes.wide))
    if moe.balance.counts_step and micro.alone:
        calls.append(Call("routing", "all_reduce", micro.groups.world, moe.experts * INDEX))
    return [Operator(tuple(calls))]


def _rows(micro: Micro, moe: MoEConfig, layer: int) -> list[list[float]]:
    """Rows that each of the ranks which share the experts sends to each of them [ep][ep]; all alike if not known."""
    ep, etp = micro.groups.ep.ranks, micro.groups.etp.ranks
    if micro.load.executed is None:
        shares = micro.load.of(layer, moe.experts)
        counts = left_by_capacity(shares, micro.sizes.tokens, micro.groups.batch.ranks, moe)
        return [_by_rank([count * etp for count in counts], ep)] * ep
    first = (micro.rank // etp - _place(micro)) * etp
    known = micro.load.executed[layer]
    return [
        _by_rank([sum(counts) for counts in zip(*known[start : start + etp], strict=True)], ep)
        for start in range(first, first + ep * etp, etp)
    ]


def _by_rank(counts: Sequence[float], ep: int) -> list[float]:
    """Choices of each expert, summed over those of each rank."""
    part = len(counts) // ep
    return [sum(counts[start : start + part]) for start in range(0, len(counts), part)]


def _place(micro: Micro) -> int:
    """This rank's among those that share the experts."""
    mesh = micro.sizes.mesh
    return micro.rank // mesh.etp % mesh.ep


def _all_to_all(micro: Micro, moe: MoEConfig, layer: int) -> list[Operator]:
    ep, row = micro.groups.ep, micro.sizes.config.dim * micro.sizes.item
    place = _place(micro)
    rows = _rows(micro, moe, layer)
    there = Call("experts", "all_to_all", ep, sum(rows[place]) * row)
    back = Call("experts", "all_to_all", ep, sum(each[place] for each in rows) * row)
    return [
        Operator((Call("experts", "all_to_all", ep, moe.experts * INDEX),)),
        Operator((there,), (back,)),
        Operator((back,), (there,)),
    ]


def _by_nodes(micro: Micro, moe: MoEConfig, layer: int) -> list[Operator]:
    """Inside the node, then across nodes (`moe.hierarchical`); and the way back."""
    nodes = nodes_of(micro.sizes.mesh, micro.rank, micro.per_node)
    inside, across = nodes.inside, nodes.across
    row, place = micro.sizes.config.dim * micro.sizes.item, _place(micro)
    rows = _rows(micro, moe, layer)
    sent, arrived = sum(rows[place]) * row, sum(each[place] for each in rows) * row
    node, seat = divmod(place, inside.ranks)
    neighbours = rows[node * inside.ranks : (node + 1) * inside.ranks]
    between = sum(sum(each[seat :: inside.ranks]) for each in neighbours) * row
    counts = moe.experts * INDEX
    to_experts = (
        Call(INSIDE, "all_to_all", inside, sent),
        Call(ACROSS, "all_to_all", across, between),
    )
    to_tokens = (
        Call(ACROSS, "all_to_all", across, arrived),
        Call(INSIDE, "all_to_all", inside, between),
    )
    told = (Call(INSIDE, "all_to_all", inside, counts), Call(ACROSS, "all_to_all", across, counts))
    return [Operator(told), Operator(to_experts, to_tokens), Operator(to_tokens, to_experts)]


def _in_blocks(micro: Micro, moe: MoEConfig, tokens: int) -> list[Operator]:
    """Blocks of one size to every expert (`moe.static`)."""
    sizes, ep = micro.sizes, micro.groups.ep
    room = room_for(
        moe.capacity.factor, tokens, micro.groups.batch.ranks // micro.groups.etp.ranks, moe.top_k, moe.experts
    )
    call = Call("experts", "all_to_all", ep, moe.experts * room * sizes.config.dim * sizes.item)
    swap = Operator((call,), (call,))
    if sizes.accelerator and sizes.item == 2:  # products of the rows that came alone: their numbers are told
        return [swap, Operator((Call("experts", "all_to_all", ep, moe.experts * INDEX),)), swap]
    return [swap, swap]
