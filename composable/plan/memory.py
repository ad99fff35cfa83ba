"""How much memory each rank needs, from a recipe alone: a step played through, operator by operator.

Counted are the bytes of tensors: parameters, gradients and optimizer state as this rank holds them, what the forward
pass keeps for the backward pass, what data parallelism gathers and reduces, and what operators need while they run. Not
counted are scratch memory within kernels and in communication libraries, and the device's context; on accelerators an
allocator also holds more than it gave out, for which a share is added (`SLACK`).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from composable.data.loader import DataConfig, accumulation
from composable.mesh import Mesh
from composable.models.config import DecoderConfig
from composable.optim.optimizers import OptimizerConfig
from composable.parallel.architecture import Architecture
from composable.parallel.compose import split
from composable.parallel.config import SPLIT_BACKWARD, Parallel, Pipeline
from composable.parallel.split import Stage
from composable.plan.bubble import Event, StageCost, simulate
from composable.plan.exchange import Exchange, Items
from composable.plan.layers import Sizes
from composable.plan.passes import StagePasses
from composable.plan.shards import Units, Weight, stage_units
from composable.plan.stage import stage_tape
from composable.plan.tape import Ledger, Pass, Tape

SLACK = 0.12
"""share of what tensors need that an accelerator's allocator holds beside it, as blocks are rounded up and gaps stay:
so much that reported figures are met (tests/plan/test_anchors.py)"""
ITEM = {"float32": 4, "bfloat16": 2, "float64": 8}
ADAM_STEP = 4
"""bytes of AdamW's count of steps, for each parameter"""


class Planned(Protocol):
    """What is asked of a recipe, which stands above the planner."""

    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]

    def resolve(self, world: int) -> tuple[Planned, list[str]]: ...
    @property
    def name(self) -> str: ...
    @property
    def model(self) -> DecoderConfig: ...
    @property
    def dtype(self) -> str: ...
    @property
    def mesh(self) -> Mesh: ...
    @property
    def parallel(self) -> Parallel: ...
    @property
    def pipeline(self) -> Pipeline: ...
    @property
    def data(self) -> DataConfig: ...
    @property
    def optimizer(self) -> OptimizerConfig: ...
    @property
    def architecture(self) -> Architecture: ...
    @property
    def foreign(self) -> Any: ...


@dataclass(frozen=True)
class RankMemory:
    """Of one rank of a pipeline: the one of its stages' ranks that holds the most. Bytes."""

    rank: int
    """of the pipeline"""
    parameters: int
    """that it holds: its shards of what the optimizer updates"""
    gradients: int
    """of these, after the last reduction"""
    optimizer: int
    """its state"""
    parts: Mapping[str, int]
    """what tensors hold on the device when that is most, by part: parameters, optimizer, gradients (whole ones too),
    gathered (parameters for computation), communication (buffers), norms (the residual stream too), attention, mlp,
    experts, head (logits and loss), temporary (gradients of activations, scratch), batch"""
    host: int
    """in host memory, with offload on an accelerator"""
    slack: int
    """that the allocator holds beside `peak`"""

    @property
    def peak(self) -> int:
        """What tensors hold at most on the device."""
        return sum(self.parts.values())

    @property
    def total(self) -> int:
        """With the allocator's slack: what must fit."""
        return self.peak + self.slack


def memory(
    recipe: Planned,
    *,
    accelerator: bool = True,
    load: float | Mapping[int, float] = 1.0,
    slack: float = SLACK,
    ranks: Collection[int] | None = None,
) -> tuple[RankMemory, ...]:
    """Of each rank of the pipeline (of one rank without a pipeline), in the steps after the first.

    Args:
        recipe: resolved: its mesh is that of the world to plan for.
        accelerator: kernels and offload are those of an accelerator; else of a CPU, where host and device are one.
        load: rows that the experts of the fullest rank get, over an even share; or of each layer that has experts.
        slack: share of the peak that an accelerator's allocator holds beside it.
        ranks: of the pipeline, those that are asked for; all if None.

    Raises:
        ValueError: a mesh that is not resolved, or a model that is not ours.
    """
    if recipe.foreign is not None:
        raise ValueError("the memory of a model of another library is not known by its sizes; measure it by a dry run")
    if min(recipe.mesh.dp_replicate, recipe.mesh.dp_shard) < 1:
        raise ValueError("the mesh has a degree of -1; give what Recipe.resolve gives for the world to plan for")
    stages, rank_of = split(recipe.architecture, recipe.mesh, recipe.pipeline, recipe.data.seq_len)
    events, found = _events(recipe), []
    for rank in range(recipe.mesh.pp) if ranks is None else ranks:
        mine = {number: stage for number, stage in enumerate(stages) if rank_of[number] == rank}
        found.append(_rank(recipe, rank, mine, accelerator, load, slack, events))
    return tuple(found)


