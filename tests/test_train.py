"""A run as a user sees it: its folder, its lines, its resumption on any data layout."""

import dataclasses
import errno
import json
import math
import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from composable.checkpoint.folder import is_complete, latest
from composable.checkpoint.load import load
from composable.data.loader import DataConfig
from composable.data.token_writer import TokenWriter
from composable.mesh import Mesh
from composable.models.config import DecoderConfig
from composable.models.decoder import Decoder
from composable.models.families import from_hugging_face
from composable.moe.config import Balance, Capacity, Exploration, MoEConfig
from composable.observe.metrics import read_metrics
from composable.optim.optimizers import OptimizerConfig
from composable.optim.schedules import ScheduleConfig
from composable.parallel.config import Parallel, Pipeline
from composable.recipe import CheckpointConfig, ObserveConfig, Recipe, ValidationConfig, command_line
from composable.state import ORDER_FIELDS, Corpus, changes_of_course, check_same_run
from composable.step import NonFinite
from composable.train import train
from tests.pool import RankError

MODEL = DecoderConfig(vocab_size=256, dim=16, layers=2, heads=2, kv_heads=1, head_dim=8, ffn=24, init_std=0.2)
EXPERTS = dataclasses.replace(
    MODEL,
    moe=MoEConfig(
        experts=8,
        top_k=2,
        ffn=8,
        shared_ffn=12,
        score="sigmoid",
        correction=True,
        balance=Balance(switch=0.05, z=0.001, bias_rate=0.02),
        capacity=Capacity(1.0, "drop_position"),
        exploration=Exploration(jitter=0.1),
    ),
)


@pytest.fixture
def text(tmp_path):
    """A token file of 60 rows of 8, of which the last 12 are held out."""
    generator = np.random.default_rng(7)
    with TokenWriter(tmp_path / "text.safetensors", 256) as writer:
        for length in (100, 17, 3, 200, 160):
            writer.add(generator.integers(0, 256, length).astype(np.uint8))
    return str(tmp_path / "text.safetensors")


def recipe_of(text: str, out: Path, steps: int = 12, **changes) -> Recipe:
    base = Recipe(
        "tiny",
        MODEL,
        steps=steps,
        out=str(out),
        dtype="float64",
        data=DataConfig(path=text, seq_len=8, global_batch=8, micro_batch=1, holdout=0.2),
        optimizer=OptimizerConfig(lr=0.01),
        schedule=ScheduleConfig(kind="linear", warmup=4),
        checkpoint=CheckpointConfig(every=3, keep=0),
        validation=ValidationConfig(every=4, steps=0),
    )
    return dataclasses.replace(base, **changes)


def lines(out: Path) -> list[dict]:
    return [line for line in read_metrics(out / "metrics.jsonl") if "loss" in line]


def validations(out: Path) -> list[dict]:
    return [line for line in read_metrics(out / "metrics.jsonl") if "validation_loss" in line]


def until(recipe: Recipe, step: int) -> None:
    """Train the recipe's run and ask it to stop after `step`, as a signal would."""
    from composable import train as module

    def agreed(run, result, state, lr, clock, log=module.log):
        log(run, result, state, lr, clock)
        if state.step == step - 1 and dist.get_rank() == 0:
            os.kill(os.getpid(), signal.SIGTERM)

    original, module.log = module.log, agreed
    try:
        module.train(recipe)
    finally:
        module.log = original


def same(ours: list[dict], theirs: list[dict], tolerance: float) -> None:
    assert [line["step"] for line in ours] == [line["step"] for line in theirs]
    for a, b in zip(ours, theirs, strict=True):
        for key in ("loss", "grad_norm", "lr", "tokens", "valid_tokens", "samples"):
            assert abs(a[key] - b[key]) <= tolerance * abs(b[key]), (key, a, b)


