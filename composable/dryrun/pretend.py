"""One rank of many in a process of its own: tensors without memory, and peers that hold what this rank holds.

Numbers (floating point) are fake tensors: they have a shape and a dtype. Indices and counts (integers, truth values) of
moderate size are real: what code does depends on them. Where two ranks meet, the others are taken to hold the same
integers as this one; that is so of token counts, and of the routing, which is given.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from composable._torch import (
    DispatchMode,
    asks_device,
    device_of,
    fake_copy,
    fake_tensor_mode,
    finished_work,
    group_of,
    infers_shapes,
    is_fake,
    map_tensors,
    run_fake,
)
from composable.observe.traffic import tensors_in

LARGEST = 1 << 22
"""elements of a tensor that is still real: a mask of tokens by tokens is not"""
NEW = ("new_empty", "new_empty_strided", "new_full", "new_ones", "new_zeros")
FACTORIES = frozenset({"arange", "empty", "empty_strided", "full", "ones", "zeros", *NEW})
SIZED = FACTORIES | {"expand", "repeat"}
ONLY_WORK = frozenset({"alltoall_base_", "send", "recv_", "recv_any_source_", "barrier", "monitored_barrier_"})
"""operators of `c10d` that give only what is to be waited for; others give their outputs before it"""


class Pretend(DispatchMode):
    """Under it floating-point tensors are fake, and collectives are made up.

    Args:
        stands_for: is told of each fake tensor that is made for a real one.
    """

    def __init__(self, stands_for: Callable[[Tensor], None] = lambda fake: None) -> None:
        super().__init__()
        self.fakes = fake_tensor_mode()
        self.stands_for = stands_for

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator on real tensors if it is about small integers, else on fake ones."""
        if asks_device(func):
            return device_of(args[0])
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        kwargs = kwargs or {}
        if infers_shapes():
            return func(*args, **kwargs)
        if func.namespace == "c10d":
            return _collective(func, args)
        if func is torch.ops.aten._local_scalar_dense.default and is_fake(args[0]):
            return _any_number(args[0].dtype)
        tensors = [*tensors_in(args), *tensors_in(tuple(kwargs.values()))] if kwargs else list(tensors_in(args))
        fakes = sum(map(is_fake, tensors))
        if not fakes and _stays_real(func, tensors, args, kwargs):
            return func(*args, **kwargs)
        if fakes < len(tensors):
            args, kwargs = map_tensors(self._fake, (args, kwargs))
        return run_fake(self.fakes, func, types, args, kwargs)

    def _fake(self, tensor: Tensor) -> Tensor:
        if is_fake(tensor):
            return tensor
        fake = fake_copy(self.fakes, tensor)
        if device_of(fake).type != "meta":
            self.stands_for(fake)
        return fake


def _any_number(dtype: torch.dtype) -> float | int | bool:
    """What a number is taken to be that nobody knows: a loss, a norm; a question is answered with no."""
    return 1.0 if dtype.is_floating_point else dtype != torch.bool and 1


def _stays_real(func: Any, tensors: Sequence[Tensor], args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Whether an operator, none of whose tensors is fake, is really run."""
    name = func.name().partition("::")[2].partition(".")[0]
    device = kwargs.get("device")
    if tensors and all(tensor.is_meta for tensor in tensors):
        return device is None or torch.device(device).type == "meta"
    if device is not None and torch.device(device).type == "meta":
        return True
    sizes = _sizes(args) if name in SIZED else ()
    if not tensors:
        return name not in FACTORIES or (_counts(name, args, kwargs) and prod(sizes) <= LARGEST)
    if name in FACTORIES and prod(sizes) > LARGEST:
        return False
    return max(_elements(tensors), prod(sizes)) <= LARGEST


def _counts(name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Whether a new tensor holds integers or truth values."""
    dtype = kwargs.get("dtype")
    if dtype is not None:
        return not (dtype.is_floating_point or dtype.is_complex)
    if name == "arange":
        return all(isinstance(arg, int) for arg in args)
    return name == "full" and isinstance(args[1], int)


def _sizes(args: Sequence[Any]) -> Sequence[int]:
    """The size that an operator is given, as a list or, by arange, as its end."""
    for arg in args:
        if isinstance(arg, (list, tuple)) and all(isinstance(n, int) for n in arg):
            return [abs(n) for n in arg]
    return [abs(int(arg)) for arg in args[:2] if isinstance(arg, (int, float)) and abs(arg) > 1]


def _elements(tensors: Sequence[Tensor]) -> int:
    """At most so many has a result: those of the largest tensor, or of all of them broadcast."""
    largest = max(tensor.numel() for tensor in tensors)
    try:
        return max(largest, prod(_broadcast(tuple(tuple(tensor.shape) for tensor in tensors))))
    except RuntimeError:
        return largest


@functools.lru_cache(maxsize=4096)
def _broadcast(shapes: tuple[tuple[int, ...], ...]) -> tuple[int, ...]:
    return tuple(torch.broadcast_shapes(*shapes))


def _collective(func: Any, args: Sequence[Any]) -> Any:
    """What a collective leaves where all ranks of its group hold what this one holds."""
    name = func.name().partition("::")[2].partition(".")[0]
    group = next((found for arg in args if (found := group_of(arg)) is not None), None)
    outputs, inputs = list(tensors_in(args[0])), list(tensors_in(args[1]))
    if group is not None and not any(is_fake(tensor) for tensor in (*outputs, *inputs)):
        _exchange(name, outputs, inputs, dist.get_world_size(group), dist.get_rank(group))
    return finished_work() if name in ONLY_WORK else (args[0], finished_work())


def _exchange(name: str, outputs: Sequence[Tensor], inputs: Sequence[Tensor], ranks: int, rank: int) -> None:
    """The values of real tensors, in place."""
    if name == "allreduce_":  # a sum; torch's other reductions of equal numbers are not used
        for tensor in outputs:
            tensor.mul_(ranks)
    elif name == "_allgather_base_":
        outputs[0].view(ranks, -1).copy_(inputs[0].reshape(1, -1).expand(ranks, -1))
    elif name == "allgather_":
        for tensor in outputs:
            tensor.copy_(inputs[0])
    elif name == "recv_":  # the stages of a pipeline agree that each knows the shapes it takes: 1
        outputs[0].fill_(1)
    elif name == "alltoall_base_" and outputs[0].numel() == inputs[0].numel() and outputs[0].numel() % ranks == 0:
        mine = inputs[0].reshape(ranks, -1)[rank]
        outputs[0].view(ranks, -1).copy_(mine.expand(ranks, -1))
