"""The simulated pipeline is the real one: closed forms where there are any, and runs whose stages sleep."""

import collections
import dataclasses
import itertools
import time
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from composable.data.loader import MicroBatch
from composable.parallel import pipeline as parallel_pipeline
from composable.parallel.config import SPLIT_BACKWARD, Pipeline
from composable.parallel.pipeline import Border, pipelined
from composable.parallel.split import owners
from composable.plan.bubble import Simulation, StageCost, action_lists, simulate

SCHEDULES = ("GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
RATIOS = (StageCost(1.0, 0.5, 0.5), StageCost(0.3, 0.7, 0.4), StageCost(1.0, 0.1, 0.2), StageCost(0.1, 2.0, 2.0))


def of(schedule: str, virtual: int = 2) -> Pipeline:
    return Pipeline(schedule, virtual=virtual) if "Interleaved" in schedule or "BFS" in schedule else Pipeline(schedule)


def equal(pipeline: Pipeline, pp: int, micro_batches: int, cost: StageCost, **options):
    return simulate(pipeline, pp, micro_batches, [cost] * (pp * pipeline.stages_per_rank), **options)


def legal(pipeline: Pipeline, pp: int, micro_batches: int) -> bool:
    try:
        pipeline.check(pp, micro_batches, pp * pipeline.stages_per_rank)
    except ValueError:
        return False
    return True


@pytest.mark.parametrize("schedule", ["GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS"])
def test_equal_stages_have_the_closed_form_whatever_a_backward_costs(schedule):
    virtual = (1,) if schedule in ("GPipe", "1F1B") else (1, 2, 3)
    tried = 0
    for pp, stages in itertools.product(range(2, 9), virtual):
        pipeline = of(schedule, stages)
        numbers = [each for each in (pp, pp + 1, 2 * pp + 2) if legal(pipeline, pp, each)]
        for micro_batches, cost in itertools.product(numbers, RATIOS):
            found = equal(pipeline, pp, micro_batches, cost)
            closed = (pp - 1) / (stages * micro_batches + pp - 1)
            assert found.bubble == pytest.approx(closed, rel=0, abs=1e-12), (pp, stages, micro_batches, cost)
            assert found.bubble == pytest.approx(pipeline.bubble(pp, micro_batches), rel=0, abs=1e-12)
            tried += 1
    assert tried >= 7 * 4 * 2


def test_eight_stages_wait_46_7_percent_with_8_micro_batches_and_17_9_with_32():
    for schedule, cost in itertools.product(("GPipe", "1F1B"), RATIOS):
        assert f"{equal(Pipeline(schedule), 8, 8, cost).bubble:.1%}" == "46.7%"
        assert f"{equal(Pipeline(schedule), 8, 32, cost).bubble:.1%}" == "17.9%"


@pytest.mark.parametrize("schedule", sorted(SPLIT_BACKWARD))
def test_a_split_backward_waits_less_than_the_interleaved_bound_and_a_whole_one_does_not_gain(schedule):
    cost, pipeline = StageCost(1.0, 1.0, 1.0), of(schedule)
    bound = pipeline.bubble(4, 16)
    assert 0 < equal(pipeline, 4, 16, cost).bubble < bound
    assert equal(pipeline, 4, 16, cost, whole_blocks=True).bubble > equal(pipeline, 4, 16, cost).bubble


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_rank_computes_every_micro_batch_once_and_one_at_a_time(schedule):
    pipeline = of(schedule)
    stages = 4 * pipeline.stages_per_rank
    costs = [StageCost(1.0 + 0.1 * stage, 1.5 - 0.05 * stage, 0.7) for stage in range(stages)]
    found = simulate(pipeline, 4, 8, costs, transfer=0.2)
    assert [rank for rank, _ in itertools.groupby(event.rank for event in found.events)] == [0, 1, 2, 3]
    for rank in range(4):
        mine = [event for event in found.events if event.rank == rank]
        assert all(before.end <= after.start for before, after in itertools.pairwise(mine))
    done = {(event.kind, event.stage, event.micro_batch): event for event in found.events}
    assert len(done) == len(found.events)
    rank_of = owners(schedule, 4, stages)
    for stage, index in itertools.product(range(stages), range(8)):
        forward = done["F", stage, index]
        back = done.get(("B", stage, index)) or done["I", stage, index]
        assert forward.rank == rank_of[stage]
        assert (("W", stage, index) in done) == (back.kind == "I")
        assert back.start >= forward.end
        if stage:
            wait = 0.2 * (rank_of[stage] != rank_of[stage - 1])
            before = done.get(("B", stage - 1, index)) or done["I", stage - 1, index]
            assert forward.start >= done["F", stage - 1, index].end + wait - 1e-12
            assert before.start >= back.end + wait - 1e-12 or before.kind == "B"
    total = sum(8 * (cost.forward + cost.backward_input + cost.backward_weight) for cost in costs)
    assert sum(found.busy) == pytest.approx(total)
    assert found.bubble == pytest.approx(1 - total / 4 / found.time)


def test_a_transfer_starts_when_both_ends_are_there():
    # One stage a rank: the receiver asks when it is about to compute, so what was sent long ago takes its time then.
    found = equal(Pipeline("GPipe"), 2, 2, StageCost(1.0, 1.0, 1.0), transfer=0.5)
    starts = {(event.kind, event.stage, event.micro_batch): event.start for event in found.events}
    assert starts == {
        **{("F", 0, 0): 0.0, ("F", 0, 1): 1.0, ("F", 1, 0): 1.5, ("F", 1, 1): 3.0},
        **{("B", 1, 0): 4.0, ("B", 1, 1): 6.0, ("B", 0, 0): 6.5, ("B", 0, 1): 9.0},
    }
    assert found.time == 11.0
    # DualPipeV asks for the forward of stage 3 before it computes two halves of a backward: it comes meanwhile.
    ahead = equal(Pipeline("DualPipeV"), 2, 4, StageCost(1.0, 1.0, 1.0), transfer=0.5)
    done = {(event.kind, event.stage, event.micro_batch): event for event in ahead.events}
    assert done["I", 3, 0].start < done["F", 2, 1].end + 0.5 < done["W", 3, 0].end
    assert done["F", 3, 1].start == done["W", 3, 0].end


def test_each_border_has_its_own_transfer_time():
    costs = [StageCost(1.0, 1.0, 0.0)] * 3
    slow_end = simulate(Pipeline("GPipe"), 3, 3, costs, transfer=[0.0, 5.0])
    starts = {(event.kind, event.stage, event.micro_batch): event.start for event in slow_end.events}
    assert starts["F", 1, 0] == 1.0
    assert starts["F", 2, 0] == 2.0 + 5.0


@pytest.mark.parametrize("pp", [2, 4, 8])
def test_in_flight_is_what_the_papers_say(pp):
    cost = StageCost(1.0, 1.0, 1.0)
    assert equal(Pipeline("GPipe"), pp, 2 * pp, cost).in_flight == (2 * pp,) * pp
    assert equal(Pipeline("1F1B"), pp, 2 * pp, cost).in_flight == tuple(pp - stage for stage in range(pp))
    # arXiv:2104.04473, section 2.2: the first rank of an interleaved schedule holds (V - 1) * P + 2 * (P - 1) + 1
    held = equal(Pipeline("Interleaved1F1B", virtual=3), pp, 4 * pp, cost).peak([1.0] * 3 * pp)
    assert held[0] == 2 * pp + 2 * (pp - 1) + 1
    assert held[-1] == 2 * pp + 1
    # arXiv:2401.10241, section 6: ZB-V holds as much on every rank, P whole micro-batches of two half stages
    assert set(equal(Pipeline("ZBVZeroBubble"), pp, 4 * pp, cost).peak([0.5] * 2 * pp)) == {float(pp)}


def test_a_rank_holds_the_bytes_of_its_stages_at_one_time():
    pipeline, costs = Pipeline("InterleavedZeroBubble"), [StageCost(1.0, 1.0, 1.0)] * 4
    found = simulate(pipeline, 2, 4, costs)
    assert max(found.awaiting_weights[1:]) > 0
    assert found.awaiting_weights[0] == 0  # the first stage's backward is one piece
    single = [[float(stage == chosen) for stage in range(4)] for chosen in range(4)]
    assert [max(found.peak(bytes_)) for bytes_ in single] == [float(number) for number in found.in_flight]
    for rank in range(2):
        alone = [found.peak(single[stage])[rank] for stage in (rank, rank + 2)]
        assert max(alone) <= found.peak([1.0] * 4)[rank] <= sum(alone)
    for rank in range(2):
        changes = [{"I": 1, "W": -1}.get(event.kind, 0) for event in found.events if event.rank == rank]
        assert found.peak([0.0] * 4, [1.0] * 4)[rank] == max(itertools.accumulate(changes)) > 0
    assert found.peak([1.0] * 4, [3.0] * 4)[1] > found.peak([1.0] * 4)[1]


def test_one_rank_is_no_pipeline():
    for schedule in SCHEDULES:
        found = simulate(of(schedule), 1, 5, [StageCost(1.0, 2.0, 3.0)], transfer=7.0)
        assert found.time == 5 * 6.0
        assert found.bubble == 0.0
        assert found.in_flight == (1,)


def test_what_the_schedule_cannot_do_is_refused():
    cost = StageCost(1.0, 1.0, 1.0)
    with pytest.raises(ValueError, match=r"3 costs for 4 stages: 1F1B on 4 ranks"):
        simulate(Pipeline("1F1B"), 4, 8, [cost] * 3)
    with pytest.raises(ValueError, match="1F1B needs at least 4 micro-batches"):
        simulate(Pipeline("1F1B"), 4, 3, [cost] * 4)
    with pytest.raises(ValueError, match=r"2 transfer times for 4 stages: write one number, or 3"):
        simulate(Pipeline("1F1B"), 4, 8, [cost] * 4, transfer=[1.0, 1.0])


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_large_pipeline_takes_at_most_two_seconds(schedule):
    start = time.process_time()
    equal(of(schedule, 4), 16, 256, StageCost(1.0, 1.0, 1.0))
    assert time.process_time() - start < 2


class _InputHalf(torch.autograd.Function):
    """Takes time in the forward, and in the backward for the gradient of the stage's input."""

    @staticmethod
    def forward(ctx, x, sleeper):
        sleeper.sleep(sleeper.cost.forward)
        ctx.sleeper = sleeper
        ctx.save_for_backward(x)
        return x + 0

    @staticmethod
    def backward(ctx, grad):
        ctx.sleeper.sleep(ctx.sleeper.cost.backward_input)
        return grad, None


class _WeightHalf(torch.autograd.Function):
    """Takes time in the backward for the gradient of a weight."""

    @staticmethod
    def forward(ctx, weight, sleeper):
        ctx.sleeper = sleeper
        return weight + 0

    @staticmethod
    def backward(ctx, grad):
        ctx.sleeper.sleep(ctx.sleeper.cost.backward_weight)
        return grad, None


class _Kept:
    """What stands for a saved activation: gone when autograd lets go of it."""

    def __init__(self, tensor):
        self.tensor = tensor


class _Sleeper(nn.Module):
    """A stage that sleeps, and counts the micro-batches whose activations are alive."""

    def __init__(self, first: bool, last: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1, 1, 1, dtype=torch.float64))
        self.embedding = nn.Parameter(torch.zeros(1, 1, 1, dtype=torch.float64)) if first else None
        self.last, self.cost = last, StageCost(0.0, 0.0, 0.0)
        self.alive: weakref.WeakSet[_Kept] = weakref.WeakSet()
        self.told, self.slept = 0.0, 0.0

    def sleep(self, seconds: float) -> None:
        start = time.monotonic()
        time.sleep(seconds)
        self.told, self.slept = self.told + seconds, self.slept + time.monotonic() - start

    def _keep(self, tensor):
        kept = _Kept(tensor)
        self.alive.add(kept)
        return kept

    def forward(self, x, **told):
        x = x if self.embedding is None else self.embedding * 1
        with saved_tensors_hooks(self._keep, lambda kept: kept.tensor):
            x = _InputHalf.apply(x, self)
        x = x + _WeightHalf.apply(self.weight, self)
        return x.sum() if self.last else x


