"""Which collectives a rank makes in a training step, from a recipe alone: kind, group, calls and bytes, exactly.

Counted is what `observe.traffic.Traffic` sees of a step after the first, without reports of the training loop. On a
CPU sums of activations over ranks are exchanged, on accelerators reduce-scattered: as many bytes by another kind.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from composable.data.loader import accumulation
from composable.moe.given import Load
from composable.parallel.compose import split
from composable.parallel.config import SPLIT_BACKWARD
from composable.parallel.split import Stage
from composable.plan.calls import INDEX, Call, Group, Groups, Micro, groups_of
from composable.plan.exchange import Items
from composable.plan.flows_data import (
    Turns,
    on_rank,
    parameters_and_gradients,
    shard_on_rank,
    turns,
    turns_in_pipeline,
)
from composable.plan.flows_layers import activations
from composable.plan.layers import Sizes
from composable.plan.memory import ITEM, Planned
from composable.plan.shards import Units, stage_units

PURPOSES = (
    "gather parameters",  # by data parallelism, for computation
    "reduce gradients",  # by data parallelism, over shards and copies
    "replicated gradients",  # summed over tensor ranks, of what each holds whole
    "tied gradients",  # summed between the ends of a pipeline
    "sequence",  # activations between tensor ranks
    "context",  # keys and values, or heads, between context ranks; documents
    "experts",  # rows to their experts and back
    "experts inside nodes",  # the same by the hierarchical dispatcher, its first part
    "experts across nodes",  # and its second
    "routing",  # choices under a capacity; statistics of balance
    "pipeline",  # hidden states and their gradients between stages
    "loss",  # over vocabulary shards
    "sums",  # numbers of tokens, the gradient norm, the step's loss
)
"""what exchanges are for"""
EVEN = Load()
"""each expert has the same share of choices"""
FLOAT, SCALAR = 8, 4
"""bytes of a number in the sums of a step, and of one that tells a number of tokens"""


@dataclass(frozen=True, order=True)
class Flow:
    """What a rank exchanges in a step for one purpose, in calls of one kind over one group."""

    purpose: str
    """one of `PURPOSES`"""
    kind: str
    """as `observe.traffic.Collective` has it"""
    group: str
    """as `mesh.group_name` has it"""
    ranks: int
    """of the group"""
    count: int
    """calls in a step"""
    bytes: int
    """of all calls, as `observe.traffic.Collective` counts them"""
    hides: bool
    """it runs beside computation by its nature: parameters and gradients of all units but the root, sends between
    stages; all others are waited for"""


def traffic(
    recipe: Planned,
    rank: int = 0,
    *,
    load: Load = EVEN,
    accelerator: bool = True,
    ranks_per_node: int | None = None,
) -> tuple[Flow, ...]:
    """The collectives of one rank in one step after the first.

    Args:
        recipe: resolved: its mesh is that of the world to plan for.
        rank: of the mesh.
        load: choices of each expert: every rank's tokens choose alike, or as `load.executed` has it.
        accelerator: kinds are those of an accelerator; else of a CPU.
        ranks_per_node: consecutive ranks of a node, for the hierarchical dispatcher; all ranks if None.

    Raises:
        ValueError: a mesh that is not resolved, no such rank, or a model that is not ours.
    """
    mesh = recipe.mesh
    _check(recipe, rank)
    groups = groups_of(mesh, rank, whole=recipe.parallel.data == "ddp")
    micro, count, counting = _micro(recipe, groups, rank, load, accelerator, ranks_per_node or mesh.world)
    stages, owners = split(recipe.architecture, mesh, recipe.pipeline, recipe.data.seq_len)
    mine = {number: stage for number, stage in enumerate(stages) if owners[number] == rank // mesh.stage_ranks}
    found = _sums(recipe, groups, counting)
    passing = _turns(recipe, rank, count)
    parts = {number: _units(recipe, stage, rank) for number, stage in mine.items()}
    for number, stage in mine.items():
        found += _activations(recipe, micro, stage, count, counting)
        found += parameters_and_gradients(parts[number], passing[number], counting, groups, _items(recipe))
        found += _borders(micro, number, owners, count, counting)
    if mesh.tp > 1:
        found.append(_replicated(recipe, parts, groups, rank))
    if recipe.model.tied and mesh.pp > 1 and owners[0] != owners[-1]:
        found += _tied(recipe, parts, groups, rank)
    return _merged(found)


def _check(recipe: Planned, rank: int) -> None:
    if recipe.foreign is not None:
        raise ValueError("the traffic of a model of another library is not known by its sizes; count it by a dry run")
    if min(recipe.mesh.dp_replicate, recipe.mesh.dp_shard) < 1:
        raise ValueError("the mesh has a degree of -1; give what Recipe.resolve gives for the world to plan for")
    if not 0 <= rank < recipe.mesh.world:
        raise ValueError(f"rank {rank}: the ranks of a world of {recipe.mesh.world} are 0 to {recipe.mesh.world - 1}")


def _merged(calls: Sequence[Call]) -> tuple[Flow, ...]:
    """Flows of what agrees in all but count and bytes."""
    sums: dict[tuple[str, str, Group, bool], tuple[int, float]] = {}
    for call in calls:
        key = call.purpose, call.kind, call.group, call.hides
        count, size = sums.get(key, (0, 0))
        sums[key] = count + call.count, size + call.bytes
    return tuple(
        sorted(
            Flow(purpose, kind, group.name, group.ranks, count, round(size), hides)
            for (purpose, kind, group, hides), (count, size) in sums.items()
            if count
        )
    )


def _times(calls: Sequence[Call], number: int) -> list[Call]:
    """Calls that are made so many times."""
    return [dataclasses.replace(each, bytes=number * each.bytes, count=number * each.count) for each in calls]


def _items(recipe: Planned) -> Items:
    kept, parallel = ITEM[recipe.dtype], recipe.parallel
    if parallel.precision == "none":
        return Items(kept, kept, kept)
    return Items(kept, ITEM[parallel.precision], ITEM[parallel.reduce])


def _micro(
    recipe: Planned, groups: Groups, rank: int, load: Load, accelerator: bool, per_node: int
) -> tuple[Micro, int, int]:
    """One micro-batch, how many a rank has in a step, and how many it runs forward before, to count choices."""
    data, parallel, mesh, moe = recipe.data, recipe.parallel, recipe.mesh, recipe.model.moe
    sizes = Sizes(
        recipe.model,
        mesh,
        data.micro_batch,
        data.seq_len,
        _items(recipe).computed,
        data.document_mask,
        accelerator,
        parallel.context,
        1.0,
    )
    count = accumulation(data, mesh.data_ranks)
    alone, balances = mesh.pp == count == 1, moe is not None and bool(moe.balance.losses)
    micro = Micro(sizes, groups, rank, load, per_node, parallel.recompute, parallel.loss_chunk, alone, balances)
    return micro, count, count if moe is not None and moe.balance.counts_step and not alone else 0


def _units(recipe: Planned, stage: Stage, rank: int) -> Units:
    mesh = recipe.mesh
    keeps = mesh.pp > 1 and recipe.pipeline.schedule in SPLIT_BACKWARD
    units = stage_units(recipe.model, mesh, recipe.parallel, stage, keeps=keeps)
    return on_rank(units, recipe.model, mesh, stage, rank % mesh.tp)


def _turns(recipe: Planned, rank: int, count: int) -> Mapping[int, Turns]:
    mesh, pipeline, data = recipe.mesh, recipe.pipeline, recipe.parallel.data
    if mesh.pp == 1:
        return {0: turns(data, count)}
    micro_batches = pipeline.micro_batches or count
    return turns_in_pipeline(data, pipeline, mesh.pp, rank // mesh.stage_ranks, micro_batches, count // micro_batches)


def _activations(recipe: Planned, micro: Micro, stage: Stage, count: int, counting: int) -> list[Call]:
    """Of all micro-batches of a step; those that count choices run forward alone, without losses of balance."""
    one = activations(micro, stage)
    found = _times([*one.forward, *one.backward], count)
    if recipe.mesh.pp > 1 and recipe.pipeline.schedule in SPLIT_BACKWARD and not recipe.parallel.whole_blocks:
        found += _times(one.weights, count)
    if counting:
        found += _times(activations(dataclasses.replace(micro, balances=False), stage).forward, counting)
    return found


def _borders(micro: Micro, number: int, owners: Sequence[int], count: int, counting: int) -> list[Call]:
    """Hidden states to the next stage and gradients back, where that is on another rank."""
    found = []
    for other, forward, backward in ((number - 1, "receive", "send"), (number + 1, "send", "receive")):
        if 0 <= other < len(owners) and owners[other] != owners[number]:
            for kind, times in ((forward, count + counting), (backward, count)):
                size = times * micro.sizes.hidden
                found.append(Call("pipeline", kind, micro.groups.pp, size, times, hides=True))
    return found


def _sums(recipe: Planned, groups: Groups, counting: int) -> list[Call]:
    """Once a step, over all ranks: tokens, rows and labels; loss and squared norm; what experts ask for."""
    world = groups.world
    found = [
        Call("sums", "all_reduce", world, 3 * INDEX),
        Call("sums", "all_gather", world, 2 * FLOAT * world.ranks),
    ]
    moe = recipe.model.moe
    if moe is None:
        return found
    if moe.balance.losses:
        found.append(Call("routing", "all_reduce", world, SCALAR))
    layers = recipe.model.layers - moe.first_dense
    log = Call("routing", "all_reduce", world, layers * (2 * moe.experts + len(moe.balance.losses)) * FLOAT)
    return found + [log] * (bool(counting) + bool(moe.balance.bias_rate))


def _replicated(recipe: Planned, parts: Mapping[int, Units], groups: Groups, rank: int) -> Call:
    """One sum of all gradients, of this rank's shards, whose weights each tensor rank holds whole."""
    mine = _shard(recipe, rank)
    elements = sum(
        shard_on_rank(unit, weight, mine if unit.ranks > 1 else 0)
        for part in parts.values()
        for unit in part.all
        for weight in unit.weights
        if weight.replicated and not weight.expert
    )
    return Call("replicated gradients", "all_reduce", groups.tp, elements * ITEM[recipe.dtype])


def _tied(recipe: Planned, parts: Mapping[int, Units], groups: Groups, rank: int) -> list[Call]:
    """The embedding's gradient and that of the head's copy, of this rank's shard."""
    found = []
    for part in parts.values():
        if part.first or part.last:
            unit = part.root
            mine = _shard(recipe, rank) if unit.ranks > 1 else 0
            size = shard_on_rank(unit, unit.weights[0], mine) * ITEM[recipe.dtype]
            found += [Call("tied gradients", kind, groups.pp, size) for kind in ("send", "receive") if size]
    return found


def _shard(recipe: Planned, rank: int) -> int:
    """The place of a rank among those that cut dense parameters."""
    mesh = recipe.mesh
    return rank % mesh.stage_ranks // mesh.tp % (mesh.dp_shard * mesh.cp)
