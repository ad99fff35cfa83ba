"""Checks of a run's health: copies of one parameter that should be equal on several ranks, and are not."""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor

from composable.optim.local import local

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_PIECE = 1 << 20  # elements that are widened to int64 at a time


@torch.no_grad()
def replicas_differ(named: Iterable[tuple[str, Tensor]], group: dist.ProcessGroup) -> list[str]:
    """Names of the tensors whose bits are not the same on all ranks of `group`; the same answer on all of them.

    Two 64-bit sums of each tensor are compared, one of them weighted by place, so that exchanged elements show.

    Args:
        named: (name, tensor): the same names in the same order on every rank. Of a DTensor the local part is taken.
    """
    pairs = [(name, local(tensor)) for name, tensor in named]
    if not pairs:
        return []
    sums = torch.stack([_checksums(tensor).to(pairs[0][1].device) for _, tensor in pairs])  # [P, 2]
    extremes = torch.stack([sums, ~sums])  # ~ turns the order around, without overflow
    dist.all_reduce(extremes, dist.ReduceOp.MAX, group=group)
    differ = (extremes[0] != ~extremes[1]).any(1).tolist()
    return [name for (name, _), different in zip(pairs, differ, strict=True) if different]


def check_replicas(named: Iterable[tuple[str, Tensor]], group: dist.ProcessGroup) -> None:
    """Raise on every rank of `group` if tensors that should be copies of each other are not.

    Raises:
        RuntimeError: with the names.
    """
    names = replicas_differ(named, group)
    if names:
        more = f" and {len(names) - 8} more" if len(names) > 8 else ""
        raise RuntimeError(
            f"{', '.join(names[:8])}{more}: these should be the same on all {dist.get_world_size(group)} ranks that "
            "hold a copy, and are not. Gradients of such parameters must be summed over these ranks before the update; "
            "go back to the last checkpoint, which holds one copy of each"
        )


def _checksums(tensor: Tensor) -> Tensor:
    """Sums of the elements' bits, plain and weighted by place, modulo 2**64: [2] int64."""
    bits = tensor.detach().contiguous().view(-1).view(_INTEGERS[tensor.element_size()])
    total = torch.zeros(2, dtype=torch.int64, device=tensor.device)
    for start in range(0, bits.numel(), _PIECE):
        piece = bits[start : start + _PIECE].long()
        place = torch.arange(start, start + piece.numel(), device=tensor.device) * -0x61C8864680B583EB + 1
        total += torch.stack([piece.sum(), (piece * place).sum()])
    return total
