"""Every use of a private torch name, each with the versions it was checked on.

A torch upgrade is reviewed here and nowhere else: each function says what it reads, why no public name does, and on
which versions its result was compared with torch's own behaviour.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor.placement_types import Placement, _StridedShard


def strided_split_factor(placement: Placement) -> int | None:
    """The split factor of FSDP2's strided shard, or None for any other placement.

    FSDP2 marks a tensor dimension that tensor parallelism has already sharded with `_StridedShard(dim, split_factor)`:
    the shard was taken *after* the `split_factor` shards of the mesh dimensions to its right. No public placement
    expresses that order. Checked on torch 2.13.
    """
    return int(placement.split_factor) if isinstance(placement, _StridedShard) else None


def strided_shard(dim: int, split_factor: int) -> Placement:
    """FSDP2's placement for a dimension of which mesh dimensions to its right took `split_factor` shards before.

    For plans and proofs without a process group; a composed model has it from `fully_shard`. Checked on torch 2.13.
    """
    return _StridedShard(dim, split_factor=split_factor)


@torch.library.custom_op("composable::onednn_linear", mutates_args=())
def onednn_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [..., I] @ weight [O, I]^T + bias [O] by oneDNN's float32 matrix product, with gradients; CPU only.

    `F.linear` gives float32 to MKL; the oneDNN product has no public name. Measured on an AMD EPYC core with AVX-512:
    250 against 107 GFLOP/s forward, 210 against 100 with backward. An operator of our own, because inductor's lowering
    of torch's operator takes constant weights only. Checked on torch 2.13.
    """
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


@onednn_linear.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return x.new_empty(*x.shape[:-1], weight.size(0))


def _linear_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor | None], output: Tensor) -> None:
    x, weight, bias = inputs
    ctx.save_for_backward(x, weight)
    ctx.biased = bias is not None


def _linear_backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    x, weight = ctx.saved_tensors
    rows = g.flatten(0, -2)
    for_x = onednn_linear(g, weight.t()) if ctx.needs_input_grad[0] else None
    for_weight = onednn_linear(rows.t(), x.flatten(0, -2).t()) if ctx.needs_input_grad[1] else None
    return for_x, for_weight, rows.sum(0) if ctx.biased else None


onednn_linear.register_autograd(_linear_backward, setup_context=_linear_context)


def foreach_norm(tensors: list[Tensor], dtype: torch.dtype | None = None) -> list[Tensor]:
    """The 2-norm of each tensor, summed in `dtype` if given: few kernels for many tensors.

    `torch.nn.utils.get_total_norm` is public but joins the norms in the tensors' own dtype, too coarse in bfloat16 and
    for norms that are to be added in float64. Checked on torch 2.13.
    """
    return list(torch._foreach_norm(tensors, 2.0, dtype=dtype))


def foreach_mul_(tensors: list[Tensor], factor: Tensor | float) -> None:
    """Multiply each tensor in place by `factor`, a number or a [] tensor on their device: few kernels for many tensors.

    `torch.nn.utils.clip_grads_with_norm_` is public but adds 1e-6 to the norm. Checked on torch 2.13.
    """
    torch._foreach_mul_(tensors, factor)


def record_cuda_memory(entries: int) -> None:
    """Keep the stack traces of the last `entries` CUDA allocations, for `dump_cuda_memory`; 0 stops it.

    torch documents this call for its memory viewer but gives it no public name. Checked on torch 2.13.
    """
    torch.cuda.memory._record_memory_history("all" if entries else None, max_entries=max(entries, 1))


def dump_cuda_memory(path: str) -> None:
    """Write the CUDA allocator's state (with the recorded traces) to `path`, as pytorch.org/memory_viz reads it.

    torch documents this call for its memory viewer but gives it no public name. Checked on torch 2.13.
    """
    torch.cuda.memory._dump_snapshot(path)


def fake_tensor_mode() -> AbstractContextManager[Any]:
    """Under it tensors have a shape, a dtype and a device, but no memory and no values: code runs at any size.

    The meta device is public, but its tensors forget which device they stand for. Checked on torch 2.13.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode()