@pytest.mark.parametrize("kind", ["ddp", "zero1", "zero3"])
def test_a_run_stopped_by_a_signal_goes_on_to_the_bit(kind, ranks, text, tmp_path):
    parallel = Parallel(data=kind)
    straight = recipe_of(text, tmp_path / "straight", 20, parallel=parallel, dtype="float32")
    broken = dataclasses.replace(straight, out=str(tmp_path / "broken"))
    ranks(2, train, straight)
    ranks(2, until, broken, 12)
    assert latest(tmp_path / "broken" / "checkpoints").name == "step-00000012"
    ranks(2, train, broken)
    same(lines(tmp_path / "broken"), lines(tmp_path / "straight"), 0.0)
    assert [line["step"] for line in validations(tmp_path / "broken")] == [4, 8, 12, 16, 20]
    assert validations(tmp_path / "broken") == validations(tmp_path / "straight")


def on_a_disk(recipe: Recipe, seconds: float = 0.0, full: str = "", stop: int = 0) -> tuple[str, str]:
    """Train where each write takes `seconds`, and rank 1 can write nothing to the folder `full`; what was raised."""
    real = os.pwrite

    def pwrite(handle, data, offset):
        time.sleep(seconds)
        if full and dist.get_rank() == 1 and full in os.readlink(f"/proc/self/fd/{handle}"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(handle, data, offset)

    os.pwrite = pwrite
    try:
        until(recipe, stop) if stop else train(recipe)
    except Exception as error:
        return type(error).__name__, str(error)
    finally:
        os.pwrite = real
    return "", ""


def asynchronous(recipe: Recipe) -> Recipe:
    return dataclasses.replace(recipe, checkpoint=dataclasses.replace(recipe.checkpoint, asynchronous=True))


@pytest.mark.parametrize("kind", ["ddp", "zero3"])
def test_checkpoints_written_in_the_background_are_those_written_in_the_foreground(kind, ranks, text, tmp_path):
    front = recipe_of(text, tmp_path / "front", 7, parallel=Parallel(data=kind), checkpoint=CheckpointConfig(2, 0))
    back = asynchronous(dataclasses.replace(front, out=str(tmp_path / "back")))
    ranks(2, train, front)
    assert ranks(2, on_a_disk, back, 0.002) == [("", "")] * 2  # as slow as several steps
    same(lines(tmp_path / "back"), lines(tmp_path / "front"), 0.0)
    for out in (tmp_path / "front", tmp_path / "back"):
        assert [line["step"] for line in lines(out) if line.get("save_seconds", 0) > 0] == [3, 5, 7]
    for step in (2, 4, 6, 7):
        ours, theirs = (out / "checkpoints" / f"step-{step:08d}" for out in (tmp_path / "back", tmp_path / "front"))
        assert is_complete(ours)
        for file in ("model.safetensors", "optimizer/optimizer.safetensors"):
            assert (ours / file).read_bytes() == (theirs / file).read_bytes()


def test_a_failure_to_write_in_the_background_stops_all_ranks_and_the_run_goes_on_from_before(ranks, text, tmp_path):
    straight = recipe_of(text, tmp_path / "straight", 9, checkpoint=CheckpointConfig(2, 0))
    ranks(2, train, straight)
    broken = asynchronous(dataclasses.replace(straight, out=str(tmp_path / "broken")))
    errors = ranks(2, on_a_disk, broken, 0.0, "step-00000004")
    assert errors[0] == errors[1]
    assert errors[0][0] == "OSError"
    assert "step-00000004 was not saved in the background: rank 1: " in errors[0][1]
    assert "No space left on device" in errors[0][1]
    assert (
        4 <= lines(tmp_path / "broken")[-1]["step"] <= 6
    )  # as soon as the loop could know, at the latest when it saves
    assert latest(tmp_path / "broken" / "checkpoints").name == "step-00000002"
    ranks(2, train, broken)
    same_runs(tmp_path / "broken", tmp_path / "straight")


def test_a_failure_to_write_the_last_checkpoint_in_the_background_is_the_end_of_the_run(ranks, text, tmp_path):
    recipe = asynchronous(recipe_of(text, tmp_path / "run", 4, checkpoint=CheckpointConfig(0, 0)))
    errors = ranks(2, on_a_disk, recipe, 0.0, "step-00000004")
    assert errors[0] == errors[1]
    assert "step-00000004 was not saved in the background: rank 1: " in errors[0][1]


def test_a_signal_waits_for_the_last_checkpoint_in_the_background_and_old_ones_are_deleted(ranks, text, tmp_path):
    straight = recipe_of(text, tmp_path / "straight", 12)
    ranks(1, train, straight)
    moving = asynchronous(dataclasses.replace(straight, out=str(tmp_path / "moving")))
    moving = dataclasses.replace(moving, checkpoint=dataclasses.replace(moving.checkpoint, every=1, keep=2))
    assert ranks(2, on_a_disk, moving, 0.002, "", 7) == [("", "")] * 2
    kept = sorted(p.name for p in (tmp_path / "moving" / "checkpoints").iterdir() if p.is_dir())
    assert kept == ["step-00000006", "step-00000007"]
    ranks(2, train, moving)
    same_runs(tmp_path / "moving", tmp_path / "straight")


def test_a_run_resumes_on_any_number_of_ranks_and_kind_of_data_parallelism(ranks, text, tmp_path):
    straight = recipe_of(text, tmp_path / "straight", 15)
    ranks(1, train, straight)
    moving = dataclasses.replace(straight, out=str(tmp_path / "moving"))
    for stop, world, kind, mesh in (
        (3, 2, "zero3", Mesh()),
        (6, 8, "zero2", Mesh(dp_replicate=2)),
        (9, 4, "ddp", Mesh()),
        (12, 1, "zero3", Mesh()),
        (15, 8, "zero1", Mesh()),
    ):
        recipe = dataclasses.replace(moving, mesh=mesh, parallel=Parallel(data=kind))
        ranks(world, *((train, recipe) if stop == 15 else (until, recipe, stop)))
    same_runs(tmp_path / "moving", tmp_path / "straight")


@pytest.mark.slow
def test_a_run_moves_between_tensor_context_and_pipeline_layouts(ranks, text, tmp_path):
    model = dataclasses.replace(MODEL, layers=4, heads=4, kv_heads=2, dim=24, tied=True)
    straight = recipe_of(text, tmp_path / "straight", 18, model=model)
    straight = dataclasses.replace(straight, data=dataclasses.replace(straight.data, document_mask=True))
    ranks(1, train, straight)
    moving = dataclasses.replace(straight, out=str(tmp_path / "moving"))
    zbv = Pipeline("ZBVZeroBubble")
    for stop, world, changes in (
        (3, 8, {"mesh": Mesh(tp=2, pp=2), "pipeline": Pipeline("1F1B")}),
        (6, 1, {}),
        (9, 8, {"mesh": Mesh(cp=2, tp=4), "parallel": Parallel(context="ring")}),
        (12, 4, {"mesh": Mesh(pp=2), "pipeline": zbv, "parallel": Parallel("zero1", recompute="full")}),
        (15, 4, {"mesh": Mesh(tp=2, cp=2), "parallel": Parallel("ddp", loss_chunk=3)}),
        (18, 2, {"mesh": Mesh(pp=2), "pipeline": Pipeline("Interleaved1F1B"), "parallel": Parallel("zero2")}),
    ):
        recipe = dataclasses.replace(moving, **changes)
        ranks(world, *((train, recipe) if stop == 18 else (until, recipe, stop)))
    same_runs(tmp_path / "moving", tmp_path / "straight")


def test_a_run_with_experts_moves_between_expert_tensor_and_pipeline_layouts(ranks, text, tmp_path):
    straight = recipe_of(text, tmp_path / "straight", 12, model=EXPERTS)
    ranks(1, train, straight)
    moving = dataclasses.replace(straight, out=str(tmp_path / "moving"))
    for stop, world, changes in (
        (3, 2, {"mesh": Mesh(ep=2)}),
        (6, 1, {}),
        (9, 4, {"mesh": Mesh(tp=2, ep=2, etp=2)}),
        (12, 4, {"mesh": Mesh(pp=2, ep=2), "parallel": Parallel("zero1"), "pipeline": Pipeline("1F1B")}),
    ):
        recipe = dataclasses.replace(moving, **changes)
        ranks(world, *((train, recipe) if stop == 12 else (until, recipe, stop)))
        kept = json.loads((latest(tmp_path / "moving" / "checkpoints") / "train_state.json").read_text())
        assert (kept["step"], kept["layout"]["ep"]) == (stop, recipe.mesh.ep)
    same_runs(tmp_path / "moving", tmp_path / "straight")
    for name, values in experts_seen(tmp_path / "straight").items():
        assert experts_seen(tmp_path / "moving")[name] == pytest.approx(values, rel=1e-9, abs=1e-12), name
    final = final_tensors(tmp_path / "moving")
    biases = [final[f"model.layers.{layer}.mlp.gate.e_score_correction_bias"] for layer in range(2)]
    for bias in biases:  # 12 steps of 0.02 up, down or not at all
        assert bias.dtype == torch.float32
        assert bias.any()
        torch.testing.assert_close((bias / 0.02).round() * 0.02, bias, rtol=0, atol=1e-6)
    written = json.loads((tmp_path / "moving" / "recipe.json").read_text())
    assert written["model"]["moe"] == dataclasses.asdict(EXPERTS.moe)


def experts_seen(out: Path) -> dict[str, list[float]]:
    """Everything that metrics.jsonl says of the experts of single steps, by name: a value a line."""
    steps = lines(out)
    names = [name for name in steps[0] if name.startswith("moe/") and not name.endswith("dead")]
    assert names
    return {name: [line[name] for line in steps] for name in names}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"capacity": Capacity(1.5, "drop_position")}, r"model.moe.capacity.factor was 1.0 and is 1.5"),
        ({"correction": False, "balance": Balance()}, "model.moe.correction was True and is False"),
        ({"experts": 4}, "model.moe.experts was 8 and is 4"),
    ],
)
def test_a_run_does_not_go_on_with_other_experts(changes, words, ranks, text, tmp_path):
    recipe = recipe_of(text, tmp_path / "run", 2, model=EXPERTS, mesh=Mesh(ep=2))
    ranks(2, train, recipe)
    other = dataclasses.replace(EXPERTS, moe=dataclasses.replace(EXPERTS.moe, **changes))
    with pytest.raises(RankError, match=words):
        ranks(2, train, dataclasses.replace(recipe, steps=3, model=other))


