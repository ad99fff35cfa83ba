"""Recipes of published sizes: exact counts, layouts that fit, dry runs; and the small twin of every recipe trains."""

import dataclasses
import json
import math
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from composable.checkpoint.folder import is_complete
from composable.dryrun.run import dry_run
from composable.mesh import Mesh
from composable.models.count import count_parameters
from composable.observe.metrics import read_metrics
from composable.parallel.config import Pipeline
from composable.plan.devices import device
from composable.plan.memory import memory, worst
from composable.recipe import Recipe, command_line, recipe_of
from composable.shrink import STEPS, fit, small_twin
from composable.train import from_command_line, train
from tests.test_commands import ROOT, run

H100 = device("H100").memory
PUBLISHED = {  # recipe -> parameters, worlds that it is set up for
    "dense_8b": (8_030_261_248, (8,)),
    "dense_70b": (70_553_706_496, (64, 512)),
    "dense_405b": (405_853_388_800, (1024, 16384)),
    "moe_30b_a3b": (30_532_122_624, (32, 64)),
    "moe_671b": (671_026_419_200, (2048,)),
}
RECOMMENDED = {
    "dense_1b": 8,
    "moe_8x7b": 64,
    "finetune_8b": 8,
    "dense_8b": 8,
    "dense_70b": 512,
    "dense_405b": 1024,
    "moe_30b_a3b": 64,
    "moe_671b": 2048,
}
LAYOUTS = [(name, world) for name, (_, worlds) in PUBLISHED.items() for world in worlds]
SCRIPTS = sorted(path.name for path in (ROOT / "recipes").glob("*.py") if "composable.train" in path.read_text())


def recipe(name: str) -> Recipe:
    return recipe_of(ROOT / "recipes" / f"{name.removesuffix('.py')}.py")


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_recipe_has_exactly_the_published_parameters_and_says_so(name):
    model, parameters = recipe(name).model, PUBLISHED[name][0]
    moe = model.moe
    biases = len(model.expert_layers) * moe.experts if moe is not None and moe.correction else 0
    assert count_parameters(model).total + biases == parameters
    text = (ROOT / "recipes" / f"{name}.py").read_text()
    assert f"{parameters:,} parameters" in text
    if moe is not None and not biases:
        assert f"{count_parameters(model).active:,}" in text


@pytest.mark.parametrize(("name", "world"), LAYOUTS)
def test_a_recipe_is_legal_and_fits_the_cluster_that_it_is_set_up_for(name, world):
    resolved, _ = recipe(name).resolve(world)
    assert not resolved.mesh.across_nodes(8) or name == "moe_671b"  # whose experts cross nodes, as in the report
    assert worst(memory(resolved, accelerator=True)).total < H100


def fullest_and_last_parts() -> Iterator[Any]:
    """Of each recipe's pipeline, in the world that it is set up for: the part that should hold most, and the last."""
    for name, world in RECOMMENDED.items():
        yield pytest.param(name, world, False, id=f"{name}-{world}-fullest")
        if recipe(name).mesh.pp > 1:
            yield pytest.param(name, world, True, marks=pytest.mark.slow, id=f"{name}-{world}-last")


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("name", "world", "last"), list(fullest_and_last_parts()))
def test_a_rank_of_every_recipe_runs_without_memory_and_holds_what_is_predicted(name, world, last):
    whole = few_micro_batches(recipe(name), world)
    resolved, _ = whole.resolve(world)
    predicted = memory(resolved, accelerator=False)
    part = len(predicted) - 1 if last else predicted.index(worst(predicted))
    # The checkpoint of the last is planned too: the plan of a whole world takes longer than the step.
    ran = dry_run(whole, world, [part * resolved.mesh.stage_ranks], checkpoint=last).ranks[0]
    assert not ran.error
    weights, moments = (ran.held.get(part, 0) for part in ("parameters", "optimizer"))
    assert moments == pytest.approx(2 * weights, rel=1e-3)
    if last:
        assert ran.saved is not None
        assert ran.saved.bytes == pytest.approx(weights + moments, rel=0.02)  # few tensors are held by several ranks
    assert predicted[part].peak == pytest.approx(ran.peak, rel=0.07)
    assert max(ran.peak, predicted[part].peak) < H100


def few_micro_batches(whole: Recipe, world: int) -> Recipe:
    """With a step of one micro-batch, or of as many as fill the pipeline: memory is at its most by then."""
    mesh = whole.resolve(world)[0].mesh
    count = 1 if mesh.pp == 1 else mesh.pp * whole.pipeline.stages_per_rank
    data = dataclasses.replace(whole.data, global_batch=count * whole.data.micro_batch * mesh.data_ranks)
    return dataclasses.replace(whole, data=data, pipeline=dataclasses.replace(whole.pipeline, micro_batches=0))


