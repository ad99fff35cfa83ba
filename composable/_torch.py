"""Every use of a private torch name, each with the versions it was checked on.

A torch upgrade is reviewed here and nowhere else: each function says what it reads, why no public name does, and on
which versions its result was compared with torch's own behaviour.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import importlib
import pickle
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata
    from torch.distributed.tensor.placement_types import Placement

# torch 2.13 warns of the names on the right, which are all that 2.11 has.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def strided_split_factor(placement: Placement) -> int | None:
    """The split factor of FSDP2's strided shard, or None for any other placement.

    FSDP2 marks a tensor dimension that tensor parallelism has already sharded with `_StridedShard(dim, split_factor)`:
    the shard was taken *after* the `split_factor` shards of the mesh dimensions to its right. No public placement
    expresses that order. Checked on torch 2.13.
    """
    from torch.distributed.tensor.placement_types import _StridedShard

    return int(placement.split_factor) if isinstance(placement, _StridedShard) else None


def strided_shard(dim: int, split_factor: int) -> Placement:
    """FSDP2's placement for a dimension of which mesh dimensions to its right took `split_factor` shards before.

    For plans and proofs without a process group; a composed model has it from `fully_shard`. Checked on torch 2.13.
    """
    from torch.distributed.tensor.placement_types import _StridedShard

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


def onednn_product(x: Tensor, weight: Tensor) -> Tensor:
    """x [N, I] @ weight [O, I]^T by oneDNN's float32 matrix product, without gradients; CPU only.

    What `onednn_linear` calls, for autograd functions that make many small products: no dispatch of an operator of our
    own around each. Checked on torch 2.13.
    """
    return torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")


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


@functools.cache
def take_empty_gradients() -> None:
    """Have FSDP2, for the rest of the process, exchange gradients of which some are empty.

    Its `_chunk_cat` refuses them, as those of a vocabulary that has fewer rows than ranks; they add nothing to what is
    exchanged. Checked on torch 2.13.
    """
    from torch.distributed.fsdp._fully_shard import _fsdp_collectives as collectives

    copy_in = collectives.foreach_reduce_scatter_copy_in

    def copy_filled(unsharded_grads: list[Tensor], reduce_scatter_input: Tensor, world_size: int) -> None:
        if filled := [gradient for gradient in unsharded_grads if gradient.numel()]:
            copy_in(filled, reduce_scatter_input, world_size)

    collectives.foreach_reduce_scatter_copy_in = copy_filled


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


class DispatchMode(TorchDispatchMode):
    """What sees every operator that reaches a kernel; not for what is compiled.

    torch documents it ("Extending PyTorch"), but in a private module. By default each call goes through a wrapper that
    keeps the compiler out, which costs as much as what is done in it. Checked on torch 2.13.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


@functools.cache
def _fake_type() -> type:
    from torch._subclasses.fake_tensor import FakeTensor

    return FakeTensor


def is_fake(tensor: Tensor) -> bool:
    """Whether a tensor was made under `fake_tensor_mode`. Checked on torch 2.13."""
    return isinstance(tensor, _fake_type())


def device_of(tensor: Any) -> torch.device:
    """A tensor's device; that of a fake one without the operator that `device` is to it. Checked on torch 2.13."""
    device: torch.device = tensor.fake_device if is_fake(tensor) else tensor.device
    return device


def asks_device(func: Any) -> bool:
    """Whether an operator does nothing but give the device of a fake tensor. Checked on torch 2.13."""
    return func is torch.ops.prim.device.default


def fake_copy(mode: Any, tensor: Tensor) -> Tensor:
    """A fake tensor of `mode` (a `fake_tensor_mode`) like a real one, the same each time. Checked on torch 2.13."""
    fake: Tensor = mode.from_tensor(tensor)
    return fake


def map_tensors(function: Callable[[Tensor], Tensor], values: Any) -> Any:
    """Nested lists, tuples and dictionaries with `function` of each tensor in them in its place.

    torch's trees of values are documented for dispatch modes, but in a private module. Checked on torch 2.13.
    """
    return tree_map_only(Tensor, function, values)