def test_a_run_goes_on_with_other_numbers_of_balance_and_says_so_and_by_another_dispatcher(text, tmp_path):
    recipe = recipe_of(text, tmp_path / "run", model=EXPERTS)
    balance = dataclasses.replace(EXPERTS.moe.balance, switch=0.5)
    now = dataclasses.replace(EXPERTS.moe, balance=balance, dispatcher="hierarchical", upcycle=True)
    other = dataclasses.replace(recipe, model=dataclasses.replace(EXPERTS, moe=now))
    corpus = Corpus.open(recipe.data, 256)
    facts = {"version": 1, "recipe": json.loads(recipe.to_json())}
    facts["data"] = {"fingerprint": corpus.fingerprint, **{name: getattr(recipe.data, name) for name in ORDER_FIELDS}}
    check_same_run(tmp_path, facts, other, corpus)
    was = EXPERTS.moe.balance.switch
    assert changes_of_course(facts["recipe"], other.options()) == [
        f"model.moe.balance.switch was {was} and is 0.5: the run goes on otherwise from here"
    ]
    with pytest.raises(ValueError, match=r"model\.moe\.experts was 8 and is None"):
        check_same_run(tmp_path, facts, dataclasses.replace(recipe, model=MODEL), corpus)


def same_runs(ours: Path, theirs: Path) -> None:
    same(lines(ours), lines(theirs), 1e-9)
    for a, b in zip(validations(ours), validations(theirs), strict=True):
        assert a["validation_loss"] == pytest.approx(b["validation_loss"], rel=1e-9)
    left, right = final_tensors(ours), final_tensors(theirs)
    assert list(left) == list(right)
    for name in right:
        torch.testing.assert_close(left[name], right[name], rtol=1e-9, atol=1e-12)


