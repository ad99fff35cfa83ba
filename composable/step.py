"""One optimizer step, and its counterpart without gradients."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from composable.data.loader import MicroBatch
from composable.mesh import Mesh
from composable.models.loss import IGNORE
from composable.optim.clip import clip_coefficient, scale_gradients, squared_norm
from composable.optim.optimizers import set_learning_rate
from composable.parallel.config import DataKind
from composable.parallel.data import begin_micro_batch, reshard


@dataclass(frozen=True)
class StepResult:
    """What all ranks know after a step."""

    loss: float
    """mean over the step's valid tokens"""
    grad_norm: float
    """of the whole gradient, before clipping"""
    valid_tokens: int
    """labels that had a loss"""
    tokens: int
    """tokens read, padding rows left out"""
    samples: int
    """rows read, padding rows left out"""
    reports: list[list[float]]
    """[world][...] what each rank gave as `report`"""


class NonFinite(RuntimeError):
    """The loss or the gradient norm of a step is not finite; weights were not touched."""


def train_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    micro_batches: Sequence[MicroBatch],
    *,
    step: int,
    lr: float,
    max_norm: float,
    mesh: Mesh,
    data: DataKind,
    device: torch.device,
    report: Sequence[float] = (),
) -> StepResult:
    """Gradients of all micro-batches, clipping, update; collective over all ranks.

    The loss of the step is the sum over its valid tokens divided by their number on all ranks, which is known before
    the first forward pass, so that every later reduction is a plain sum. The device is waited for once, before the
    update.

    Args:
        model: `model(tokens, labels, positions, documents)` gives the summed loss of a micro-batch.
        micro_batches: those of this data rank; as many on every rank.
        step: its number, for messages.
        lr: learning rate of this step.
        max_norm: gradient norm above which gradients are scaled down; 0 never.
        report: numbers of this rank (as many on every rank) that all ranks get to see.

    Raises:
        NonFinite: on every rank alike, before the weights are touched.
    """
    counts = _count(micro_batches, mesh, device)
    divisor = counts[0].clamp(min=1)
    losses = []
    for index, batch in enumerate(micro_batches):
        begin_micro_batch(model, data, last=index == len(micro_batches) - 1)
        loss = _summed_loss(model, batch.to(device))
        (loss / divisor.to(loss.dtype)).backward()
        losses.append(loss.detach())
    parameters = list(model.parameters())
    share = squared_norm(parameters, mesh.stage_ranks).to(device)
    summed = torch.stack(losses).double().sum() / mesh.copies_of_loss
    seen = _gather(torch.cat([torch.stack([summed, share]), torch.tensor(report, dtype=torch.float64, device=device)]))
    total, square = (sum(row[i] for row in seen) for i in (0, 1))
    valid, tokens, samples = counts.tolist()
    norm = torch.tensor(square, dtype=torch.float64).sqrt()
    if not (torch.isfinite(norm) and abs(total) < float("inf")):
        _raise_non_finite(step, micro_batches, losses, seen)
    coefficient = clip_coefficient(norm, max_norm).item()
    scale_gradients(parameters, coefficient)
    set_learning_rate(optimizer, lr)
    optimizer.step()
    optimizer.zero_grad()
    return StepResult(total / max(valid, 1), norm.item(), valid, tokens, samples, [row[2:] for row in seen])


@torch.no_grad()
def evaluate(model: nn.Module, batches: Iterable[MicroBatch], *, mesh: Mesh, device: torch.device) -> float:
    """Mean loss over the valid tokens of all batches on all ranks; collective, the same on every rank and layout."""
    training = model.training
    model.eval()
    total = torch.zeros(2, dtype=torch.float64, device=device)
    for batch in batches:
        loss = _summed_loss(model, batch.to(device))
        valid = (batch.labels != IGNORE).sum().to(device)
        total += torch.stack([loss.double(), valid.double()]) / mesh.copies_of_loss
    reshard(model)
    model.train(training)
    dist.all_reduce(total)
    loss_sum, valid_tokens = total.tolist()
    return loss_sum / max(valid_tokens, 1)


def _summed_loss(model: nn.Module, batch: MicroBatch) -> Tensor:
    return model(batch.tokens, batch.labels, batch.positions, batch.documents)


def _count(micro_batches: Sequence[MicroBatch], mesh: Mesh, device: torch.device) -> Tensor:
    """[3] int64 on the device: valid labels, tokens and rows of the step on all data ranks."""
    valid = sum(int((batch.labels != IGNORE).sum()) for batch in micro_batches)
    rows = sum(int((batch.samples >= 0).sum()) for batch in micro_batches)
    length = micro_batches[0].tokens.size(1)
    counts = torch.tensor([valid, rows * length, rows], device=device)
    dist.all_reduce(counts)
    return counts // mesh.copies_of_loss


def _gather(row: Tensor) -> list[list[float]]:
    """row [N] of every rank -> [world][N] on the host."""
    world = dist.get_world_size()
    out = row.new_empty(world * row.numel())
    dist.all_gather(list(out.chunk(world)), row)
    return out.view(world, -1).tolist()


def _raise_non_finite(
    step: int, micro_batches: Sequence[MicroBatch], losses: Sequence[Tensor], seen: Sequence[Sequence[float]]
) -> None:
    """Every rank is here, as all saw the same numbers; they exchange which samples it was."""
    bad = [batch.samples.tolist() for batch, loss in zip(micro_batches, losses, strict=True) if not loss.isfinite()]
    mine = bad or ([] if all(map(_finite, seen[dist.get_rank()][:2])) else [b.samples.tolist() for b in micro_batches])
    everyone: list[object] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    by_loss = [rank for rank, row in enumerate(seen) if not _finite(row[0])]
    by_norm = [rank for rank, row in enumerate(seen) if not _finite(row[1])]
    ranks = by_loss or by_norm
    what = "loss" if by_loss else "gradient norm"
    samples = "; ".join(f"rank {rank}: samples {everyone[rank]}" for rank in ranks[:8])
    raise NonFinite(
        f"step {step}: the {what} is not finite on rank {', '.join(map(str, ranks[:8]))}; weights were not touched. "
        f"{samples}. Look at these samples, or lower the learning rate"
    )


def _finite(value: float) -> bool:
    return abs(value) < float("inf")