def run_fake(mode: Any, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
    """An operator on fake tensors of `mode`: what it does itself when it is entered, in half the time.

    For dispatch modes, within which no mode is active. Checked on torch 2.13.
    """
    return mode.dispatch(func, types, args, kwargs)


def infers_shapes() -> bool:
    """Whether torch itself runs operators on fake tensors now, as DTensor does to learn shapes: nothing is computed.

    Dispatch modes see these operators too. Checked on torch 2.13.
    """
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None


def in_backward() -> bool:
    """Whether autograd runs a backward pass in this thread. Checked on torch 2.13."""
    return torch._C._current_graph_task_id() != -1


def group_of(argument: Any) -> dist.ProcessGroup | None:
    """The process group that an argument of an operator of the namespace `c10d` is; None if it is something else.

    It is what `dist.new_group` gave, so that `dist.get_process_group_ranks` takes it. Checked on torch 2.13.
    """
    if not isinstance(argument, torch.ScriptObject):
        return None
    try:
        return dist.ProcessGroup.unbox(argument)
    except RuntimeError:  # another object, such as the reduction
        return None


def finished_work() -> Any:
    """What an operator of the namespace `c10d` gives to be waited for, done already. Checked on torch 2.13."""
    from torch._C._distributed_c10d import FakeWork

    return FakeWork().boxed()


@contextlib.contextmanager
def fake_process_group(rank: int, world: int) -> Iterator[None]:
    """A default process group of `world` ranks of which this process is one and the others do not exist.

    Groups and meshes are made over it as over a real one; what is received is never written. torch keeps it with its
    test helpers. Checked on torch 2.13.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        yield
    finally:
        dist.destroy_process_group()
        forget_process_groups()


def offset_in_file(tensor: Tensor) -> int:
    """Where the storage of a tensor that `torch.load(map_location="meta")` gave lies in the file: a byte's offset.

    `torch.load(mmap=True)` is public, but maps whole files and tells no place. Checked on torch 2.13.
    """
    return tensor.untyped_storage()._checkpoint_offset or 0


def dcp_place(file: str, offset: int, length: int) -> Any:
    """What the metadata of `torch.distributed.checkpoint` says of where a piece lies: bytes of a file.

    Its `WriteResult` is public, but not what it holds. Checked on torch 2.13.
    """
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    return _StorageInfo(file, offset, length)


def read_dcp_metadata(path: Path) -> Metadata:
    """The metadata of a checkpoint of `torch.distributed.checkpoint`, made of its own classes and no others.

    `FileSystemReader.read_metadata` is public, but loads any pickle, which may run a stranger's code; and the class
    that says where a piece lies has no public name. Checked on torch 2.13.

    Raises:
        pickle.UnpicklingError: the pickle asks for another class.
    """
    from torch.distributed.checkpoint.metadata import Metadata

    class Reader(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            if module == "torch" and isinstance(found := getattr(torch, name, None), torch.dtype):
                return found
            if (module, name) == ("builtins", "getattr"):  # how Python before 3.11.4 writes a member of an enumeration
                return _member
            if name not in _DCP_CLASSES.get(module, ()):
                raise pickle.UnpicklingError(f"it asks for {module}.{name}, which is no part of such metadata")
            return getattr(importlib.import_module(module), name)

    with open(path, "rb") as file:
        found = Reader(file).load()
    if not isinstance(found, Metadata):
        raise pickle.UnpicklingError(f"it holds a {type(found).__name__}")
    return found


def _member(kind: type, name: str) -> Any:
    if not (isinstance(kind, type) and issubclass(kind, enum.Enum)):
        raise pickle.UnpicklingError(f"it asks for {name} of {kind}, which is no part of such metadata")
    return kind[name]


_DCP_CLASSES = {
    "torch": ("Size",),
    "torch.serialization": ("_get_layout",),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    "torch.distributed.checkpoint.metadata": (
        *("Metadata", "MetadataIndex", "StorageMeta", "TensorStorageMetadata", "BytesStorageMetadata"),
        *("ChunkStorageMetadata", "TensorProperties", "_MEM_FORMAT_ENCODING"),
    ),
    "collections": ("OrderedDict",),
    "pathlib": ("Path", "PosixPath", "PurePosixPath"),
    "pathlib._local": ("Path", "PosixPath", "PurePosixPath"),
}


def attention_forward(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float | None = None
) -> tuple[Tensor, Tensor]:
    """Softmax attention, and the log-sum-exp of every row of scores, which `scaled_dot_product_attention` keeps back.

    Carries no gradient: that is `attention_backward`. Checked on torch 2.13: on CPU values and gradients against the
    public function, on CUDA shapes alone.

    Args:
        q: [B, H, S, hd]; k, v: [B, H_kv, T, hd] with H_kv a divisor of H.
        mask: bool [B or 1, 1, S, T], True: may attend; or None.
        causal: row i sees columns up to i; S = T, and there is no mask.
        scale: of the scores; 1 / sqrt(hd) if None.

    Returns:
        out [B, H, S, hd] in q's dtype, 0 in rows that see nothing; lse [B, H, S] in float32 or wider, -inf in those.
    """
    aten, bias = torch.ops.aten, _bias(q, mask)
    kernel = _attention_kernel(q, k, v, bias, causal)
    if kernel == "cpu":
        out, lse = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, attn_mask=bias, scale=scale)
    elif kernel == "flash":
        out, lse = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, False, scale=scale)[:2]
    elif kernel == "efficient":
        wide_k, wide_v = _every_head(q, k), _every_head(q, v)
        bias = None if bias is None else bias.expand(*q.shape[:2], -1, -1)
        out, lse = aten._scaled_dot_product_efficient_attention(
            q, wide_k, wide_v, bias, True, 0.0, causal, scale=scale
        )[:2]
        lse = lse[..., : q.size(2)]  # the kernel pads rows to 32
    else:
        scores = _scores(q, k, bias, causal, scale)
        lse = scores.logsumexp(-1)
        out = ((scores - lse[..., None]).exp() @ _every_head(q, v).to(scores.dtype)).to(q.dtype)
    if mask is not None:  # kernels differ in what they give for a row that sees nothing
        seen = mask.any(-1)
        out, lse = out.masked_fill(~seen[..., None], 0.0), lse.masked_fill(~seen, -torch.inf)
    return out, lse


def attention_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    causal: bool,
    out: Tensor,
    lse: Tensor,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v of `attention_forward` for `grad` [B, H, S, hd] of its output, in their dtypes.

    `out` and `lse` may be those of rows that have seen other keys too: the result is this call's share of the whole
    row's gradient. `lse` is finite. Checked on torch 2.13: values on CPU, on CUDA shapes alone.
    """
    aten, bias = torch.ops.aten, _bias(q, mask)
    kernel = _attention_kernel(q, k, v, bias, causal)
    if kernel == "cpu":
        return aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q, k, v, out, lse, 0.0, causal, attn_mask=bias, scale=scale
        )
    seed = torch.zeros((), dtype=torch.int64, device=q.device)  # of dropout, of which there is none
    if kernel == "flash":
        lengths = (None, None, q.size(2), k.size(2))
        return aten._scaled_dot_product_flash_attention_backward(
            grad, q, k, v, out, lse.contiguous(), *lengths, 0.0, causal, seed, seed, scale=scale
        )
    wide_k, wide_v = _every_head(q, k), _every_head(q, v)
    if kernel == "efficient":
        lse = torch.nn.functional.pad(lse, (0, -lse.size(-1) % 32), value=torch.inf)
        bias = None if bias is None else bias.expand(*q.shape[:2], -1, -1)
        wanted = [True, True, True, False]
        for_q, for_k, for_v, _ = aten._scaled_dot_product_efficient_attention_backward(
            grad, q, wide_k, wide_v, bias, out, lse, seed, seed, 0.0, wanted, causal, scale=scale
        )
    else:
        weights = (_scores(q, k, bias, causal, scale) - lse[..., None]).exp()
        wide = weights.dtype
        grad, scale = grad.to(wide), q.size(-1) ** -0.5 if scale is None else scale
        along = (grad * out.to(wide)).sum(-1, keepdim=True)
        for_scores = weights * (grad @ wide_v.to(wide).mT - along) * scale
        for_q, for_k, for_v = for_scores @ wide_k.to(wide), for_scores.mT @ q.to(wide), weights.mT @ grad
    for_k, for_v = (x.unflatten(1, (k.size(1), -1)).sum(2) for x in (for_k, for_v))
    return for_q.to(q.dtype), for_k.to(k.dtype), for_v.to(v.dtype)