def _sleep(pipeline: Pipeline, micro_batches: int, costs: list[StageCost], whole_blocks: bool):
    """A pass of this rank, and the seconds that it should have slept and did.

    Of each action: (kind, stage, micro-batch), start, end, micro-batches alive on the stage then.
    """
    pp = dist.get_world_size()
    rank_of = owners(pipeline.schedule, pp, len(costs))
    mine = [stage for stage, rank in enumerate(rank_of) if rank == dist.get_rank()]
    parts = [_Sleeper(stage == 0, stage == len(costs) - 1) for stage in mine]
    train, _ = pipelined(
        parts,
        mine,
        len(costs),
        pipeline,
        Border((1, 1), (1, 1, 1), torch.float64),
        micro_batches=micro_batches,
        device=torch.device("cpu"),
        group=dist.group.WORLD,
        data="ddp",
        whole_blocks=whole_blocks,
    )
    ones = torch.ones(1, 1, dtype=torch.int64)
    batches = [MicroBatch(ones, ones, None, None, torch.zeros(1, dtype=torch.int64)) for _ in range(micro_batches)]
    train(batches, torch.tensor(1.0))  # connects the ranks
    for stage, part in zip(mine, parts, strict=True):
        part.cost, part.told, part.slept = costs[stage], 0.0, 0.0
    records: list[tuple] = []
    with pytest.MonkeyPatch.context() as patch:
        for name in ("forward_one_chunk", "backward_one_chunk", "backward_weight_one_chunk"):
            patch.setattr(parallel_pipeline.PipelineStage, name, _recorded(name, records))
        dist.barrier()
        train(batches, torch.tensor(1.0))
    return records, sum(part.told for part in parts), sum(part.slept for part in parts)


