"""The one place that knows in which order the parts of parallelism are applied to a model."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from composable.data.loader import MicroBatch
from composable.mesh import Mesh, MeshViews
from composable.models.attention import LOCAL, Method
from composable.models.init import materialise
from composable.moe.layer import ALONE, Runtime
from composable.moe.log import RoutingLog, Totals
from composable.parallel.architecture import Architecture
from composable.parallel.config import Parallel, Pipeline
from composable.parallel.context import context_method, shard_sequence
from composable.parallel.data import begin_micro_batch, reshard, shard_data
from composable.parallel.expert import expert_parallel, runtime_of
from composable.parallel.expert_step import ExpertStep
from composable.parallel.pipeline import Border, Evaluate, Train, pipelined
from composable.parallel.recompute import recompute
from composable.parallel.replicated import place_gradients, sum_replicated_gradients
from composable.parallel.split import Stage, owners, parse_split, split_by_cost
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
    train: Callable[[Sequence[MicroBatch], Tensor, int], Tensor]
    """(M micro-batches, divisor [], the optimizer's step) -> summed loss of each [M] float64; leaves the gradients of
    their sum / divisor, summed over all ranks. Of a pipeline's ranks one has the loss, the others 0"""
    evaluate: Evaluate
    """micro-batch -> its summed loss [] float64 likewise, without gradients"""
    update: Callable[[torch.optim.Optimizer], None]
    """one step of the optimizer; copies of a weight on this rank, and the biases that balance experts, follow"""
    routing: Callable[[], Totals] | None = None
    """what experts did since it was last asked for; collective. None: there are no experts"""

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
        """Name -> parameter, one for each name: what is optimised."""
        return named(self.parts)

    @property
    def saved(self) -> dict[str, Tensor]:
        """Name -> parameter or buffer: the state of the model; not buffers that it builds anew (`persistent=False`)."""
        saved: dict[str, Tensor] = {**self.named}
        for part in self.parts:
            kept = part.state_dict(keep_vars=True).keys()
            saved |= {name: buffer for name, buffer in part.named_buffers() if name in kept}
        return saved


def compose(
    architecture: Architecture,
    mesh: Mesh,
    parallel: Parallel,
    pipeline: Pipeline,
    shape: Shape,
    *,
    seed: int,
    device: torch.device,
    ranks_per_node: int | None = None,
) -> Composed:
    """Pipeline split, tensor, expert, context, recompute, compile, data; then every rank gets its initial weights.

    Args:
        mesh: resolved; its world is the default process group.
        device: of this rank.
        ranks_per_node: for what talks inside a node first; all ranks if None.

    Raises:
        ValueError: a combination that does not work, with the reason, on every rank.
    """
    views = mesh.views(device.type, replicate=parallel.data == "ddp")
    stages, ranks = split(architecture, mesh, pipeline, shape.seq_len)
    mine = [index for index, rank in enumerate(ranks) if rank == views.parameters.get_local_rank("pp")]
    method = LOCAL if mesh.cp == 1 else context_method(parallel.context, views.dense.get_group("cp"))
    log, runtime = _routing_log(architecture, mesh, shape, device), ALONE
    if log:
        runtime = runtime_of(
            log.config,
            mesh,
            views,
            ranks_per_node=ranks_per_node or mesh.world,
            micro_batches=shape.micro_batches,
            seed=seed,
            record=log.add,
        )
    place = partial(
        _part, architecture, mesh, views, parallel, method=method, runtime=runtime, seed=seed, device=device
    )
    parts = [place(stages[index]) for index in mine]
    if mesh.pp > 1:
        train, evaluate = _pipeline(parts, mine, architecture, mesh, parallel, pipeline, shape, device, views)
    else:
        train, evaluate = partial(_train, parts[0], parallel, device), partial(_evaluate, parts[0], device)
    cut = partial(shard_sequence, rank=views.dense.get_local_rank("cp"), cp=mesh.cp) if mesh.cp > 1 else _whole
    experts = ExpertStep(mesh, runtime, log, _biases(parts, architecture)) if log else None
    return Composed(
        tuple(parts),
        mesh,
        device,
        partial(_step, train, evaluate, cut, partial(_finish, parts, architecture, mesh, views), experts),
        lambda batch: evaluate(cut(experts.told([batch])[0] if experts else batch)),
        partial(_update, parts, experts),
        experts.totals if experts else None,
    )


def _part(
    architecture: Architecture,
    mesh: Mesh,
    views: MeshViews,
    parallel: Parallel,
    stage: Stage,
    *,
    method: Method,
    runtime: Runtime,
    seed: int,
    device: torch.device,
) -> nn.Module:
    """This rank's part of a stage, with its weights."""
    with torch.device("meta"):
        part = architecture.build(stage, method, runtime)
    if mesh.tp > 1:
        architecture.tensor(part, views.parameters["tp"])
    experts = [layer.experts for layer in architecture.experts(part).values()]
    for module in experts:
        expert_parallel(module, views.expert["ep", "etp"])
    blocks = architecture.blocks(part)
    # A checkpoint within a graph allows no break, as collectives and experts are: it would silently run uncompiled.
    # Selective ones must be within, where they see the operators.
    within = parallel.recompute == "selective"
    if parallel.compile and not within:
        compile_blocks(part, blocks)
    recompute(blocks, parallel.recompute)
    if parallel.compile and within:
        compile_blocks(part, blocks)
    shard_data(part, blocks, mesh, views, parallel, experts)
    materialise(part, torch.device("cpu") if parallel.offload else device, architecture.init, seed)
    return part


def _routing_log(architecture: Architecture, mesh: Mesh, shape: Shape, device: torch.device) -> RoutingLog | None:
    if architecture.moe is None:
        return None
    layers = range(architecture.moe.first_dense, len(architecture.costs(shape.seq_len).blocks))
    owned = dist.get_rank() % mesh.stage_ranks == 0
    return RoutingLog(layers, architecture.moe, device, owned=owned, parts_of_loss=mesh.cp * mesh.tp)


def _biases(parts: Sequence[nn.Module], architecture: Architecture) -> dict[int, Tensor]:
    """Layer -> its correction bias [E], of the layers on this rank that have one."""
    gates = {layer: module.gate for part in parts for layer, module in architecture.experts(part).items()}
    biases = {layer: gate.e_score_correction_bias for layer, gate in gates.items()}
    return {layer: bias for layer, bias in biases.items() if bias is not None}


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


def _step(
    train: Train,
    evaluate: Evaluate,
    cut: Callable[[MicroBatch], MicroBatch],
    finish: Callable[[], None],
    experts: ExpertStep | None,
    micro_batches: Sequence[MicroBatch],
    divisor: Tensor,
    step: int,
) -> Tensor:
    batches = [cut(batch) for batch in (experts.told(micro_batches, step) if experts else micro_batches)]
    if experts:
        experts.log.next_step()
    losses = train(experts.with_loads(evaluate, batches) if experts else batches, divisor)
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


def _update(parts: Sequence[nn.Module], experts: ExpertStep | None, optimizer: torch.optim.Optimizer) -> None:
    optimizer.step()
    copy_tied_weight(parts)
    if experts:
        experts.update()


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
    return model(batch.tokens, **batch.told)
