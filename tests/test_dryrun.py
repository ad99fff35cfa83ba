"""The dry run of a rank does what the rank does: the same collectives to the byte, the same memory, the same shares."""

import dataclasses
import json
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist

from composable._torch import fake_process_group, is_fake
from composable.checkpoint.plan import Table, plan_sections, table_of
from composable.checkpoint.save import described
from composable.dryrun.pretend import LARGEST, Pretend
from composable.dryrun.run import RankReport, composed, default_ranks, dry_run, one_step
from composable.dryrun.saved import MAX_FILE_SIZE, shares_of
from composable.moe.config import Capacity, MoEConfig
from composable.moe.given import Load, given, left_by_capacity, whole_choices
from composable.observe.live import LiveMemory
from composable.recipe import Recipe
from composable.recipe import recipe_of as recipe_of_script
from composable.state import saved_tensors
from tests import test_experts as experts
from tests.covering import Row
from tests.test_commands import ROOT
from tests.test_compositions import name

PLAIN = dict(dp_replicate=1, dp_shard=1, cp=1, tp=1, pp=1, data="zero3", accumulate=1, schedule=None, context=None)
DENSE = [
    PLAIN | dict(dp_shard=2, tp=2),
    PLAIN | dict(dp_shard=2, pp=2, data="zero1", schedule="1F1B", accumulate=2, tied=True),
    PLAIN | dict(cp=2, tp=2, data="zero2", context="ring", recompute="full", loss_chunk=5),
]
EXPERTS = [
    PLAIN | dict(dp_shard=2, ep=2, etp=1, kind="balanced"),
]
SLOW = [
    PLAIN | dict(dp_replicate=2, dp_shard=2, data="zero3", accumulate=2),
    PLAIN | dict(dp_replicate=4, data="ddp", accumulate=2, tied=True),
    PLAIN | dict(cp=4, data="zero3", context="ulysses", recompute="selective"),
    PLAIN | dict(cp=2, pp=2, data="zero2", context="all_gather", schedule="ZBVZeroBubble"),
    PLAIN | dict(tp=2, pp=2, data="zero3", schedule="Interleaved1F1B", recompute="full"),
    PLAIN | dict(dp_shard=2, pp=2, data="zero3", schedule="DualPipeV", accumulate=2),
]
SLOW_EXPERTS = [
    PLAIN | dict(dp_shard=4, ep=4, etp=1, kind="across nodes"),
    PLAIN | dict(dp_shard=2, tp=2, ep=2, etp=2, kind="capacity"),
    PLAIN | dict(dp_shard=2, tp=2, ep=4, etp=1, kind="static"),
    PLAIN | dict(dp_shard=2, pp=2, ep=2, etp=1, kind="global", schedule="1F1B", accumulate=2, recompute="full"),
    PLAIN | dict(cp=2, tp=2, ep=2, etp=1, kind="capacity", context="ring", data="zero1"),
]


def recipe_of(row: Row) -> Recipe:
    return experts.recipe_of(row) if "kind" in row else experts.dense.recipe_of(row)


def really(recipe: Recipe) -> tuple[RankReport, Table]:
    """A real step, with the books of the dry run; and what the rank holds of a checkpoint."""
    recipe, _ = recipe.resolve(dist.get_world_size())
    report = one_step(recipe, Load(), 2, LiveMemory(), RankReport(dist.get_rank(), {}))[0]
    return report, table_of(described(*saved_tensors(recipe, *composed(recipe, 2)), {}))


def check(row: Row, ranks) -> None:
    recipe = recipe_of(row)
    world = recipe.mesh.world
    real, tables = zip(*ranks(world, really, recipe), strict=True)
    pretended = dry_run(recipe, world, range(world), ranks_per_node=2).ranks
    written = shares_of(plan_sections(tables, MAX_FILE_SIZE), world)
    for mine, theirs, share in zip(pretended, real, written, strict=True):
        assert not mine.error
        assert mine.collectives == theirs.collectives
        assert mine.held == theirs.held
        assert mine.saved == share
    check_peaks([rank.peak for rank in pretended], [rank.peak for rank in real], recipe, ranks)


def check_peaks(pretended: list[int], real: list[int], recipe: Recipe, ranks) -> None:
    """Within 5%, and in a pipeline two transfers: a real rank holds what it sent until that is known to have arrived,
    a busy one for longer, which has more chances."""
    mesh, data = recipe.mesh, recipe.data
    border = data.micro_batch * data.seq_len // (mesh.cp * mesh.tp) * recipe.model.dim * recipe.torch_dtype.itemsize
    more = 2 * border if mesh.pp > 1 else 0
    for _ in range(3):
        if any(theirs > 1.05 * mine + more for mine, theirs in zip(pretended, real, strict=True)):
            again = [report.peak for report, _ in ranks(mesh.world, really, recipe)]
            real = [min(pair) for pair in zip(real, again, strict=True)]
    assert all(
        -0.05 * theirs <= theirs - mine <= 0.05 * theirs + more for mine, theirs in zip(pretended, real, strict=True)
    ), (pretended, real, more)


@pytest.mark.parametrize("row", DENSE + EXPERTS, ids=name)
def test_a_dry_run_exchanges_and_holds_what_real_ranks_do(row, ranks):
    check(row, ranks)


@pytest.mark.slow
@pytest.mark.parametrize("row", SLOW + SLOW_EXPERTS, ids=name)
def test_a_dry_run_of_any_layout_exchanges_and_holds_what_real_ranks_do(row, ranks):
    check(row, ranks)


