"""Models and checkpoints in the forms of others: every tensor to the bit, and what is bad is refused in one line."""

import io
import json
import os
import pickle
import re
import subprocess
import sys
import threading
import zipfile

import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
import transformers

from composable._torch import read_dcp_metadata
from composable.checkpoint import save
from composable.checkpoint.formats import dcp as dcp_format
from composable.checkpoint.formats import hugging_face, meta, torch_file
from composable.checkpoint.formats.recognise import open_source
from composable.checkpoint.formats.source import narrowed, write
from composable.checkpoint.listing import list_folder
from composable.checkpoint.verify import find_damage
from composable.models.families import to_hugging_face
from tests.checkpoint.test_save_load import bits, many_kinds
from tests.models import test_family_attention, test_family_deepseek, test_family_gpt_oss, test_family_plain
from tests.models.published import made
from tests.test_commands import ROOT
from tests.tools.test_reshard import DENSE, MIXTRAL, SHARED, contents, saved, tensors, weights_of

LLAMA = transformers.LlamaConfig(
    vocab_size=32,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=4,
    max_position_embeddings=64,
)


@pytest.fixture
def convert(run_tool):
    return run_tool("convert")


def llama(**changes):
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**LLAMA.to_dict(), **changes}))


def logits(folder):
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model(torch.arange(12).view(1, 12)).logits


@pytest.mark.parametrize("config", [DENSE, MIXTRAL, SHARED])
def test_a_checkpoint_comes_back_byte_for_byte_through_every_format(convert, tmp_path, config):
    first = saved(tmp_path / "a", config)
    source = first
    for number, to in enumerate(["dcp", "torch", "dcp", "composable", "torch", "composable"]):
        status, out, err = convert(source, tmp_path / str(number), "--to", to)
        assert (status, err) == (0, [])
        assert len(out) == 1  # nothing is left out
        source = tmp_path / str(number)
        if to == "composable":
            assert contents(source) == contents(first)
            assert find_damage(source, list_folder(source).manifest) == []
    assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize("chunk", [1, 24, 1 << 20])
@pytest.mark.parametrize("make", [dcp_format.target, torch_file.target])
def test_every_kind_of_tensor_passes_in_chunks_of_no_more_than_was_said(tmp_path, monkeypatch, chunk, make):
    kinds = many_kinds()
    save(tmp_path / "a", kinds, {"x.m": torch.ones(3), "x.step": torch.tensor(2.0)}, {"config.json": "{}"})
    module = sys.modules["composable.checkpoint.rewrite"]
    read, sizes = module.read_region, []

    def counted(*arguments):
        values = read(*arguments)
        sizes.append((values.nbytes, values.numel()))
        return values

    monkeypatch.setattr(module, "read_region", counted)
    write(make(open_source(str(tmp_path / "a"))), tmp_path / "b", chunk)
    write(hugging_face.target(open_source(str(tmp_path / "b")), 10**9), tmp_path / "c", chunk)
    assert tensors(tmp_path / "c") == {name: bits(tensor) for name, tensor in kinds.items()}
    assert contents(tmp_path / "c") == contents(tmp_path / "a")
    assert all(nbytes <= chunk or numel == 1 for nbytes, numel in sizes)


def test_a_cast_holds_both_forms_in_its_chunk(tmp_path, monkeypatch):
    save(tmp_path / "a", {"w": torch.randn(64, 5, dtype=torch.float64)}, {}, {})
    module = sys.modules["composable.checkpoint.rewrite"]
    read, sizes = module.read_region, []
    monkeypatch.setattr(module, "read_region", lambda *a: sizes.append(read(*a)) or sizes[-1])
    found = narrowed(open_source(str(tmp_path / "a")), torch.bfloat16)
    write(hugging_face.target(found, 10**9), tmp_path / "b", 400)
    assert max(values.nbytes + values.numel() * 2 for values in sizes) <= 400


