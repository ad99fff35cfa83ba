"""The proof finds what is wrong, and blames the right dimension."""

import dataclasses
import json
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from composable.mesh import Mesh
from composable.moe.config import Balance, MoEConfig
from composable.optim.local import local
from composable.parallel.config import Parallel, Pipeline
from composable.recipe import Recipe
from composable.shrink import shrink
from composable.verify import Numbers, compare, record, reference_of, suspects
from tests.parity import MODEL, recipe_of
from tests.test_commands import ROOT, command

FOUR_LAYERS = dataclasses.replace(MODEL, layers=4, heads=4, vocab_size=40)
EXPERTS = dataclasses.replace(FOUR_LAYERS, moe=MoEConfig(8, 2, 8, balance=Balance(switch=0.1)))


def without_tensor_sum() -> None:
    """A missing gradient reduction."""
    from composable.parallel import compose

    compose.sum_replicated_gradients = lambda *_: None


def divided_by_data_ranks() -> None:
    """A wrong divisor: the mean over ranks that other toolkits take."""
    from composable.parallel import compose, data

    original = data.shard_data

    def shard(part, blocks, mesh, views, parallel, *experts):
        original(part, blocks, mesh, views, parallel, *experts)
        for module in part.modules():
            if hasattr(module, "set_gradient_divide_factor"):
                module.set_gradient_divide_factor(float(views.parameters["fsdp"].size()))

    compose.shard_data = shard


def dropped_layer() -> None:
    """A stage that leaves out its last block."""
    from composable.models.decoder import Decoder

    blocks = Decoder.blocks.fget
    Decoder.blocks = property(lambda self: blocks(self)[: -1 if not self.first else None])


def norm_counted_twice() -> None:
    """A norm in which every tensor rank counts what all of them hold."""
    from composable import step

    original = step.squared_norm
    step.squared_norm = lambda parameters, ranks: original(parameters, ranks) * min(2, dist.get_world_size())


def stale_replica() -> None:
    """One replica that misses its first update."""
    from composable.optim.optimizers import AdamW

    original, calls = AdamW.step, []

    def step(self, closure=None):
        calls.append(1)
        if len(calls) == 1 and dist.get_rank() == dist.get_world_size() - 1 > 0:
            return None
        return original(self, closure)

    AdamW.step = step


def swapped_shards() -> None:
    """Two ranks that each hold the other's shard of a weight."""
    swap_local_parts(lambda name, mesh: name.endswith("0.mlp.gate_proj.weight") and mesh.dp_shard > 1)


def swap_local_parts(wrong: Callable[[str, Mesh], bool]) -> None:
    """Ranks in pairs hold each other's part of the chosen weights, once the model is built."""
    from composable import verify

    original = verify.build_model

    def build(recipe, device):
        model = original(recipe, device)
        for name, parameter in model.named.items():
            if wrong(name, recipe.mesh):
                with torch.no_grad():
                    mine = parameter.to_local()
                    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
                    dist.all_gather(everyone, mine.clone())
                    mine.copy_(everyone[dist.get_rank() ^ 1])
        return model

    verify.build_model = build


def expert_gradients_scaled() -> None:
    """Expert gradients as many times too large as there are ranks that share the experts."""
    from composable.parallel import compose

    original = compose._finish

    def finish(parts, architecture, mesh, views):
        original(parts, architecture, mesh, views)
        for part in parts:
            for name, parameter in part.named_parameters():
                if ".experts." in name:
                    local(parameter.grad).mul_(mesh.ep)

    compose._finish = finish


def balance_loss_divided_by_ranks() -> None:
    """Balance losses averaged over data ranks, where the loss of the tokens is a sum."""
    from composable.parallel.expert_step import ExpertStep

    original = ExpertStep.told

    def told(self, batches, step=None):
        out = original(self, batches, step)
        return [b if b.scale is None else b._replace(scale=b.scale / self.mesh.data_ranks) for b in out]

    ExpertStep.told = told


