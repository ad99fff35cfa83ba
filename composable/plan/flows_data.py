"""What data parallelism exchanges in a step: gathered parameters and reduced gradients, as FSDP2 of torch 2.13 does."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

from composable.mesh import Mesh
from composable.models.config import DecoderConfig
from composable.parallel.config import DataKind, Pipeline
from composable.parallel.split import Stage
from composable.plan.bubble import all_actions
from composable.plan.calls import Call, Groups
from composable.plan.exchange import Items
from composable.plan.shards import Unit, Units, Weight, outer_weights, rows


@dataclass(frozen=True)
class Turns:
    """How often in a step."""

    kept: int
    """units that stay gathered between forward and backward are gathered"""
    given_back: int
    """units that do not are gathered"""
    reduced: int
    """gradients are reduce-scattered"""
    summed: int
    """they are summed over copies too"""


def turns(data: DataKind, count: int) -> Turns:
    """Without a pipeline, of `count` micro-batches: the root is gathered for each of zero3's."""
    each = count if data in ("zero2", "zero3") else 1
    return Turns(count if data == "zero3" else 1, 2 * count, each, 1)


def turns_in_pipeline(
    data: DataKind, pipeline: Pipeline, pp: int, rank: int, micro_batches: int, passes: int
) -> Mapping[int, Turns]:
    """Of each stage on a rank of a pipeline: parameters stay after a backward pass until the pass is over, or until a
    schedule of several stages a rank makes room for others.

    Args:
        micro_batches: of one pass.
    """
    program = all_actions(pipeline.schedule, pp, pipeline.stages_per_rank, micro_batches)[rank]
    stages = sorted({stage for _, stage, _ in program})
    reduced = passes if data in ("zero2", "zero3") else 1
    there = {(stage, keeps): False for stage in stages for keeps in (True, False)}
    gathers = dict.fromkeys(there, 0)
    for index in range(passes):
        for kind, stage, _ in program:
            for keeps in (True, False):
                key = stage, keeps
                if kind in ("UNSHARD", "F", "B", "I", "W"):
                    gathers[key] += not there[key]
                    there[key] = keeps or kind != "F"
                elif kind == "RESHARD":
                    there[key] = False
        if reduced == passes or index == passes - 1:
            there = dict.fromkeys(there, False)
    return {stage: Turns(gathers[stage, True], gathers[stage, False], reduced, reduced) for stage in stages}


def on_rank(units: Units, config: DecoderConfig, mesh: Mesh, stage: Stage, tensor_rank: int) -> Units:
    """The units of a stage, of a tensor rank: the last ones may have fewer rows of the vocabulary, or none."""
    mine = piece(config.vocab_size, mesh.tp, tensor_rank)
    outer = len(outer_weights(config, mesh, stage))
    weights = tuple(
        Weight((mine, config.dim)) if index < outer and not weight.replicated else weight
        for index, weight in enumerate(units.root.weights)
    )
    return dataclasses.replace(units, root=dataclasses.replace(units.root, weights=weights, keeps=True))


def piece(size: int, ranks: int, rank: int) -> int:
    """Of `size` rows in `ranks` pieces, those of one rank."""
    most = rows(size, ranks)
    return max(0, min(most, size - rank * most))


def shard_on_rank(unit: Unit, weight: Weight, rank: int) -> int:
    """Elements of one weight that a rank of those that cut it holds, padding left out."""
    dim = unit.cut_dimension(weight)
    return weight.elements // weight.shape[dim] * piece(weight.shape[dim], unit.ranks, rank) if weight.elements else 0


def parameters_and_gradients(units: Units, turn: Turns, counting: int, groups: Groups, items: Items) -> list[Call]:
    """Of the units of a stage in a step.

    Args:
        counting: forward passes before the step, of which each gathers everything.

    What the root gathers is waited for, and its gradients come last: nothing runs beside.
    """
    found = []
    for unit in units.all:
        if not unit.sharded or not unit.weights:
            continue
        expert = all(weight.expert for weight in unit.weights)
        shards = groups.expert_shards if expert else groups.shards
        copies = groups.expert_copies if expert else groups.copies
        beside = unit is not units.root
        if unit.ranks > 1:
            count = (turn.kept if unit.keeps else turn.given_back) + counting
            size = unit.padded * items.computed
            found.append(Call("gather parameters", "all_gather", shards, count * size, count, beside))
            size = turn.reduced * unit.padded * items.reduced
            found.append(Call("reduce gradients", "reduce_scatter", shards, size, turn.reduced, beside))
        if unit.all_reduced:
            size = turn.summed * unit.shard * items.reduced
            found.append(Call("reduce gradients", "all_reduce", copies, size, turn.summed, beside))
    return found