def least_states(recipe: Planned) -> int:
    """Bytes of parameters, gradients and optimizer state that some rank holds at least on its device: an even share."""
    if recipe.parallel.offload:
        return 0
    whole = Stage(True, range(recipe.model.layers), True)
    units = stage_units(recipe.model, recipe.mesh, recipe.parallel, whole, keeps=False)
    moments = 2 if recipe.optimizer.kind == "adamw" else int(bool(recipe.optimizer.momentum))
    return units.elements * ITEM[recipe.dtype] * (2 + moments) // recipe.mesh.pp


def worst(ranks: tuple[RankMemory, ...]) -> RankMemory:
    """The rank that needs the most."""
    return max(ranks, key=lambda each: each.total)


@dataclass(frozen=True)
class _Part:
    """One stage."""

    units: Units
    tape: Tape
    exchange: Exchange


def _rank(
    recipe: Planned,
    rank: int,
    stages: Mapping[int, Stage],
    accelerator: bool,
    load: float | Mapping[int, float],
    slack: float,
    events: Sequence[Event],
) -> RankMemory:
    parallel, mesh, kept = recipe.parallel, recipe.mesh, ITEM[recipe.dtype]
    computed = kept if parallel.precision == "none" else ITEM[parallel.precision]
    reduced = kept if parallel.precision == "none" else ITEM[parallel.reduce]
    items, host = Items(kept, computed, reduced), parallel.offload and accelerator
    ledger = Ledger()
    sizes = Sizes(
        recipe.model,
        mesh,
        recipe.data.micro_batch,
        recipe.data.seq_len,
        computed,
        recipe.data.document_mask,
        accelerator,
        parallel.context,
        load,
    )
    keeps = mesh.pp > 1 and recipe.pipeline.schedule in SPLIT_BACKWARD
    parts = {}
    for number, stage in stages.items():
        units = stage_units(recipe.model, mesh, parallel, stage, keeps=keeps)
        tape, order = stage_tape(sizes, parallel, stage, units)
        where = "" if host else "gradients"
        exchange = Exchange(order, ledger, items, gradients=where, copies=host, at_end=mesh.pp > 1)
        parts[number] = _Part(units, tape, exchange)
    weights = [weight for part in parts.values() for unit in part.units.all for weight in unit.weights]
    elements = sum(part.units.elements for part in parts.values())
    parameters, optimizer = elements * kept, _optimizer(recipe, parts, len(weights), elements)
    if not host:
        ledger.hold("parameters", parameters)
        ledger.hold("optimizer", optimizer)
    ledger.hold("batch", _batches(recipe))
    if mesh.pp == 1:
        _accumulate(recipe, parts[0])
    else:
        _pipeline(recipe, rank, parts, ledger, sizes, events)
    if mesh.tp > 1:
        shared = sum(_replicated(part.units) for part in parts.values())
        ledger.touch("communication", shared * kept)
    in_host = (2 * parameters + optimizer) if host else 0
    held = {part: size for part, size in ledger.at_peak.items() if size}
    return RankMemory(
        rank, parameters, parameters, optimizer, held, in_host, int(slack * ledger.peak) if accelerator else 0
    )


def _optimizer(recipe: Planned, parts: Mapping[int, _Part], count: int, elements: int) -> int:
    """Bytes of its state; a tied weight that both ends of a V schedule hold here has it once."""
    first_and_last = recipe.model.tied and len(parts) > 1 and any(p.units.first for p in parts.values())
    if first_and_last and any(part.units.last for part in parts.values()):
        copy = max(parts.values(), key=lambda part: part.units.last).units.root
        elements -= copy.shard_of(copy.weights[0])
        count -= 1
    kept = ITEM[recipe.dtype]
    if recipe.optimizer.kind == "adamw":
        return 2 * elements * kept + count * ADAM_STEP
    return elements * kept if recipe.optimizer.momentum else 0


def _batches(recipe: Planned) -> int:
    """Bytes of a step's tokens, and of what is told of them, int64 each; pipelines join them."""
    tensors = 2 + 2 * recipe.data.document_mask + (recipe.model.moe is not None)
    tokens = recipe.data.micro_batch * recipe.data.seq_len * accumulation(recipe.data, recipe.mesh.data_ranks)
    return 8 * tensors * tokens * (2 if recipe.mesh.pp > 1 else 1)


