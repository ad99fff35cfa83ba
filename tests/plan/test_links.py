"""Which nodes a group of ranks spans, and what its collectives take over links inside and between them."""

import dataclasses

import pytest

from composable.mesh import Mesh
from composable.plan.devices import cluster
from composable.plan.flows_experts import ACROSS, INSIDE
from composable.plan.links import Span, ranks_of, seconds, span
from composable.plan.traffic import Flow

MESH = Mesh(pp=2, dp_replicate=2, dp_shard=4, cp=2, tp=4, ep=8)  # 128 ranks; efsdp 4
CLUSTER = dataclasses.replace(
    cluster("H100"), per_node=8, inside=400e9, across=50e9, inside_latency=1e-6, across_latency=1e-5
)


@pytest.mark.parametrize(
    ("name", "ranks", "nodes", "per_node"),
    [
        ("tp", [100, 101, 102, 103], 1, 4),
        ("cp", [97, 101], 1, 2),
        ("cp x tp", [96, 97, 98, 99, 100, 101, 102, 103], 1, 8),
        ("dp_shard", [101, 109, 117, 125], 4, 1),
        ("dp_shard x cp", [97, 101, 105, 109, 113, 117, 121, 125], 4, 2),
        ("dp_replicate", [69, 101], 2, 1),
        ("dp_replicate x cp", [65, 69, 97, 101], 2, 2),
        ("pp", [37, 101], 2, 1),
        ("ep", [96, 97, 98, 99, 100, 101, 102, 103], 1, 8),
        ("etp", [101], 1, 1),
        ("efsdp", [101, 109, 117, 125], 4, 1),
        ("dp_replicate x efsdp", [69, 77, 85, 93, 101, 109, 117, 125], 8, 1),
        ("alone", [101], 1, 1),
        ("world", list(range(128)), 16, 8),
    ],
)
def test_a_group_lies_in_the_nodes_of_its_ranks(name, ranks, nodes, per_node):
    assert ranks_of(name, MESH, 101, 8) == ranks
    assert span(name, MESH, 101, 8) == Span(nodes, per_node)


def test_groups_of_experts_inside_and_across_nodes_are_told_apart_by_the_flow():
    inside, across = (Flow(purpose, "all_to_all", "part of ep", 4, 1, 1, False) for purpose in (INSIDE, ACROSS))
    mesh = Mesh(dp_shard=16, ep=16)
    assert ranks_of(inside, mesh, 6, 4) == [4, 5, 6, 7]
    assert ranks_of(across, mesh, 6, 4) == [2, 6, 10, 14]
    assert (span(inside, mesh, 6, 4), span(across, mesh, 6, 4)) == (Span(1, 4), Span(4, 1))


def test_a_node_that_a_group_fills_less_counts_by_the_fullest():
    found = span("dp_shard", Mesh(dp_shard=6), 0, 4)
    assert found == Span(2, 4)


@pytest.mark.parametrize("name", ["part of ep", "3 ranks"])
def test_a_name_that_says_too_little_is_refused(name):
    with pytest.raises(ValueError, match=f"group '{name}' is none of tp, cp"):
        span(name, MESH, 0, 8)


def flow(kind: str, ranks: int, size: int, count: int = 1) -> Flow:
    return Flow("sequence", kind, "tp", ranks, count, size, False)


def test_seconds_are_those_of_a_ring_over_the_narrowest_link():
    one = seconds(flow("all_gather", 8, 8 * 400_000_000, 2), Span(1, 8), CLUSTER)
    assert one == pytest.approx(7 * 400e6 / 400e9 + 2 * 7 * 1e-6)
    assert seconds(flow("reduce_scatter", 8, 8 * 400_000_000, 2), Span(1, 8), CLUSTER) == one
    assert seconds(flow("all_reduce", 8, 8 * 400_000_000, 2), Span(1, 8), CLUSTER) == pytest.approx(2 * one)
    far = seconds(flow("all_gather", 16, 16 * 100_000_000), Span(8, 2), CLUSTER)
    assert far == pytest.approx(15 * 100e6 / (2 * 50e9) + 8 * 1e-6 + 7 * 1e-5)


def test_a_small_all_reduce_over_many_nodes_goes_by_a_tree():
    assert seconds(flow("all_reduce", 128, 0), Span(16, 8), CLUSTER) == pytest.approx(2 * (7 * 1e-6 + 4 * 1e-5))


def test_an_all_to_all_sends_what_leaves_the_node_by_the_own_link():
    found = seconds(flow("all_to_all", 16, 16 * 100_000_000), Span(2, 8), CLUSTER)
    assert found == pytest.approx(8 * 100e6 / 50e9 + 1e-5)
    inside = seconds(flow("all_to_all", 8, 8 * 100_000_000), Span(1, 8), CLUSTER)
    assert inside == pytest.approx(7 * 100e6 / 400e9 + 1e-6)


def test_a_group_of_one_and_what_is_received_take_no_time_of_their_own():
    assert seconds(flow("all_reduce", 1, 1000), Span(1, 1), CLUSTER) == 0
    assert seconds(flow("receive", 2, 1000), Span(2, 1), CLUSTER) == 0
    assert seconds(flow("send", 2, 50_000_000), Span(2, 1), CLUSTER) == pytest.approx(1e-3 + 1e-5)


def test_wider_links_and_fewer_nodes_are_never_slower():
    for kind in ("all_gather", "all_reduce", "all_to_all", "send"):
        one = flow(kind, 16, 10**9)
        times = [seconds(one, where, CLUSTER) for where in (Span(1, 16), Span(2, 8), Span(16, 1))]
        assert times == sorted(times)
        wide = dataclasses.replace(CLUSTER, across=100e9)
        assert seconds(one, Span(2, 8), wide) <= times[1]