def final_tensors(out: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    folder = latest(out / "checkpoints")
    return load_file(folder / "model.safetensors") | load_file(folder / "optimizer" / "optimizer.safetensors")


def test_a_complete_run_takes_no_step_and_touches_no_file_until_more_steps_are_asked_for(ranks, text, tmp_path):
    recipe = recipe_of(text, tmp_path / "run", 6)
    ranks(2, train, recipe)

    def files() -> dict[str, int]:
        return {str(p): p.stat().st_mtime_ns for p in tmp_path.joinpath("run").rglob("*") if p.is_file()}

    before = {name: when for name, when in files().items() if "tfevents" not in name}
    ranks(2, train, recipe)
    assert {name: when for name, when in files().items() if "tfevents" not in name} == before
    ranks(2, train, dataclasses.replace(recipe, steps=8))
    assert [line["step"] for line in lines(tmp_path / "run")] == list(range(1, 9))


def test_counters_count_tokens_and_valid_tokens_once_on_every_layout(ranks, text, tmp_path):
    for world, micro_batch in ((1, 8), (2, 1), (4, 2), (8, 1)):
        out = tmp_path / f"{world}-{micro_batch}"
        recipe = recipe_of(text, out, 10, observe=ObserveConfig(every=5))
        recipe = dataclasses.replace(
            recipe, data=dataclasses.replace(recipe.data, micro_batch=micro_batch, document_mask=True)
        )
        ranks(world, train, recipe)
        steps = lines(out)
        assert [line["step"] for line in steps] == [5, 10]
        assert [line["tokens"] for line in steps] == [320, 640]
        assert [line["samples"] for line in steps] == [40, 80]
        assert steps[-1]["valid_tokens"] < 640
        assert "mfu" not in steps[-1]
        assert steps[-1]["tokens_per_second"] == pytest.approx(64 / steps[-1]["step_seconds"])
        same(steps, lines(tmp_path / "1-8"), 1e-9)


def zero_head(recipe: Recipe) -> float:
    from composable import train as module

    def build(*args, build_model=module.build_model):
        model = build_model(*args)
        with torch.no_grad():
            model.parts[0].lm_head.weight.zero_()
        return model

    original, module.build_model = module.build_model, build
    try:
        module.train(recipe)
    finally:
        module.build_model = original


@pytest.mark.parametrize(("world", "micro_batch"), [(1, 1), (1, 8), (2, 2), (4, 1)])
def test_validation_of_a_zero_head_is_the_logarithm_of_the_vocabulary(world, micro_batch, ranks, text, tmp_path):
    recipe = recipe_of(text, tmp_path / "run", 1, dtype="float32", optimizer=OptimizerConfig(lr=1e-12))
    recipe = dataclasses.replace(
        recipe, data=dataclasses.replace(recipe.data, micro_batch=micro_batch, document_mask=True)
    )
    ranks(world, zero_head, recipe)
    assert lines(tmp_path / "run")[0]["loss"] == pytest.approx(math.log(256), abs=1e-5)
    assert validations(tmp_path / "run")[0]["validation_loss"] == pytest.approx(math.log(256), abs=1e-5)


def test_learning_rate_depends_on_the_step_alone(ranks, text, tmp_path):
    recipe = recipe_of(text, tmp_path / "run", 10, optimizer=OptimizerConfig(lr=1.0))
    ranks(2, train, recipe)
    rates = [line["lr"] for line in lines(tmp_path / "run")]
    assert rates == pytest.approx([0.25, 0.5, 0.75, 1.0, 0.85, 0.7, 0.55, 0.4, 0.25, 0.1])


def test_epochs_end_the_run_after_every_row_was_read_once(ranks, text, tmp_path):
    recipe = recipe_of(text, tmp_path / "run", 100)
    recipe = dataclasses.replace(recipe, data=dataclasses.replace(recipe.data, epochs=2))
    state = ranks(2, train, recipe)[0]
    assert (state.step, state.samples) == (12, 96)  # 48 rows to train on, 2 epochs, 8 rows a step


def test_transformers_opens_a_checkpoint_of_any_layout_and_gives_the_same_logits(ranks, text, tmp_path):
    recipe = recipe_of(text, tmp_path / "run", 3, dtype="float32")
    ranks(4, train, recipe)
    folder = latest(tmp_path / "run" / "checkpoints")
    theirs = AutoModelForCausalLM.from_pretrained(folder)
    ours = Decoder(from_hugging_face(json.loads((folder / "config.json").read_text())))
    load(folder, dict(ours.named_parameters()))
    ids = torch.arange(32).view(2, 16)
    torch.testing.assert_close(ours(ids), theirs(ids).logits, rtol=0, atol=1e-5)


def test_a_run_starts_from_the_weights_of_a_checkpoint_with_a_fresh_optimizer(ranks, text, tmp_path):
    ranks(2, train, recipe_of(text, tmp_path / "first", 3))
    source = str(latest(tmp_path / "first" / "checkpoints"))
    ranks(2, train, recipe_of(text, tmp_path / "second", 1, init_from=source))
    state = final_tensors(tmp_path / "second")
    assert state["lm_head.weight.step"].item() == 1.0
    first = lines(tmp_path / "second")[0]
    with pytest.raises(RankError, match=r"another model: model.norm_eps is 1e-05 there and 0.5 here"):
        ranks(
            2,
            train,
            recipe_of(text, tmp_path / "third", 1, init_from=source, model=dataclasses.replace(MODEL, norm_eps=0.5)),
        )
    assert first["samples"] == 8
    assert first["loss"] < lines(tmp_path / "first")[0]["loss"]


def poisoned(recipe: Recipe) -> tuple[bool, str]:
    from composable import train as module

    held = {}

    def build(*args, build_model=module.build_model):
        model = build_model(*args)
        with torch.no_grad():
            model.parts[0].model.norm.weight.to_local().fill_(float("inf"))
        held["model"] = model
        held["before"] = [p.to_local().clone() for p in model.parameters]
        return model

    original, module.build_model = module.build_model, build
    try:
        module.train(recipe)
    except NonFinite as error:
        after = [p.to_local() for p in held["model"].parameters]
        return all(torch.equal(a, b) for a, b in zip(after, held["before"], strict=True)), str(error)
    finally:
        module.build_model = original
    return False, ""


def test_a_loss_that_is_not_finite_stops_all_ranks_before_the_weights_change(ranks, text, tmp_path):
    results = ranks(2, poisoned, recipe_of(text, tmp_path / "run"))
    assert len({message for _, message in results}) == 1
    untouched, message = results[0]
    assert untouched
    assert "step 1: the loss is not finite on rank 0, 1" in message
    assert "rank 0: samples [" in message
    assert latest(tmp_path / "run" / "checkpoints") is None


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model": dataclasses.replace(MODEL, ffn=32)}, "model.ffn was 24 and is 32"),
        ({"seed": 5}, "seed was 1234 and is 5"),
        ({"dtype": "float32"}, "dtype was float64 and is float32"),
        ({"data": {"seq_len": 4}}, "data.seq_len was 8 and is 4"),
        ({"data": {"path": "other"}}, r"data \(fingerprint\) was"),
        ({"checkpoint": CheckpointConfig(resume="never")}, "resume=never"),
    ],
)
def test_a_checkpoint_of_another_run_is_refused_on_every_rank(changes, words, ranks, text, tmp_path):
    recipe = recipe_of(text, tmp_path / "run", 3)
    ranks(2, train, recipe)
    if changes.get("data", {}).get("path"):
        changes = {"data": {"path": str(tmp_path / "other.safetensors")}}
        with TokenWriter(tmp_path / "other.safetensors", 256) as writer:
            writer.add(np.arange(480, dtype=np.uint8))
    if "data" in changes:
        changes = {"data": dataclasses.replace(recipe.data, **changes["data"])}
    with pytest.raises(RankError, match=words) as caught:
        ranks(2, train, dataclasses.replace(recipe, steps=6, **changes))
    assert "rank 0: ValueError" in str(caught.value)
    assert "rank 1: ValueError" in str(caught.value)


