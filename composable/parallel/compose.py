"""The one place that knows in which order the parts of parallelism are applied to a model."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from composable.data.loader import MicroBatch
from composable.mesh import Mesh, MeshViews
from composable.models.attention import LOCAL
from composable.models.init import materialise
from composable.parallel.architecture import Architecture
from composable.parallel.config import Parallel, Pipeline
from composable.parallel.context import context_method, shard_sequence
from composable.parallel.data import begin_micro_batch, reshard, shard_data
from composable.parallel.pipeline import Border, Evaluate, Train, pipelined
from composable.parallel.recompute import recompute
from composable.parallel.split import Stage, owners, parse_split, split_by_cost
from composable.parallel.tensor import place_gradients, sum_replicated_gradients
from composable.parallel.tied import copy_tied_weight, counted, named, sum_tied_gradients


@dataclass(frozen=True)
class Shape:
    """What passes through a model at a time."""

    micro_batch: int
    """rows of a micro-batch"""
    seq_len: int
    """tokens of a row, before any parallelism"""
    micro_batches: int
    """micro-batches of a step on one data rank"""


@dataclass(frozen=True)
class Composed:
    """A model on this rank of a mesh, and how micro-batches pass through it."""

    parts: tuple[nn.Module, ...]
    """the modules that this rank holds: one, or its stages of a pipeline"""
    mesh: Mesh
    device: torch.device
    train: Train
    """(M micro-batches, divisor []) -> summed loss of each [M] float64; leaves the gradients of their sum / divisor,
    summed over all ranks. Of a pipeline's ranks one has the loss, the others 0"""
    evaluate: Evaluate
    """micro-batch -> its summed loss [] float64 likewise, without gradients"""
    update: Callable[[torch.optim.Optimizer], None]
    """one step of the optimizer; copies of a weight on this rank follow"""

    @property
    def parameters(self) -> list[nn.Parameter]:
        """All parameters, or the shards of them, that this rank holds."""
        return [parameter for part in self.parts for parameter in part.parameters()]

    @property
    def counted(self) -> list[nn.Parameter]:
        """Those of the gradient norm: a weight that two stages hold counts once."""
        return counted(self.parts)

    @property
    def named(self) -> dict[str, nn.Parameter]:
        """Name -> parameter, one for each name: what is optimised and saved."""
        return named(self.parts)


def compose(
    architecture: Architecture,
    mesh: Mesh,
    parallel: Parallel,
    pipeline: Pipeline,
    shape: Shape,
    *,
    seed: int,
    device: torch.device,
) -> Composed:
    """Pipeline split, tensor, context, recompute, compile, data; then every rank gets its part of the initial weights.

    Args:
        mesh: resolved; its world is the default process group.
        device: of this rank.

    Raises:
        ValueError: a combination that does not work, with the reason, on every rank.
    """
    views = mesh.views(device.type, replicate=parallel.data == "ddp")
    stages, ranks = split(architecture, mesh, pipeline, shape.seq_len)
    mine = [index for index, rank in enumerate(ranks) if rank == views.parameters.get_local_rank("pp")]
    method = LOCAL if mesh.cp == 1 else context_method(parallel.context, views.dense.get_group("cp"))
    parts = []
    for index in mine:
        with torch.device("meta"):
            part = architecture.build(stages[index], method)
        if mesh.tp > 1:
            architecture.tensor(part, views.parameters["tp"])
        blocks = architecture.blocks(part)
        recompute(blocks, parallel.recompute)
        if parallel.compile:
            compile_blocks(part, blocks)
        shard_data(part, blocks, mesh, views, parallel)
        materialise(part, torch.device("cpu") if parallel.offload else device, architecture.init, seed)
        parts.append(part)
    if mesh.pp > 1:
        train, evaluate = _pipeline(parts, mine, architecture, mesh, parallel, pipeline, shape, device, views)
    else:
        train, evaluate = partial(_train, parts[0], parallel, device), partial(_evaluate, parts[0], device)
    finish = partial(_finish, parts, architecture, mesh, views)
    cut = partial(shard_sequence, rank=views.dense.get_local_rank("cp"), cp=mesh.cp) if mesh.cp > 1 else _whole
    return Composed(
        tuple(parts),
        mesh,
        device,
        partial(_then, train, cut, finish),
        lambda batch: evaluate(cut(batch)),
        partial(_update, parts),
    )


