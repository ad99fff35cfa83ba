from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh

from composable.moe.dispatch import ExpertRanks, all_to_all, dispatch
from composable.moe.experts import Experts
from composable.moe.hierarchical import hierarchical
from tests.moe.test_dispatch import check, routing_of, tokens_of

D = 8


def nodes_of(places):
    """Simulated nodes of `places` ranks each."""
    mesh = init_device_mesh("cpu", (dist.get_world_size() // places, places), mesh_dim_names=("across", "inside"))
    return ExpertRanks(dist.group.WORLD, mesh.get_group("inside"), mesh.get_group("across"))


def both_ways(places, cases):
    """Each case: (tokens of ranks, experts of a rank, choices, load, share of drops)."""
    shared_by, world, rank = nodes_of(places), dist.get_world_size(), dist.get_rank()
    for seed, (tokens, local, k, load, dropped) in enumerate(cases):
        mine = tokens[rank % len(tokens)]
        routing = routing_of(mine, local * world, min(k, local * world), seed * world + rank, load, dropped)
        x, g = (tokens_of(mine, D, 10 * rank + seed + i).requires_grad_(i == 0) for i in range(2))
        sent = [dispatch(x, routing, shared_by, plan) for plan in (all_to_all, hierarchical)]
        assert sent[0][1] == sent[1][1]
        assert torch.equal(sent[0][0], sent[1][0])  # rows of an expert arrive in the same order
        check(x.detach(), routing, shared_by, hierarchical)
        results = []
        for name in ("all_to_all", "hierarchical"):
            torch.manual_seed(rank)
            experts = Experts(local, D, 12, name).double()
            out = experts(x, routing, shared_by)
            results.append([out, *torch.autograd.grad(out, [x, routing.weights, *experts.parameters()], g)])
        for a, b in zip(*results, strict=True):
            assert torch.allclose(a, b, rtol=1e-12, atol=1e-14)


CASES = [
    ((5, 0, 1, 7, 2), 1, 2, "random", 0.0),
    ((4, 9), 2, 1, "first", 0.0),  # one expert has all tokens
    ((4, 9), 2, 2, "last", 0.0),
    ((0,), 1, 2, "random", 0.0),  # nobody has a token
    ((0, 0, 0, 1), 1, 1, "first", 0.0),
    ((0, 0, 0, 0, 6, 3, 0, 2), 1, 2, "first", 0.0),  # a node without tokens, all to the other
    ((6, 3), 1, 2, "skewed", 0.4),
    ((6, 3), 2, 2, "random", 1.0),  # everything is dropped
    ((3, 2), 1, 8, "random", 0.0),  # every expert
]


@pytest.mark.parametrize(("world", "places"), [(8, 4), (4, 2), (4, 1), (4, 4), (2, 1)])
def test_two_steps_give_what_one_gives(ranks, world, places):
    ranks(world, both_ways, places, CASES)


LOADS = st.tuples(
    st.lists(st.integers(0, 12), min_size=1, max_size=4),
    st.integers(1, 3),
    st.integers(1, 6),
    st.sampled_from(["random", "skewed", "first", "last"]),
    st.sampled_from([0.0, 0.3]),
)


@settings(max_examples=3, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(cases=st.lists(LOADS, min_size=12, max_size=12))
def test_two_steps_give_what_one_gives_for_any_load(ranks, cases):
    ranks(4, both_ways, 2, cases)


def one_row_to_each_rank():
    """Rank r sends r + 1 rows to every rank, of one expert each."""
    shared_by, rank = nodes_of(2), dist.get_rank()
    counts, read, waits = torch.full((4,), rank + 1), torch.Tensor.tolist, []
    with patch.object(torch.Tensor, "tolist", lambda x: waits.append(0) or read(x)):
        own, exchange = hierarchical(counts, shared_by)
    return own, exchange.inside.sizes, exchange.across.sizes, exchange.across.arriving, len(waits)


def test_rows_of_a_node_cross_together_and_the_host_waits_once(ranks):
    for rank, (own, inside, across, arriving, waits) in enumerate(ranks(4, one_row_to_each_rank)):
        assert own == [10]
        assert inside == [2 * (rank + 1)] * 2  # for both nodes
        assert across == [[3, 3], [7, 7]][rank // 2]  # of both ranks of the node
        assert arriving == [3, 7]
        assert waits == 1


def without_the_groups():
    group = dist.group.WORLD
    with pytest.raises(ValueError, match="give ExpertRanks its groups"):
        dispatch(tokens_of(2, D, 0), routing_of(2, 4, 1, 0), ExpertRanks(group), hierarchical)
    right = nodes_of(2)
    with pytest.raises(ValueError, match="both, or neither"):
        ExpertRanks(group, right.inside)
    with pytest.raises(ValueError, match="node by node"):
        ExpertRanks(group, right.across, right.inside)


def test_groups_that_are_not_nodes_are_refused(ranks):
    ranks(4, without_the_groups)