def test_a_field_that_an_older_version_did_not_know_had_its_default(text, tmp_path):
    recipe = recipe_of(text, tmp_path / "run", model=EXPERTS)
    corpus = Corpus.open(recipe.data, EXPERTS.vocab_size)
    data = {"fingerprint": corpus.fingerprint, **{name: getattr(recipe.data, name) for name in ORDER_FIELDS}}
    facts = {"version": 1, "recipe": recipe.options(), "data": data}
    for name in ("qk_norm", "window_layers"):
        del facts["recipe"]["model"][name]
    del facts["recipe"]["model"]["rope"]["mscale"]
    del facts["recipe"]["model"]["moe"]["groups"]
    check_same_run(tmp_path, facts, recipe, corpus)
    with pytest.raises(ValueError, match=r"model.qk_norm was False and is True"):
        check_same_run(
            tmp_path, facts, dataclasses.replace(recipe, model=dataclasses.replace(EXPERTS, qk_norm=True)), corpus
        )
    facts["recipe"]["model"]["moe"] = None
    with pytest.raises(ValueError, match=r"model.moe"):
        check_same_run(tmp_path, facts, recipe, corpus)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"mesh": Mesh(ep=2)}, "the model has no experts"),
        (
            {
                "model": dataclasses.replace(EXPERTS, moe=dataclasses.replace(EXPERTS.moe, upcycle=True)),
                "init_from": "dense",
                "init_missing": ("*",),
            },
            "every weight is taken from the dense model",
        ),
        ({"init_from": "nowhere"}, "init_from=nowhere is not a folder"),
        ({"observe": ObserveConfig(profile=-1)}, "observe.profile=-1"),
        ({"data": DataConfig(seq_len=8, holdout=0.0)}, "validation.every needs data.holdout"),
        ({"mesh": Mesh(dp_shard=3)}, "has 3 ranks, and there are 2"),
        ({"parallel": Parallel(unit=9)}, "parallel.unit=9.*2 blocks"),
        ({"parallel": Parallel(recompute="every:5")}, "every:5.*every:2 or less"),
        ({"data": DataConfig(path="absent.bin", seq_len=8)}, "absent.bin"),
        ({"data": DataConfig(seq_len=8, global_batch=9, micro_batch=2)}, "global_batch 9 is not a multiple of 4"),
        ({"checkpoint": CheckpointConfig(resume="must")}, "resume=must"),
        ({"model": dataclasses.replace(MODEL, vocab_size=100)}, "vocabulary of 256 and the model one of 100"),
        ({"schedule": ScheduleConfig(warmup=-1)}, "warmup is -1"),
        ({"out": "s3://bucket/run"}, r"out=s3://bucket/run is a URL.*checkpoint\.folder"),
        ({"steps": -1}, "steps=-1"),
    ],
)
def test_bad_input_is_refused_on_every_rank(changes, words, ranks, text, tmp_path):
    with pytest.raises(RankError, match=words) as caught:
        ranks(
            2,
            train,
            recipe_of(text, tmp_path / "run", **changes)
            if not {"steps", "out"} & changes.keys()
            else dataclasses.replace(recipe_of(text, tmp_path / "run"), **changes),
        )
    assert "rank 0: " in str(caught.value)
    assert "rank 1: " in str(caught.value)