def _accumulate(recipe: Planned, part: _Part) -> None:
    """The micro-batches of a step, one after the other; those between the second and the last are all alike."""
    count, data = accumulation(recipe.data, recipe.mesh.data_ranks), recipe.parallel.data
    exchange = part.exchange
    for index in sorted({0, min(1, count - 1), count - 1}):
        last = index == count - 1
        exchange.micro_batch(last=last, sync=last or data in ("zero2", "zero3"), reshards=last or data == "zero3")
        exchange.begin_forward()
        run = Pass(part.tape, exchange.ledger, exchange.border, exchange.weights)
        run.forward()
        exchange.end_forward()
        exchange.begin_backward()
        run.backward()
        exchange.end_backward()


def _pipeline(
    recipe: Planned,
    rank: int,
    parts: Mapping[int, _Part],
    ledger: Ledger,
    sizes: Sizes,
    events: Sequence[Event],
) -> None:
    """The passes of a step, `events` of all ranks each; those after the second are like it."""
    mesh, pipeline = recipe.mesh, recipe.pipeline
    count = accumulation(recipe.data, mesh.data_ranks)
    micro_batches = pipeline.micro_batches or count
    stages = mesh.pp * pipeline.stages_per_rank
    for number in parts:  # buffers for what arrives, one for each micro-batch, made once
        ends = (number > 0) + (number < stages - 1)
        ledger.hold("communication", ends * micro_batches * sizes.hidden)
    mine = [event for event in events if event.rank == rank]
    if pipeline.stages_per_rank > 1:  # what is sent is held to the end: of micro-batches that are not played, too
        played = _played(pipeline, mesh.pp, micro_batches)
        each = sum(_sends(event, parts, stages) for event in mine) // played
        ledger.hold("communication", (micro_batches - played) * each * sizes.hidden)
    passes_of = {number: StagePasses(part.tape, part.exchange, ledger) for number, part in parts.items()}
    passes = count // micro_batches
    for index in range(min(passes, 2)):
        for part in parts.values():
            part.exchange.micro_batch(last=True, sync=True, reshards=False)
        sent = 0
        for event in mine:
            output = sizes.hidden * (event.stage < stages - 1 and event.kind == "B")
            ledger.hold("communication", output)  # what the stage gave is let go once its backward pass is over
            passes_of[event.stage].play(event.kind)
            ledger.free("communication", output)
            more = sizes.hidden * _sends(event, parts, stages)
            if pipeline.stages_per_rank > 1 or not sent:
                sent += more
                ledger.hold("communication", more)
        if index == min(passes, 2) - 1 or recipe.parallel.data in ("zero2", "zero3"):
            for part in parts.values():
                part.exchange.reshards = True
                part.exchange.reduce_all()
        ledger.free("communication", sent)


def _events(recipe: Planned) -> tuple[Event, ...]:
    """A pass of all ranks; in which order a rank does what does not depend on what it costs."""
    mesh, pipeline = recipe.mesh, recipe.pipeline
    if mesh.pp == 1:
        return ()
    micro_batches = pipeline.micro_batches or accumulation(recipe.data, mesh.data_ranks)
    played = dataclasses.replace(pipeline, micro_batches=0)
    return _events_of(played, mesh.pp, _played(pipeline, mesh.pp, micro_batches), recipe.parallel.whole_blocks)


@functools.lru_cache(maxsize=64)  # a search asks for the same again and again
def _events_of(pipeline: Pipeline, pp: int, micro_batches: int, whole_blocks: bool) -> tuple[Event, ...]:
    costs = [StageCost(1, 1, 1)] * (pp * pipeline.stages_per_rank)
    return simulate(pipeline, pp, micro_batches, costs, whole_blocks=whole_blocks).events


def _played(pipeline: Pipeline, pp: int, micro_batches: int) -> int:
    """Micro-batches of a pass that are played through: after so many a rank does the same over and over, but where all
    of a pass go forward before one goes back."""
    if pipeline.schedule in ("GPipe", "LoopedBFS"):
        return micro_batches
    rounds = 2 if pipeline.stages_per_rank == 1 else 4 if pipeline.schedule == "DualPipeV" else 3
    return min(micro_batches, rounds * pp)


def _sends(event: Event, parts: Mapping[int, _Part], stages: int) -> int:
    """Tensors that are held for their sending alone once a computation is over: schedules of several stages a rank
    hold them until the pass is over, others those of the first micro-batch or as many."""
    output = event.stage < stages - 1 and event.stage + 1 not in parts and event.kind in "BW"
    gradient = event.stage > 0 and event.stage - 1 not in parts and event.kind in "BI"
    return output + gradient


def _replicated(units: Units) -> int:
    """Elements of what all tensor ranks hold alike."""

    def here(weight: Weight) -> bool:
        return weight.replicated and not weight.expert

    return sum(unit.shard_of(weight) for unit in units.all for weight in unit.weights if here(weight))