def test_a_given_routing_gives_each_expert_its_share_and_a_token_different_experts():
    moe = MoEConfig(8, 2, 8)
    logits = torch.randn(13, 8, generator=torch.Generator().manual_seed(1), requires_grad=True)
    even = given((1.0,) * 8)(logits, moe, None)
    assert even.counts.tolist() == [4, 4, 3, 3, 3, 3, 3, 3]
    assert all(len(set(row)) == 2 for row in even.ids.tolist())
    even.weights.square().sum().backward()
    assert logits.grad is not None
    assert logits.grad.abs().sum() > 0
    skewed = given(Load.parse("4", moe).of(0, 8))(logits, moe, None)
    assert skewed.counts.tolist()[0] == 13
    assert whole_choices((1, 0, 0), 5, 2) == [5, 5, 0]
    assert whole_choices((3, 1), 8, 1) == [6, 2]


def test_what_is_left_by_a_capacity_is_given_by_counts():
    dropped = MoEConfig(4, 2, 8, capacity=Capacity(1.25))  # 8 tokens: 5 to each expert at most
    assert left_by_capacity((2, 1, 1, 0), 8, 1, dropped) == [5, 4, 4, 0]
    asked = dataclasses.replace(dropped, capacity=Capacity(1.25, "next"))
    assert left_by_capacity((2, 1, 1, 0), 8, 1, asked) == [5, 4, 4, 3]
    assert left_by_capacity((2, 1, 1, 0), 8, 2, asked) == [5, 4, 4, 3]
    assert left_by_capacity((2, 1, 1, 0), 8, 1, MoEConfig(4, 2, 8)) == [8, 4, 4, 0]
    tight = dataclasses.replace(dropped, capacity=Capacity(0.5, "next"))  # no room for all
    assert left_by_capacity((2, 1, 1, 0), 8, 1, tight) == [2, 2, 2, 2]


def test_new_tensors_of_numbers_are_fake_and_small_ones_of_indices_are_not():
    size = (3, 5)
    with fake_process_group(0, 2), Pretend():
        like = torch.zeros(size)
        numbers = [
            like,
            torch.empty(size),
            torch.empty_strided(size, (5, 1)),  # what a pipeline receives into
            torch.full(size, 1.5),
            torch.ones(size),
            torch.arange(5.0),
            like.new_empty(size),
            like.new_empty_strided(size, (5, 1)),
            like.new_zeros(size),
        ]
        indices = [torch.zeros(size, dtype=torch.int64), torch.empty_strided(size, (5, 1), dtype=torch.bool)]
        large = torch.empty_strided((LARGEST + 1,), (1,), dtype=torch.int64)
    assert all(map(is_fake, [*numbers, large]))
    assert not any(map(is_fake, indices))


def test_a_load_is_read_by_layer_and_refused_where_it_does_not_fit(tmp_path):
    moe, path = MoEConfig(4, 2, 8), tmp_path / "load.json"
    path.write_text(json.dumps({"1": [1, 2, 3, 4]}))
    load = Load.parse(str(path), moe)
    assert (load.of(1, 4), load.of(2, 4)) == ((1, 2, 3, 4), (1.0,) * 4)
    path.write_text(json.dumps([1, 2, 3]))
    for text in (str(path), "3", "0.5", "nowhere.json"):
        with pytest.raises(ValueError, match="load="):
            Load.parse(text, moe)
    with pytest.raises(ValueError, match="no experts"):
        Load.parse("2", None)


def test_an_error_of_one_rank_at_set_up_is_told_as_the_real_run_has_it():
    moe = MoEConfig(8, 2, 8, dispatcher="hierarchical")
    recipe = experts.recipe_of(PLAIN | dict(dp_shard=8, ep=8, etp=1, kind="no aux"))
    recipe = dataclasses.replace(recipe, model=dataclasses.replace(recipe.model, moe=moe))
    (report,) = dry_run(recipe, 8, [3], ranks_per_node=3).ranks
    assert report.error.startswith("model.moe.dispatcher=hierarchical with mesh.ep=8 and 3 ranks a node")
    with pytest.raises(ValueError, match="rank 8: the ranks of a world of 8 are 0 to 7"):
        dry_run(recipe, 8, [8])


def test_chosen_ranks_are_the_first_of_stages():
    recipe = recipe_of(PLAIN | dict(dp_shard=2, pp=4, schedule="1F1B"))
    assert default_ranks(recipe) == [0, 2, 4, 6]
    deep, _ = recipe_of_script(ROOT / "recipes" / "dense_405b.py").resolve(1024)
    assert default_ranks(deep) == [64, 960]  # the second part has more layers than the first


def test_the_command_prints_tables_writes_json_and_has_exit_codes(tmp_path):
    command = [sys.executable, "tools/dryrun.py", "recipes/moe_debug.py", "--jobs", "1"]

    def run(*words: str) -> subprocess.CompletedProcess:
        return subprocess.run([*command, *words], cwd=ROOT, capture_output=True, text=True, timeout=280)

    report = tmp_path / "report.json"
    small = ("--data.seq-len", "64", "--data.global-batch", "64", "--data.micro-batch", "1", "--mesh.ep", "8")
    done = run("--world", "64", "--rank", "63", "--memory", "1MB", "--json", str(report), *small)
    assert done.returncode == 1, done.stderr
    assert "rank 63 (dp_shard 63, ep 7)" in done.stdout
    assert "all_to_all      ep" in done.stdout
    (rank,) = json.loads(report.read_text())["ranks"]
    assert rank["peak"] == sum(rank["at_peak"].values()) > 10**6
    done = run("--world", "64", "--mesh.tp", "5")
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert "Traceback" not in done.stderr