def _attention_kernel(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool) -> str:
    """cpu; flash (CUDA, half precision, no mask); efficient (CUDA); plain where no kernel fits, as float64 on CUDA."""
    if q.device.type == "cpu":
        return "cpu"
    if q.device.type != "cuda":
        return "plain"
    cuda = torch.backends.cuda
    shared = q.size(1) != k.size(1)
    if q.size(-1) % 8 == 0 and cuda.can_use_flash_attention(cuda.SDPAParams(q, k, v, bias, 0.0, causal, shared)):
        return "flash"
    wide_k, wide_v = _every_head(q, k), _every_head(q, v)
    params = cuda.SDPAParams(q, wide_k, wide_v, bias, 0.0, causal, False)
    return "efficient" if cuda.can_use_efficient_attention(params) else "plain"


def _bias(q: Tensor, mask: Tensor | None) -> Tensor | None:
    """bool -> 0 and -inf in q's dtype, rows padded in memory to 8 elements as CUDA kernels want them aligned."""
    if mask is None:
        return None
    bias = q.new_zeros(*mask.shape[:-1], mask.size(-1) + -mask.size(-1) % 8)[..., : mask.size(-1)]
    return bias.masked_fill_(~mask, -torch.inf)


def _every_head(q: Tensor, x: Tensor) -> Tensor:
    """Keys or values x [B, H_kv, T, hd] -> [B, H, T, hd]."""
    return x if q.size(1) == x.size(1) else x.repeat_interleave(q.size(1) // x.size(1), dim=1)


def _scores(q: Tensor, k: Tensor, bias: Tensor | None, causal: bool, scale: float | None) -> Tensor:
    """Masked scores [B, H, S, T] in float32 or wider."""
    wide = torch.promote_types(q.dtype, torch.float32)
    scores = q.to(wide) @ _every_head(q, k).to(wide).mT * (q.size(-1) ** -0.5 if scale is None else scale)
    if causal:
        scores = scores.masked_fill(scores.new_ones(scores.shape[-2:], dtype=torch.bool).triu(1), -torch.inf)
    return scores if bias is None else scores + bias


def forget_process_groups() -> None:
    """Drop what outlives process groups that were destroyed: call it before others are made in this process.

    DTensor's caches of sharding decisions and of ways from one placement to another: a mesh that is made anew over the
    same ranks compares equal to the old one, whose groups (flattened ones too, which only some ranks may have) are
    gone. Compiled code: its guards do not see which group a function exchanges data over, so a block compiled for one
    group would run for another of another size. The first have no public calls. Checked on torch 2.13.
    """
    if "torch.distributed.tensor" in sys.modules:  # there is nothing of what was not imported, which takes long
        import torch.distributed.tensor._redistribute as redistribute
        import torch.distributed.tensor.debug as dtensor_debug

        dtensor_debug._clear_sharding_prop_cache()
        redistribute._gen_transform_infos.cache_clear()
        getattr(redistribute, "clear_redistribute_planner_cache", lambda: None)()  # later than torch 2.11
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()
