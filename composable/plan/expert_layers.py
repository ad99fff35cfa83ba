"""What a layer of experts computes, written down as operators with their bytes (`tape.Tape`).

Rows that no dispatch brings to this rank's experts take no memory: their number is the rank's load, which is given.
"""

from composable.moe.config import MoEConfig
from composable.moe.static import room_for
from composable.plan.layers import Sizes, swiglu
from composable.plan.tape import Tape


def experts(tape: Tape, sizes: Sizes, x: int, layer: int, unit: int | None) -> int:
    """The normed hidden states -> what a layer of experts adds to them.

    Args:
        layer: its global index.
        unit: number of the unit that its experts are; None: they are with their block.
    """
    config, moe, tokens, item = sizes.config, sizes.config.moe, sizes.tokens, sizes.item
    assert moe is not None
    scores = tokens * moe.experts * sizes.wide
    choices = tokens * moe.top_k
    cast = tokens * config.dim * sizes.wide if item < 4 else 0
    router = tape.add(
        "experts",
        choices * sizes.wide,
        x,
        keep=(x,) if not cast else (),
        extra=cast + scores + choices * (8 + 2 * sizes.wide),
        weight=moe.experts * config.dim * item,
        forward=4 * scores,
        backward=2 * scores + cast,
    )
    shared = None
    if moe.shared_ffn:
        shared = swiglu(tape, sizes, x, tokens, moe.shared_ffn, "experts")
        if moe.shared_gate:
            shared = tape.add("experts", sizes.hidden, shared, keep=(shared,), extra=2 * tokens * item)
    if unit is not None:
        tape.enter(unit)
    out = _routed(tape, sizes, moe, x, router, sizes.load_of(layer))
    if unit is not None:
        tape.leave(unit)
    return out if shared is None else tape.add("experts", sizes.hidden, out, shared, through=True)


def _expert_weights(sizes: Sizes, moe: MoEConfig) -> int:
    """Bytes of the gradients of a rank's experts, before data ranks cut them."""
    mesh, dim = sizes.mesh, sizes.config.dim
    ffn = moe.ffn // mesh.etp
    biases = 2 * ffn + dim // mesh.etp if moe.expert_bias else 0
    return moe.experts // mesh.ep * (3 * dim * ffn + biases) * sizes.item


def _routed(tape: Tape, sizes: Sizes, moe: MoEConfig, x: int, router: int, load: float) -> int:
    mesh, dim, item = sizes.mesh, sizes.config.dim, sizes.item
    tokens, batch_ranks = sizes.tokens, mesh.cp * mesh.tp
    if mesh.etp > 1:  # all of its ranks compute for each other's tokens
        tokens, batch_ranks = tokens * mesh.etp, batch_ranks // mesh.etp
        x = tape.add("experts", tokens * dim * item, x, backward=2 * tokens * dim * item)
    if moe.dispatcher == "static":
        room = room_for(moe.capacity.factor, tokens, batch_ranks, moe.top_k, moe.experts)
        out = _in_blocks(tape, sizes, moe, x, router, tokens, moe.experts * room)
    elif mesh.ep == 1 and not sizes.accelerator:
        out = _in_place(tape, sizes, moe, x, router, tokens)
    else:
        out = _exchanged(tape, sizes, moe, x, router, tokens, load)
    if mesh.etp > 1:
        out = tape.add("experts", sizes.hidden, out, forward=2 * tokens * dim * item, backward=tokens * dim * item)
    return out


def _in_place(tape: Tape, sizes: Sizes, moe: MoEConfig, x: int, router: int, tokens: int) -> int:
    """`experts.swiglu_in_place`: the rows of one expert alone exist at a time."""
    dim, item, ffn = sizes.config.dim, sizes.item, moe.ffn // sizes.mesh.etp
    choices, wide = tokens * moe.top_k, tokens * sizes.config.dim * sizes.wide
    one = choices // moe.experts
    cast = wide if item < 4 else 0
    return tape.add(
        "experts",
        tokens * dim * item,
        x,
        router,
        keep=(x,),
        extra=choices * (2 * ffn * item + 8 + sizes.wide),
        weight=_expert_weights(sizes, moe),
        forward=cast + one * (2 * dim + ffn) * item,
        backward=cast + one * (3 * ffn + 4 * dim) * item + dim * ffn * item,
    )


