"""A pipeline stage, or the whole decoder, as a tape of operators with the borders of its units."""

from composable.parallel.config import Parallel, recompute_every
from composable.parallel.split import Stage
from composable.plan.expert_layers import experts
from composable.plan.layers import Sizes, attention, embedding, head, mlp, norm, tables
from composable.plan.shards import Unit, Units
from composable.plan.tape import Segment, Tape


def stage_tape(sizes: Sizes, parallel: Parallel, stage: Stage, units: Units) -> tuple[Tape, list[Unit]]:
    """What a stage computes, and its units in the order of the numbers by which the tape knows them; the root is 0."""
    tape, order = Tape(), [units.root]
    tables(tape, sizes)
    x = embedding(tape, sizes) if stage.first else tape.add("norms", 0)
    every, open_unit = recompute_every(parallel.recompute), None
    for index, layer in enumerate(stage.layers):
        if layer in units.blocks:
            if open_unit is not None:
                tape.leave(open_unit)
            open_unit = len(order)
            order.append(units.blocks[layer])
            tape.enter(open_unit)
        own = None
        if layer in units.experts:
            own = len(order)
            order.append(units.experts[layer])
        chosen = bool(every) and index % every == 0
        x = _block(tape, sizes, x, layer, own, parallel.recompute if chosen else "none")
    if open_unit is not None:
        tape.leave(open_unit)
    if stage.last:
        head(tape, sizes, x, parallel.loss_chunk)
    else:
        tape.add("norms", 0, x, keep=(x,), through=True)  # the schedule keeps what it sent
    return tape, order


def _block(tape: Tape, sizes: Sizes, x: int, layer: int, own: int | None, kind: str) -> int:
    """One block; `own` is the unit of its experts, if they are one."""
    config = sizes.config
    routed = config.moe is not None and layer in config.expert_layers
    post, elements, width = config.norm_place == "post", sizes.tokens * config.dim, config.dim
    start = len(tape.operators)
    inside = x if post else norm(tape, sizes, x, elements, width)
    before = len(tape.operators)
    added = attention(tape, sizes, inside, layer)
    if kind == "selective" and routed:  # of layers with experts it takes the attention
        tape.segments.append(Segment(before, len(tape.operators), True))
    added = norm(tape, sizes, added, elements, width) if post else added
    x = tape.add("norms", sizes.hidden, x, added, through=True)
    inside = x if post else norm(tape, sizes, x, elements, width)
    added = experts(tape, sizes, inside, layer, own) if routed else mlp(tape, sizes, inside)
    added = norm(tape, sizes, added, elements, width) if post else added
    x = tape.add("norms", sizes.hidden, x, added, through=True)
    if kind != "none" and not (kind == "selective" and routed):
        tape.segments.append(Segment(start, len(tape.operators), kind == "selective"))
    return x
