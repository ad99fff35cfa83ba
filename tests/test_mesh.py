import pytest
import torch.distributed as dist

from composable.mesh import Mesh


@pytest.mark.parametrize(
    ("mesh", "world", "replicate", "expected"),
    [
        (Mesh(), 1, False, Mesh(dp_shard=1)),
        (Mesh(), 8, False, Mesh(dp_shard=8)),
        (Mesh(dp_replicate=2), 8, False, Mesh(dp_replicate=2, dp_shard=4)),
        (Mesh(tp=2, pp=2), 8, False, Mesh(dp_shard=2, tp=2, pp=2)),
        (Mesh(dp_replicate=-1, dp_shard=2), 8, False, Mesh(dp_replicate=4, dp_shard=2)),
        (Mesh(), 8, True, Mesh(dp_replicate=8, dp_shard=1)),
        (Mesh(dp_replicate=2, tp=2), 4, True, Mesh(dp_replicate=2, dp_shard=1, tp=2)),
    ],
)
def test_minus_one_takes_what_is_left_of_the_world(mesh, world, replicate, expected):
    assert mesh.resolve(world, replicate=replicate) == expected


@pytest.mark.parametrize(
    ("mesh", "world", "replicate", "words"),
    [
        (Mesh(tp=0), 1, False, "mesh.tp=0.*1 or more.*write mesh.tp=1"),
        (Mesh(tp=-1), 1, False, "mesh.tp=-1.*dp_replicate and dp_shard"),
        (Mesh(tp=3), 8, False, "tp 3 needs a multiple of 3 ranks, and there are 8; start 6 or 9 ranks"),
        (Mesh(dp_shard=4), 8, False, "dp_shard 4 has 4 ranks, and there are 8.*mesh.dp_shard=8"),
        (Mesh(dp_replicate=-1), 4, False, "only one degree"),
        (Mesh(dp_shard=4), 4, True, "ddp keeps parameters whole.*mesh.dp_replicate=4"),
        (Mesh(tp=4, etp=2), 8, False, "mesh.etp=2.*1 or tp=4"),
        (Mesh(ep=3), 8, False, "mesh.ep=3.*must divide dp_shard.cp.tp = 8.*nearest ep is 2 or 4"),
    ],
)
def test_illegal_degrees_are_refused_with_the_rule_and_the_nearest_legal_choice(mesh, world, replicate, words):
    with pytest.raises(ValueError, match=words):
        mesh.resolve(world, replicate=replicate)


def test_a_tensor_group_across_nodes_draws_a_warning():
    assert "mesh.tp = 16 ranks crosses nodes of 8" in Mesh(dp_shard=1, tp=16).across_nodes(8)[0]
    assert Mesh(dp_shard=8, tp=4, ep=2, etp=4).across_nodes(8) == []
    assert "mesh.ep*etp = 8 ranks crosses nodes of 4" in Mesh(dp_shard=8, ep=8).across_nodes(4)[0]


def views_of(mesh):
    views = mesh.views("cpu")
    rank = dist.get_rank()
    return (
        dict(zip(views.dense.mesh_dim_names, views.dense.get_coordinate(), strict=True)),
        dict(zip(views.expert.mesh_dim_names, views.expert.get_coordinate(), strict=True)),
        views.parameters["fsdp"].size(),
        mesh.data_rank(rank),
    )


def test_both_views_order_the_same_ranks_outermost_first(ranks):
    mesh = Mesh(dp_replicate=1, dp_shard=2, tp=2, pp=2, ep=4).resolve(8)
    for rank, (dense, expert, fsdp, data_rank) in enumerate(ranks(8, views_of, mesh)):
        assert dense == dict(pp=rank // 4, dp_replicate=0, dp_shard=rank // 2 % 2, cp=0, tp=rank % 2)
        assert expert == dict(pp=rank // 4, dp_replicate=0, efsdp=0, ep=rank % 4, etp=0)
        assert fsdp == 2
        assert data_rank == rank // 2 % 2
    assert mesh.efsdp == 1
