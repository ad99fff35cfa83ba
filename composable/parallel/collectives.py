"""Collectives with gradients over one group: what a sharded sequence needs on its way through a block.

Everything works on stacks: dimension 0 counts the ranks of the group. Plain `torch.distributed` calls within autograd
functions; `torch.compile` leaves them out of its graphs.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from composable._torch import all_gather_single, reduce_scatter_single


def stack_ranks(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """x [...] of every rank -> [ranks, ...], without gradients."""
    ranks = dist.get_world_size(group)
    out = x.new_empty(ranks * x.numel())
    all_gather_single(out, x.contiguous().view(-1), group=group)
    return out.view(ranks, *x.shape)


def sum_ranks(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """x [ranks, ...] -> [...]: the sum over all ranks of the slice that is this rank's, without gradients."""
    if x.device.type == "cpu":
        # gloo reduces and scatters at the price of a whole all-reduce; exchanged slices are half of that, and their
        # sum has the same order on every rank.
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        dist.all_to_all_single(out, x.contiguous(), group=group)
        return out.sum(0)
    out = x.new_empty(x[0].numel())
    reduce_scatter_single(out, x.contiguous().view(-1), group=group)
    return out.view(x.shape[1:])


class _Stack(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return stack_ranks(x, group)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        return sum_ranks(g, ctx.group), None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return sum_ranks(x, group)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        return stack_ranks(g, ctx.group), None


class _SumEverywhere(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        out = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(out, group=group)
        return out

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        return _SumEverywhere.apply(g, ctx.group), None


@torch.compiler.disable
def sum_over_ranks(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Sum x [...] over ranks, for each of them; backward likewise, as each rank goes on with the sum in its own way."""
    return _SumEverywhere.apply(x, group)


@torch.compiler.disable
def gather_stacked(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """All-gather x [B, s, D] -> [ranks, B, s, D]; backward: reduce-scatter. For what treats each token alike."""
    return _Stack.apply(x, group)


@torch.compiler.disable
def scatter_stacked(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Reduce-scatter x [ranks, B, s, D] -> [B, s, D]; backward: all-gather."""
    return _Sum.apply(x, group)


def gather_sequence(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """All-gather shards [B, s, D] of a sequence -> [B, ranks * s, D]; backward: reduce-scatter."""
    return gather_stacked(x, group).transpose(0, 1).flatten(1, 2)


def scatter_sequence(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Sum x [B, S, D] over ranks and keep this rank's shard [B, S / ranks, D]; backward: all-gather.

    Raises:
        RuntimeError: from torch, if the ranks do not divide S.
    """
    return scatter_stacked(x.unflatten(1, (dist.get_world_size(group), -1)).transpose(0, 1), group)
