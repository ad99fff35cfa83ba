"""What is shown of a checkpoint is what is in it; damage is found and named; differences are counted exactly."""

import json
import math
import shutil

import pytest
import torch
import transformers
from fsspec.implementations.memory import MemoryFileSystem

from composable.checkpoint import save
from composable.checkpoint.budget import BUFFERS, GROWTH, chunk_bytes, parse_size, size_text
from composable.checkpoint.compare import statistics
from composable.checkpoint.listing import list_folder
from composable.checkpoint.transfer import THREADS
from composable.checkpoint.tree import fold
from tests.checkpoint.test_save_load import many_kinds

STATE = {
    "step": 1200,
    "steps": 2000,
    "samples": 38400,
    "tokens": 9830400,
    "valid_tokens": 9830000,
    "data": {"fingerprint": "abc"},
    "layout": {"world": 8, "dp_shard": 2, "tp": 4, "pp": 1, "data": "zero3"},
    "recipe": {"checkpoint": {"writer": "shared"}},
    "versions": {"composable": "0.1.0"},
}


@pytest.fixture
def show(run_tool):
    return run_tool("show")


def layers(count=3, dim=4):
    weights = {"model.embed_tokens.weight": torch.randn(10, dim), "model.norm.weight": torch.ones(dim)}
    for layer in range(count):
        weights |= {f"model.layers.{layer}.q.weight": torch.randn(dim, dim).bfloat16() + layer}
        weights |= {f"model.layers.{layer}.experts.{e}.w.weight": torch.randn(2, dim) for e in range(2)}
    return weights


def saved(folder, weights=None, **options):
    weights = weights or layers()
    moments = {f"{name}.exp_avg": torch.zeros(t.shape) for name, t in weights.items() if "q.weight" in name}
    files = {"config.json": '{"model_type": "llama"}', "train_state.json": json.dumps(STATE)}
    save(folder, weights, moments, files, **options)
    return folder


def flip(path, text, by=0):
    """Change the byte after the tensor data's first occurrence of `text` bytes."""
    content = bytearray(path.read_bytes())
    content[content.index(text) + by] ^= 1
    path.write_bytes(content)


def test_layers_and_experts_that_are_alike_stand_once_with_totals_and_the_state_of_the_run(show, tmp_path):
    status, lines, _ = show(saved(tmp_path / "c"))
    assert status == 0
    text = [" ".join(line.split()) for line in lines]
    assert text[1:6] == [
        "kind a complete checkpoint",
        "model llama",
        "step 1,200 of 2,000",
        "data 38,400 samples consumed, 9,830,400 tokens, 9,830,000 with a label; data abc",
        "layout 8 ranks: dp_shard 2 tp 4 data zero3",
    ]
    assert text[8:18] == [
        "weights: 11 tensors, 140 values, 464 bytes (464 B), 1 file",
        "model.embed_tokens.weight [10, 4] F32 160 model.safetensors",
        "model.layers.0..2.",
        "experts.0..1.",
        "w.weight 6 x [2, 4] F32 192 model.safetensors",
        "q.weight 3 x [4, 4] BF16 96 model.safetensors",
        "model.norm.weight [4] F32 16 model.safetensors",
        "",
        "optimizer: 3 tensors, 48 values, 192 bytes (192 B), 1 file",
        "model.layers.0..2.",
    ]


def test_what_is_not_alike_or_has_a_gap_is_not_folded(tmp_path):
    names = {f"l.{i}.w": torch.zeros(2) for i in (0, 1, 3, 9, 10, 11)}
    names |= {"l.10.w": torch.zeros(3), "l": torch.zeros(1), "l.9": torch.zeros(())}
    save(tmp_path / "c", names, {}, {})
    rows = fold(list_folder(tmp_path / "c").tensors["weights"])
    assert [(row.depth, row.name, len(row.tensors)) for row in rows] == [
        (0, "l", 1),
        *((0, "l.0..1.", 0), (1, "w", 2)),
        *((0, "l.3.", 0), (1, "w", 1)),
        *((0, "l.9", 1), (0, "l.9.", 0), (1, "w", 1)),
        *((0, "l.10.", 0), (1, "w", 1)),
        *((0, "l.11.", 0), (1, "w", 1)),
    ]


