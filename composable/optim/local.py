"""This rank's part of parameters and gradients, and how often the whole job holds it.

Clipping and updating are elementwise (the norm up to one scalar), so both work on local tensors: no operation goes
through DTensor's dispatch, and plain tensors and DTensors of any number of meshes mix freely.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import prod

from torch import Tensor, nn
from torch.distributed.tensor import DTensor


def local(tensor: Tensor) -> Tensor:
    """The storage this rank holds of `tensor`: its local shard, or itself if it is plain. Call it under no_grad."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def distinct_shards(tensor: Tensor) -> int:
    """Into how many different pieces `tensor` is cut: the product of the mesh dimensions that shard it, 1 if plain.

    Raises:
        ValueError: a placement is Partial (a sum still to be made).
    """
    if not isinstance(tensor, DTensor):
        return 1
    if any(placement.is_partial() for placement in tensor.placements):
        raise ValueError(
            f"a gradient of shape {tuple(tensor.shape)} has placements {tensor.placements}: Partial means that its sum "
            "over ranks is still to be made; call grad.redistribute(placements=parameter.placements) before this"
        )
    # What is neither replicated nor partial cuts the tensor: FSDP2's strided shards are not `is_shard()`.
    return prod(tensor.device_mesh.size(i) for i, p in enumerate(tensor.placements) if not p.is_replicate())


def with_gradient(parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    """The parameters that take part in a step, each once: not frozen, with a gradient laid out as they are.

    Raises:
        ValueError: a gradient on another mesh or with other placements than its parameter.
    """
    chosen = [p for p in dict.fromkeys(parameters) if p.requires_grad and p.grad is not None]
    for parameter in chosen:
        if not isinstance(parameter, DTensor) and not isinstance(parameter.grad, DTensor):
            continue
        theirs, ours = (
            (t.device_mesh, t.placements) if isinstance(t, DTensor) else ("no mesh", "plain")
            for t in (parameter.grad, parameter)
        )
        if theirs != ours:
            raise ValueError(
                f"a parameter of shape {tuple(parameter.shape)} has placements {ours[1]} on {ours[0]} but its gradient "
                f"{theirs[1]} on {theirs[0]}; call grad.redistribute(placements=parameter.placements) before the step"
            )
    return chosen