def lost_token() -> None:
    """A dispatch that forgets the last token that arrives, on one of the ranks that share the experts."""
    from composable.moe.dispatch import AllToAll

    original = AllToAll.to_experts

    def to_experts(self, x):
        rows = original(self, x)
        if len(rows) and dist.get_rank(self.group) == 1:
            rows[-1] = 0
        return rows

    AllToAll.to_experts = to_experts


def swapped_experts() -> None:
    """Two ranks that each hold the other's experts, as after a wrong reshard."""
    swap_local_parts(lambda name, mesh: ".layers.1.mlp.experts." in name and mesh.ep > 1)


def resharding_under_split_backward() -> None:
    """FSDP's resharding between forward and a backward pass in two halves."""
    from composable.parallel import pipeline

    pipeline.keep_gathered = lambda *_: None


FAULTS = {  # fault -> (mesh, changes, who is to blame)
    without_tensor_sum: (Mesh(dp_shard=2, tp=2), {}, ["tp"]),
    divided_by_data_ranks: (Mesh(dp_shard=2, tp=2), {}, ["dp_shard"]),
    dropped_layer: (Mesh(dp_shard=2, pp=2), {}, ["pp"]),
    norm_counted_twice: (Mesh(dp_shard=1, dp_replicate=1, tp=2), {}, ["tp"]),
    stale_replica: (Mesh(dp_replicate=2, dp_shard=1), {}, ["dp_replicate"]),
    swapped_shards: (Mesh(dp_shard=2), {}, ["dp_shard"]),
    resharding_under_split_backward: (
        Mesh(dp_shard=2, pp=2),
        {"pipeline": Pipeline("ZBVZeroBubble"), "parallel": Parallel("zero3")},
        ["pp", "dp_shard"],
    ),
    expert_gradients_scaled: (Mesh(dp_shard=2, ep=2), {"model": EXPERTS}, ["ep"]),
    balance_loss_divided_by_ranks: (Mesh(dp_shard=2, ep=2), {"model": EXPERTS}, ["dp_shard"]),
    lost_token: (Mesh(dp_shard=2, tp=2, ep=4), {"model": EXPERTS}, ["ep"]),
    swapped_experts: (Mesh(dp_shard=2, ep=2), {"model": EXPERTS}, ["ep"]),
}


def faulty(fault, recipe: Recipe, steps: int) -> Numbers | None:
    """`record` in a process that is thrown away, with a fault planted in it."""
    fault()
    return record(recipe, steps)


@pytest.fixture
def thrown_away():
    """A pool of its own for each call: a planted fault stays in its processes."""
    from tests.pool import Pool

    def run(world, *args):
        pool = Pool()
        try:
            return pool.run(world, *args)[0]
        finally:
            pool.close()

    return run


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_planted_fault_is_caught_and_blamed_on_its_dimension(fault, ranks, thrown_away):
    mesh, changes, blamed = FAULTS[fault]
    recipe = recipe_of(mesh.data_ranks, 4, mesh=mesh, model=FOUR_LAYERS)
    recipe, _ = dataclasses.replace(recipe, **changes).resolve(mesh.world)

    def disagreement(changed: Recipe, world: int) -> str:
        ours = thrown_away(world, faulty, fault, changed, 2)
        return compare(ours, ranks(1, record, reference_of(changed), 2)[0], 1e-9).first

    assert disagreement(recipe, mesh.world)
    found = suspects(recipe, lambda changed, world: bool(disagreement(changed, world)))
    assert found
    assert set(found) <= set(blamed), found


def test_the_first_step_and_tensor_that_disagree_are_named():
    ones = {"model.norm.weight": torch.ones(4), "lm_head.weight": torch.ones(4, 4)}
    wrong = ones | {"lm_head.weight": torch.ones(4, 4) * 1.5}
    right = Numbers([2.0, 1.5], [1.0, 1.0], [ones, ones], ones)
    result = compare(Numbers([2.0, 1.5], [1.0, 1.0], [ones, wrong], ones), right, 1e-9)
    assert result.first == "step 2: gradient of lm_head.weight, error 0.5"
    assert result.errors["head gradient"] == 0.5
    assert result.errors["norms gradient"] == 0.0
    lost = Numbers([2.0, 1.5], [1.0, 1.0], [ones, {"lm_head.weight": ones["lm_head.weight"]}], ones)
    assert compare(lost, right, 1e-9).first == "step 2: gradient of model.norm.weight, error inf"
    assert compare(right, right, 1e-9).first == ""