def _recorded(name: str, records: list):
    method = getattr(parallel_pipeline.PipelineStage, name)
    kinds = {"forward_one_chunk": "F", "backward_weight_one_chunk": "W"}

    def call(stage, index, *args, **kwargs):
        start = time.monotonic()  # one clock for all processes of a machine
        result = method(stage, index, *args, **kwargs)
        kind = kinds.get(name) or ("B" if kwargs.get("full_backward", True) else "I")
        action = (kind, stage.stage_index, index)
        records.append((action, start, time.monotonic(), len(stage.submod.alive)))
        return result

    return call


def check_against_a_real_run(ranks, pipeline: Pipeline, pp: int, micro_batches: int, costs, whole_blocks=False) -> None:
    """The same actions in the same order, as many micro-batches in flight after each, and the same time within 5%.

    A busy machine wakes sleepers late, and ranks that wait for others no less. That weighs less where actions are
    longer: it is given more chances, with those, and at last allowed what its sleeps were late by.
    """
    off = []
    for longer in (1, 1, 2, 4):
        scaled = [StageCost(*(longer * seconds for seconds in dataclasses.astuple(cost))) for cost in costs]
        predicted = simulate(pipeline, pp, micro_batches, scaled, whole_blocks=whole_blocks)
        results = ranks(pp, _sleep, pipeline, micro_batches, scaled, whole_blocks)
        for rank, (records, _, _) in enumerate(results):
            done = [really(action, alive, pipeline, whole_blocks) for action, _, _, alive in records]
            assert [each for each in done if each] == said(predicted, rank)
        ends = [end for records, _, _ in results for _, _, end, _ in records]
        took = max(ends) - min(start for records, _, _ in results for _, start, _, _ in records)
        late = sum(slept for _, _, slept in results) / sum(told for _, told, _ in results) - 1
        off.append((took / predicted.time - 1, late))
        assert off[-1][0] > -0.05  # sleep sleeps at least as long as it is told to
        if off[-1][0] < 0.05:
            return
    assert any(late > 0.01 and more - 3 * late < 0.05 for more, late in off), off