def test_torchs_own_libraries_load_what_was_written_under_the_documented_names(convert, tmp_path):
    first, weights = saved(tmp_path / "a", SHARED), weights_of(SHARED)
    moments = safetensors.torch.load_file(first / "optimizer" / "optimizer.safetensors")
    assert convert(first, tmp_path / "d", "--to", "dcp")[0] == 0
    states = {}
    for name, tensor in moments.items():
        states.setdefault(name.rpartition(".")[0], {})[name.rpartition(".")[2]] = torch.zeros_like(tensor)
    loaded = {"model": {name: torch.zeros_like(w) for name, w in weights.items()}, "optimizer": {"state": states}}
    dcp.load(loaded, checkpoint_id=tmp_path / "d", no_dist=True)
    assert convert(first, tmp_path / "t", "--to", "torch")[0] == 0
    model = torch.load(tmp_path / "t" / "model.pt", weights_only=True)
    optimizer = torch.load(tmp_path / "t" / "optimizer.pt", weights_only=True)
    for found, state in ((loaded["model"], loaded["optimizer"]["state"]), (model, optimizer["state"])):
        assert found.keys() == weights.keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in weights.items())
        assert all(torch.equal(state[n.rpartition(".")[0]][n.rpartition(".")[2]], t) for n, t in moments.items())
    mapped = torch.load(tmp_path / "t" / "model.pt", weights_only=True, mmap=True)
    assert all(torch.equal(mapped[name], tensor) for name, tensor in weights.items())
    for file in ("model.pt", "optimizer.pt"):
        assert zipfile.ZipFile(tmp_path / "t" / file).testzip() is None  # its checksums are right
    pieces = read_dcp_metadata(tmp_path / "d" / ".metadata").storage_data.values()
    content = (tmp_path / "d" / "__0_0.distcp").read_bytes()
    assert len(pieces) == len(weights) + len(moments)
    for where in pieces:
        piece = io.BytesIO(content[where.offset : where.offset + where.length])
        assert zipfile.ZipFile(piece).testzip() is None
    for folder in ("d", "t"):
        assert (tmp_path / folder / "tokenizer.json").read_text() == "[]"


