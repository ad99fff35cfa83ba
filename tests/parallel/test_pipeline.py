"""A pipeline of stages has the numbers of one process, whatever the schedule, and refuses what it cannot do."""

import dataclasses
import time
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from composable.data.loader import MicroBatch
from composable.mesh import Mesh, MeshViews
from composable.models.config import DecoderConfig
from composable.models.count import count_parameters
from composable.models.decoder import Decoder
from composable.models.init import decoder_init, materialise
from composable.models.loss import IGNORE
from composable.optim.clip import squared_norm
from composable.parallel import pipeline
from composable.parallel.config import SPLIT_BACKWARD, Parallel, Pipeline
from composable.parallel.data import shard_data
from composable.parallel.pipeline import Border, pipelined
from composable.parallel.recompute import recompute
from composable.parallel.split import costs, owners, parse_split, split_by_cost
from composable.parallel.tied import copy_tied_weight, counted, named, sum_tied_gradients, tied_copy, tied_original
from tests.pool import RankError

MODEL = DecoderConfig(vocab_size=19, dim=8, layers=8, heads=2, kv_heads=1, head_dim=4, ffn=12, init_std=0.3)
TIED = dataclasses.replace(MODEL, tied=True)
EMBEDDING = "model.embed_tokens.weight"
ROWS, LENGTH = 2, 6
SCHEDULES = ("GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")


@dataclass(frozen=True)
class Case:
    """A step on a pipeline."""

    pipeline: Pipeline
    micro_batches: int
    """of a pass"""
    passes: int = 1
    model: DecoderConfig = MODEL
    mesh: Mesh = Mesh(pp=2, dp_shard=1)  # noqa: RUF009
    parallel: Parallel = Parallel()  # noqa: RUF009
    documents: bool = False
    steps: int = 1


@dataclass(frozen=True)
class Numbers:
    """What one rank (or, merged, all of them) computed."""

    losses: list[float]
    gradients: dict[str, torch.Tensor]
    square: float
    evaluated: list[float]


def batch(index: int, documents: bool) -> MicroBatch:
    """Micro-batch `index`: labels ignored raggedly, wholly in every fourth."""
    generator = torch.Generator().manual_seed(index)
    tokens = torch.randint(0, MODEL.vocab_size, (ROWS, LENGTH + 1), generator=generator)
    labels = tokens[:, 1:].clone()
    labels[torch.rand(labels.shape, generator=generator) < (0.2 * (index % 3) if index % 4 != 3 else 2.0)] = IGNORE
    positions = borders = None
    if documents:
        borders = (torch.arange(LENGTH) >= 1 + index % (LENGTH - 1)).long().expand(ROWS, -1).contiguous()
        positions = torch.arange(LENGTH) - (1 + index % (LENGTH - 1)) * borders[0]
        positions = positions if index == 0 else positions.expand(ROWS, -1).contiguous()
    return MicroBatch(tokens[:, :-1].contiguous(), labels, positions, borders, torch.arange(ROWS))


def batches_of(case: Case, step: int) -> list[MicroBatch]:
    count = case.micro_batches * case.passes * case.mesh.data_ranks
    return [batch(100 * step + index, case.documents) for index in range(count)]


def error(a, b) -> float:
    """max|a - b| / max|b|, absolute where b is zero."""
    a, b = torch.as_tensor(a, dtype=torch.float64), torch.as_tensor(b, dtype=torch.float64)
    assert a.shape == b.shape
    return (a - b).abs().max().item() / (b.abs().max().item() or 1.0)


def divisor_of(batches: list[MicroBatch]) -> torch.Tensor:
    return sum((each.labels != IGNORE).sum() for each in batches)