def _exchanged(tape: Tape, sizes: Sizes, moe: MoEConfig, x: int, router: int, tokens: int, load: float) -> int:
    """`dispatch`, the experts' products, `combine`."""
    dim, item, ffn = sizes.config.dim, sizes.item, moe.ffn // sizes.mesh.etp
    sent = tokens * moe.top_k
    if moe.capacity.factor:
        sent = min(sent, int(sent * moe.capacity.factor))
    arrived = int(sent * load)
    away, here, wide = sent * dim * item, arrived * dim * item, sent * dim * sizes.wide
    summed = away + wide if item < 4 else 0  # `sum_choices` adds rows up in float32
    travels = sizes.mesh.ep > 1
    there = tape.add(
        "experts",
        here,
        x,
        extra=8 * (2 * sent + 2 * arrived * travels),
        forward=(away + here) if travels else 0,
        backward=max(here + away, away + summed) if travels else summed,
    )
    done = _products(tape, sizes, moe, there, arrived, ffn)
    back = tape.add("communication", away, done, forward=here, backward=here + away) if travels else done
    return tape.add(
        "experts",
        tokens * dim * item,
        back,
        router,
        keep=(back,),
        forward=summed + here * travels,  # what the experts gave is there to the end
        backward=wide + (away if item < 4 else 0),
    )


def _products(tape: Tape, sizes: Sizes, moe: MoEConfig, x: int, count: int, ffn: int) -> int:
    """The experts' three products of `count` rows."""
    dim, item, weights = sizes.config.dim, sizes.item, _expert_weights(sizes, moe)
    if not sizes.accelerator:
        one = count // (moe.experts // sizes.mesh.ep)
        return tape.add(
            "experts",
            count * dim * item,
            x,
            keep=(x,),
            extra=count * 2 * ffn * item,
            weight=weights,
            forward=one * (ffn + dim) * item,
            backward=one * (3 * ffn + 2 * dim) * item + dim * ffn * item,
        )
    return _separate(tape, item, x, count, dim, ffn, weights)


def _separate(tape: Tape, item: int, x: int, count: int, dim: int, ffn: int, weights: int) -> int:
    """Each operator of SwiGLU by itself."""
    size = count * ffn * item
    gate = tape.add("experts", size, x, keep=(x,), weight=weights // 3, product=True)
    up = tape.add("experts", size, x, keep=(x,), weight=weights // 3, product=True)
    activated = tape.add("experts", size, gate, keep=(gate,))
    inside = tape.add("experts", size, activated, up, keep=(activated, up))
    return tape.add(
        "experts", count * dim * item, inside, keep=(inside,), weight=weights - 2 * (weights // 3), product=True
    )


def _in_blocks(tape: Tape, sizes: Sizes, moe: MoEConfig, x: int, router: int, tokens: int, count: int) -> int:
    """Blocks of one size to every expert (`moe.static`)."""
    dim, item = sizes.config.dim, sizes.item
    size, travels = count * dim * item, sizes.mesh.ep > 1
    more = tokens * dim * item
    places = 8 * (count + tokens * moe.top_k)
    sent = tape.add("experts", size, x, extra=places, forward=more + size * travels, backward=size + more)
    if travels:
        sent = tape.add("experts", size, sent, forward=size, backward=size)
    done = _separate(tape, item, sent, count, dim, moe.ffn // sizes.mesh.etp, _expert_weights(sizes, moe))
    if travels:
        done = tape.add("communication", size, done, forward=size, backward=size)
    wide = count * dim * sizes.wide
    return tape.add(
        "experts",
        tokens * dim * item,
        done,
        router,
        keep=(done,),
        forward=size,
        backward=2 * wide + (size if item < 4 else 0),
    )