@pytest.mark.parametrize("tied", [False, True])
def test_published_folders_become_checkpoints_that_transformers_opens(convert, tmp_path, tied):
    model = llama(tie_word_embeddings=tied)
    model.save_pretrained(tmp_path / "st", max_shard_size="5KB")
    state = model.state_dict()  # as old .bin files: a tied weight under both of its names, in shards
    (tmp_path / "bin").mkdir()
    model.config.save_pretrained(tmp_path / "bin")
    names = sorted(state)
    shards = {"pytorch_model-00001-of-00002.bin": names[:9], "pytorch_model-00002-of-00002.bin": names[9:]}
    if tied:
        shards = {"pytorch_model-00001-of-00002.bin": names, "pytorch_model-00002-of-00002.bin": []}
    for file, held in shards.items():
        torch.save({name: state[name] for name in held}, tmp_path / "bin" / file)
    index = {"weight_map": {name: file for file, held in shards.items() for name in held}}
    (tmp_path / "bin" / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    for folder in ("st", "bin"):
        to = tmp_path / f"{folder}-c"
        status, _, err = convert(tmp_path / folder, to, "--to", "composable", "--max-file-size", "5kB")
        assert (status, err) == (0, [])
        assert len(list(to.glob("model-0*.safetensors"))) > 1
        assert ("lm_head.weight" in list_folder(to).tensors["weights"]) is not tied
        opened, told = transformers.LlamaForCausalLM.from_pretrained(to, output_loading_info=True)
        assert not any(told.values())
        assert all(torch.equal(tensor, opened.state_dict()[name]) for name, tensor in state.items())
    assert contents(tmp_path / "bin-c").keys() - contents(tmp_path / "st-c").keys() == set()
    assert tensors(tmp_path / "bin-c") == tensors(tmp_path / "st-c")


def test_a_cast_is_of_floating_point_weights_alone_and_told_in_the_plan(convert, tmp_path):
    weights = weights_of(DENSE)
    moments = {"model.norm.weight.exp_avg": torch.randn(16)}
    save(
        tmp_path / "a", weights | {"ids": torch.arange(3)}, moments, {"config.json": json.dumps(to_hugging_face(DENSE))}
    )
    how = ("--to", "composable", "--any-model", "--dtype", "bfloat16")
    status, told, _ = convert(tmp_path / "a", tmp_path / "b", *how, "--plan")
    assert status == 0
    assert any("bfloat16" in line and "lost" in line for line in told)
    assert "a checkpoint of ours" in told[0]
    assert not (tmp_path / "b").exists()
    assert convert(tmp_path / "a", tmp_path / "b", *how)[0] == 0
    found = safetensors.torch.load_file(tmp_path / "b" / "model.safetensors")
    assert all(torch.equal(found[name], tensor.bfloat16()) for name, tensor in weights.items())
    assert torch.equal(found["ids"], torch.arange(3))
    kept = safetensors.torch.load_file(tmp_path / "b" / "optimizer" / "optimizer.safetensors")
    assert torch.equal(kept["model.norm.weight.exp_avg"], moments["model.norm.weight.exp_avg"])
    assert json.loads((tmp_path / "b" / "config.json").read_text())["torch_dtype"] == "bfloat16"
    for line in told:
        if line.startswith("write") and line.endswith(tuple("0123456789")):
            name, size = line.split("  ")[-2:]
            assert (tmp_path / name.removeprefix("write").strip()).stat().st_size == int(size.replace(",", ""))


def meta_parts(folder, model, parts, *, newer=True, **params):
    """The files that Meta's training code would have written of the same weights."""
    folder.mkdir()
    config, state = model.config, model.state_dict()
    names = {"q_proj": "attention.wq", "k_proj": "attention.wk", "v_proj": "attention.wv", "o_proj": "attention.wo"}
    names |= {"gate_proj": "feed_forward.w1", "down_proj": "feed_forward.w2", "up_proj": "feed_forward.w3"}
    names |= {"input_layernorm": "attention_norm", "post_attention_layernorm": "ffn_norm"}
    files = [{"rope.freqs": torch.ones(2)} for _ in range(parts)]
    for name, tensor in state.items():
        words = name.split(".")
        kind = words[-2]
        if kind in ("q_proj", "k_proj"):  # halves -> pairs
            tensor = tensor.view(-1, 2, config.head_dim // 2, tensor.size(1)).transpose(1, 2).reshape(tensor.shape)
        theirs = f"layers.{words[2]}.{names[kind]}.weight" if kind in names else f"{kind}.weight"
        theirs = {"embed_tokens.weight": "tok_embeddings.weight", "lm_head.weight": "output.weight"}.get(theirs, theirs)
        cut = 1 if kind in ("o_proj", "down_proj") or (kind == "embed_tokens" and not newer) else 0
        pieces = [tensor] * parts if tensor.ndim == 1 else tensor.chunk(parts, cut)
        for file, piece in zip(files, pieces, strict=True):
            file[theirs] = piece.clone()
    for rank, file in enumerate(files):
        torch.save(file, folder / f"consolidated.{rank:02d}.pth")
    values = {
        "dim": 16,
        "n_layers": 2,
        "n_heads": 4,
        "n_kv_heads": 2,
        "norm_eps": config.rms_norm_eps,
        "vocab_size": -1,
    }
    (folder / "params.json").write_text(json.dumps(values | params))
    (folder / "tokenizer.model").write_bytes(b"pieces")
    return folder


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("kind", ["llama 2", "llama 3", "llama 3.1"])
def test_metas_parts_compute_what_transformers_computes(convert, tmp_path, parts, kind):
    rope = {"rope_type": "default", "rope_theta": 10000.0 if kind == "llama 2" else 500000.0}
    params = {} if kind == "llama 2" else {"rope_theta": 500000.0}
    if kind == "llama 3.1":
        rope |= {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
        rope |= {"original_max_position_embeddings": 8192}
        params |= {"use_scaled_rope": True}
    model = llama(rope_parameters=rope)
    folder = meta_parts(tmp_path / "m", model, parts, newer=kind != "llama 2", **params)
    status, told, err = convert(folder, tmp_path / "c", "--to", "composable")
    assert (status, err) == (0, [])
    assert f"Meta's checkpoint in {parts} part" in told[-1]
    opened = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "c")
    assert all(torch.equal(tensor, opened.state_dict()[name]) for name, tensor in model.state_dict().items())
    assert torch.equal(logits(tmp_path / "c"), model(torch.arange(12).view(1, 12)).logits)
    assert (tmp_path / "c" / "tokenizer.model").read_bytes() == b"pieces"
    assert not (tmp_path / "c" / "params.json").exists()
    for chunk in (8, 40, 200):  # rows of q and k come in another order, whatever the chunks
        write(hugging_face.target(open_source(str(folder)), 10**9), tmp_path / str(chunk), chunk)
        assert tensors(tmp_path / str(chunk)) == tensors(tmp_path / "c")


@pytest.mark.parametrize(("told", "factor"), [({}, 32.0), ({"rope_scaling_factor": 16}, 16.0)])
def test_the_small_models_of_llama_3_2_do_not_tell_by_what_they_were_stretched(
    convert, tmp_path, monkeypatch, told, factor
):
    assert meta.WIDTHS_OF_3_2 == (2048, 3072)  # 1B and 3B, as published
    monkeypatch.setattr(meta, "WIDTHS_OF_3_2", (16,))
    folder = meta_parts(tmp_path / "m", llama(), 1, rope_theta=500000.0, use_scaled_rope=True, **told)
    assert convert(folder, tmp_path / "c", "--to", "composable")[0] == 0
    config = json.loads((tmp_path / "c" / "config.json").read_text())
    assert (config.get("rope_scaling") or config["rope_parameters"])["factor"] == factor


FAMILIES = {
    **{f"plain: {name}": config for name, config in test_family_plain.MODELS.items()},
    **{f"attention: {name}": config for name, config in test_family_attention.MODELS.items()},
    **{f"deepseek: {name}": config for name, config in test_family_deepseek.MODELS.items()},
    "gpt_oss": transformers.GptOssConfig(**test_family_gpt_oss.TINY),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_is_known_by_its_names_and_shapes(convert, tmp_path, name):
    made(FAMILIES[name], tmp_path / "a")
    assert convert(tmp_path / "a", tmp_path / "d", "--to", "dcp")[::2] == (0, [])
    assert convert(tmp_path / "d", tmp_path / "c", "--to", "composable")[::2] == (0, [])
    stored = safetensors.torch.load_file(tmp_path / "a" / "model.safetensors")
    assert tensors(tmp_path / "c") == {name: bits(tensor) for name, tensor in stored.items()}


def test_layers_for_multi_token_prediction_are_carried_or_dropped(convert, tmp_path):
    config = transformers.DeepseekV3Config(num_hidden_layers=2, first_k_dense_replace=1).to_dict() | {
        "num_nextn_predict_layers": 1
    }
    weights = {f"model.layers.{layer}.w.weight": torch.ones(2) for layer in range(3)}
    weights |= {"model.layers.2.embed_tokens.weight": torch.ones(2)}
    save(tmp_path / "a", weights, {}, {"config.json": json.dumps(config)})
    assert convert(tmp_path / "a", tmp_path / "b", "--to", "composable", "--any-model")[0] == 0
    assert tensors(tmp_path / "b").keys() == weights.keys()
    status, told, err = convert(tmp_path / "a", tmp_path / "c", "--to", "composable", "--any-model", "--drop-mtp")
    assert (status, err) == (0, [])
    assert "2 tensors for multi-token prediction" in told[0]
    assert sorted(tensors(tmp_path / "c")) == ["model.layers.0.w.weight", "model.layers.1.w.weight"]
    assert json.loads((tmp_path / "c" / "config.json").read_text())["num_nextn_predict_layers"] == 0


def test_what_config_json_says_beyond_the_family_is_told_and_goes_along(convert, tmp_path):
    llama().save_pretrained(tmp_path / "a")
    path = tmp_path / "a" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"sparkle": 0.5}))
    for number, also in enumerate([[], ["--any-model"]]):
        status, told, err = convert(tmp_path / "a", tmp_path / f"b{number}", "--to", "composable", *also)
        assert (status, err) == (0, [])
        assert [line.endswith("not read of config.json: sparkle") for line in told[:-1]] == ([] if also else [True])
        assert json.loads((tmp_path / f"b{number}" / "config.json").read_text())["sparkle"] == 0.5


