"""Which collectives a rank takes part in: kind, group, bytes and count, of real runs and of pretended ones alike."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from composable._torch import DispatchMode, asks_device, device_of, group_of, infers_shapes
from composable.mesh import Mesh

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


def group_name(ranks: Iterable[int], mesh: Mesh, rank: int) -> str:
    """Which dimension of the mesh a group is, by its ranks.

    Dimensions that are the same ranks have one name, the first that fits of tp, cp, dp_shard, dp_replicate, pp, ep,
    etp, efsdp, products of two, and world. `alone` is a group of one; `part of ep` are, among the ranks that share
    experts, those inside a node or those of one place in all nodes.
    """
    wanted = sorted(ranks)
    if len(wanted) == 1:
        return "alone"
    dense = (mesh.pp, mesh.dp_replicate, mesh.dp_shard, mesh.cp, mesh.tp)
    expert = (mesh.pp, mesh.dp_replicate, mesh.efsdp, mesh.ep, mesh.etp)
    views = (
        (dense, "tp", (4,)),
        (dense, "cp", (3,)),
        (dense, "dp_shard", (2,)),
        (dense, "dp_replicate", (1,)),
        (dense, "pp", (0,)),
        (expert, "ep", (3,)),
        (expert, "etp", (4,)),
        (expert, "efsdp", (2,)),
        (dense, "dp_shard x cp", (2, 3)),
        (dense, "cp x tp", (3, 4)),
        (expert, "dp_replicate x efsdp", (1, 2)),
    )
    for shape, name, dims in views:
        if members(shape, dims, rank) == wanted:
            return name
    if dense[1] > 1 and members(dense, (1, 3), rank) == wanted:
        return "dp_replicate x cp"
    if len(wanted) == mesh.world:
        return "world"
    return "part of ep" if set(wanted) < set(members(expert, (3,), rank)) else f"{len(wanted)} ranks"


def members(shape: Sequence[int], dims: Sequence[int], rank: int) -> list[int]:
    """The ranks that share a rank's place in a mesh of that shape but for the dimensions `dims`, ascending."""
    if prod(shape) == 0:
        return []
    grid = torch.arange(prod(shape)).view(*shape)
    place = (grid == rank).nonzero()[0].tolist()
    index = tuple(slice(None) if dim in dims else place[dim] for dim in range(len(shape)))
    found: list[int] = grid[index].flatten().tolist()
    return found
