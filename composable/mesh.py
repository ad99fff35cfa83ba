"""Degrees of parallelism -> views of the same ranks as `DeviceMesh`es.

Outermost first, so that the chattiest dimension varies fastest and stays inside a node.
"""

import contextlib
import math
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from composable._torch import forget_process_groups


@dataclass(frozen=True)
class Mesh:
    """Degrees of every parallelism; -1 takes what is left of the world."""

    dp_replicate: int = 1
    """data ranks that hold whole copies of the sharded parameters"""
    dp_shard: int = -1
    """data ranks over which parameters, gradients and optimizer state are sharded"""
    cp: int = 1
    """context: ranks that share one sequence"""
    tp: int = 1
    """tensor: ranks that share one matrix"""
    pp: int = 1
    """pipeline: ranks that share the layers"""
    ep: int = 1
    """expert: ranks that share the experts of a layer"""
    etp: int = 1
    """tensor ranks within one expert: 1 or tp"""

    @property
    def world(self) -> int:
        """Ranks in all; the mesh must be resolved."""
        return self.pp * self.stage_ranks

    @property
    def stage_ranks(self) -> int:
        """Ranks that hold one pipeline stage."""
        return self.dp_replicate * self.dp_shard * self.cp * self.tp

    @property
    def data_ranks(self) -> int:
        """Ranks (or groups of them) that read different samples."""
        return self.dp_replicate * self.dp_shard

    @property
    def copies_of_batch(self) -> int:
        """Ranks that read the same samples: each counts its share of sums over the world."""
        return self.world // self.data_ranks

    @property
    def copies_of_loss(self) -> int:
        """Ranks that compute the same loss: context ranks have parts of it, and one stage of a pipeline has it."""
        return self.tp

    @property
    def efsdp(self) -> int:
        """Ranks over which one expert's parameters are sharded by FSDP."""
        return self.dp_shard * self.cp * self.tp // (self.ep * self.etp)

    def __str__(self) -> str:
        degrees = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return " x ".join(f"{name} {degree}" for name, degree in degrees.items() if degree != 1) or "one process"

    def resolve(self, world: int, *, replicate: bool = False) -> "Mesh":
        """Fill in -1 and check every rule.

        Args:
            world: number of ranks.
            replicate: what is left goes to `dp_replicate` and `dp_shard` is 1 (plain data parallelism).

        Raises:
            ValueError: illegal degrees, with the rule, the numbers and the nearest legal choice.
        """
        for name in self.__dataclass_fields__:
            degree = getattr(self, name)
            if degree < 1 and not (degree == -1 and name in ("dp_replicate", "dp_shard")):
                raise ValueError(
                    f"mesh.{name}={degree}: a degree is 1 or more (-1, what is left of the world, is for dp_replicate "
                    f"and dp_shard); write mesh.{name}=1 to leave it out"
                )
        mesh = self
        if replicate and self.dp_shard in (-1, 1):
            mesh = replace(self, dp_shard=1, dp_replicate=-1 if self.dp_replicate == 1 else self.dp_replicate)
        elif replicate:
            raise ValueError(
                f"mesh.dp_shard={self.dp_shard}: parallel.data=ddp keeps parameters whole on every rank, so dp_shard "
                f"is 1; write mesh.dp_replicate={self.dp_shard}, or choose zero1, zero2 or zero3 to shard"
            )
        mesh = _take_what_is_left(mesh, world)
        _check_experts(mesh, replicate)
        return mesh

    def views(self, device_type: str, *, replicate: bool = False) -> "MeshViews":
        """Build the views; collective over the default process group, of which the mesh is the size.

        Args:
            replicate: parameters are whole on every data and context rank (plain data parallelism).
        """
        parameters = (self.pp, self.dp_replicate, self.dp_shard * self.cp, self.tp)
        if replicate:
            parameters = (self.pp, self.dp_replicate * self.cp, self.dp_shard, self.tp)
        dense = (self.pp, self.dp_replicate, self.dp_shard, self.cp, self.tp)
        expert = (self.pp, self.dp_replicate, self.efsdp, self.ep, self.etp)
        if replicate:
            expert = (self.pp, self.dp_replicate * self.efsdp, 1, self.ep, self.etp)
        return MeshViews(
            init_device_mesh(device_type, dense, mesh_dim_names=("pp", "dp_replicate", "dp_shard", "cp", "tp")),
            init_device_mesh(device_type, parameters, mesh_dim_names=("pp", "dp_replicate", "fsdp", "tp")),
            init_device_mesh(device_type, expert, mesh_dim_names=("pp", "dp_replicate", "efsdp", "ep", "etp")),
        )

    def data_rank(self, rank: int) -> int:
        """Which of the `data_ranks` this rank is: the samples that it reads."""
        return rank % self.stage_ranks // (self.cp * self.tp)

    def across_nodes(self, ranks_per_node: int) -> list[str]:
        """Warnings of tensor and expert groups that would cross a node: those talk inside every layer."""
        return [
            f"a group of mesh.{name} = {size} ranks crosses nodes of {ranks_per_node} ranks; it talks in every layer, "
            f"so choose a divisor of {ranks_per_node}"
            for name, size in (("tp", self.tp), ("ep*etp", self.ep * self.etp))
            if size > 1 and (size > ranks_per_node or ranks_per_node % size)
        ]


