"""What people type: scripts under torchrun, signals, kills."""

import json
import math
import os
import random
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch

from composable.checkpoint.folder import is_complete, latest, steps
from composable.checkpoint.listing import list_folder
from composable.checkpoint.load import load
from composable.data.token_writer import TokenWriter
from composable.observe.metrics import read_metrics
from composable.recipe import command_line, recipe_of

ROOT = Path(__file__).parent.parent
TINY = [
    *("--model.dim", "16", "--model.layers", "2", "--model.heads", "2", "--model.kv-heads", "1"),
    *("--model.head-dim", "8", "--model.ffn", "24", "--data.seq-len", "16", "--data.global-batch", "8"),
    *("--data.micro-batch", "1", "--validation.every", "0", "--schedule.warmup", "4"),
]


LAUNCH = ("--nnodes", "--nproc-per-node")


def commands_of_the_readme() -> list[str]:
    """Those that start a recipe, or its verification, with options that the recipe's own `RECIPE` takes."""
    text = (ROOT / "README.md").read_text().replace("\\\n", " ")
    lines = [line.partition("#")[0].strip() for line in text.splitlines()]
    found = [line for line in lines if line.startswith(("torchrun", "python")) and " recipes/" in line]
    return [line for line in found if not re.search(r"by_hand|bench_step|tools/plan|--help|\.\.\.$", line)]


@pytest.mark.parametrize("command", commands_of_the_readme())
def test_the_options_of_every_command_of_the_readme_go_together(command):
    words = shlex.split(command)
    counts = [int(words[words.index(name) + 1]) for name in (*LAUNCH, "--world") if name in words]
    place = next(i for i, word in enumerate(words) if word.startswith("recipes/"))
    rest = words[place + 1 :]
    for name in ("--world", "--rank", "--memory") if "tools/dryrun.py" in words else ():
        del rest[rest.index(name) : rest.index(name) + 2]
    command_line(recipe_of(ROOT / words[place]), rest).resolve(math.prod(counts))


def test_the_readme_has_commands():
    assert len(commands_of_the_readme()) >= 7


@pytest.fixture
def text(tmp_path):
    with TokenWriter(tmp_path / "text.safetensors", 256) as writer:
        writer.add(np.random.default_rng(7).integers(0, 256, 20000).astype(np.uint8))
    return str(tmp_path / "text.safetensors")


def command(script: str, ranks: int, *args: str) -> list[str]:
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    return [*launch, str(ROOT / script), *args]


def start(script: str, ranks: int, *args: str) -> subprocess.Popen:
    return subprocess.Popen(
        command(script, ranks, *args),
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def run(script: str, ranks: int, *args: str, code: int = 0) -> str:
    process = start(script, ranks, *args)
    output, _ = process.communicate(timeout=200)
    assert (process.returncode != 0) == (code != 0), output
    return output


def losses(out: Path) -> list[tuple[int, float, float]]:
    return [(line["step"], line["loss"], line["grad_norm"]) for line in read_metrics(out / "metrics.jsonl")]


def ranks_of(process: subprocess.Popen) -> list[psutil.Process]:
    return [child for child in psutil.Process(process.pid).children() if "dense_debug.py" in " ".join(child.cmdline())]


def wait_for_step(out: Path, step: int, process: subprocess.Popen) -> None:
    deadline = time.monotonic() + 100
    while time.monotonic() < deadline:
        lines = losses(out) if (out / "metrics.jsonl").exists() else []
        if lines and lines[-1][0] >= step:
            return
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.02)
    raise AssertionError(f"step {step} never came")


def test_the_loop_written_out_gives_the_losses_of_the_recipe(text, tmp_path):
    args = [*TINY, "--data.path", text, "--steps", "6", "--dtype", "float64"]
    run("recipes/dense_debug.py", 2, *args, "--out", str(tmp_path / "recipe"))
    output = run("recipes/by_hand.py", 2, *args, "--out", str(tmp_path / "hand"))
    found = re.findall(r"step (\d+) loss (\S+) grad_norm (\S+)", output)
    by_hand = [(int(step), float(loss), float(norm)) for step, loss, norm in found]
    assert len(by_hand) == 6
    for ours, theirs in zip(by_hand, losses(tmp_path / "recipe"), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-12)
    assert len((ROOT / "recipes/by_hand.py").read_text().splitlines()) < 80


def test_bad_input_ends_every_rank_with_one_clear_line_and_no_run_folder(text, tmp_path):
    out = tmp_path / "run"
    output = run(
        "recipes/dense_debug.py", 2, *TINY, "--data.path", text, "--data.global-batch", "9", "--out", str(out), code=1
    )
    for rank in (0, 1):
        assert re.search(rf"\[rank {rank}\] error: data.global_batch 9 is not a multiple of 2", output), output
    assert not out.exists()


@pytest.mark.parametrize("workers", [pytest.param("0", marks=pytest.mark.slow), "2"])
def test_a_terminated_job_saves_and_goes_on_where_it_was(workers, text, tmp_path):
    args = [*TINY, "--data.path", text, "--steps", "60", "--checkpoint.every", "0", "--data.workers", workers]
    run("recipes/dense_debug.py", 2, *args, "--out", str(tmp_path / "straight"))
    broken = [*args, "--out", str(tmp_path / "broken")]
    process = start("recipes/dense_debug.py", 2, *broken)
    wait_for_step(tmp_path / "broken", 5, process)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=60)
    if latest(tmp_path / "broken" / "checkpoints").name != "step-00000060":
        assert "stopped by a signal after step" in output
    run("recipes/dense_debug.py", 2, *broken)
    assert losses(tmp_path / "broken") == losses(tmp_path / "straight")


