"""Who talks to whom, and what one operator exchanges on its way forward and back: the words of the traffic model."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

from composable.mesh import Mesh, group_name, members
from composable.moe.given import Load
from composable.plan.layers import Sizes

INDEX = 8
"""bytes of an index or a count"""


@dataclass(frozen=True)
class Group:
    """Ranks that exchange something."""

    name: str
    """as `mesh.group_name` has it"""
    ranks: int


@dataclass(frozen=True)
class Groups:
    """The groups that one rank is in, as `mesh.MeshViews` has them."""

    world: Group
    pp: Group
    tp: Group
    cp: Group
    batch: Group
    """those that hold other tokens of the same sequences: cp x tp"""
    shards: Group
    """those that cut dense parameters"""
    copies: Group
    """those that have copies of the same shards"""
    ep: Group
    etp: Group
    expert_shards: Group
    """those that cut the parameters of the same experts"""
    expert_copies: Group


@functools.lru_cache(maxsize=1024)
def groups_of(mesh: Mesh, rank: int, *, whole: bool) -> Groups:
    """The groups of a rank of the mesh.

    Args:
        whole: parameters are whole on every data and context rank (plain data parallelism).
    """
    dense = (mesh.pp, mesh.dp_replicate, mesh.dp_shard, mesh.cp, mesh.tp)
    parameters = (mesh.pp, mesh.dp_replicate, mesh.dp_shard * mesh.cp, mesh.tp)
    expert = (mesh.pp, mesh.dp_replicate, mesh.efsdp, mesh.ep, mesh.etp)
    experts = expert
    if whole:
        parameters = (mesh.pp, mesh.dp_replicate * mesh.cp, mesh.dp_shard, mesh.tp)
        experts = (mesh.pp, mesh.dp_replicate * mesh.efsdp, 1, mesh.ep, mesh.etp)

    def group(shape: Sequence[int], *dims: int) -> Group:
        ranks = members(shape, dims, rank)
        return Group(group_name(ranks, mesh, rank), len(ranks))

    return Groups(
        world=group((mesh.world,), 0),
        pp=group(dense, 0),
        tp=group(dense, 4),
        cp=group(dense, 3),
        batch=group(dense, 3, 4),
        shards=group(parameters, 2),
        copies=group(parameters, 1),
        ep=group(expert, 3),
        etp=group(expert, 4),
        expert_shards=group(experts, 2),
        expert_copies=group(experts, 1),
    )


@dataclass(frozen=True)
class Nodes:
    """The ranks that share experts, by node: for the exchange in two all-to-alls."""

    inside: Group
    """those on this rank's node"""
    across: Group
    """those of this rank's place in all nodes"""


@functools.lru_cache(maxsize=1024)
def nodes_of(mesh: Mesh, rank: int, per_node: int) -> Nodes:
    """The groups of `node_members`, whose errors it raises."""
    inside, across = node_members(mesh, rank, per_node)
    return Nodes(Group(group_name(inside, mesh, rank), len(inside)), Group(group_name(across, mesh, rank), len(across)))


def node_members(mesh: Mesh, rank: int, per_node: int) -> tuple[list[int], list[int]]:
    """Of the ranks that share a rank's experts, those on its node, and those of its place in all nodes; as
    `parallel.expert` groups them.

    Args:
        per_node: consecutive ranks of a node.

    Raises:
        ValueError: the experts' ranks do not fill whole nodes.
    """
    inner, places = mesh.ep * mesh.etp, max(1, min(mesh.ep, per_node // mesh.etp))
    if (inner > per_node and inner % per_node) or mesh.ep % places:
        raise ValueError(
            f"model.moe.dispatcher=hierarchical with mesh.ep={mesh.ep} and {per_node} ranks a node: the experts' ranks "
            "fill whole nodes; choose an ep that is a multiple of a node's ranks, or dispatcher=all_to_all"
        )
    shape = (mesh.world // inner, mesh.ep // places, places, mesh.etp)
    return members(shape, (2,), rank), members(shape, (1,), rank)


@dataclass(frozen=True)
class Call:
    """Calls of one kind over one group; kinds and bytes as `observe.traffic.Collective` has them."""

    purpose: str
    kind: str
    group: Group
    bytes: float
    """of all of them; where rows to experts are known as means over micro-batches, these too"""
    count: int = 1
    hides: bool = False


@dataclass(frozen=True)
class Operator:
    """What one operator exchanges in a forward pass, and in its backward pass."""

    forward: tuple[Call, ...]
    backward: tuple[Call, ...] = ()


def gathered(purpose: str, group: Group, size: int, *, reduce: str) -> Operator:
    """An all-gather of `size` bytes in all, whose backward pass sums and scatters as many by the kind `reduce`."""
    return Operator((Call(purpose, "all_gather", group, size),), (Call(purpose, reduce, group, size),))


def scattered(purpose: str, group: Group, size: int, *, reduce: str) -> Operator:
    """Its transpose."""
    return Operator((Call(purpose, reduce, group, size),), (Call(purpose, "all_gather", group, size),))


@dataclass(frozen=True)
class Micro:
    """One micro-batch on one rank."""

    sizes: Sizes
    groups: Groups
    rank: int
    """of the mesh"""
    load: Load
    per_node: int
    recompute: str
    """as `Parallel.recompute`"""
    loss_chunk: int
    alone: bool
    """it is all that a rank has of a step, without a pipeline"""
    balances: bool
    """losses of balance are computed"""

    @property
    def reduce(self) -> str:
        """The kind by which activations are summed and scattered: a CPU exchanges them and adds up."""
        return "reduce_scatter" if self.sizes.accelerator else "all_to_all"
