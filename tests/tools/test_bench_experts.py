"""What a layer with experts is compared with are its own rows, weights and products, and wrong results are seen."""

import dataclasses
import functools
import json
import sys

import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

from tests.test_commands import ROOT

CPU = torch.device("cpu")


@pytest.fixture
def bench(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    import bench_experts

    return bench_experts


def test_one_thread_of_a_cpu_is_measured_by_a_command(bench, monkeypatch, capsys):
    threads = []
    monkeypatch.setattr(torch, "set_num_threads", threads.append)
    sizes = ["--tokens", "64", "--dim", "16", "--ffn", "24", "--experts", "4", "--rounds", "2", "--warmup", "1"]
    monkeypatch.setattr(sys, "argv", ["bench_experts.py", *sizes])
    bench.main()
    facts = json.loads(capsys.readouterr().out.removeprefix("BENCH "))
    assert threads == [1]
    assert facts["name"] == "experts 4 top-2 all_to_all eager"
    assert facts["to_products"] == pytest.approx(facts["layer_ms"] / facts["products_ms"])
    assert facts["tflops"] == pytest.approx(18 * 128 * 16 * 24 / facts["layer_ms"] / 1e9)


def test_two_layers_are_measured_in_all_four_ways_compiled_ones_last(bench):
    for tiny in (False, True):
        cases = list(bench.cases(tiny))
        assert len({case.name for case in cases}) == 8
        assert [case.compile for case in cases] == [False] * 4 + [True] * 4


@pytest.mark.parametrize("dispatcher", ["all_to_all", "static"])
def test_the_rows_are_as_many_as_the_layer_executes(bench, dispatcher):
    torch.manual_seed(0)
    case = bench.Case(8, 2, 16, 24, 64, dispatcher)
    rows = bench.rows_of(case.layer(CPU, torch.float32), torch.randn(1, 64, 16))
    assert len(rows.x) == len(rows.for_hidden) == sum(rows.counts) == rows.ends[-1]
    if dispatcher == "static":
        assert max(rows.counts) == 20  # 1.25 x 64 x 2 / 8
    else:
        assert sum(rows.counts) == 128


def test_the_products_alone_are_nine_for_each_row_one_by_one_or_grouped(bench, monkeypatch):
    torch.manual_seed(0)
    case = bench.Case(4, 2, 16, 24, 32)
    rows = bench.rows_of(case.layer(CPU, torch.float64), torch.randn(1, 32, 16, dtype=torch.float64))
    with FlopCounterMode(display=False) as counter:
        bench.loop_products(rows)
    assert counter.get_total_flops() == 18 * 64 * 16 * 24

    half = bench.rows_of(case.layer(CPU, torch.bfloat16), torch.randn(1, 32, 16).bfloat16())
    made, grouped = [], F.grouped_mm

    def kept(a, b, *, offs):
        made.append(grouped(a, b, offs=offs))
        return made[-1]

    monkeypatch.setattr(F, "grouped_mm", kept)
    bench.grouped_products(half)
    assert sorted(tuple(out.shape) for out in made) == [
        (4, 16, 24),
        (4, 24, 16),
        (4, 24, 16),
        (64, 16),
        (64, 16),
        (64, 16),
        (64, 24),
        (64, 24),
        (64, 24),
    ]


def test_sides_take_turns_and_medians_are_of_one_call(bench, monkeypatch):
    now, calls = [0.0], []

    def side(name, seconds):
        calls.append(name)
        now[0] += seconds.pop(0)

    monkeypatch.setattr(bench.time, "perf_counter", lambda: now[0])
    sides = {
        "a": functools.partial(side, "a", [1.0, 1.0, 9.0, 9.0, 2.0, 2.0]),
        "b": functools.partial(side, "b", [5.0] * 6),
    }
    assert bench.milliseconds(sides, CPU, rounds=3, repeat=2) == {"a": 2000.0, "b": 5000.0}
    assert "".join(calls) == "aabb" * 3


@pytest.mark.parametrize("dispatcher", ["all_to_all", "static"])
def test_results_are_compared_eager_ones_with_float32_and_compiled_ones_with_eager_ones(bench, monkeypatch, dispatcher):
    case = bench.Case(8, 2, 32, 48, 64, dispatcher)
    assert 1e-4 < bench.deviation(case, CPU, torch.bfloat16) < 2e-2

    # A compiler that gives back what it gets, and one that loses a factor.
    compiled = dataclasses.replace(case, compile=True)
    forward = bench.MoE.forward
    monkeypatch.setattr(bench.MoE, "compile", lambda self: None)
    assert bench.deviation(compiled, CPU, torch.bfloat16) == 0
    monkeypatch.setattr(bench.MoE, "compile", lambda self: setattr(self, "forward", lambda x: 1.5 * forward(self, x)))
    assert bench.deviation(compiled, CPU, torch.bfloat16) == pytest.approx(0.5, rel=1e-2)