def test_what_a_resumed_run_changes_is_said_and_what_is_layout_is_not():
    base = Recipe("tiny", MODEL)
    now = dataclasses.replace(
        base, steps=47, mesh=Mesh(tp=2), out="elsewhere", optimizer=OptimizerConfig(lr=1e-4), parallel=Parallel("zero1")
    )
    assert changes_of_course(json.loads(base.to_json()), now.options()) == [
        "steps was 1000 and is 47: the run goes on otherwise from here",
        "optimizer.lr was 0.001 and is 0.0001: the run goes on otherwise from here",
    ]
    assert changes_of_course(json.loads(base.to_json()), base.options()) == []


def test_the_tokenizer_goes_along_with_the_checkpoint_wherever_the_data_was_moved_to(ranks, tmp_path):
    from tokenizers import Tokenizer, models

    words = {"<s>": 0, "</s>": 1} | {f"w{i}": i for i in range(2, 40)}
    Tokenizer(models.WordLevel(words, unk_token="<s>")).save(str(tmp_path / "tokenizer.json"))
    with TokenWriter(tmp_path / "text.safetensors", 40, bos=0, eos=1, tokenizer="gone/tokenizer.json") as writer:
        writer.add(np.arange(480) % 40)
    ranks(1, train, recipe_of(str(tmp_path / "text.safetensors"), tmp_path / "run", 2))
    folder = latest(tmp_path / "run" / "checkpoints")
    assert (folder / "tokenizer.json").read_bytes() == (tmp_path / "tokenizer.json").read_bytes()
    config = json.loads((folder / "config.json").read_text())
    assert (config["bos_token_id"], config["eos_token_id"]) == (0, 1)


