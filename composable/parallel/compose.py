"""The one place that knows in which order the parts of parallelism are applied to a model."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from composable.data.loader import MicroBatch
from composable.mesh import Mesh
from composable.models.init import InitRule, materialise
from composable.parallel.config import Parallel
from composable.parallel.data import begin_micro_batch, reshard, shard_data
from composable.parallel.recompute import recompute


@dataclass(frozen=True)
class Composed:
    """A model on this rank of a mesh, and how micro-batches pass through it."""

    parts: tuple[nn.Module, ...]
    """the modules that this rank holds"""
    mesh: Mesh
    device: torch.device
    train: Callable[[Sequence[MicroBatch], Tensor], Tensor]
    """(M micro-batches, divisor []) -> summed loss of each [M] float64; leaves the gradients of their sum / divisor"""
    evaluate: Callable[[MicroBatch], Tensor]
    """micro-batch -> its summed loss [], without gradients"""

    @property
    def parameters(self) -> list[nn.Parameter]:
        """All parameters, or the shards of them, that this rank holds."""
        return [parameter for part in self.parts for parameter in part.parameters()]


def compose(
    model: nn.Module,
    mesh: Mesh,
    parallel: Parallel,
    *,
    blocks: Sequence[nn.Module],
    init: InitRule,
    seed: int,
    device: torch.device,
) -> Composed:
    """Recompute, compile, shard over data ranks; then give every rank its part of the initial weights.

    Args:
        model: built on the meta device; changed in place. `model(tokens, labels, positions, documents)` gives the
            summed loss of a micro-batch.
        mesh: resolved; its world is the default process group.
        blocks: the model's blocks in order.
        init: how each parameter starts.
        device: of this rank.

    Raises:
        ValueError: a combination that does not work, with the reason, on every rank.
    """
    parallel.check(mesh, len(blocks))
    recompute(blocks, parallel.recompute)
    if parallel.compile:
        compile_blocks(model, blocks)
    shard_data(model, blocks, mesh, mesh.views(device.type), parallel)
    materialise(model, torch.device("cpu") if parallel.offload else device, init, seed)
    train = partial(_train, model, parallel, device)
    return Composed((model,), mesh, device, train, partial(_evaluate, model, device))


def compile_blocks(model: nn.Module, blocks: Sequence[nn.Module]) -> None:
    """Compile every block's forward, and the loss of a model that has one as `model.loss`, in place: names stay."""
    for block in blocks:
        block.forward = torch.compile(block.forward)
    loss = getattr(model, "loss", None)
    if callable(loss):
        model.loss = torch.compile(loss)  # type: ignore[assignment]


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
    return model(batch.tokens, batch.labels, batch.positions, batch.documents)
