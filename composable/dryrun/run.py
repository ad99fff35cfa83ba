"""The dry run itself: for each chosen rank the real build, the real composition and one real step."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import get_context

import torch
from torch import Tensor

from composable._torch import fake_process_group
from composable.data.loader import DataConfig, MicroBatch, accumulation
from composable.dryrun.pretend import Pretend
from composable.dryrun.saved import Share, Stage, coordinates, held, shares
from composable.mesh import Mesh
from composable.models.init import Init
from composable.moe.given import Load, give_routing
from composable.observe.live import LiveMemory
from composable.observe.traffic import Collective, Traffic
from composable.optim.optimizers import build_optimizer, optimizer_tensors
from composable.parallel.compose import Composed, compose
from composable.plan.memory import memory as predicted
from composable.recipe import Recipe
from composable.step import train_step


@dataclass(frozen=True)
class RankReport:
    """What one rank would do."""

    rank: int
    place: dict[str, int]
    """in each dimension of the mesh that has more than one rank"""
    error: str = ""
    """at which the rank ends when it is set up; then there is nothing else"""
    held: dict[str, int] = field(default_factory=dict)
    """part -> bytes between steps"""
    at_peak: dict[str, int] = field(default_factory=dict)
    """part -> bytes when most is held"""
    collectives: tuple[Collective, ...] = ()
    """of one step"""
    saved: Share | None = None
    """of a checkpoint; None: not asked for"""
    seconds: float = 0.0
    """that the dry run of this rank took"""

    @property
    def peak(self) -> int:
        """Bytes of tensors when most is held."""
        return sum(self.at_peak.values())


@dataclass(frozen=True)
class Report:
    """What a recipe would do on a world."""

    name: str
    world: int
    mesh: Mesh
    ranks: tuple[RankReport, ...]
    remarks: tuple[str, ...] = ()
    checkpoint_bytes: int = 0
    """of all tensors of a checkpoint"""
    checkpoint_files: int = 0


def dry_run(
    recipe: Recipe,
    world: int,
    ranks: Sequence[int] | None = None,
    *,
    load: str = "even",
    ranks_per_node: int = 8,
    checkpoint: bool = True,
    jobs: int = 1,
    say: Callable[[str], None] = lambda text: None,
) -> Report:
    """Build, compose and train one step as each of the chosen ranks, one after another, without memory or peers.

    There must be no process group. The step is the first: in a pipeline its stages also agree, once, on how they learn
    shapes (four bytes to and from each neighbour). The device is the CPU, whose kernels and ways to exchange data are
    counted; what differs on an accelerator is a reduce-scatter of activations, which a CPU makes as an all-to-all of as
    many bytes. Data and checkpoints are not opened.

    Args:
        world: number of ranks.
        ranks: those that are run; by default those of `default_ranks`.
        load: of experts, as `Load.parse` takes it.
        ranks_per_node: consecutive ranks of a node.
        checkpoint: also plan a checkpoint, for which one rank of every stage is built.
        jobs: processes that run ranks beside each other.
        say: is told what is being done.

    Raises:
        ValueError: what the real run would refuse on every rank, and ranks that are none.
    """
    recipe, remarks = recipe.resolve(world)
    mesh = recipe.mesh
    remarks += mesh.across_nodes(ranks_per_node)
    given = Load.parse(load, recipe.model.moe)
    chosen = default_ranks(recipe) if ranks is None else list(dict.fromkeys(ranks))
    if wrong := [rank for rank in chosen if not 0 <= rank < world]:
        raise ValueError(f"rank {wrong[0]}: the ranks of a world of {world} are 0 to {world - 1}")
    if recipe.foreign is not None:
        jobs = 1  # what builds such a model is in a script, which another process does not know
    stages: dict[int, Stage] = {}
    reports = []
    with contextlib.ExitStack() as stack:
        pool = stack.enter_context(_processes(jobs)) if min(jobs, len(chosen)) > 1 else None
        run = pool.map if pool is not None else map
        found = run(partial(_rank, recipe, load=given, ranks_per_node=ranks_per_node), chosen)
        for rank in chosen:
            say(f"rank {rank}: build, compose and one step")
            report, stage = next(found)
            reports.append(report)
            if stage is not None:
                stages[rank // mesh.stage_ranks] = stage
        if not checkpoint or any(report.error for report in reports):
            return Report(recipe.name, world, mesh, tuple(reports), tuple(remarks))
        others = [index for index in range(mesh.pp) if index not in stages]
        firsts = [index * mesh.stage_ranks for index in others]
        built = run(partial(_built, recipe, ranks_per_node=ranks_per_node), firsts)
        for index in others:
            say(f"stage {index}: build and compose, for the checkpoint")
            stages[index] = next(built)
    say("plan of a checkpoint")
    whole = recipe.parallel.data == "ddp"
    in_order = [stages[index] for index in range(mesh.pp)]
    written, sections = shares(in_order, mesh, recipe.model, recipe.checkpoint.writer, replicate=whole)
    reports = [dataclasses.replace(report, saved=written[report.rank]) for report in reports]
    total = sum(share.bytes for share in written)
    files = sum(len(section.files) for section in sections)
    return Report(recipe.name, world, mesh, tuple(reports), tuple(remarks), total, files)


def default_ranks(recipe: Recipe) -> list[int]:
    """The first rank of each part of a pipeline of up to 4; of a longer one, of the part that is predicted to hold most
    (of the first, if that is not known) and of the last. The recipe is resolved."""
    mesh = recipe.mesh
    chosen = set(range(mesh.pp))
    if mesh.pp > 4:
        peaks = [] if recipe.foreign is not None else [part.peak for part in predicted(recipe, accelerator=False)]
        chosen = {peaks.index(max(peaks)) if peaks else 0, mesh.pp - 1}
    return [index * mesh.stage_ranks for index in sorted(chosen)]


def _processes(jobs: int) -> ProcessPoolExecutor:
    return ProcessPoolExecutor(jobs, get_context("spawn"), torch.set_num_threads, (1,))


def batches(data: DataConfig, count: int) -> list[MicroBatch]:
    """`count` micro-batches of the shape that data has, of one token over and over; all have a loss."""
    shape = (data.micro_batch, data.seq_len)
    documents = positions = None
    if data.document_mask:
        documents = torch.zeros(shape, dtype=torch.int64)
        positions = torch.arange(data.seq_len).expand(shape).contiguous()
    tokens, rows = torch.zeros(shape, dtype=torch.int64), torch.arange(data.micro_batch)
    return [
        MicroBatch(tokens.clone(), tokens.clone(), positions, documents, rows + index * data.micro_batch)
        for index in range(count)
    ]


def _rank(recipe: Recipe, rank: int, *, load: Load, ranks_per_node: int) -> tuple[RankReport, Stage | None]:
    """What a rank does, and what it holds of a checkpoint."""
    start = time.perf_counter()
    mesh = recipe.mesh
    where = coordinates(mesh, rank, replicate=False)
    names = ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep")
    report = RankReport(rank, {name: where[name] for name in names if getattr(mesh, name) > 1})
    try:
        with fake_process_group(rank, mesh.world), eager():
            memory = LiveMemory()
            with Pretend(memory.ignore):
                report, stage = one_step(recipe, load, ranks_per_node, memory, report)
    except (ValueError, OSError) as error:
        return dataclasses.replace(report, error=str(error), seconds=time.perf_counter() - start), None
    finally:
        gc.collect()  # models are full of cycles
    return dataclasses.replace(report, seconds=time.perf_counter() - start), stage


def one_step(
    recipe: Recipe, load: Load, ranks_per_node: int, memory: LiveMemory, report: RankReport
) -> tuple[RankReport, Stage]:
    """What this rank of the default process group does in its first step, and what it holds of a checkpoint.

    Under a real process group it is a real step, collective over all ranks, of weights that are zero.

    Args:
        recipe: resolved.
        memory: new.
        report: what is known already.
    """
    traffic = Traffic()
    count = accumulation(recipe.data, recipe.mesh.data_ranks)
    with memory:
        model, optimizer = composed(recipe, ranks_per_node)
        stage = _stage(model, optimizer)
        for part in model.parts:
            give_routing(part, load, limits=True)
            part.register_forward_pre_hook(lambda module, args: memory.forward_begins())
        follow(memory, model, optimizer)
        rest = memory.at_rest()
        memory.restart()
        followed, config = claiming_gradients(memory, model), recipe.optimizer
        micro_batches = batches(recipe.data, count)
        with traffic:
            train_step(followed, optimizer, micro_batches, step=1, lr=config.lr, max_norm=config.max_norm)
        peak = memory.at_peak()
    counted = tuple(traffic.collectives(recipe.mesh, report.rank))
    return dataclasses.replace(report, held=rest, at_peak=peak, collectives=counted), stage


def composed(recipe: Recipe, ranks_per_node: int) -> tuple[Composed, torch.optim.Optimizer]:
    """The recipe's model and optimizer on this rank, weights and state zero."""
    model = compose(
        dataclasses.replace(recipe.architecture, init=lambda name: Init()),
        recipe.mesh,
        recipe.parallel,
        recipe.pipeline,
        recipe.shape,
        seed=recipe.seed,
        device=torch.device("cpu"),
        ranks_per_node=ranks_per_node,
    )
    return model, build_optimizer(model.parts, recipe.optimizer, only=model.named)


