"""One optimizer step, and its counterpart without gradients."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from composable.data.loader import MicroBatch
from composable.models.loss import IGNORE
from composable.optim.clip import clip_coefficient, scale_gradients, squared_norm
from composable.optim.optimizers import set_learning_rate
from composable.parallel.compose import Composed


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
    model: Composed,
    optimizer: torch.optim.Optimizer,
    micro_batches: Sequence[MicroBatch],
    *,
    step: int,
    lr: float,
    max_norm: float,
    report: Sequence[float] = (),
) -> StepResult:
    """Gradients of all micro-batches, clipping, update; collective over all ranks.

    The loss of the step is the sum over its valid tokens divided by their number on all ranks, which is known before
    the first forward pass, so that every later reduction is a plain sum. The device is waited for once, before the
    update.

    Args:
        micro_batches: those of this data rank; as many on every rank.
        step: its number, from 1.
        lr: learning rate of this step.
        max_norm: gradient norm above which gradients are scaled down; 0 never.
        report: numbers of this rank (as many on every rank) that all ranks get to see.

    Raises:
        NonFinite: on every rank alike, before the weights are touched.
    """
    counts = _count(model, micro_batches)
    losses = model.train(micro_batches, counts[0].clamp(min=1), step) / model.mesh.copies_of_loss  # [M]
    square = squared_norm(model.counted, model.mesh.stage_ranks).to(losses)
    seen = _gather(torch.cat([torch.stack([losses.sum(), square]), torch.tensor(report).to(losses)]))
    total, norm = sum(row[0] for row in seen), sum(row[1] for row in seen) ** 0.5
    if not (_finite(total) and _finite(norm)):
        _raise_non_finite(step, micro_batches, losses, seen)
    scale_gradients(model.parameters, clip_coefficient(torch.tensor(norm, dtype=torch.float64), max_norm).item())
    set_learning_rate(optimizer, lr)
    model.update(optimizer)
    for parameter in model.parameters:
        parameter.grad = None
    valid, tokens, samples = counts.tolist()
    return StepResult(total / max(valid, 1), norm, valid, tokens, samples, [row[2:] for row in seen])


def evaluate(model: Composed, batches: Iterable[MicroBatch]) -> float:
    """Mean loss over the valid tokens of all batches on all ranks; collective, the same on every rank and layout."""
    training = [part.training for part in model.parts]
    for part in model.parts:
        part.eval()
    total = torch.zeros(2, dtype=torch.float64, device=model.device)
    for batch in batches:
        valid = (batch.labels != IGNORE).sum().to(total)
        total += torch.stack([model.evaluate(batch) / model.mesh.copies_of_loss, valid / model.mesh.copies_of_batch])
    for part, mode in zip(model.parts, training, strict=True):
        part.train(mode)
    dist.all_reduce(total)
    loss, valid_tokens = total.tolist()
    return loss / max(valid_tokens, 1)


def _count(model: Composed, micro_batches: Sequence[MicroBatch]) -> Tensor:
    """[3] int64 on the device: valid labels, tokens and rows of the step on all data ranks."""
    valid = sum(int((batch.labels != IGNORE).sum()) for batch in micro_batches)
    rows = sum(int((batch.samples >= 0).sum()) for batch in micro_batches)
    length = micro_batches[0].tokens.size(1)
    counts = torch.tensor([valid, rows * length, rows], device=model.device)
    dist.all_reduce(counts)
    return counts // model.mesh.copies_of_batch


def _gather(row: Tensor) -> list[list[float]]:
    """row [N] of every rank -> [world][N] on the host."""
    world = dist.get_world_size()
    out = row.new_empty(world * row.numel())
    dist.all_gather(list(out.chunk(world)), row)
    return out.view(world, -1).tolist()


def _raise_non_finite(
    step: int, micro_batches: Sequence[MicroBatch], losses: Tensor, seen: Sequence[Sequence[float]]
) -> None:
    """Every rank is here, as all saw the same numbers; they exchange which samples it was."""
    pairs = list(zip(micro_batches, losses.isfinite().tolist(), strict=True))
    chosen = [batch for batch, fine in pairs if not fine] or micro_batches
    everyone: list[list[int]] = [[]] * dist.get_world_size()
    dist.all_gather_object(everyone, [sample for batch in chosen for sample in batch.samples.tolist()])
    by_loss = [rank for rank, row in enumerate(seen) if not _finite(row[0])]
    by_norm = [rank for rank, row in enumerate(seen) if not _finite(row[1])]
    ranks, what = (by_loss, "loss") if by_loss else (by_norm, "gradient norm")
    samples = "; ".join(f"rank {rank}: samples {everyone[rank]}" for rank in ranks[:8])
    raise NonFinite(
        f"step {step}: the {what} is not finite on rank {', '.join(map(str, ranks[:8]))}; weights were not touched. "
        f"{samples}. Look at these samples, or lower the learning rate"
    )


def _finite(value: float) -> bool:
    return abs(value) < float("inf")
