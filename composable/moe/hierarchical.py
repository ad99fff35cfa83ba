"""An exchange in two all-to-alls: inside the node first, then across nodes among the ranks of one place.

A rank sends its rows for place p of any node to the rank at place p of its own node, over the fast links; that rank
then has what its node sends to place p, and sends it in one message to each other node: `places` times fewer messages
between nodes, each as many times longer, than one all-to-all of all with all.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from composable.moe.dispatch import Exchange, ExpertRanks, reorder, swap


@dataclass(frozen=True)
class Leg:
    """One of the two all-to-alls, with what rearranges rows before it."""

    group: dist.ProcessGroup
    sizes: list[int]
    """rows to each rank"""
    arriving: list[int]
    """rows from each rank"""
    order: Tensor
    """[N] int64: row that lies at each place of what is sent"""
    inverse: Tensor
    """[N] int64"""

    def go(self, x: Tensor) -> Tensor:
        return swap(x.index_select(0, self.order), self.sizes, self.arriving, self.group)

    def back(self, x: Tensor) -> Tensor:
        return swap(x, self.arriving, self.sizes, self.group).index_select(0, self.inverse)


@dataclass(frozen=True)
class Hierarchical:
    """What ranks send each other by way of their nodes."""

    inside: Leg
    across: Leg
    by_expert: Tensor
    """[R] int64: received row of each row in expert order"""
    by_rank: Tensor
    """[R] int64: its inverse"""

    @property
    def sent(self) -> int:
        return sum(self.inside.sizes)

    def to_experts(self, x: Tensor) -> Tensor:
        return self.across.go(self.inside.go(x)).index_select(0, self.by_expert)

    def to_tokens(self, x: Tensor) -> Tensor:
        return self.inside.back(self.across.back(x.index_select(0, self.by_rank)))


def hierarchical(counts: Tensor, ranks: ExpertRanks) -> tuple[list[int], Exchange]:
    """The `Plan` of two all-to-alls; collective, with two small exchanges of counts and one host synchronisation.

    Rows arrive in the order of `all_to_all`: by expert, within one by rank, token and choice.

    Raises:
        ValueError: ranks without the groups inside and across nodes.
    """
    inside, across = ranks.inside, ranks.across
    if inside is None or across is None:
        raise ValueError(
            "the hierarchical exchange goes inside nodes, then across them: give ExpertRanks its groups `inside` and "
            "`across`, or write moe.dispatcher all_to_all"
        )
    nodes, places = dist.get_world_size(across), dist.get_world_size(inside)
    mine = counts.view(nodes, places, -1)  # [node, place, E_local], where they go
    from_places = _swapped(mine.transpose(0, 1), inside)  # [place of the sender, node, E_local]
    from_nodes = _swapped(from_places.transpose(0, 1), across)  # [node of the sender, place of the sender, E_local]
    to_place, of_place = mine.sum(2), from_places.sum(2)  # [node, place] both of the destination; [sender, node]
    arriving = from_nodes.flatten(0, 1)  # [sender, E_local]
    sizes = [to_place.sum(0), of_place.sum(1), of_place.sum(0), from_nodes.sum((1, 2)), arriving.sum(0)]
    host = iter(torch.cat(sizes).tolist())
    to_places, by_places, to_nodes, by_nodes, own = ([next(host) for _ in range(len(part))] for part in sizes)
    # Rows lie by (node, place) and leave by place; they arrive by (sender, node) and leave by node; they arrive by
    # (node, place) of the sender, which is its rank, and are wanted by expert.
    first = Leg(inside, to_places, by_places, *reorder(to_place, sum(to_places)))
    second = Leg(across, to_nodes, by_nodes, *reorder(of_place, sum(to_nodes)))
    return own, Hierarchical(first, second, *reorder(arriving, sum(own)))


def _swapped(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """x[r] for rank r of the group -> out[r] of rank r."""
    out = x.new_empty(x.shape)
    dist.all_to_all_single(out, x.contiguous(), group=group)
    return out
