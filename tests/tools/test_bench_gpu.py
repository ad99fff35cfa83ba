"""The benchmark of an accelerator runs anywhere, and one case that fails does not end it."""

import json
import os
import subprocess
import sys

import pytest
import torch

from composable.models.config import DecoderConfig
from composable.models.count import count_parameters
from composable.recipe import recipe_of
from tests.test_commands import ROOT


@pytest.fixture
def bench(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    import bench_gpu

    return bench_gpu


def test_it_runs_at_a_tiny_size_where_there_is_no_accelerator():
    done = subprocess.run(
        [
            sys.executable,
            str(ROOT / "tools/bench_gpu.py"),
            "--tiny",
            "--steps",
            "1",
            "--warmup",
            "1",
            "--only",
            "eager",
        ],
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    facts = [json.loads(line.removeprefix("BENCH ")) for line in done.stdout.splitlines() if line.startswith("BENCH ")]
    assert facts[0]["right"]
    assert facts[0]["loss_error"] > 0
    assert [fact["name"].split(" ", 1)[1] for fact in facts[1:]] == ["eager none", "eager selective", "eager full"] * 2
    assert all(fact["tok_s"] > 0 and fact["peak_gib"] > 0 for fact in facts[1:])
    assert "case " in done.stdout.splitlines()[-7]


def test_both_models_are_measured_in_all_six_ways(bench):
    names = [case.name for case in bench.cases(torch.device("cpu"), True)]
    assert len(set(names)) == 12
    assert {name.split(" ", 1)[1] for name in names} == {
        f"{mode} {how}" for mode in ("eager", "compile") for how in ("none", "selective", "full")
    }


def failing(case, options, device):
    raise AssertionError


def test_a_case_out_of_memory_or_failed_is_reported_and_the_rest_goes_on(bench, monkeypatch, capsys):
    problems = iter([torch.OutOfMemoryError("2 GiB"), RuntimeError("first line\nsecond"), None, None])

    def measure(options, recipe):
        problem = next(problems)
        if problem is not None:
            raise problem
        return {"tok_s": 7.0, "mfu": 0.5}

    monkeypatch.setattr(bench, "measure", measure)
    options = bench.Options(tiny=True, only="dense_1b eager")
    results = bench.measured(options, torch.device("cpu"), deadline=float("inf"))
    assert [result.note for result in results] == ["out of memory", "failed: RuntimeError: first line", ""]
    assert [result.failed for result in results] == [False, True, False]
    assert capsys.readouterr().out.count("BENCH {") == 3
    lines = bench.table(results).splitlines()
    assert lines[1].endswith("out of memory")
    assert "50.0%" in lines[3]


def test_a_case_is_not_begun_when_the_time_is_over(bench, monkeypatch):
    monkeypatch.setattr(bench, "measure", failing)
    results = bench.measured(bench.Options(tiny=True), torch.device("cpu"), deadline=0.0)
    assert len(results) == 12
    assert all(result.note == "not run: the 4.5 minutes are over" for result in results)


def test_the_blocks_that_fit_are_counted_by_their_bytes(bench):
    config = DecoderConfig(vocab_size=10, dim=4, layers=3, heads=1, kv_heads=1, head_dim=4, ffn=8)
    block = 16 * (4 * 16 + 3 * 32 + 8) + 5 * 2 * (20 * 4 + 5 * 8)  # state, and activations of 5 tokens
    rest = 20 * (2 * 40 + 4) + 8 * 40  # embedding, head and last norm; the head's wide gradient
    for blocks in (1, 2):
        bytes_needed = (blocks * block + rest) / 0.9
        assert bench.blocks_that_fit(config, int(bytes_needed) + 2, tokens=5) == blocks
        assert bench.blocks_that_fit(config, int(bytes_needed) - 2, tokens=5) == blocks - 1
    assert bench.blocks_that_fit(config, 1 << 40, tokens=5) == 3
    assert bench.blocks_that_fit(config, 0, tokens=5) == 0


def test_dense_1b_has_the_parameters_of_llama_3_2_1b():
    recipe = recipe_of(ROOT / "recipes/dense_1b.py")
    assert count_parameters(recipe.model).total == 1_235_814_400
    recipe.resolve(8)