def full(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def build(case: Case, views: MeshViews | None = None, break_stage: int | None = None):
    """This rank's parts of the case's model, and how micro-batches pass through them."""
    mesh, config, schedule = case.mesh, case.model, case.pipeline
    views = views or mesh.views("cpu")
    group = views.dense.get_group("pp")
    count = mesh.pp * schedule.stages_per_rank
    of = owners(schedule.schedule, mesh.pp, count)
    cut = parse_split(schedule.split, config.layers, count) if schedule.split else None
    cut = cut or split_by_cost(costs(config, LENGTH), count, of)
    mine = [index for index, rank in enumerate(of) if rank == dist.get_rank(group)]
    parts = []
    for index in mine:
        with torch.device("meta"):
            part = Decoder(config, layers=cut[index].layers, first=cut[index].first, last=cut[index].last).double()
        recompute(part.blocks, case.parallel.recompute)
        shard_data(part, part.blocks, mesh, views, case.parallel)
        materialise(part, torch.device("cpu"), decoder_init(config), 1)
        parts.append(part)
    if break_stage in mine:
        parts[mine.index(break_stage)].register_forward_pre_hook(_break)
    train, evaluate = pipelined(
        parts,
        mine,
        count,
        schedule,
        Border((ROWS, LENGTH), (ROWS, LENGTH, config.dim), torch.float64),
        micro_batches=case.micro_batches,
        device=torch.device("cpu"),
        group=group,
        data=case.parallel.data,
        whole_blocks=case.parallel.recompute != "none",
    )
    return parts, train, evaluate, group


def _break(module, arguments):
    raise FloatingPointError("the third valve is stuck")


def run(case: Case, views: MeshViews | None = None) -> Numbers:
    parts, train, evaluate, group = build(case, views)
    mine = case.mesh.data_rank(dist.get_rank())
    evaluated, losses = [], torch.zeros(0)
    for step in range(case.steps):
        for part in parts:
            part.zero_grad()
        batches = batches_of(case, step)
        losses = train(batches[mine :: case.mesh.data_ranks], divisor_of(batches))
        evaluated.append(evaluate(batches[mine]).item())  # changes nothing, in between
    sum_tied_gradients(parts, group)
    square = squared_norm(counted(parts), case.mesh.stage_ranks).item()
    copy, original = tied_copy(parts), tied_original(parts)
    if copy is not None and original is not None:
        assert torch.equal(full(copy.grad), full(original.grad))
        assert torch.equal(full(copy), full(original))
    gradients = {name: full(each.grad) for part in parts for name, each in part.named_parameters()}
    gradients |= {f"copy {name}": full(each.grad) for name, each in named(parts).items() if name.startswith("model.e")}
    return Numbers(losses.tolist(), gradients, square, evaluated)


def run_all(cases: list[Case]) -> list[Numbers]:
    # One set of groups for all cases of a mesh: DTensor keeps the mesh that it saw first, and finds groups by name.
    views = {mesh: mesh.views("cpu") for mesh in dict.fromkeys(case.mesh for case in cases)}
    return [run(case, views[case.mesh]) for case in cases]


def reference(case: Case) -> Numbers:
    """The last step of the case on one process."""
    with torch.device("meta"):
        model = Decoder(case.model).double()
    materialise(model, torch.device("cpu"), decoder_init(case.model), 1)
    losses, batches = [], batches_of(case, case.steps - 1)
    for each in batches:
        loss = model(each.tokens, each.labels, each.positions, each.documents)
        (loss / divisor_of(batches)).backward()
        losses.append(loss.item())
    gradients = {name: each.grad for name, each in model.named_parameters()}
    return Numbers(losses, gradients, squared_norm(model.parameters(), 1).item(), losses)


def compare(case: Case, ranks: list[Numbers]) -> None:
    """Losses on exactly one rank of each pipeline, every gradient by name, the norm, and the evaluation."""
    truth, width = reference(case), case.mesh.data_ranks
    for mine in range(width):
        group = [numbers for rank, numbers in enumerate(ranks) if case.mesh.data_rank(rank) == mine]
        assert sum(any(numbers.losses) for numbers in group) == 1
        losses = torch.tensor([numbers.losses for numbers in group]).sum(0)
        assert error(losses, torch.tensor(truth.losses[mine::width])) <= 1e-9
        assert error(sum(numbers.evaluated[-1] for numbers in group), truth.losses[mine]) <= 1e-9
    found = set()
    for numbers in ranks:
        for name, gradient in numbers.gradients.items():
            found.add(name.removeprefix("copy "))
            assert error(gradient, truth.gradients[name.removeprefix("copy ")]) <= 1e-9, f"{case}: {name}"
    assert found == set(truth.gradients)
    assert error(sum(numbers.square for numbers in ranks), truth.square) <= 1e-9


def check_all(ranks, cases: list[Case]) -> None:
    for case in cases:
        case.pipeline.check(case.mesh.pp, case.micro_batches, case.model.layers)
    results = ranks(cases[0].mesh.world, run_all, cases)
    for index, case in enumerate(cases):
        compare(case, [result[index] for result in results])


def legal(schedule: str, pp: int, numbers: range) -> list[int]:
    def fits(number: int) -> bool:
        try:
            Pipeline(schedule).check(pp, number, MODEL.layers)
        except ValueError:
            return False
        return True

    return [number for number in numbers if fits(number)]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_schedule_has_the_numbers_of_one_process_for_any_number_of_micro_batches(schedule, ranks):
    numbers = legal(schedule, 2, range(2, 9))
    check_all(ranks, [Case(Pipeline(schedule), number) for number in numbers])


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_accumulated_passes_ragged_labels_documents_and_steps(schedule, ranks):
    plain = [Case(Pipeline(schedule), 4, passes) for passes in (2, 3)]
    tied = [Case(Pipeline(schedule), 4, passes, TIED, documents=True, steps=2) for passes in (1, 2)]
    check_all(ranks, plain + tied)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_four_ranks(schedule, ranks):
    mesh = Mesh(pp=4, dp_shard=1)
    numbers = legal(schedule, 4, range(4, 9))
    check_all(ranks, [Case(Pipeline(schedule), number, 1, TIED, mesh) for number in (numbers[0], numbers[-1])])


@pytest.mark.parametrize(
    "schedule",
    [name if name in ("1F1B", "ZBVZeroBubble") else pytest.param(name, marks=pytest.mark.slow) for name in SCHEDULES],
)
def test_data_parallelism_on_top_in_one_pass_or_two(schedule, ranks):
    sharded, replicated = Mesh(pp=2, dp_shard=2), Mesh(pp=2, dp_replicate=2, dp_shard=1)
    meshes = {"zero1": sharded, "zero2": sharded, "zero3": sharded, "ddp": replicated}
    layouts = [(mesh, Parallel(data=kind)) for kind, mesh in meshes.items()]
    one = [Case(Pipeline(schedule), 4, 1, MODEL, mesh, parallel, steps=2) for mesh, parallel in layouts]
    two = [Case(Pipeline(schedule), 4, 2, TIED, mesh, parallel) for mesh, parallel in layouts]
    check_all(ranks, one + two)


@pytest.mark.parametrize("schedule", ["1F1B", *sorted(SPLIT_BACKWARD)])
def test_recomputed_blocks(schedule, ranks):
    check_all(ranks, [Case(Pipeline(schedule), 4, 2, TIED, Mesh(pp=2, dp_shard=2), Parallel(recompute="full"))])


def _forwards(schedule: str) -> int:
    case = Case(Pipeline(schedule), 4, parallel=Parallel(recompute="full"))
    parts, train, _, _ = build(case)
    calls = [0]

    def count(module, arguments):
        calls[0] += 1

    for part in parts:
        for block in part.blocks:
            block.self_attn.register_forward_pre_hook(count)
    train(batches_of(case, 0), torch.tensor(1))
    return calls[0]


@pytest.mark.parametrize("schedule", ["1F1B", *sorted(SPLIT_BACKWARD)])
def test_a_recomputed_block_runs_twice_a_micro_batch_whatever_the_schedule(schedule, ranks):
    assert sum(ranks(2, _forwards, schedule)) == 2 * 4 * MODEL.layers


def _without_keeping(case: Case) -> float:
    # What keep_gathered is for: the numbers without it.
    before, pipeline.keep_gathered = pipeline.keep_gathered, lambda parts, schedule: None
    try:
        numbers, truth = run(case), reference(case)
    finally:
        pipeline.keep_gathered = before
    return max(error(each, truth.gradients[name.removeprefix("copy ")]) for name, each in numbers.gradients.items())


def test_resharding_under_a_split_backward_pass_would_be_wrong(ranks):
    case = Case(Pipeline("DualPipeV"), 4, mesh=Mesh(pp=2, dp_shard=2), parallel=Parallel(data="zero3"))
    assert max(ranks(4, _without_keeping, case)) > 0.1


def _reductions(case: Case) -> int:
    _, train, _, _ = build(case)
    calls, before = [0], pipeline.PipelineStage.perform_reduce_grad

    def count(stage, factor: int) -> None:
        calls[0] += 1
        before(stage, factor)

    pipeline.PipelineStage.perform_reduce_grad = count
    try:
        train(batches_of(case, 0)[case.mesh.data_rank(dist.get_rank()) :: 2], torch.tensor(1))
    finally:
        pipeline.PipelineStage.perform_reduce_grad = before
    return calls[0]


def test_zero1_reduces_once_a_step_and_zero2_once_a_pass(ranks):
    case = Case(Pipeline("1F1B"), 2, 3, mesh=Mesh(pp=2, dp_shard=2), parallel=Parallel(data="zero1"))
    assert ranks(4, _reductions, case) == [1] * 4
    assert ranks(4, _reductions, dataclasses.replace(case, parallel=Parallel(data="zero2"))) == [3] * 4


def test_more_stages_a_rank_and_splits_by_hand(ranks):
    check_all(
        ranks,
        [
            Case(Pipeline("Interleaved1F1B", virtual=4), 4),
            Case(Pipeline("LoopedBFS", virtual=4), 3, 2, TIED),
            Case(Pipeline("InterleavedZeroBubble", virtual=1), 4),
            Case(Pipeline("1F1B", split="E t | t*7 H"), 3),
            Case(Pipeline("ZBVZeroBubble", split="E | t*3 | t*5 | H"), 4, 2, TIED),
        ],
    )


def _tied_weights(schedule: str) -> tuple[int, list[str], int]:
    parts, *_ = build(Case(Pipeline(schedule), 4, model=TIED))
    original, copy = tied_original(parts), tied_copy(parts)
    if original is not None and copy is not None:
        with torch.no_grad():
            original.add_(1.0)
        copy_tied_weight(parts)
        assert torch.equal(original, copy)
        assert original is not copy
    names = [name for part in parts for name, _ in part.named_parameters()]
    return sum(p.numel() for p in counted(parts)), list(named(parts)), len(names)


@pytest.mark.parametrize("schedule", ["1F1B", "ZBVZeroBubble"])
def test_a_tied_weight_is_counted_once_and_has_one_name_on_a_rank(schedule, ranks):
    results = ranks(2, _tied_weights, schedule)
    assert sum(numel for numel, _, _ in results) == count_parameters(TIED).total
    names = [names for _, names, _ in results]
    assert all(len(set(each)) == len(each) for each in names)
    assert [EMBEDDING in each for each in names] == [True, schedule == "1F1B"]
    assert [count - len(each) for _, each, count in results] == [int(schedule != "1F1B"), 0]


def _fails(schedule: str, stage: int, evaluating: bool) -> None:
    case = Case(Pipeline(schedule), 4, mesh=Mesh(pp=dist.get_world_size(), dp_shard=1))
    _, train, evaluate, _ = build(case, break_stage=stage)
    if evaluating:
        evaluate(batch(0, False))
    train(batches_of(case, 0), torch.tensor(1))


@pytest.mark.parametrize(
    ("schedule", "world", "stage", "rank", "evaluating"),
    [
        ("1F1B", 4, 3, 3, False),
        ("ZBVZeroBubble", 2, 3, 0, False),
        ("LoopedBFS", 2, 3, 1, True),
    ],
)
def test_an_exception_on_one_stage_ends_all_ranks_with_its_message(schedule, world, stage, rank, evaluating, ranks):
    start = time.monotonic()
    with pytest.raises(RankError) as caught:
        ranks(world, _fails, schedule, stage, evaluating)
    assert time.monotonic() - start < 20
    lines = [line for line in str(caught.value).splitlines() if line.startswith(f"rank {rank}:")]
    assert f"{stage}" in lines[0]
    assert "FloatingPointError: the third valve is stuck" in lines[0]
    assert "never answered" not in str(caught.value)


def _refusals() -> list[str]:
    case = Case(Pipeline("1F1B"), 4)
    _, train, evaluate, _ = build(case)
    fine = batches_of(case, 0)
    short = MicroBatch(*(None if part is None else part[:1] for part in fine[0]))
    messages = []
    for call in (
        lambda: train(fine[:3], torch.tensor(1)),
        lambda: train([*fine, *fine[:2]], torch.tensor(1)),
        lambda: train([], torch.tensor(1)),
        lambda: train([*fine[:3], short], torch.tensor(1)),
        lambda: evaluate(short),
    ):
        with pytest.raises(ValueError) as caught:
            call()
        messages.append(str(caught.value))
    return messages


def test_a_step_that_does_not_fit_is_refused_on_every_rank_before_anything_is_sent(ranks):
    results = ranks(2, _refusals)
    assert results[0] == results[1]
    few, six, none, short, evaluated = results[0]
    assert "3 micro-batches does not divide into pipeline passes of 4" in few
    assert few.endswith("give 4")
    assert six.endswith("give 4 or 8")
    assert none.endswith("give 4")
    assert "micro-batch 3 has tokens of shape (1, 6), and the pipeline was built for (2, 6)" in short
    assert "micro-batch 0 has tokens of shape (1, 6)" in evaluated
