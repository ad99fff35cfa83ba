"""How long a pipeline's ranks wait, and how many micro-batches they hold: torch's own action lists, played through.

A rank works through its list in order. A computation starts when the one before it is done and what it needs from
another rank has come. A transfer starts when both ends have reached it in their lists and takes as long as it is told
to; transfers do not slow each other or the computation, and reductions over data ranks are not part of it.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Literal, cast

from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class

from composable.parallel.config import SPLIT_BACKWARD, Pipeline
from composable.parallel.split import owners

Kind = Literal["F", "B", "I", "W"]
"""forward; whole backward; backward for the gradient of the stage's input; then for those of its weights"""
Instruction = tuple[str, int, int]
"""what of which stage and micro-batch: a kind, SEND_F, RECV_F, SEND_B, RECV_B, or AWAIT: an input half of nothing"""
Action = tuple[str, int, int | None]
"""an instruction, or what happens to the parameters of a stage: UNSHARD, RESHARD, REDUCE_GRAD"""


@dataclass(frozen=True)
class StageCost:
    """Seconds of one micro-batch on one stage."""

    forward: float
    backward_input: float
    """of the gradients that the stage before waits for"""
    backward_weight: float
    """of those of the weights; a backward pass in one piece takes both"""

    def of(self, kind: Kind) -> float:
        """Of one computation."""
        if kind == "B":
            return self.backward_input + self.backward_weight
        return {"F": self.forward, "I": self.backward_input, "W": self.backward_weight}[kind]


@dataclass(frozen=True, slots=True)
class Event:
    """One computation of a rank."""

    rank: int
    stage: int
    micro_batch: int
    kind: Kind
    start: float
    """seconds from the start of the pass"""
    end: float


@dataclass(frozen=True)
class Simulation:
    """A pass of a pipeline through time."""

    time: float
    """seconds from the first forward to the end of the last backward of any rank"""
    busy: tuple[float, ...]
    """seconds in which each rank computes [ranks]"""
    in_flight: tuple[int, ...]
    """at most so many micro-batches have gone forward on a stage whose backward is not over [stages]"""
    awaiting_weights: tuple[int, ...]
    """of those, at most so many have their input's gradient and wait for those of the weights [stages]"""
    events: tuple[Event, ...]
    """by rank, in time"""

    @property
    def ideal(self) -> float:
        """Seconds of the pass if the ranks shared its computation evenly and never waited."""
        return math.fsum(self.busy) / len(self.busy)

    @property
    def bubble(self) -> float:
        """(time - ideal) / time: the share of the ranks' time that is waiting, whatever for.

        With equal stages and transfers that take no time, (P - 1) / (M + P - 1) under GPipe and 1F1B, and
        (P - 1) / (V * M + P - 1) with V stages a rank under Interleaved1F1B and LoopedBFS, whatever a backward takes
        compared to a forward (arXiv:2104.04473, section 2.2, has V * M below: waiting over computation). Where stages
        are unequal, the ranks with the cheaper ones wait for the others, which counts too.
        """
        return (self.time - self.ideal) / self.time if self.time else 0.0

    def peak(self, whole: Sequence[float], halved: Sequence[float] | None = None) -> tuple[float, ...]:
        """The most that each rank holds at once for the micro-batches in flight on its stages [ranks].

        Args:
            whole: bytes that a stage keeps of a micro-batch from its forward to its backward [stages].
            halved: bytes that it keeps from the end of the input half to the end of the weight half [stages]; as many
                as `whole` if None. torch keeps the graph of the forward until then, less what lies behind the last
                weight, and adds the gradients that the weights will be multiplied with.
        """
        halved = whole if halved is None else halved
        held, peaks = [0.0] * len(self.busy), [0.0] * len(self.busy)
        for event in self.events:
            stage = event.stage
            held[event.rank] += {
                "F": whole[stage],
                "B": -whole[stage],
                "I": halved[stage] - whole[stage],
                "W": -halved[stage],
            }[event.kind]
            peaks[event.rank] = max(peaks[event.rank], held[event.rank])
        return tuple(peaks)


