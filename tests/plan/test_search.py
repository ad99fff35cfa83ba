"""The search gives the best of what is legal and fits, and says why."""

import dataclasses

import pytest

from composable.data.loader import DataConfig
from composable.mesh import Mesh
from composable.models.config import DecoderConfig
from composable.moe.config import MoEConfig
from composable.parallel.config import Parallel
from composable.plan import advice
from composable.plan.devices import cluster
from composable.plan.search import Space, layouts, meshes, search, work_out
from composable.recipe import Recipe

MODEL = DecoderConfig(vocab_size=8192, dim=1024, layers=8, heads=16, kv_heads=8, head_dim=64, ffn=2816)
RECIPE = Recipe(
    "searched",
    MODEL,
    mesh=Mesh(),
    data=DataConfig(seq_len=1024, global_batch=32, micro_batch=1),
    parallel=Parallel(precision="bfloat16"),
)
SPACE = Space(micro_batch=(1, 2), data=("ddp", "zero1", "zero3"), schedule=("1F1B",))


def every(recipe: Recipe, world: int, nodes, space: Space):
    """All that are legal and fit, worked out."""
    for layout in layouts(recipe, world, nodes, space):
        for recompute in space.recompute:
            try:
                found = work_out(dataclasses.replace(layout, recompute=recompute), recipe, world, nodes)
            except ValueError:
                continue
            if found.worst.total <= nodes.device.usable:
                yield found


@pytest.mark.parametrize("memory", ["80GB", "3.4GB"])
def test_the_best_is_the_best_of_all(memory):
    nodes = cluster("H100", [f"memory={memory}"])
    plan = search(RECIPE, 8, nodes, space=SPACE, top=3)
    best = min(each.time.total for each in every(RECIPE, 8, nodes, SPACE))
    assert plan.best[0].time.total == pytest.approx(best, rel=0.006)  # of times alike the one with less memory
    assert [each.time.total for each in plan.best] == sorted(
        (each.time.total for each in plan.best), key=lambda seconds: float(f"{seconds:.2e}")
    )
    assert all(each.worst.total <= nodes.device.usable for each in plan.best)
    if memory == "3.4GB":
        assert plan.too_large > 0


def test_what_is_promising_is_looked_at_and_the_rest_is_not():
    plan = search(RECIPE, 8, cluster("H100"), space=SPACE, top=1)
    assert plan.tried > 30
    assert plan.worked_out < plan.tried


def test_degrees_share_nodes_heads_layers_and_experts_evenly():
    nodes = cluster("H100")
    routed = dataclasses.replace(RECIPE, model=dataclasses.replace(MODEL, moe=MoEConfig(experts=6, top_k=2, ffn=512)))
    found = list(meshes(routed, 16, nodes))
    assert len(found) == len(set(found))
    for mesh in found:
        assert mesh.world == 16
        assert MODEL.heads % mesh.tp == 0
        assert 8 % mesh.tp == 0
        assert mesh.pp <= MODEL.layers
        assert 6 % mesh.ep == 0
        assert mesh.etp in (1, mesh.tp)
        assert mesh.cp == 1  # rows are short
    assert {mesh.ep for mesh in found} == {1, 2}
    long = dataclasses.replace(RECIPE, data=dataclasses.replace(RECIPE.data, seq_len=32768))
    assert max(mesh.cp for mesh in meshes(long, 16, nodes)) == 16


def test_where_nothing_fits_it_is_said_what_would_help():
    nodes = cluster("H100", ["memory=2.2GB"])
    plan = search(RECIPE, 4, nodes, space=SPACE)
    assert not plan.best
    assert plan.too_large
    said = advice.remedies(RECIPE, 4, nodes, SPACE)
    assert any("on 8 devices it fits" in line or "on 16 devices it fits" in line for line in said), said


def test_the_way_asks_in_order():
    few = advice.way(RECIPE, 8, cluster("H100"))
    assert "one device holds all" in few[0]
    tight = advice.way(RECIPE, 8, cluster("H100", ["memory=3.2GB"]))
    assert "one device does not hold it" in tight[0]
    assert "sharded over all 8 devices (zero3) it takes" in tight[1]
    assert tight[1].endswith("fits")


def test_each_neighbour_has_a_verdict():
    nodes = cluster("H100", ["memory=3.4GB"])
    best = search(RECIPE, 8, nodes, space=SPACE, top=1).best[0]
    verdicts = {each.change: each.verdict for each in advice.neighbours(best, RECIPE, 8, nodes)}
    assert {"tp 2", "pp 2"} <= verdicts.keys()
    assert any("slower" in verdict for verdict in verdicts.values())
    assert any("does not fit" in verdict or "not legal" in verdict for verdict in verdicts.values())
    assert not any("faster" in verdict and not verdict.startswith("0.") for verdict in verdicts.values()), verdicts
