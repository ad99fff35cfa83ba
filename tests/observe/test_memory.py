import json

import torch
from torch import nn

from composable.observe.memory import memory_snapshot, peak_memory_gib, record_memory, tensor_table

CPU = torch.device("cpu")


def test_the_peak_on_a_cpu_grows_with_what_is_held_and_stays():
    before = peak_memory_gib(CPU)
    assert 0.01 < before < 100
    held = torch.ones(2**28, dtype=torch.uint8)  # a quarter of a GiB
    grown = peak_memory_gib(CPU)
    del held
    assert before <= grown == peak_memory_gib(CPU)
    assert grown >= 0.25


def rows(table, shape):
    return [(row["dtype"], row["count"], row["bytes"]) for row in table["tensors"] if list(row["shape"]) == shape]


def test_the_table_counts_live_tensors_by_shape_and_dtype():
    before = tensor_table()["bytes"]
    held = [torch.zeros(3, 1217) for _ in range(2)] + [nn.Parameter(torch.zeros(3, 1217, dtype=torch.float64))]
    view = held[0][:1]
    table = tensor_table()
    assert sorted(rows(table, [3, 1217])) == [("float32", 2, 2 * 3651 * 4), ("float64", 1, 3651 * 8)]
    assert rows(table, [1, 1217]) == [("float32", 1, 1217 * 4)]
    assert table["bytes"] - before == 3651 * 16  # the view holds nothing of its own
    assert [row["bytes"] for row in table["tensors"]] == sorted(
        (row["bytes"] for row in table["tensors"]), reverse=True
    )
    del held, view
    assert rows(tensor_table(), [3, 1217]) == []


def test_a_snapshot_on_a_cpu_is_a_json_table(tmp_path):
    record_memory(CPU)
    held = torch.zeros(2, 1319)
    memory_snapshot(tmp_path / "deep" / "memory.json", CPU)
    assert rows(json.loads((tmp_path / "deep" / "memory.json").read_text()), [2, 1319]) == [("float32", 1, held.nbytes)]
