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
    training, experts = facts[1:7], facts[7:]
    assert [fact["name"].split(" ", 1)[1] for fact in training] == ["eager none", "eager selective", "eager full"] * 2
    assert all(fact["tok_s"] > 0 and fact["peak_gib"] > 0 for fact in training)
    layers = ("8 top-2 all_to_all", "8 top-2 static", "64 top-8 all_to_all", "64 top-8 static")
    assert [fact["name"] for fact in experts] == [f"experts {layer} eager" for layer in layers]
    for fact in experts:
        assert fact["to_experts"] == pytest.approx(fact["layer_ms"] / fact["experts_ms"])
        assert fact["to_products"] == pytest.approx(fact["layer_ms"] / fact["products_ms"])
        assert fact["products_ms"] > 0
        assert 0 < fact["deviation"] < 2e-2
    lines = done.stdout.splitlines()
    assert ["case " in lines[-12], "case " in lines[-5]] == [True, True]


def test_both_models_are_measured_in_all_six_ways(bench):
    names = [case.name for case in bench.training_cases(torch.device("cpu"), bench.Options(tiny=True))]
    assert len(set(names)) == 12
    assert {name.split(" ", 1)[1] for name in names} == {
        f"{mode} {how}" for mode in ("eager", "compile") for how in ("none", "selective", "full")
    }


def failing(*_):
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
    device = torch.device("cpu")
    results = bench.measured(bench.training_cases(device, options), options, device, deadline=float("inf"))
    assert [result.note for result in results] == ["out of memory", "failed: RuntimeError: first line", ""]
    assert [result.failed for result in results] == [False, True, False]
    assert capsys.readouterr().out.count("BENCH {") == 3
    lines = bench.table(results, bench.TRAINING).splitlines()
    assert lines[1].endswith("out of memory")
    assert "50.0%" in lines[3]


def test_a_case_is_not_begun_when_the_time_is_over(bench, monkeypatch):
    monkeypatch.setattr(bench, "measure", failing)
    device, options = torch.device("cpu"), bench.Options(tiny=True)
    cases = bench.training_cases(device, options)
    results = bench.measured(cases, options, device, deadline=0.0)
    assert len(results) == 12
    assert all(result.note == "not run: the 4.5 minutes are over" for result in results)


def test_a_layer_with_experts_whose_results_are_wrong_is_a_failure(bench, monkeypatch):
    def wrong(case, device, dtype):
        return float("nan")

    monkeypatch.setattr(bench.bench_experts, "deviation", wrong)
    monkeypatch.setattr(bench.bench_experts, "measure", failing)
    device, options = torch.device("cpu"), bench.Options(tiny=True)
    results = bench.measured(bench.expert_cases(device, options), options, device, deadline=float("inf"))
    assert len(results) == 8
    assert all(result.failed and "results are not right: nan off" in result.note for result in results)


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