def test_a_published_folder_is_shown_and_a_folder_of_a_store(show, tmp_path):
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=3, num_attention_heads=2
    )
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "hf", max_shard_size="10KB")
    status, lines, _ = show(tmp_path / "hf")
    assert status == 0
    assert any(line.split()[:1] == ["model.layers.0..2."] for line in lines)
    assert show(tmp_path / "hf", "--verify") == (
        0,
        [f"{tmp_path}/hf: 30 tensors, headers and sizes agree; there are no checksums (no manifest.json)"],
        [],
    )
    try:
        saved("memory://run/c", writer="per_rank")
        assert show("memory://run/c")[1][0] == "memory:///run/c"
        assert show("memory://run/c", "--verify")[0] == 0
        assert show("memory://run/c", "--tensor", "model.norm.weight")[0] == 0
    finally:
        MemoryFileSystem.store.clear()


def test_every_broken_file_is_named_with_its_tensors_and_no_other(show, tmp_path):
    folder = saved(tmp_path / "c", max_file_size=100)
    assert show(folder, "--verify") == (0, [f"{folder}: 12 files and 14 checksums of tensors agree"], [])
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    changed, short = index["model.norm.weight"], index["model.embed_tokens.weight"]
    flip(folder / changed, torch.ones(4).numpy().tobytes())
    (folder / short).write_bytes((folder / short).read_bytes()[:-1])
    flip(folder / "config.json", b"llama")
    header = folder / index["model.layers.2.q.weight"]
    flip(header, b"[4,4]", 1)
    (folder / "optimizer/optimizer-00002-of-00003.safetensors").unlink()
    status, lines, _ = show(folder, "--verify")
    assert status == 1
    size = (folder / short).stat().st_size
    held = sorted(name for name, file in index.items() if file == header.name)
    assert lines == [
        f"BROKEN {folder}/config.json was changed",
        *sorted_blocks(
            [f"BROKEN {folder}/{changed} has bytes that were changed", "    model.norm.weight"],
            [f"BROKEN {folder}/{short} has {size} bytes, not {size + 1}", "    model.embed_tokens.weight"],
            [f"BROKEN {header} has a header that was changed", *(f"    {name}" for name in held)],
        ),
        f"BROKEN {folder}/optimizer/optimizer-00002-of-00003.safetensors is missing",
        "    model.layers.1.q.weight.exp_avg",
    ]


def sorted_blocks(*blocks):
    return [line for block in sorted(blocks) for line in block]


def test_a_checksum_of_what_no_file_holds_is_found(show, tmp_path):
    folder = saved(tmp_path / "c")
    path = folder / "manifest.json"
    document = json.loads(path.read_text())
    document["checksums"]["weights"]["ghost"] = document["checksums"]["weights"]["model.norm.weight"]
    path.write_text(json.dumps(document))
    assert show(folder, "--verify")[:2] == (
        1,
        [f"BROKEN {path} has checksums of what no file holds", "    ghost"],
    )


@pytest.mark.parametrize("chunk", [64, 64 * 7, 1 << 20])
def test_statistics_in_chunks_are_those_of_the_whole(tmp_path, chunk):
    torch.manual_seed(1)
    values = torch.randn(13, 11).bfloat16() * 50 + 1000
    values[0, 0], values[3, 3], values[5, 5], values[12, 10] = math.nan, math.inf, -math.inf, 0.0
    save(tmp_path / "c", {"w": values, "e": torch.empty(0, 3), "i": torch.tensor([2**62, -1])}, {}, {})
    stored = list_folder(tmp_path / "c").tensors["weights"]
    found = statistics(tmp_path / "c", stored["w"], chunk)
    finite = values.double()[values.isfinite()]
    assert (found.values, found.zeros, found.nan, found.infinite) == (143, 1, 1, 2)
    assert (found.minimum, found.maximum) == (0.0, float(finite.max()))
    assert found.mean == pytest.approx(float(finite.mean()), rel=1e-13)
    assert found.std == pytest.approx(float(finite.std(correction=0)), rel=1e-13)
    assert found.norm == pytest.approx(float(finite.norm()), rel=1e-13)
    assert math.isnan(found.first[0])
    assert found.first[1:] == tuple(values.view(-1)[1:8].tolist())
    assert statistics(tmp_path / "c", stored["i"], chunk).first == (2**62, -1)
    empty = statistics(tmp_path / "c", stored["e"], chunk)
    assert (empty.values, empty.first) == (0, ())
    assert math.isnan(empty.mean)


