"""Clipping by the global gradient norm, exact for any mix of shardings, meshes and pipeline stages.

Each rank counts its share so that the plain SUM over all ranks of the job is the squared norm: one scalar reduction, in
which every rank takes part whatever it holds. Pascanu et al. 2013 (arXiv 1211.5063).
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from composable._torch import foreach_mul_, foreach_norm
from composable.optim.local import distinct_shards, local, with_gradient

# A CPU sums squares in float32 one after the other in few lanes: 4M elements lose four digits, 64M all but two. Norms
# of pieces this long keep six, and the pieces are added in float64. GPUs sum in a tree and need no pieces.
CPU_PIECE = 1 << 16


@torch.no_grad()
def squared_norm(parameters: Iterable[nn.Parameter], ranks_per_stage: int) -> Tensor:
    """This rank's share of the squared gradient norm: the sum over all ranks of the job is the exact square.

    A gradient cut into s distinct shards lies `ranks_per_stage / s` times in the job, so its local square is divided
    by that; a plain gradient is taken as equal on all ranks of its stage. Parameters that are frozen or have no
    gradient are skipped. Tied weights that lie in two stages must be given on one of them only.

    Args:
        parameters: those this rank holds, of all its pipeline stages; plain tensors and DTensors of any mesh.
        ranks_per_stage: world size / pipeline degree.

    Returns:
        [] float64 on the parameters' device, without waiting for it; 0 where there is no gradient.

    Raises:
        ValueError: a Partial gradient, one laid out unlike its parameter, or shards that do not divide
            `ranks_per_stage`.
    """
    parameters = list(parameters)
    groups: dict[tuple[int, torch.device, torch.dtype], list[Tensor]] = {}
    for parameter in with_gradient(parameters):
        gradient = parameter.grad
        assert gradient is not None
        shards = distinct_shards(gradient)
        if ranks_per_stage % shards:
            raise ValueError(
                f"a gradient of shape {tuple(gradient.shape)} is cut into {shards} shards, which does not divide "
                f"ranks_per_stage={ranks_per_stage}; give world size / pipeline degree"
            )
        part = local(gradient)
        long = part.device.type == "cpu" and part.numel() > CPU_PIECE
        pieces = part.reshape(-1).split(CPU_PIECE) if long else (part,)
        groups.setdefault((ranks_per_stage // shards, part.device, part.dtype), []).extend(pieces)
    device = local(parameters[0]).device if parameters else torch.device("cpu")
    total = torch.zeros((), dtype=torch.float64, device=device)
    for (copies, _, dtype), pieces in groups.items():
        # Half precision has too few digits for a norm.
        norms = foreach_norm(pieces, torch.float32 if dtype.itemsize < 4 else None)
        total += (torch.stack(norms).double().square().sum() / copies).to(device)
    return total


def clip_coefficient(norm: Tensor, max_norm: float) -> Tensor:
    """min(1, max_norm / norm), [] like `norm`; 1 for a norm of 0 and for max_norm 0 (no clipping); NaN stays NaN.

    Raises:
        ValueError: a negative `max_norm`.
    """
    if max_norm < 0:
        raise ValueError(f"max_norm is {max_norm}: a norm is not negative; write 0 for no clipping")
    return torch.clamp(max_norm / norm, max=1.0) if max_norm else torch.ones_like(norm)


@torch.no_grad()
def scale_gradients(parameters: Iterable[nn.Parameter], coefficient: Tensor | float) -> None:
    """Multiply the gradients in place by `coefficient`, a number or [] tensor, equal on all ranks.

    A number 1.0 costs nothing; a tensor is not looked at, as that would wait for the device.
    """
    if not isinstance(coefficient, Tensor) and coefficient == 1.0:
        return
    groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for parameter in with_gradient(parameters):
        assert parameter.grad is not None
        part = local(parameter.grad)
        groups.setdefault((part.device, part.dtype), []).append(part)
    for (device, dtype), parts in groups.items():
        scale = coefficient.to(device, dtype) if isinstance(coefficient, Tensor) else coefficient
        foreach_mul_(parts, scale)


def clip_by_global_norm(
    parameters: Iterable[nn.Parameter],
    max_norm: float,
    *,
    ranks_per_stage: int | None = None,
    counted: Iterable[nn.Parameter] | None = None,
    group: dist.ProcessGroup | None = None,
) -> Tensor:
    """Scale all gradients by min(1, max_norm / norm) and give the norm they had: for a training loop of one's own.

    Args:
        parameters: those this rank holds.
        max_norm: the norm not to be exceeded; 0 only measures.
        ranks_per_stage: world size / pipeline degree; by default the size of `group` (no pipeline).
        counted: those of them that make up the norm, as where two stages hold one weight; all if None.
        group: all ranks of the job; by default the default group. Without a process group the rank is alone.

    Returns:
        [] float64, equal on all ranks.
    """
    parameters = list(parameters)
    distributed = group is not None or (dist.is_available() and dist.is_initialized())
    if ranks_per_stage is None:
        ranks_per_stage = dist.get_world_size(group) if distributed else 1
    square = squared_norm(parameters if counted is None else counted, ranks_per_stage)
    if distributed:
        dist.all_reduce(square, group=group)
    norm = square.sqrt()
    scale_gradients(parameters, clip_coefficient(norm, max_norm) if max_norm else 1.0)
    return norm
