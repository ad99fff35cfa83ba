"""Parameters that every tensor rank holds whole: each has its own tokens' or heads' gradient, and these are summed."""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from composable.optim.local import local


def is_replicated(parameter: Tensor) -> bool:
    """Whether every tensor rank holds all of it (up to data sharding), with a gradient that is a part of the sum.

    Experts are not: to them tensor ranks are data ranks, or hold parts.
    """
    if not isinstance(parameter, DTensor):
        return True
    names = parameter.device_mesh.mesh_dim_names or ()
    if {"efsdp", "ep", "etp"} & set(names):
        return False
    return all(p.is_replicate() for name, p in zip(names, parameter.placements, strict=False) if name == "tp")


def replicated(model: nn.Module) -> list[nn.Parameter]:
    """The parameters that are not sharded over the mesh dimension `tp`, before `fully_shard` or after it."""
    return [parameter for parameter in model.parameters() if is_replicated(parameter)]


@torch.no_grad()
def place_gradients(model: nn.Module) -> None:
    """Give gradients the placements of their parameters, where torch's own styles leave others and no FSDP sees them.

    An embedding of `RowwiseParallel` has a replicated gradient, a norm of `SequenceParallel` a partial one.
    """
    for parameter in model.parameters():
        gradient = parameter.grad
        if (
            isinstance(gradient, DTensor)
            and isinstance(parameter, DTensor)
            and gradient.placements != parameter.placements
        ):
            parameter.grad = gradient.redistribute(placements=parameter.placements)


@torch.no_grad()
def sum_replicated_gradients(parameters: Iterable[nn.Parameter], group: dist.ProcessGroup) -> None:
    """Sum the local gradients over the tensor ranks, in place, by one flat all-reduce (one for each dtype and device).

    Args:
        parameters: those of `replicated`, in the same order on every rank; one without a gradient, which must be so on
            all ranks alike, is left out.
    """
    kinds: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            part = local(parameter.grad)
            kinds.setdefault((part.dtype, part.device), []).append(part)
    for parts in kinds.values():
        flat = torch.cat([part.reshape(-1) for part in parts])
        dist.all_reduce(flat, group=group)
        for part, total in zip(parts, flat.split([part.numel() for part in parts]), strict=True):
            part.copy_(total.view_as(part))