def test_every_kind_of_tensor_has_statistics_and_equals_itself(show, tmp_path):
    save(tmp_path / "a", many_kinds(), {}, {})
    save(tmp_path / "b", many_kinds(), {}, {}, writer="per_rank", max_file_size=40)
    for name in many_kinds():
        assert show(tmp_path / "a", "--tensor", name)[0] == 0
    status, lines, _ = show(tmp_path / "a", "--diff", tmp_path / "b")
    assert status == 0
    assert lines[-1] == f"{len(many_kinds())} tensors are equal, 0 differ"


def test_differences_are_told_tensor_by_tensor(show, tmp_path):
    a = {"same": torch.ones(3), "far": torch.tensor([1.0, 2.0, -4.0]), "nan": torch.tensor([math.nan, 1.0])}
    a |= {"zero": torch.tensor([0.0, 1.0]), "left": torch.ones(1), "shape": torch.ones(2, 2), "cast": torch.ones(2)}
    b = a | {"far": torch.tensor([1.0, 2.5, -5.0]), "zero": torch.tensor([-0.0, 1.0]), "right": torch.ones(1)}
    b |= {"shape": torch.ones(4), "cast": torch.ones(2).bfloat16() * 2, "nan": torch.tensor([1.0, 1.0])}
    del b["left"]
    for name, weights in (("a", a), ("b", b)):
        save(tmp_path / name, weights, {}, {})
    status, lines, _ = show(tmp_path / "a", "--diff", tmp_path / "b")
    assert status == 1
    assert sorted(lines) == sorted(
        [
            "same: equal",
            "far: other values, difference 1.000e+00, relative 2.000e-01",
            "nan: other values, difference inf, relative inf",
            "zero: equal values in other bits (sign of zero, kind of NaN), difference 0.000e+00, relative 0.000e+00",
            "cast: F32 and BF16, difference 1.000e+00, relative 5.000e-01",
            "shape: [2, 2] and [4]",
            f"left: only in {tmp_path}/a",
            f"right: only in {tmp_path}/b",
            "1 tensors are equal, 7 differ",
        ]
    )


def test_a_bad_question_is_one_line_and_exit_code_2(show, tmp_path):
    folder = saved(tmp_path / "c")
    (tmp_path / "empty").mkdir()
    begun = shutil.copytree(folder, tmp_path / "begun")
    (begun / "manifest.json").rename(begun / "manifest.json.partial")
    plain = shutil.copytree(folder, tmp_path / "plain", ignore=shutil.ignore_patterns("manifest.json"))
    (plain / "config.json").write_text("{")
    cases = [
        ((tmp_path / "none",), "no folder"),
        ((tmp_path / "none", "--verify"), "no folder"),
        ((tmp_path / "empty",), "no safetensors"),
        ((begun,), "incomplete"),
        ((begun, "--verify"), "incomplete"),
        ((plain,), "config.json is no JSON"),
        ((folder, "--tensor", "q.weight"), "has no tensor q.weight; it has model.layers.0.q.weight"),
        ((folder, "--diff", tmp_path / "none"), "no folder"),
        ((folder, "--diff", folder, "--verify"), "ask one at a time"),
        (("nosuch://x/y",), "nosuch"),
    ]
    for arguments, text in cases:
        status, out, err = show(*arguments)
        assert (status, out, len(err)) == (2, [], 1), arguments
        assert err[0].startswith("error: ")
        assert text in err[0]


@pytest.mark.parametrize(
    ("text", "size"), [("2GB", 2 * 10**9), ("512MiB", 2**29), ("1.5kb", 1500), ("7", 7), (" 3 TiB ", 3 * 2**40)]
)
def test_sizes_are_read_as_people_write_them(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "0", "GB", "-1GB", "1.2.3MB", "5XB", "nan", "1e9"])
def test_what_is_no_size_is_refused(text):
    with pytest.raises(ValueError, match="no size"):
        parse_size(text)


def test_memory_that_does_not_suffice_is_refused_with_what_does():
    with pytest.raises(ValueError, match=r"does not suffice.*write --memory (\d+)MB or more") as caught:
        chunk_bytes(1 << 20)
    least = int(str(caught.value).split("--memory ")[1].split("MB")[0]) * 10**6
    room = least + 100 * 2**20
    assert THREADS * (chunk_bytes(room) + BUFFERS) + GROWTH < room
    assert [size_text(n) for n in (999, 1000, 1_349_888, 5 * 10**9, 10**12)] == [
        "999 B",
        "1 kB",
        "1.35 MB",
        "5 GB",
        "1 TB",
    ]
