"""Context parallelism by exchanging heads for tokens (DeepSpeed-Ulysses, Jacobs et al. 2023, arXiv:2309.14509).

For attention alone, each rank holds the whole row of some heads; any attention kernel serves.
"""

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from composable.models import attention
from composable.models.attention import Banded, Method
from composable.parallel.collectives import stack_ranks
from composable.parallel.head_tail import from_row, to_row


def ulysses(group: ProcessGroup) -> Method:
    """Attention over a sequence in head-and-tail order on the ranks of `group`; query heads must divide by them.

    Key/value heads that do not divide are repeated until they do, each for the query heads that it serves.
    """
    cp = group.size()

    def mask(documents: Tensor | None) -> Tensor | None:
        return None if documents is None else attention.document_mask(to_row(stack_ranks(documents, group), -1))

    @torch.compiler.disable  # a collective in the backward pass
    def attend(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | Banded | None,
        *,
        window: int = 0,
        sinks: Tensor | None = None,
    ) -> Tensor:
        repeats = math.lcm(k.size(1), cp) // k.size(1)
        if repeats > 1:
            k, v = k.repeat_interleave(repeats, dim=1), v.repeat_interleave(repeats, dim=1)
        mine = [x.unflatten(1, (cp, -1)) for x in (q, k, v)]  # [B, cp, H / cp, S / cp, hd]
        heads = [x.size(2) for x in mine]
        shards = _Exchange.apply(torch.cat(mine, dim=2).transpose(0, 1), group)
        q, k, v = to_row(shards, -2).split(heads, dim=1)  # [B, H / cp, S, hd]
        own = None if sinks is None else sinks.view(cp, -1)[group.rank()]  # of the heads that came here
        out = attention.attend(q, k, v, mask, window=window, sinks=own)
        return _Exchange.apply(from_row(out, cp, -2), group).transpose(0, 1).flatten(1, 2)

    def narrow(mask: Tensor | None, window: int, positions: Tensor) -> Tensor | Banded | None:
        return attention.window_mask(mask, window, cp * positions.size(-1), positions.device)

    return Method(mask, attend, narrow)


class _Exchange(torch.autograd.Function):
    """x [cp, ...] -> [cp, ...]: what every rank had at this rank's place. Its own inverse, and its own transpose."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        x = x.contiguous()
        out = torch.empty_like(x)
        dist.all_to_all_single(out, x, group=group)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _Exchange.apply(grad, ctx.group), None
