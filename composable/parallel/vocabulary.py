"""A vocabulary cut into rows over the ranks of a group: look-up, loss and logits. Shards may be uneven, or empty.

Every rank but the last ones holds ceil(V / ranks) rows, as `Shard(0)` of a DTensor cuts them; with fewer tokens than
that the rest is short, or nothing.
"""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from composable.models.loss import IGNORE
from composable.parallel.collectives import scatter_stacked, stack_ranks


def rows_per_rank(vocab: int, ranks: int) -> int:
    """Rows of a full shard."""
    return -(-vocab // ranks)


def look_up(tokens: Tensor, weight: Tensor, first: int, group: dist.ProcessGroup) -> Tensor:
    """Embed tokens [B, S] of a sequence, and keep this rank's shard of it.

    Args:
        weight: [V_local, D], this rank's rows.
        first: the token of its first row.

    Returns:
        [B, S / ranks, D].
    """
    # In the order in which the shards lie, so that nothing is copied before they are exchanged.
    stacked = tokens.unflatten(1, (dist.get_world_size(group), -1)).transpose(0, 1)
    if weight.size(0) == 0:
        rows = weight.sum(0).expand(*stacked.shape, -1)  # zeros, still with a gradient: every rank has one
    else:
        index = stacked - first
        elsewhere = (index < 0) | (index >= weight.size(0))
        rows = F.embedding(index.masked_fill(elsewhere, 0), weight).masked_fill(elsewhere[..., None], 0)
    return scatter_stacked(rows, group)


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, first: int, group: dist.ProcessGroup) -> Tensor:
        """logits [N, V_local], labels [N] -> sum of losses []; exchanges three numbers a token."""
        dtype = torch.promote_types(logits.dtype, torch.float32)
        index = labels - first
        here = (index >= 0) & (index < logits.size(1))
        index = index.where(here, 0)[:, None]
        top = torch.full(labels.shape, torch.finfo(dtype).min, dtype=dtype, device=labels.device)
        target = torch.zeros_like(top)
        if logits.size(1):
            top = torch.maximum(top, logits.amax(1))
            target = logits.gather(1, index)[:, 0].to(dtype).where(here, 0)
        exponentials = logits.to(dtype).sub(top[:, None]).exp_()
        tops, sums, targets = stack_ranks(torch.stack([top, exponentials.sum(1), target]), group).unbind(1)
        highest = tops.amax(0)
        total = (sums * (tops - highest).exp()).sum(0)
        valid = labels != IGNORE
        ctx.save_for_backward(exponentials, ((top - highest).exp() / total).where(valid, 0), index, here)
        ctx.dtype = logits.dtype
        return (total.log() + highest - targets.sum(0)).where(valid, 0).sum()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None, None]:
        exponentials, scale, index, here = ctx.saved_tensors
        gradient = exponentials * (scale * g)[:, None]  # softmax
        if gradient.size(1):
            gradient.scatter_add_(1, index, -(here * g)[:, None].to(gradient.dtype))
        return gradient.to(ctx.dtype), None, None, None


@torch.compiler.disable
def cross_entropy_sum_of_shards(logits: Tensor, labels: Tensor, first: int, group: dist.ProcessGroup) -> Tensor:
    """As `cross_entropy_sum`, over logits of which each rank holds some tokens' columns; equal on all ranks.

    Args:
        logits: [B, S, V_local] of the same B x S places on every rank.
        labels: [B, S], of the whole vocabulary, equal on all ranks.
        first: the token of this rank's first column.
    """
    return _CrossEntropy.apply(logits.flatten(0, -2), labels.flatten(), first, group)


class _Whole(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, vocab: int, group: dist.ProcessGroup) -> Tensor:
        ranks = dist.get_world_size(group)
        rows = rows_per_rank(vocab, ranks)
        ctx.first, ctx.count = dist.get_rank(group) * rows, logits.size(-1)
        padded = F.pad(logits, (0, rows - logits.size(-1)))  # only the end of the vocabulary is short
        return stack_ranks(padded, group).movedim(0, -2).flatten(-2)[..., :vocab].contiguous()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None]:
        first = min(ctx.first, g.size(-1))
        return g.narrow(-1, first, ctx.count).contiguous(), None, None


@torch.compiler.disable
def whole_logits(logits: Tensor, vocab: int, group: dist.ProcessGroup) -> Tensor:
    """Gather logits [B, S, V_local] -> [B, S, V]; backward: what every rank computes from them alike counts once."""
    return _Whole.apply(logits, vocab, group)