def really(action, alive: int, pipeline: Pipeline, whole_blocks: bool):
    """What a call of torch's stage does: the first stage has no input half, a backward in one piece no weight half."""
    kind, stage, index = action
    if whole_blocks and pipeline.schedule in SPLIT_BACKWARD:
        kind = {"I": "B", "W": None}.get(kind, kind)
    elif stage == 0:
        kind = {"I": None, "W": "B"}.get(kind, kind)
    return kind and (kind, stage, index, alive)


def said(predicted: Simulation, rank: int) -> list:
    """The same of a simulation."""
    alive: collections.Counter[int] = collections.Counter()
    result = []
    for event in predicted.events:
        if event.rank == rank:
            alive[event.stage] += {"F": 1, "B": -1, "I": 0, "W": -1}[event.kind]
            assert alive[event.stage] <= predicted.in_flight[event.stage]
            result.append((event.kind, event.stage, event.micro_batch, alive[event.stage]))
    return result


def uneven(stages: int, unit: float) -> list[StageCost]:
    weights = [1.0, 1.4, 0.8, 1.2, 1.0, 0.6, 1.3, 0.9][:stages]
    return [StageCost(unit * weight, 1.2 * unit * weight, 0.8 * unit * weight) for weight in weights]


@pytest.mark.parametrize("schedule", ["1F1B", "ZBVZeroBubble"])
def test_a_run_whose_stages_sleep_takes_the_predicted_time(schedule, ranks):
    pipeline = of(schedule)
    check_against_a_real_run(ranks, pipeline, 2, 3, uneven(2 * pipeline.stages_per_rank, 0.05))