def test_weights_in_blocks_are_made_ordinary_ones(convert, tmp_path):
    model = llama()
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    stored = dict(state)
    for name, tensor in state.items():
        if "proj" in name:
            scale = torch.rand(-(-tensor.size(0) // 8), -(-tensor.size(1) // 8)) + 0.5
            wide = scale.repeat_interleave(8, 0).repeat_interleave(8, 1)[: tensor.size(0), : tensor.size(1)]
            stored[name], stored[f"{name}_scale_inv"] = tensor.to(torch.float8_e4m3fn), scale
            state[name] = (stored[name].float() * wide).bfloat16()
    config = model.config.to_dict() | {"quantization_config": {"quant_method": "fp8", "weight_block_size": [8, 8]}}
    (tmp_path / "a").mkdir()
    safetensors.torch.save_file(stored, tmp_path / "a" / "model.safetensors", {"format": "pt"})
    (tmp_path / "a" / "config.json").write_text(json.dumps(config))
    assert convert(tmp_path / "a", tmp_path / "same", "--to", "composable")[0] == 0
    assert tensors(tmp_path / "same") == {name: bits(tensor) for name, tensor in stored.items()}
    assert convert(tmp_path / "a", tmp_path / "b", "--to", "composable", "--dequantise", "bfloat16")[0] == 0
    assert tensors(tmp_path / "b") == {name: bits(tensor) for name, tensor in state.items()}
    assert "quantization_config" not in json.loads((tmp_path / "b" / "config.json").read_text())
    assert "cast would lose" in convert(tmp_path / "a", tmp_path / "c", "--to", "torch", "--dtype", "bfloat16")[2][0]


def test_a_folder_behind_a_url_is_converted(convert, tmp_path):
    from fsspec.implementations.memory import MemoryFileSystem

    try:
        saved("memory://run/c", DENSE, writer="per_rank")
        assert convert("memory://run/c", tmp_path / "d", "--to", "dcp")[0] == 0
        assert convert(tmp_path / "d", tmp_path / "c", "--to", "composable")[0] == 0
        assert tensors(tmp_path / "c") == tensors(saved(tmp_path / "a", DENSE))
    finally:
        MemoryFileSystem.store.clear()


class Foreign:
    """What a pickle must not make."""


def bad_sources(root):
    """Name -> what is wrong there: each a folder or file that no tool may take."""
    good = saved(root / "good", DENSE)
    config = json.dumps(to_hugging_face(DENSE))
    weights = weights_of(DENSE)

    def plain(name, found=weights, text=config):
        (root / name).mkdir()
        safetensors.torch.save_file(found, root / name / "model.safetensors")
        (root / name / "config.json").write_text(text)
        return root / name

    plain("family", text='{"model_type": "rwkv"}')
    plain("json", text="{")
    plain("list", text="[1]")
    plain("short", text='{"model_type": "llama"}')
    plain("odd", weights | {"model.layers.0.odd.weight": torch.ones(2)})
    plain("lacks", {name: tensor for name, tensor in weights.items() if "k_proj" not in name})
    plain("shape", weights | {"model.norm.weight": torch.ones(3)})
    content = (plain("truncated") / "model.safetensors").read_bytes()
    (root / "truncated" / "model.safetensors").write_bytes(content[:-7])
    (plain("index") / "model.safetensors.index.json").write_text('{"weight_map": {"a": "gone.safetensors"}}')
    (plain("badindex") / "model.safetensors.index.json").write_text("no json")
    (plain("twice") / "model.safetensors").rename(root / "twice" / "model-1.safetensors")
    safetensors.torch.save_file({"model.norm.weight": torch.zeros(16)}, root / "twice" / "model-2.safetensors")
    (root / "nothing").mkdir()
    (root / "nothing" / "notes.txt").write_text("mine")
    torch.save({"w": torch.ones(2), "x": Foreign()}, root / "foreign.pt")
    torch.save({"w": torch.ones(2)}, root / "legacy.pt", _use_new_zipfile_serialization=False)
    torch.save({"w": torch.ones(2000)}, root / "cut.pt")
    (root / "cut.pt").write_bytes((root / "cut.pt").read_bytes()[:-3000])
    torch.save({"w": torch.ones(2, 2).to_sparse()}, root / "sparse.pt")
    torch.save({"step": 3}, root / "empty.pt")
    torch.save(torch.ones(2), root / "bare.pt")
    torch.save(
        {"model": {"a": torch.ones(2), "b": torch.ones(3)}, "optimizer": {"state": {0: {"m": torch.ones(2)}}}},
        root / "half.pt",
    )
    (root / "bin").mkdir()
    torch.save({"w": torch.ones(2)}, root / "bin" / "pytorch_model-1.bin")
    torch.save({"w": torch.zeros(2)}, root / "bin" / "pytorch_model-2.bin")
    (root / "meta").mkdir()
    torch.save({"norm.weight": torch.ones(2)}, root / "meta" / "consolidated.00.pth")
    dcp.save({"w": torch.ones(4)}, checkpoint_id=root / "dcp", no_dist=True)
    for name in ("dcp-half", "dcp-foreign", "dcp-cut"):
        (root / name).mkdir()
        for path in (root / "dcp").iterdir():
            (root / name / path.name).write_bytes(path.read_bytes())
    (root / "dcp-half" / ".metadata").unlink()
    (root / "dcp-foreign" / ".metadata").write_bytes(pickle.dumps(Foreign()))
    (root / "dcp-cut" / "__0_0.distcp").write_bytes((root / "dcp" / "__0_0.distcp").read_bytes()[:-300])
    (root / "full").mkdir()
    (root / "full" / "mine").write_text("mine")
    return good


CONVERTED = [  # source, more arguments, what is told
    ("none", [], "there is no file or folder"),
    ("family", [], "'rwkv' is not supported"),
    ("json", [], "config.json is no JSON"),
    ("list", [], "config.json is no JSON object"),
    ("list", ["--to", "torch", "--dtype", "float16"], "config.json is no JSON object"),
    ("short", [], "is no model's configuration"),
    ("odd", [], "has model.layers.0.odd.weight"),
    ("lacks", [], "lacks model.layers.0.self_attn.k_proj"),
    ("shape", [], "has model.norm.weight of shape (3,), not (16,)"),
    ("truncated", [], "it was truncated"),
    ("index", [], "gone.safetensors is missing"),
    ("badindex", [], "is not an index"),
    ("twice", [], "model.norm.weight stands in two files"),
    ("nothing", [], "is no checkpoint"),
    ("foreign.pt", ["--to", "torch"], "needs more than torch.load(weights_only=True)"),
    ("legacy.pt", ["--to", "torch"], "is no file of torch.save (of torch 1.6 or newer)"),
    ("cut.pt", ["--to", "torch"], "cannot be read"),
    ("sparse.pt", ["--to", "torch"], "save plain tensors"),
    ("empty.pt", ["--to", "torch"], "holds no weights"),
    ("bare.pt", ["--to", "torch"], "no dictionary of tensors"),
    ("half.pt", ["--to", "torch"], "--weights-only"),
    ("bin", ["--to", "torch"], "w stands in two files"),
    ("meta", [], "params.json is missing"),
    ("dcp", [], "has no config.json"),
    ("dcp-half", ["--to", "torch"], ".metadata is missing"),
    ("dcp-foreign", ["--to", "torch"], "asks for"),
    ("dcp-cut", ["--to", "torch"], "is truncated"),
    ("good", ["--dequantise", "bfloat16"], "no quantised weights"),
    ("good", ["--max-file-size", "much"], "is no size"),
    ("good", ["--max-file-size", "0"], "is no size"),
]


def test_bad_input_is_one_line_and_the_target_is_untouched(convert, tmp_path):
    bad_sources(tmp_path)
    before = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*"))
    cases = [((tmp_path / name, tmp_path / "b", *more), text) for name, more, text in CONVERTED]
    cases += [
        ((tmp_path / "good", tmp_path / "good"), "no empty folder"),
        ((tmp_path / "good", tmp_path / "good" / "in"), "which is read"),
        ((tmp_path / "good", tmp_path / "full"), "no empty folder"),
        ((tmp_path / "good", "memory://b"), "is a URL"),
    ]
    for arguments, text in cases:
        to = () if "--to" in arguments else ("--to", "composable")
        status, out, err = convert(*arguments, *to)
        assert (status, out, len(err)) == (2, [], 1), (arguments, out, err)
        assert text in err[0], (arguments, err)
        assert sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")) == before, arguments
    assert convert(tmp_path / "half.pt", tmp_path / "b", "--to", "torch", "--weights-only")[0] == 0  # as it was told
    with pytest.raises(SystemExit) as stopped:
        convert(tmp_path / "good", tmp_path / "c", "--to", "gguf")
    assert stopped.value.code == 2


def test_memory_that_does_not_suffice_is_refused_with_what_does(convert, tmp_path, capsys):
    first, to = str(saved(tmp_path / "a", DENSE)), str(tmp_path / "b")
    assert convert(first, to, "--to", "torch", "--plan")[0] == 0
    assert sys.modules["convert"].main([first, to, "--to", "torch", "--memory", "1MB"]) == 2
    assert "memory of 1 MB does not suffice" in capsys.readouterr().err
    assert not (tmp_path / "b").exists()


def test_the_other_tools_refuse_the_same_in_one_line(run_tool, tmp_path):
    good = bad_sources(tmp_path)
    before = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*"))
    reshard, show, average = run_tool("reshard"), run_tool("show"), run_tool("average")
    to = tmp_path / "b"
    cases = []
    for name in ("none", "truncated", "index", "badindex", "twice", "nothing", "dcp"):
        bad = tmp_path / name
        cases += [(reshard, (bad, to)), (show, (bad,)), (average, (to, good, bad))]
    cases += [
        (reshard, (good, good / "in")),
        (reshard, (good, to, "--layout", "tp=3")),
        (reshard, (tmp_path / "lacks", to, "--layout", "tp=two")),
        (reshard, (tmp_path / "odd", to, "--layout", "tp=2")),
        (average, (good / "in", good, good)),
        (average, (to, good, tmp_path / "shape")),
        (show, (good, "--tensor", "none")),
        (show, (good, "--diff", tmp_path / "none")),
    ]
    for tool, arguments in cases:
        status, out, err = tool(*arguments)
        assert (status, out, len(err)) == (2, [], 1), (arguments, out, err)
        assert err[0].startswith("error: ")
        assert sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")) == before


def test_bytes_that_were_changed_are_not_passed_on(convert, tmp_path):
    first = saved(tmp_path / "a", DENSE)
    path = first / "optimizer" / "optimizer.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    for to in ("composable", "dcp", "torch"):
        status, out, err = convert(first, tmp_path / "new" / "b", "--to", to)
        assert (status, out, len(err)) == (2, [], 1)
        assert "optimizer/optimizer.safetensors): the bytes of " in err[0]
        assert convert(first, tmp_path / to, "--to", to, "--weights-only")[0] == 0
        assert not (tmp_path / to / "train_state.json").exists()
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["a", "composable", "dcp", "torch"]


@pytest.mark.slow
def test_the_process_takes_no_more_memory_than_was_said(tmp_path):
    """A model four times as large as what is allowed beyond the program itself, through every format."""
    weights = {f"w{number}": torch.full((64 << 20,), float(number)) for number in range(4)}  # 256 MiB each
    save(tmp_path / "a", weights, {"w0.m": weights.pop("w3")}, {"config.json": "{}"})
    source = tmp_path / "a"
    for number, to in enumerate(["dcp", "torch", "composable"]):
        how = [str(source), str(tmp_path / str(number)), "--to", to, "--any-model", "--memory", "700MB"]
        code = f"import convert; print(convert.main({how!r}), *open('/proc/self/status'))"
        paths = {"PYTHONPATH": f"{ROOT}:{ROOT / 'tools'}"}
        run = subprocess.run([sys.executable, "-c", code], env=os.environ | paths, capture_output=True, text=True)
        assert run.returncode == 0, run.stderr
        peak = int(re.search(r"VmHWM:\s+(\d+) kB", run.stdout)[1]) * 1024
        assert peak <= 700 * 10**6
        assert f" as {to}\n0 " in run.stdout  # the exit status
        source = tmp_path / str(number)
    assert contents(source) == contents(tmp_path / "a")


def test_a_refused_model_ends_the_copying_that_goes_on_beside_its_check(tmp_path):
    saved(tmp_path / "source", DENSE)
    target, asked = hugging_face.target(open_source(str(tmp_path / "source")), 1 << 30), threading.Event()

    def refuse():
        assert asked.wait(10)
        raise ValueError("no such model")

    def advance(size):
        asked.set()

    with pytest.raises(ValueError, match="no such model"):
        write(target, tmp_path / "target", 1 << 20, advance, refuse)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


@pytest.mark.parametrize("tool", ["convert", "reshard", "show", "average"])
def test_a_tool_that_handles_files_starts_without_what_takes_long_to_import(tool):
    code = f"import sys; sys.path.insert(0, {str(ROOT / 'tools')!r}); import {tool}; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert not {"torch.distributed.tensor", "torch._dynamo"} & set(done.stdout.split())
