"""Which collectives a rank takes part in: kind, group, bytes and count, of real runs and of pretended ones alike."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from composable._torch import DispatchMode, asks_device, device_of, group_of, infers_shapes
from composable.mesh import Mesh, group_name

KINDS = {  # operator of torch -> what it is called here
    "allreduce_": "all_reduce",
    "allreduce_coalesced_": "all_reduce",
    "broadcast_": "broadcast",
    "reduce_": "reduce",
    "allgather_": "all_gather",
    "_allgather_base_": "all_gather",
    "allgather_into_tensor_coalesced_": "all_gather",
    "reduce_scatter_": "reduce_scatter",
    "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_tensor_coalesced_": "reduce_scatter",
    "alltoall_": "all_to_all",
    "alltoall_base_": "all_to_all",
    "gather_": "gather",
    "scatter_": "scatter",
    "send": "send",
    "recv_": "receive",
    "recv_any_source_": "receive",
    "barrier": "barrier",
}


@dataclass(frozen=True, order=True)
class Collective:
    """What a rank exchanged in calls of one kind over one group."""

    kind: str
    group: str
    """the dimension of the mesh, as `group_name` has it"""
    ranks: int
    """of the group"""
    count: int
    """calls"""
    bytes: int
    """of all calls: of an all_gather the output, of an all_to_all the rows that this rank sends (to itself too), of
    all others the input"""


@dataclass(frozen=True)
class Call:
    """One call, as the dispatcher of torch sees it."""

    kind: str
    group: dist.ProcessGroup
    bytes: int


def collective_call(func: Any, args: Sequence[Any]) -> Call | None:
    """What an operator exchanges; None if it is no collective of the namespace `c10d`."""
    if func.namespace != "c10d":
        return None
    kind = KINDS.get(func.name().partition("::")[2].partition(".")[0])
    group = next((found for arg in args if (found := group_of(arg)) is not None), None)
    if kind is None or group is None:
        return None
    sizes = [sum(t.numel() * t.element_size() for t in tensors_in(arg)) for arg in args[:2]]
    if kind in ("all_to_all", "reduce_scatter"):  # (outputs, inputs, group...)
        return Call(kind, group, sizes[1])
    return Call(kind, group, 0 if kind == "barrier" else sizes[0])


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors in nested lists and tuples."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from tensors_in(each)


class Traffic(DispatchMode):
    """Counts the collectives of what runs under it, in this thread: on a CPU backward passes too.

    Functional collectives, which torch's own tensor styles make, are seen as what they call only where they call it
    through the dispatcher; models of ours make none.
    """

    def __init__(self) -> None:
        super().__init__()
        self._calls: Counter[tuple[str, tuple[int, ...]]] = Counter()
        self._bytes: Counter[tuple[str, tuple[int, ...]]] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Count, and go on."""
        if asks_device(func):
            return device_of(args[0])
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        if func.namespace == "c10d" and not infers_shapes():
            call = collective_call(func, args)
            if call is not None:
                key = (call.kind, tuple(dist.get_process_group_ranks(call.group)))
                self._calls[key] += 1
                self._bytes[key] += call.bytes
        return func(*args, **(kwargs or {}))

    def collectives(self, mesh: Mesh, rank: int) -> list[Collective]:
        """What was counted, in the order of groups and kinds.

        Args:
            mesh: resolved.
            rank: this one.
        """
        found: dict[tuple[str, str, int], tuple[int, int]] = {}
        for (kind, ranks), count in self._calls.items():
            key = (kind, group_name(ranks, mesh, rank), len(ranks))
            calls, total = found.get(key, (0, 0))
            found[key] = (calls + count, total + self._bytes[kind, ranks])
        return sorted(Collective(*key, *numbers) for key, numbers in found.items())
