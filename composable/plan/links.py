"""Which links a collective goes over: the ranks of its group, the nodes that they lie in, and seconds by both.

Times are by NCCL's model of rings, and of trees for small all-reduces (its graph/tuning.cc): bytes over the narrowest
link, and a latency for each hop. Links are taken to be free.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

from composable.mesh import Mesh, members
from composable.plan.calls import node_members
from composable.plan.devices import Cluster
from composable.plan.flows_experts import INSIDE
from composable.plan.traffic import Flow

DENSE = {
    "tp": (4,),
    "cp": (3,),
    "dp_shard": (2,),
    "dp_replicate": (1,),
    "pp": (0,),
    "dp_shard x cp": (2, 3),
    "cp x tp": (3, 4),
    "dp_replicate x cp": (1, 3),
}
"""name of a group -> its dimensions of the dense view, as `mesh.group_name` has them"""
EXPERT = {"ep": (3,), "etp": (4,), "efsdp": (2,), "dp_replicate x efsdp": (1, 2)}
"""the same of the expert view"""


@dataclass(frozen=True)
class Span:
    """Where the ranks of a group lie."""

    nodes: int
    """in which there are any"""
    per_node: int
    """in each of them; at most, where they differ"""

    @property
    def ranks(self) -> int:
        """Of the group; more where nodes differ."""
        return self.nodes * self.per_node


def span(group: Flow | str, mesh: Mesh, rank: int, per_node: int) -> Span:
    """Where the ranks of the group of a flow lie.

    Args:
        group: a flow of `rank`, or the name of its group. Groups inside and across nodes have one name, `part of ep`,
            and are told apart by the flow alone.
        mesh: resolved.
        rank: of the mesh.
        per_node: consecutive ranks of a node.

    Raises:
        ValueError: a name that is not known.
    """
    counts = Counter(each // per_node for each in ranks_of(group, mesh, rank, per_node))
    return Span(len(counts), max(counts.values()))


def ranks_of(group: Flow | str, mesh: Mesh, rank: int, per_node: int) -> list[int]:
    """The ranks of a group, ascending; arguments and errors are those of `span`."""
    name = group if isinstance(group, str) else group.group
    if name == "world":
        return list(range(mesh.world))
    if name == "alone":
        return [rank]
    if name in DENSE:
        return members((mesh.pp, mesh.dp_replicate, mesh.dp_shard, mesh.cp, mesh.tp), DENSE[name], rank)
    if name in EXPERT:
        return members((mesh.pp, mesh.dp_replicate, mesh.efsdp, mesh.ep, mesh.etp), EXPERT[name], rank)
    if name == "part of ep" and isinstance(group, Flow):
        inside, across = node_members(mesh, rank, per_node)
        return inside if group.purpose == INSIDE else across
    known = ", ".join([*DENSE, *EXPERT, "world", "alone"])
    raise ValueError(f"group {name!r} is none of {known}; of `part of ep` give the flow, not its name")


def seconds(flow: Flow, where: Span, cluster: Cluster) -> float:
    """What the calls of a flow take one after the other.

    Rings go over all devices of the group in a node, each of which sends to other nodes by its own link: the more of
    them are in a node, the wider is the way out. What is received comes while as much is sent, and takes no time.

    Args:
        where: its `span` over nodes of `cluster.per_node`.
    """
    ranks = flow.ranks
    if ranks == 1 or flow.kind == "receive":
        return 0.0
    latency = cluster.across_latency if where.nodes > 1 else cluster.inside_latency
    if flow.kind == "send":
        return flow.bytes / (cluster.across if where.nodes > 1 else cluster.inside) + flow.count * latency
    if flow.kind == "all_to_all":
        near = flow.bytes * (where.per_node - 1) / ranks / cluster.inside
        far = flow.bytes * max(ranks - where.per_node, 0) / ranks / cluster.across
        return max(near, far) + flow.count * latency
    moved = flow.bytes * (ranks - 1) / ranks
    far = moved / (where.per_node * cluster.across) if where.nodes > 1 else 0.0
    hops = (ranks - where.nodes) * cluster.inside_latency + (where.nodes - 1) * cluster.across_latency
    rounds = 1
    if flow.kind == "all_reduce":  # a tree over the nodes has fewer hops
        tree = (where.per_node - 1) * cluster.inside_latency + math.ceil(
            math.log2(where.nodes)
        ) * cluster.across_latency
        rounds, hops = 2, min(hops, tree)
    return rounds * (max(moved / cluster.inside if where.per_node > 1 else 0.0, far) + flow.count * hops)