def test_an_exception_in_one_stage_ends_all_ranks_with_its_message(text, tmp_path):
    script = tmp_path / "broken.py"
    script.write_text(
        "import runpy, sys\n"
        "from composable.models import feedforward\n"
        "whole, calls = feedforward.SwiGLU.forward, []\n"
        "def forward(self, x):\n"
        "    import torch.distributed as dist\n"
        "    calls.append(1)\n"
        "    if dist.get_rank() == 2 and len(calls) > 20:\n"
        "        raise RuntimeError('this stage is broken on purpose')\n"
        "    return whole(self, x)\n"
        "feedforward.SwiGLU.forward = forward\n"
        f"sys.argv[0] = {str(ROOT / 'recipes/dense_debug.py')!r}\n"
        "runpy.run_path(sys.argv[0], run_name='__main__')\n"
    )
    args = [
        *TINY,
        "--data.path",
        text,
        "--mesh.pp",
        "4",
        "--model.layers",
        "4",
        "--steps",
        "50",
        "--out",
        str(tmp_path / "run"),
    ]
    began = time.monotonic()
    output = run(str(script), 4, *args, code=1)
    assert time.monotonic() - began < 60  # most of it is starting Python
    assert "pipeline stage 2 of 4 on rank 2: RuntimeError: this stage is broken on purpose" in output


def test_one_dead_rank_ends_the_job_within_seconds(text, tmp_path):
    out = tmp_path / "run"
    process = start("recipes/dense_debug.py", 2, *TINY, "--data.path", text, "--steps", "100000", "--out", str(out))
    wait_for_step(out, 3, process)
    children = ranks_of(process)
    assert len(children) == 2
    children[1].kill()
    began = time.monotonic()
    process.communicate(timeout=60)
    assert process.returncode != 0
    assert time.monotonic() - began < 20
    assert not any(child.is_running() and child.status() != psutil.STATUS_ZOMBIE for child in children)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("writer", ["shared", "per_rank"])
@pytest.mark.parametrize("how", ["no-asynchronous", "asynchronous"])
def test_killed_at_25_moments_around_saving_every_restart_ends_right(how, writer, text, tmp_path):
    draw = random.Random(20)
    base = [*TINY, "--data.path", text, "--checkpoint.every", "1", "--checkpoint.keep", "2"]
    base += [f"--checkpoint.{how}", "--checkpoint.writer", writer]
    out, reached, kills = tmp_path / "broken", 0, 0
    while kills < 25:
        # A run whose next steps are saved one by one is killed somewhere within them.
        written = losses(out)[-1][0] if (out / "metrics.jsonl").exists() else 0
        args = [*base, "--steps", "100000", "--schedule.kind", "constant", "--out", str(out)]
        process = start("recipes/dense_debug.py", 2, *args)
        wait_for_step(out, written + 1 + draw.randrange(4), process)
        time.sleep(draw.random() * 0.15)
        children = ranks_of(process)
        children[draw.randrange(2)].kill()
        process.communicate(timeout=60)
        kills += 1
        assert not any(child.is_running() and child.status() != psutil.STATUS_ZOMBIE for child in children)
        newest = latest(out / "checkpoints")
        assert newest is not None or reached == 0
        if newest is None:
            continue
        for step, folder in steps(out / "checkpoints"):
            assert is_complete(folder) or step != int(newest.name[-8:])
        at = json.loads((newest / "train_state.json").read_text())["step"]
        assert at >= reached, "a complete checkpoint was lost"
        reached = at
        load(newest, shapes(newest, ""), shapes(newest, "optimizer"))  # whole, by its checksums
    last = reached + 3
    args = [*base, "--steps", str(last), "--schedule.kind", "constant"]
    run("recipes/dense_debug.py", 2, *args, "--out", str(out))
    run("recipes/dense_debug.py", 2, *args, "--out", str(tmp_path / "straight"))
    assert losses(out) == losses(tmp_path / "straight")


def shapes(folder: Path, section: str) -> dict:
    """Empty tensors of all that a checkpoint's section holds."""
    stored = list_folder(folder).tensors[section or "weights"]
    return {name: torch.empty(tensor.spec.shape, dtype=tensor.spec.dtype) for name, tensor in stored.items()}


@pytest.mark.slow
@pytest.mark.parametrize("how", ["no-asynchronous", "asynchronous"])
def test_a_full_disk_ends_the_run_with_its_reason_and_the_last_checkpoint_stays(how, text, tmp_path):
    out, small = tmp_path / "run", tmp_path / "small"
    small.mkdir()
    args = [*TINY, "--data.path", text, "--checkpoint.every", "1", "--checkpoint.keep", "0", f"--checkpoint.{how}"]
    args += ["--out", str(out), "--checkpoint.folder", str(small)]
    launch = shlex.join(command("recipes/dense_debug.py", 2, *args, "--steps", "100"))
    keep = tmp_path / "kept"
    inside = f"mount -t tmpfs -o size=900k tmpfs {small} && {{ {launch}; code=$?; cp -r {small} {keep}; exit $code; }}"
    done = subprocess.run(
        ["unshare", "--map-root-user", "--mount", "sh", "-c", inside],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode != 0
    assert "No space left" in done.stderr or "the disk has" in done.stderr
    newest = latest(keep)
    assert newest is not None
    load(newest, shapes(newest, ""), shapes(newest, "optimizer"))
    at = int(newest.name[-8:])
    assert 0 < at < 100
    shutil.copytree(keep, tmp_path / "roomy")
    args[-1] = str(tmp_path / "roomy")
    run("recipes/dense_debug.py", 2, *args, "--steps", str(at + 2))
    assert latest(tmp_path / "roomy").name == f"step-{at + 2:08d}"