def test_two_jobs_never_share_a_run_folder(ranks, text, tmp_path):
    from composable.checkpoint.folder import locked

    (tmp_path / "run").mkdir()
    with locked(tmp_path / "run"), pytest.raises(RankError, match="give each job a folder"):
        ranks(2, train, recipe_of(text, tmp_path / "run"))


def test_two_jobs_never_share_a_folder_of_checkpoints(ranks, text, tmp_path):
    from composable.checkpoint.folder import locked

    (tmp_path / "saved").mkdir()
    recipe = recipe_of(text, tmp_path / "run", 1, checkpoint=CheckpointConfig(folder=str(tmp_path / "saved")))
    with locked(tmp_path / "saved"), pytest.raises(RankError, match=r"saved is being written by another process"):
        ranks(2, train, recipe)
    same_place = dataclasses.replace(recipe, checkpoint=CheckpointConfig(folder=recipe.out))
    assert ranks(2, train, same_place)[0].step == 1
    assert latest(tmp_path / "run") == tmp_path / "run" / "step-00000001"


def test_a_router_whose_only_weight_is_one_is_warned_of():
    def warnings(**rule) -> list[str]:
        model = dataclasses.replace(MODEL, moe=MoEConfig(experts=4, top_k=1, ffn=8, **rule))
        found = Recipe("tiny", model, data=DataConfig(seq_len=8)).resolve(1)[1]
        return [text for text in found if "router learns nothing" in text]

    assert len(warnings(normalise=True)) == len(warnings(normalise=False, score="topk_softmax")) == 1
    assert warnings(normalise=False) == []


