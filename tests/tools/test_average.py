"""The mean of checkpoints is that of their values in float64, as a folder that others open."""

import json

import pytest
import safetensors.torch
import torch
import transformers

from composable.checkpoint import save
from composable.checkpoint.average import plan_mean, write_mean


@pytest.fixture
def average(run_tool):
    return run_tool("average")


def weights(seed, dtype=torch.bfloat16):
    g = torch.Generator().manual_seed(seed)
    return {
        "w": torch.randn(7, 5, generator=g).to(dtype),
        "scalar": torch.randn((), generator=g, dtype=torch.float64),
        "empty": torch.empty(0, 3),
        "ids": torch.arange(4),
    }


def sources(tmp_path, *more):
    made = []
    for seed, found in enumerate([weights(1), weights(2, torch.float32), *more]):
        files = {"config.json": "{}", "tokenizer.json": f"[{seed}]", "train_state.json": "{}"}
        save(tmp_path / f"s{seed}", found, {"w.m": torch.zeros(2)}, files)
        made.append(tmp_path / f"s{seed}")
    return made


@pytest.mark.parametrize("chunk", [48, 48 * 6, 1 << 20])
@pytest.mark.parametrize("given", [None, [0.25, 0.5]])
def test_it_is_the_mean_in_float64_in_the_first_ones_dtype_to_the_bit(tmp_path, chunk, given):
    write_mean(plan_mean(sources(tmp_path), given, 10**9), tmp_path / "mean", chunk)
    found = safetensors.torch.load_file(tmp_path / "mean" / "model.safetensors")
    a, b = weights(1), weights(2, torch.float32)
    x, y = given or (1.0, 1.0)
    for name in ("w", "scalar", "empty"):
        assert torch.equal(found[name], ((a[name].double() * x + b[name].double() * y) / (x + y)).to(a[name].dtype))
    assert torch.equal(found["ids"], a["ids"])
    assert found["w"].dtype == torch.bfloat16


def test_the_folder_is_plain_and_has_the_first_ones_configuration_and_tokenizer(average, tmp_path):
    a, b = sources(tmp_path)
    status, out, _ = average(tmp_path / "mean", a, b, "--weights", "0.5,0.5", "--max-file-size", "75")
    assert status == 0
    assert out == [f"{tmp_path}/mean: the mean of 2 checkpoints, {out[0].split(', ')[1]}"]
    names = {path.name for path in (tmp_path / "mean").iterdir()}
    shards = {f"model-{i:05d}-of-00002.safetensors" for i in (1, 2)}
    assert names == shards | {"config.json", "tokenizer.json", "model.safetensors.index.json"}
    assert (tmp_path / "mean" / "tokenizer.json").read_text() == "[0]"
    index = json.loads((tmp_path / "mean" / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == shards


def test_transformers_opens_the_mean_of_published_folders(average, tmp_path):
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2
    )
    models = [transformers.LlamaForCausalLM(config) for _ in range(2)]
    for number, model in enumerate(models):
        model.save_pretrained(tmp_path / str(number))
    assert average(tmp_path / "mean", tmp_path / "0", tmp_path / "1")[0] == 0
    opened = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "mean").state_dict()
    for name, (a, b) in {n: (t, models[1].state_dict()[n]) for n, t in models[0].state_dict().items()}.items():
        assert torch.equal(opened[name], ((a.double() + b.double()) / 2).float())


def test_a_plan_tells_the_weights_and_the_files_and_writes_nothing(average, tmp_path):
    a, b = sources(tmp_path)
    status, out, _ = average(tmp_path / "mean", a, b, "--weights", "1,3", "--plan")
    assert status == 0
    assert out[:2] == [f"read   {a}: 110 bytes of tensors, weight 1", f"read   {b}: 180 bytes of tensors, weight 3"]
    assert out[2].startswith(f"write  {tmp_path}/mean/model.safetensors  ")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["s0", "s1"]


def test_bad_input_is_one_line_and_nothing_is_written(average, tmp_path):
    other = weights(3) | {"new": torch.ones(1), "w": torch.zeros(5, 7)}
    del other["ids"]
    a, b, foreign, ids, quantised = sources(
        tmp_path,
        other,
        weights(4) | {"ids": torch.ones(4, dtype=torch.int64)},
        weights(5) | {"w": torch.ones(7, 5).int()},
    )
    broken = tmp_path / "s1" / "model.safetensors"
    cases = [
        ((a,), "average is of two or more"),
        ((a, b, "--weights", "1"), "1 weights for 2"),
        ((a, b, "--weights", "1,x"), "write numbers"),
        ((a, b, "--weights", "1,-1"), "not negative"),
        ((a, b, "--weights", "0,0"), "above zero"),
        ((a, b, "--weights", "1,nan"), "not negative"),
        ((a, foreign), "ids is only in"),
        ((a, foreign), "new is only in"),
        ((a, foreign), "w is [7, 5] in"),
        ((a, ids), "ids is of torch.int64, which has no mean, and not the same"),
        ((a, quantised), "w is torch.int32 in"),
        ((a, tmp_path / "none"), "no folder"),
        ((a, b, "--max-file-size", "0"), "no size"),
    ]
    for arguments, text in cases:
        status, out, err = average(tmp_path / "mean", *arguments)
        assert (status, out, len(err)) == (2, [], 1), arguments
        assert text in err[0], err
    content = bytearray(broken.read_bytes())
    content[-1] ^= 1
    broken.write_bytes(content)
    status, _, err = average(tmp_path / "mean", a, b)
    assert status == 2
    assert f"{broken} has bytes that were changed (tensors: w)" in err[0]
    assert average(tmp_path / "mean", a, b, "--no-verify")[0] == 0
    status, _, err = average(tmp_path / "mean", a, b)
    assert status == 2
    assert "no empty folder" in err[0]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mean", "s0", "s1", "s2", "s3", "s4"]