@pytest.mark.slow
@pytest.mark.parametrize("pp", [2, 4])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedule_takes_the_predicted_time(schedule, pp, ranks):
    pipeline = of(schedule)
    check_against_a_real_run(ranks, pipeline, pp, 2 * pp, uneven(pp * pipeline.stages_per_rank, 0.1))


@pytest.mark.slow
@pytest.mark.parametrize("schedule", sorted(SPLIT_BACKWARD))
def test_recomputed_blocks_take_the_predicted_time(schedule, ranks):
    check_against_a_real_run(ranks, of(schedule), 2, 4, uneven(4, 0.1), whole_blocks=True)


@pytest.mark.slow
def test_more_stages_a_rank_take_the_predicted_time(ranks):
    check_against_a_real_run(ranks, of("Interleaved1F1B", 4), 2, 4, uneven(8, 0.1))
    check_against_a_real_run(ranks, of("LoopedBFS", 3), 2, 3, uneven(6, 0.1))


def test_lists_need_no_process_group():
    assert not dist.is_initialized()
    lists = action_lists("1F1B", 2, 1, 2)
    assert lists[1] == [
        *[("RECV_F", 1, 0), ("F", 1, 0), ("B", 1, 0), ("SEND_B", 1, 0)],
        *[("RECV_F", 1, 1), ("F", 1, 1), ("B", 1, 1), ("SEND_B", 1, 1)],
    ]
    assert dataclasses.asdict(simulate(Pipeline("1F1B"), 2, 2, [StageCost(1, 1, 1)] * 2))["in_flight"] == (2, 1)