def _stage(model: Composed, optimizer: torch.optim.Optimizer) -> Stage:
    """What this rank holds of a checkpoint; makes the optimizer's state."""
    return {"weights": held(model.saved), "optimizer": held(optimizer_tensors(None, optimizer))}


def _built(recipe: Recipe, rank: int, ranks_per_node: int) -> Stage:
    """What a rank holds of a checkpoint."""
    with fake_process_group(rank, recipe.mesh.world), eager(), Pretend():
        stage = _stage(*composed(recipe, ranks_per_node))
    gc.collect()
    return stage


def follow(memory: LiveMemory, model: Composed, optimizer: torch.optim.Optimizer) -> None:
    """Name what a model and its optimizer hold in the books of memory."""
    memory.claim(optimizer_tensors(None, optimizer).values(), "optimizer")
    memory.claim((buffer for part in model.parts for buffer in part.buffers()), "buffers")
    memory.claim(model.parameters, "parameters")


def claiming_gradients(memory: LiveMemory, model: Composed) -> Composed:
    """The model, whose gradients are named in the books of memory once a step has made them."""

    def train(micro_batches: Sequence[MicroBatch], divisor: Tensor, step: int) -> Tensor:
        losses = model.train(micro_batches, divisor, step)
        memory.claim((p.grad for p in model.parameters if p.grad is not None), "gradients")
        memory.claim(model.parameters, "parameters")  # FSDP pads some anew when it first runs
        return losses

    return dataclasses.replace(model, train=train)


def eager() -> contextlib.AbstractContextManager:
    """Under it compiled functions run as they are written: nothing is compiled for tensors without memory."""
    return torch.compiler.set_stance("force_eager")