@dataclass(frozen=True)
class MeshViews:
    """The same ranks three times: by what they compute, by who holds dense parameters, by who holds experts."""

    dense: DeviceMesh
    """pp, dp_replicate, dp_shard, cp, tp"""
    parameters: DeviceMesh
    """pp, dp_replicate, fsdp (= dp_shard x cp), tp; cp goes to dp_replicate in plain data parallelism"""
    expert: DeviceMesh
    """pp, dp_replicate, efsdp, ep, etp; efsdp goes to dp_replicate in plain data parallelism"""


def _take_what_is_left(mesh: Mesh, world: int) -> Mesh:
    free = [name for name in ("dp_replicate", "dp_shard") if getattr(mesh, name) == -1]
    if len(free) == 2:
        raise ValueError(
            "mesh.dp_replicate=-1 and mesh.dp_shard=-1: only one degree can take what is left of the world; "
            "write mesh.dp_shard=1 or mesh.dp_replicate=1"
        )
    names = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
    fixed = math.prod(getattr(mesh, name) for name in names if name not in free)
    said = " x ".join(f"{name} {getattr(mesh, name)}" for name in names if name not in free and getattr(mesh, name) > 1)
    if free and world % fixed:
        near = [n for n in (world // fixed * fixed, (world // fixed + 1) * fixed) if n]
        raise ValueError(
            f"the mesh {said} needs a multiple of {fixed} ranks, and there are {world}; start {_either(near)} ranks, "
            f"or choose degrees whose product divides {world}"
        )
    if free:
        return replace(mesh, **{free[0]: world // fixed})
    if fixed != world:
        name = "dp_replicate" if mesh.dp_shard == 1 < mesh.dp_replicate else "dp_shard"
        others = fixed // getattr(mesh, name)
        hint = f"mesh.{name}={world // others}" if world % others == 0 else f"{fixed} ranks"
        raise ValueError(
            f"the mesh {said or 'of one process'} has {fixed} ranks, and there are {world}; the product of pp, "
            f"dp_replicate, dp_shard, cp and tp must be the number of ranks: choose {hint} (or -1 for what is left)"
        )
    return mesh


def _check_experts(mesh: Mesh, replicate: bool) -> None:
    if mesh.etp not in (1, mesh.tp):
        raise ValueError(
            f"mesh.etp={mesh.etp}: an expert is whole on its rank or split like the dense part: 1 or tp={mesh.tp}"
        )
    ranks, group = mesh.dp_shard * mesh.cp * mesh.tp, mesh.ep * mesh.etp
    if ranks % group:
        legal = [ep for ep in range(1, ranks + 1) if ranks % (ep * mesh.etp) == 0]
        near = sorted(sorted(legal, key=lambda ep: abs(ep - mesh.ep))[:2])
        raise ValueError(
            f"mesh.ep={mesh.ep} with etp={mesh.etp}: ep*etp must divide dp_shard*cp*tp = {ranks}, the ranks that share "
            f"a layer's experts; the nearest ep is {_either(near)}"
            + (" (parallel.data=ddp keeps dp_shard at 1; zero1 shares experts among data ranks)" if replicate else "")
        )


def _either(values: list[int]) -> str:
    return " or ".join(map(str, values))


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
    if math.prod(shape) == 0:
        return []
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    found = [rank - sum(rank // strides[dim] % shape[dim] * strides[dim] for dim in dims)]
    for dim in dims:
        found = [each + place * strides[dim] for each in found for place in range(shape[dim])]
    return sorted(found)


@contextlib.contextmanager
def distributed(timeout_seconds: float = 1800) -> Iterator[torch.device]:
    """Join the job that torchrun started (or be a job of one process) and give this rank's device.

    Device and backend follow the machine: the accelerator with its own backend and gloo for CPU tensors, else CPU. A
    default process group that is there already is used, and left alone at the end.
    """
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if accelerator is None:
        device, backend = torch.device("cpu"), "gloo"
    else:
        device = torch.device(accelerator.type, int(os.environ.get("LOCAL_RANK", 0)))
        torch.accelerator.set_device_index(device.index)
        backend = f"cpu:gloo,{device.type}:{dist.get_default_backend_for_device(device.type)}"
    if dist.is_initialized():
        yield device
        return
    timeout = timedelta(seconds=timeout_seconds)
    if "RANK" in os.environ:
        dist.init_process_group(backend, timeout=timeout)
    else:
        dist.init_process_group(backend, timeout=timeout, store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield device
    finally:
        dist.destroy_process_group()
        forget_process_groups()