@pytest.mark.parametrize("script", SCRIPTS)
def test_the_twin_of_every_recipe_is_legal_on_any_number_of_ranks(script):
    whole = recipe(script)
    for ranks in (1, 2, 3, 4, 6, 8, 16, 64):
        twin, reduced = small_twin(whole, ranks)
        resolved, _ = twin.resolve(ranks)
        assert count_parameters(resolved.model).total < 10**6
        for name, was, now in (re.fullmatch(r"(\w+) (\d+) -> (\d+)", text).groups() for text in reduced):
            assert getattr(whole.mesh, name) == int(was) > int(now) == getattr(resolved.mesh, name)


def test_degrees_are_reduced_to_the_nearest_that_keep_every_dimension():
    deep = Mesh(tp=8, pp=16)
    assert fit(deep, 8) == Mesh(dp_shard=2, tp=2, pp=2)
    assert fit(deep, 4) == Mesh(dp_shard=1, tp=2, pp=2)
    assert fit(deep, 16) == Mesh(dp_shard=2, tp=2, pp=4)
    assert fit(deep, 8, kept=["tp"]) == Mesh(dp_shard=1, tp=8)
    assert fit(Mesh(tp=8), 8) == Mesh(dp_shard=2, tp=4)
    assert fit(Mesh(pp=16, ep=64), 8) == Mesh(dp_shard=4, pp=2, ep=2)
    assert fit(Mesh(tp=2, dp_shard=2), 4) == Mesh(dp_shard=2, tp=2)
    assert fit(Mesh(dp_replicate=4, dp_shard=8, cp=2), 8) == Mesh(dp_replicate=2, dp_shard=2, cp=2)
    assert fit(Mesh(tp=4, ep=4, etp=4), 8) == Mesh(dp_shard=4, tp=2, ep=2, etp=2)
    assert fit(Mesh(tp=4), 4, replicate=True) == Mesh(dp_replicate=2, dp_shard=1, tp=2)
    with pytest.raises(ValueError, match=r"tp 3.*multiple of 3 ranks"):
        fit(Mesh(tp=3), 8, kept=["tp"])


def test_a_twin_keeps_the_kinds_of_layers_and_the_way_of_the_recipe():
    whole = recipe("moe_671b")
    twin, _ = small_twin(whole, 8)
    moe, theirs = twin.model.moe, whole.model.moe
    assert (moe.groups, moe.groups_kept, moe.first_dense) == (8, 4, 1)
    assert moe.experts // moe.groups >= 2
    assert moe.shared_ffn > 0
    for name in ("score", "correction", "scale", "balance", "dispatcher", "group_score"):
        assert getattr(moe, name) == getattr(theirs, name)
    assert twin.model.latent.q_rank > 0
    assert (twin.pipeline.schedule, twin.parallel.data, twin.parallel.recompute) == ("DualPipeV", "zero1", "full")
    assert twin.data.global_batch == 2 * 4 * twin.pipeline.micro_batches * twin.data.micro_batch  # two passes
    hand = dataclasses.replace(whole, pipeline=Pipeline("Interleaved1F1B", split="E t*61 H", virtual=4))
    assert small_twin(hand, 8)[0].pipeline == Pipeline("Interleaved1F1B", virtual=4)


def test_options_hold_for_a_twin_and_it_never_writes_where_the_recipe_does():
    words = ["--shrink", "--steps", "7", "--mesh.pp=2", "--model.layers", "6", "--out", "a/b"]
    words += ["--checkpoint.folder", "s3://bucket/run/", "--checkpoint.writer", "per_rank", "--parallel.data", "zero3"]
    whole = dataclasses.replace(recipe("dense_405b"), init_from="elsewhere")
    twin, reduced = small_twin(command_line(whole, words[1:]), 4, words)
    assert (twin.steps, twin.model.layers, twin.out, twin.init_from) == (7, 6, "a/b-shrink", "")
    assert (twin.checkpoint.folder, twin.parallel.data, twin.shrink) == ("s3://bucket/run-shrink", "zero3", False)
    assert reduced == ["tp 8 -> 2"]
    with pytest.raises(ValueError, match="--shrink"):
        command_line(whole, words)


def train_twin(script: str, words: list[str]) -> None:
    """What a recipe script does with options, in this process."""
    train(from_command_line(recipe(script), ["--shrink", *words]))


def check_run(out: Path, steps: int, *, validated: bool = True) -> list[float]:
    """A finished run, with its checkpoint and the losses of validation; gives the losses of training."""
    lines = list(read_metrics(out / "metrics.jsonl"))
    losses = [line["loss"] for line in lines if "loss" in line]
    assert len(losses) == steps
    assert all(map(math.isfinite, losses))
    assert any("validation_loss" in line for line in lines) == validated
    assert is_complete(out / "checkpoints" / f"step-{steps:08d}")
    return losses