def test_a_shrunk_recipe_keeps_what_the_degrees_divide():
    big = dataclasses.replace(
        MODEL, vocab_size=128256, dim=2048, layers=16, heads=32, kv_heads=8, head_dim=64, ffn=8192, tied=True
    )
    for mesh in (Mesh(dp_shard=1, tp=4), Mesh(dp_shard=2, tp=2, cp=2), Mesh(dp_shard=1, pp=4)):
        small = shrink(recipe_of(1, 1, model=big, mesh=mesh), mesh)
        model = small.model
        assert (
            model.heads % mesh.tp == model.kv_heads % mesh.tp == model.ffn % mesh.tp == model.vocab_size % mesh.tp == 0
        )
        assert model.heads > model.kv_heads > 1
        assert model.heads * model.head_dim == model.dim
        assert model.layers >= mesh.pp
        assert model.tied
        assert model.dim <= 256
        small.resolve(mesh.world)
    odd = dataclasses.replace(big, vocab_size=50257, dim=1000)
    small = shrink(recipe_of(1, 1, model=odd, mesh=Mesh(dp_shard=1, tp=2)), Mesh(dp_shard=1, tp=2)).model
    assert small.vocab_size % 2 == 1
    assert small.heads * small.head_dim != small.dim


@pytest.mark.parametrize(
    ("mesh", "changes"),
    [
        (Mesh(dp_shard=1, pp=2), {"pipeline": Pipeline(split="E t*8 | t*8 H")}),
        (Mesh(dp_shard=1, pp=2), {"pipeline": Pipeline("Interleaved1F1B", virtual=4)}),
        (Mesh(dp_shard=2, pp=2), {"pipeline": Pipeline(micro_batches=8)}),
        (Mesh(dp_shard=2), {"parallel": Parallel(recompute="every:8", unit=8, loss_chunk=2048)}),
    ],
)
def test_a_shrunk_recipe_is_legal_where_the_whole_one_is(mesh, changes):
    big = dataclasses.replace(MODEL, layers=16, heads=32, kv_heads=8, head_dim=64, ffn=8192, vocab_size=128256)
    recipe = dataclasses.replace(recipe_of(mesh.data_ranks, 16, model=big, mesh=mesh), **changes)
    recipe.resolve(mesh.world)
    small = shrink(recipe, mesh)
    small.resolve(mesh.world)
    assert small.parallel.loss_chunk in (0, 5)


def test_the_command_prints_a_table_writes_a_report_and_exits_zero(tmp_path):
    report = tmp_path / "verify.json"
    args = ["recipes/dense_debug.py", "--mesh.tp", "2", "--parallel.data", "zero2", "--report", str(report)]
    done = subprocess.run(command("tools/verify.py", 4, *args), cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert "agrees: worst error" in done.stdout
    facts = json.loads(report.read_text())
    assert facts["first"] == ""
    assert 0 < facts["worst"] <= 1e-9
    assert facts["recipe"]["mesh"]["dp_shard"] == 2


def test_the_command_names_what_is_wrong_and_exits_one(tmp_path):
    script = tmp_path / "faulty.py"
    script.write_text(
        "import runpy, sys\n"
        f"sys.path.insert(0, {str(ROOT)!r})\n"
        "from tests.test_verify import without_tensor_sum\n"
        "without_tensor_sum()\n"
        f"sys.argv[0] = {str(ROOT / 'tools/verify.py')!r}\n"
        "runpy.run_path(sys.argv[0], run_name='__main__')\n"
    )
    args = [str(ROOT / "recipes/dense_debug.py"), "--mesh.tp", "2", "--report", str(tmp_path / "verify.json")]
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4", str(script)]
    done = subprocess.run([*launch, *args], cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert done.returncode == 1
    assert "DISAGREES, first at step 1: gradient of" in done.stdout
    assert "to blame: tp (" in done.stdout