def simulate(
    pipeline: Pipeline,
    pp: int,
    micro_batches: int,
    costs: Sequence[StageCost],
    *,
    transfer: float | Sequence[float] = 0.0,
    whole_blocks: bool = False,
) -> Simulation:
    """One pass of `micro_batches` through a pipeline of `pp` ranks, by the lists that torch would execute.

    Args:
        pipeline: the schedule, and the stages that a rank holds.
        pp: ranks; 1 is no pipeline, one stage whatever the schedule.
        costs: of each stage, in the order of the model.
        transfer: seconds that hidden states take to the next stage, or their gradient back, if that is on another
            rank; a number, or one for each border [stages - 1].
        whole_blocks: blocks are recomputed or compiled, so that a backward pass is one piece: schedules that split it
            then do all in its first half (as `parallel.pipeline` builds them).

    Raises:
        ValueError: the schedule cannot do that many micro-batches, or there is not one cost a stage.
    """
    stages = pp * pipeline.stages_per_rank if pp > 1 else 1
    if len(costs) != stages:
        raise ValueError(
            f"{len(costs)} costs for {stages} stages: {pipeline.schedule} on {pp} ranks wants one StageCost for each"
        )
    between = tuple(transfer) if isinstance(transfer, Sequence) else (transfer,) * (stages - 1)
    if len(between) != stages - 1:
        raise ValueError(f"{len(between)} transfer times for {stages} stages: write one number, or {stages - 1}")
    dataclasses.replace(pipeline, split="").check(pp, micro_batches, stages)
    schedule = pipeline.schedule if pp > 1 else "1F1B"
    rank_of = owners(schedule, pp, stages)
    programs = action_lists(schedule, pp, stages // pp, micro_batches)
    if schedule in SPLIT_BACKWARD:
        programs = [_really(program, whole_blocks) for program in programs]
    events = _play(programs, costs, between, rank_of)
    ends = [max((event.end for event in mine), default=0.0) for mine in events]
    busy = tuple(math.fsum(costs[event.stage].of(event.kind) for event in mine) for mine in events)
    flat = tuple(event for mine in events for event in mine)
    alive, waiting = _counts(flat, stages)
    return Simulation(max(ends), busy, alive, waiting, flat)


def action_lists(schedule: str, pp: int, stages_per_rank: int, micro_batches: int) -> list[list[Instruction]]:
    """What each rank computes and sends in a pass, in order [ranks]: `all_actions` without those on parameters."""
    programs = all_actions(schedule, pp, stages_per_rank, micro_batches)
    return [[(kind, stage, index) for kind, stage, index in mine if index is not None] for mine in programs]


@functools.lru_cache(maxsize=256)
def all_actions(schedule: str, pp: int, stages_per_rank: int, micro_batches: int) -> list[list[Action]]:
    """What each rank does in a pass, in order [ranks]: torch's lists, computed without a process group.

    torch's schedules build the lists of all ranks when they are made, and look at nothing of their stages but which
    they are.
    """
    build: Any = get_schedule_class(schedule)
    stages = [
        SimpleNamespace(
            stage_index=pp * index, num_stages=pp * stages_per_rank, group_size=pp, group_rank=0, submod=None
        )
        for index in range(stages_per_rank)
    ]
    if issubclass(build, PipelineScheduleSingle):
        order = build(stages[0], micro_batches, loss_fn=_no_loss).pipeline_order
        return [_with_transfers(_flat(order[rank]), pp) for rank in range(pp)]
    order = build(stages, micro_batches, loss_fn=_no_loss).pipeline_order_with_comms
    return [_flat(order[rank]) for rank in range(pp)]


def _no_loss(*_: Any) -> Any:
    """Schedules without a loss function would have no backward pass."""


def _flat(actions: Sequence[Any]) -> list[Action]:
    """torch executes a forward that "overlaps" a backward before it, one after the other."""
    return [
        (each.computation_type.value, each.stage_index, each.microbatch_index)
        for action in actions
        for each in (() if action is None else action.sub_actions or (action,))
    ]


def _with_transfers(program: Sequence[Action], pp: int) -> list[Action]:
    """The list of a rank with one stage, whose loop receives right before it computes and sends right after."""
    result: list[Action] = []
    forwards = 0
    for kind, stage, index in program:
        back = kind != "F"
        if not back:  # torch's list counts the forwards of the last rank of 1F1B from 1; its loop does from 0
            index, forwards = forwards, forwards + 1
        if stage != (pp - 1 if back else 0):
            result.append(("RECV_B" if back else "RECV_F", stage, index))
        result.append((kind, stage, index))
        if stage != (0 if back else pp - 1):
            result.append(("SEND_B" if back else "SEND_F", stage, index))
    return result


def _really(program: Sequence[Instruction], whole_blocks: bool) -> list[Instruction]:
    """Halves of a backward pass as they are executed.

    Nobody waits for the gradient of the first stage's input: there torch does everything in the weight half. Where
    blocks have a backward pass in one piece, everything is done in the input half.
    """
    result = []
    for kind, stage, index in program:
        if whole_blocks:
            kind = {"I": "B", "W": ""}.get(kind, kind)
        elif stage == 0:
            kind = {"I": "AWAIT", "W": "B"}.get(kind, kind)
        if kind:
            result.append((kind, stage, index))
    return result


def _play(
    programs: Sequence[Sequence[Instruction]],
    costs: Sequence[StageCost],
    between: Sequence[float],
    rank_of: Sequence[int],
) -> list[list[Event]]:
    """Every rank's computations in time [ranks]."""
    clocks, next_at = [0.0] * len(programs), [0] * len(programs)
    events: list[list[Event]] = [[] for _ in programs]
    posted: dict[Instruction, float] = {}  # a transfer of which one end is there
    arrived: dict[Instruction, float] = {}
    waiting: dict[Instruction, int] = {}
    ready = list(range(len(programs)))
    while ready:
        rank = ready.pop()
        while next_at[rank] < len(programs[rank]):
            kind, stage, index = programs[rank][next_at[rank]]
            step = 1 if kind.endswith("_B") else -1  # a gradient comes from the stage above
            if kind.startswith(("SEND", "RECV")):
                receiver = stage if kind.startswith("RECV") else stage - step
                key = (kind[-1], receiver, index)
                if key in posted:
                    border = min(receiver, receiver + step)
                    arrived[key] = max(posted.pop(key), clocks[rank]) + between[border]
                    if key in waiting:
                        ready.append(waiting.pop(key))
                else:
                    posted[key] = clocks[rank]
            else:
                source = stage - 1 if kind == "F" else stage + 1
                start = clocks[rank]
                if kind != "W" and 0 <= source < len(rank_of) and rank_of[source] != rank:
                    key = ("F" if kind == "F" else "B", stage, index)
                    if key not in arrived:
                        waiting[key] = rank
                        break
                    start = max(start, arrived[key])
                clocks[rank] = start
                if kind != "AWAIT":
                    computed = cast(Kind, kind)
                    clocks[rank] += costs[stage].of(computed)
                    events[rank].append(Event(rank, stage, index, computed, start, clocks[rank]))
            next_at[rank] += 1
    if any(at < len(program) for at, program in zip(next_at, programs, strict=True)):
        raise RuntimeError("the action lists wait for each other: nothing is ever sent of what a rank waits for")
    return events


def _counts(events: Sequence[Event], stages: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Micro-batches in flight at most, and those between the halves of their backward pass [stages] each."""
    alive, most_alive, halved, most_halved = ([0] * stages for _ in range(4))
    for event in events:
        alive[event.stage] += {"F": 1, "I": 0, "B": -1, "W": -1}[event.kind]
        halved[event.stage] += {"F": 0, "I": 1, "B": 0, "W": -1}[event.kind]
        most_alive[event.stage] = max(most_alive[event.stage], alive[event.stage])
        most_halved[event.stage] = max(most_halved[event.stage], halved[event.stage])
    return tuple(most_alive), tuple(most_halved)