@pytest.mark.slow
def test_a_dense_twin_trains_on_tensor_and_pipeline_ranks_as_people_type_it(tmp_path):
    said = run("recipes/dense_405b.py", 4, "--shrink", "--steps", "3", "--out", str(tmp_path / "run"))
    assert said.count("small twin of dense_405b on 4 ranks: tp 8 -> 2, pp 16 -> 2") == 1
    check_run(tmp_path / "run-shrink", 3)
    kept = json.loads((tmp_path / "run-shrink" / "recipe.json").read_text())
    assert kept["name"] == "dense_405b-shrink"
    assert kept["dtype"] == "float32"


def test_a_twin_with_experts_trains_on_pipeline_and_expert_ranks(ranks, tmp_path):
    ranks(4, train_twin, "moe_671b", ["--steps", "2", "--out", str(tmp_path / "run")])
    check_run(tmp_path / "run-shrink", 2)


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS)
def test_the_twin_of_every_recipe_learns(script, ranks, tmp_path):
    steps = STEPS // 2  # with a validation and a checkpoint
    ranks(4, train_twin, script, ["--steps", str(steps), "--out", str(tmp_path / "run")], timeout=280)
    losses = check_run(tmp_path / "run-shrink", steps, validated=recipe(script).validation.every > 0)
    assert losses[-1] < losses[0] - 0.1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "layout"),
    [
        ("recipes/dense_70b.py", ["--mesh.tp", "4"]),
        ("recipes/moe_671b.py", ["--mesh.pp", "2", "--mesh.ep", "2", "--pipeline.micro-batches", "4"]),
    ],
)
def test_the_shrunk_recipe_computes_what_one_process_computes(script, layout, tmp_path):
    report = tmp_path / "verify.json"
    said = run("tools/verify.py", 8, str(ROOT / script), *layout, "--parallel.no-compile", "--report", str(report))
    assert "agrees: worst error" in said
    assert json.loads(report.read_text())["worst"] <= 1e-9


BIN = {  # stands in for what the cluster has
    "scontrol": 'if [ "$1" = show ]; then echo node7; echo node8; else echo "$@" >> "$WORK/requeued"; fi',
    "srun": 'shift; exec "$@"',
    "torchrun": 'echo "$@" > "$WORK/started"\n'
    'for rank in 0 1; do bash -c \'trap "echo saved >> $WORK/saved; exit 0" TERM; touch $WORK/up$0; '
    "while :; do sleep 0.05; done' $rank & done\nwait; wait",
}


@pytest.fixture
def cluster(tmp_path):
    """An environment in which the commands of a cluster are scripts that write down what they are asked for."""
    for name, body in BIN.items():
        script = tmp_path / "bin" / name
        script.parent.mkdir(exist_ok=True)
        script.write_text(f"#!/bin/bash\n{body}\n")
        script.chmod(0o755)
    slurm = {"SLURM_JOB_ID": "42", "SLURM_JOB_NODELIST": "node[7-8]", "SLURM_JOB_NUM_NODES": "2"}
    path = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
    return os.environ | slurm | {"PATH": path, "WORK": str(tmp_path)}


def wait_for(*paths: Path) -> None:
    deadline = time.monotonic() + 30
    while not all(path.exists() for path in paths):
        assert time.monotonic() < deadline
        time.sleep(0.02)


SLURM = ROOT / "recipes" / "moe_671b.slurm"


def test_the_job_of_many_nodes_saves_before_its_limit_and_starts_again(cluster, tmp_path):
    subprocess.run(["bash", "-n", SLURM], check=True)
    job = subprocess.Popen(["bash", SLURM, "--out", "runs/x y"], env=cluster, cwd=ROOT)
    wait_for(tmp_path / "up0", tmp_path / "up1")
    job.send_signal(signal.SIGUSR1)
    assert job.wait(timeout=30) == 0
    assert (tmp_path / "saved").read_text() == "saved\nsaved\n"
    assert (tmp_path / "requeued").read_text() == "requeue 42\n"
    started = (tmp_path / "started").read_text()
    assert "--nnodes 2 --nproc-per-node 8 --rdzv-id 42 --rdzv-backend c10d --rdzv-endpoint node7:29400" in started
    assert started.endswith("recipes/moe_671b.py --out runs/x y\n")


def test_a_job_of_many_nodes_that_fails_is_not_started_again(cluster, tmp_path):
    (tmp_path / "bin" / "torchrun").write_text("#!/bin/bash\nexit 3\n")
    assert subprocess.run(["bash", SLURM], env=cluster, cwd=ROOT).returncode == 3
    assert not (tmp_path / "requeued").exists()