def test_a_profile_and_a_memory_snapshot_are_written_on_demand(ranks, text, tmp_path):
    observe = ObserveConfig(profile=2, profile_steps=1, memory_snapshot=2)
    ranks(2, train, recipe_of(text, tmp_path / "run", 3, observe=observe))
    assert len(list((tmp_path / "run" / "profile").iterdir())) == 2
    assert len(list((tmp_path / "run" / "memory").iterdir())) == 2


def test_tensorboard_shows_what_metrics_jsonl_holds(ranks, text, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    ranks(2, train, recipe_of(text, tmp_path / "run", 4))
    board = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    board.Reload()
    assert [e.step for e in board.Scalars("train/loss")] == [1, 2, 3, 4]
    assert board.Scalars("train/loss")[0].value == pytest.approx(lines(tmp_path / "run")[0]["loss"])
    assert board.Scalars("validation/loss")[0].step == 4
    assert {"train/grad_norm", "train/lr", "train/tokens_per_second", "train/memory_gib"} <= set(
        board.Tags()["scalars"]
    )
    assert "recipe/text_summary" in board.Tags()["tensors"]
    assert "_hparams_/session_start_info" in board.summary_metadata
    assert len(list((tmp_path / "run" / "tensorboard").iterdir())) == 1  # one writer


def test_every_field_of_a_recipe_is_an_option(text, tmp_path):
    args = ["--mesh.dp-replicate", "2", "--parallel.data", "zero1", "--data.micro-batch", "2", "--steps", "7"]
    recipe = command_line(recipe_of(text, tmp_path), args)
    assert (recipe.mesh.dp_replicate, recipe.parallel.data, recipe.data.micro_batch, recipe.steps) == (2, "zero1", 2, 7)
    assert recipe.model == MODEL


def test_only_the_newest_checkpoints_are_kept(ranks, text, tmp_path):
    recipe = recipe_of(text, tmp_path / "run", 9, checkpoint=CheckpointConfig(every=2, keep=2))
    ranks(2, train, recipe)
    kept = sorted(p for p in (tmp_path / "run" / "checkpoints").iterdir() if p.is_dir())
    assert [p.name for p in kept] == ["step-00000008", "step-00000009"]
    assert all(map(is_complete, kept))