def split(
    architecture: Architecture, mesh: Mesh, pipeline: Pipeline, seq_len: int
) -> tuple[list[Stage], tuple[int, ...]]:
    """The stages of a pipeline, and which of its ranks holds each; one stage of everything without a pipeline."""
    layers = len(architecture.costs(seq_len).blocks)
    if mesh.pp == 1:
        return [Stage(True, range(layers), True)], (0,)
    count = mesh.pp * pipeline.stages_per_rank
    ranks = owners(pipeline.schedule, mesh.pp, count)
    if pipeline.split:
        return parse_split(pipeline.split, layers, count), ranks
    return split_by_cost(architecture.costs(seq_len), count, ranks), ranks


def compile_blocks(model: nn.Module, blocks: Sequence[nn.Module]) -> None:
    """Compile every block's forward, and the loss of a model that has one as `model.loss`, in place: names stay."""
    for block in blocks:
        block.forward = torch.compile(block.forward)
    loss = getattr(model, "loss", None)
    if callable(loss):
        model.loss = torch.compile(loss)  # type: ignore[assignment]


def _pipeline(
    parts: Sequence[nn.Module],
    mine: Sequence[int],
    architecture: Architecture,
    mesh: Mesh,
    parallel: Parallel,
    pipeline: Pipeline,
    shape: Shape,
    device: torch.device,
    views: MeshViews,
) -> tuple[Train, Evaluate]:
    length = shape.seq_len // mesh.cp
    computed = next(parts[0].parameters()).dtype if parallel.precision == "none" else getattr(torch, parallel.precision)
    held = length // mesh.tp if architecture.sequence_cut else length
    border = Border((shape.micro_batch, length), (shape.micro_batch, held, architecture.width), computed)
    return pipelined(
        parts,
        mine,
        mesh.pp * pipeline.stages_per_rank,
        pipeline,
        border,
        micro_batches=pipeline.micro_batches or shape.micro_batches,
        device=device,
        group=views.parameters.get_group("pp"),
        data=parallel.data,
        whole_blocks=parallel.whole_blocks,
    )


def _then(
    train: Train,
    cut: Callable[[MicroBatch], MicroBatch],
    finish: Callable[[], None],
    micro_batches: Sequence[MicroBatch],
    divisor: Tensor,
) -> Tensor:
    losses = train([cut(batch) for batch in micro_batches], divisor)
    finish()
    return losses


def _whole(batch: MicroBatch) -> MicroBatch:
    return batch


def _finish(parts: Sequence[nn.Module], architecture: Architecture, mesh: Mesh, views: MeshViews) -> None:
    """Sums that are made once a step, after the data ranks' own."""
    if mesh.tp > 1:
        for part in parts:
            place_gradients(part)
        shared = [parameter for part in parts for parameter in architecture.partial_over_tensor(part)]
        sum_replicated_gradients(shared, views.parameters.get_group("tp"))
    if mesh.pp > 1:
        sum_tied_gradients(parts, views.parameters.get_group("pp"))


def _update(parts: Sequence[nn.Module], optimizer: torch.optim.Optimizer) -> None:
    optimizer.step()
    copy_tied_weight(parts)


def _train(
    model: nn.Module, parallel: Parallel, device: torch.device, micro_batches: Sequence[MicroBatch], divisor: Tensor
) -> Tensor:
    losses = []
    for index, batch in enumerate(micro_batches):
        begin_micro_batch(model, parallel.data, last=index == len(micro_batches) - 1)
        loss = _summed_loss(model, batch.to(device))
        (loss / divisor.to(loss.dtype)).backward()
        losses.append(loss.detach().double())
    return torch.stack(losses)


@torch.no_grad()
def _evaluate(model: nn.Module, device: torch.device, batch: MicroBatch) -> Tensor:
    loss = _summed_loss(model, batch.to(device)).double()
    reshard(model)
    return loss


def _summed_loss(model: nn.Module, batch: MicroBatch) -> Tensor:
    return model(batch.tokens, labels=batch.labels, positions=batch.positions, documents=batch.documents)
