"""A model writes from its checkpoint, with its own tokenizer; what cannot work is one line."""

import dataclasses
import importlib
import io
import json
import shutil

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from composable.checkpoint import save
from composable.data.chat import question_encoder
from composable.models.config import DecoderConfig
from composable.models.families import to_hugging_face
from composable.models.generate import Sampling, stream
from composable.models.names import in_file
from composable.moe.config import Capacity, MoEConfig
from tests.data.test_chat import WITH_GENERATION, save_bpe
from tests.models.test_decoder import built
from tests.test_commands import ROOT

CONFIG = DecoderConfig(257, 16, 2, 4, 2, 8, 24, init_std=0.3, max_length=64)
EXPERTS = dataclasses.replace(CONFIG, moe=MoEConfig(8, 2, 8, capacity=Capacity(0.5)))


def saved(folder, config=CONFIG, tokenizer="byte"):
    model = built(config)
    files = {
        "config.json": json.dumps(to_hugging_face(config)),
        "train_state.json": json.dumps({"data": {"tokenizer": tokenizer}}),
    }
    save(folder, in_file(dict(model.named_parameters()), config), {}, files)
    return folder


@pytest.fixture
def generate(monkeypatch, capsys):
    """Exit status, standard output, standard error."""
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    tool = importlib.import_module("generate")

    def run(*arguments):
        capsys.readouterr()
        return tool.main([*map(str, arguments)]), *capsys.readouterr()

    return run


def text_of(config, prompt, count, **options):
    ids = torch.tensor(list(prompt.encode()))
    more = stream(built(config), ids, count, Sampling(**options), context=64)
    return bytes(t for t in more if t < 256).decode("utf-8", "replace")


def test_a_checkpoint_continues_a_prompt(generate, tmp_path, monkeypatch):
    folder = saved(tmp_path / "run/checkpoints/step-00000007")
    status, out, err = generate(folder, "--prompt", "Once", "--tokens", 20, "--temperature", 0, "--ignore-eos")
    assert status == 0
    assert out.rstrip("\n") in text_of(CONFIG, "Once", 20, temperature=0)  # bytes that end no character are not shown
    assert "4 tokens read" in err
    for place, extra in ((tmp_path / "run", ()), (tmp_path / "run/checkpoints", ()), (folder, ("--no-cache",))):
        again = generate(place, "--prompt", "Once", "--tokens", 20, "--temperature", 0, "--ignore-eos", *extra)
        assert again[:2] == (0, out)
    (tmp_path / "prompt.txt").write_text("Once")
    named = ("--prompt-file", tmp_path / "prompt.txt", "--tokens", 20, "--temperature", 0, "--ignore-eos")
    assert generate(folder, *named)[:2] == (0, out)
    monkeypatch.setattr("sys.stdin", io.StringIO("Once"))
    assert generate(folder, "--prompt-file", "-", *named[2:])[:2] == (0, out)
    drawn = [generate(folder, "--prompt", "Once", "--tokens", 20, "--seed", seed)[1] for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]


def test_a_plan_reads_no_weight(generate, tmp_path):
    folder = saved(tmp_path / "model")
    for path in folder.glob("*.safetensors"):
        path.unlink()
    status, out, _ = generate(folder, "--prompt", "x", "--plan")
    assert status == 0
    assert "parameters as float32" in out
    assert "keys and values of 64 tokens" in out


def test_a_folder_with_a_tokenizer_uses_it(generate, tmp_path):
    config = dataclasses.replace(CONFIG, vocab_size=4)
    folder = saved(tmp_path / "model", config, "tokenizer.json")
    words = Tokenizer(models.WordLevel({"a": 0, "b": 1, "</s>": 2, "c": 3}, "a"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    status, out, _ = generate(folder, "--prompt", "a b", "--tokens", 10, "--ignore-eos")
    assert status == 0
    assert set(out.split()) <= {"a", "b", "c", "</s>"}
    assert len(out.split()) > 1
    (folder / "tokenizer.json").unlink()
    assert generate(folder, "--prompt", "a b")[0] == 2
    assert generate(folder, "--prompt", "a b", "--tokenizer", "byte")[0] == 2  # ids beyond the vocabulary


def test_a_conversation_is_answered_as_its_template_writes_it_and_ends_where_chat_models_end(generate, tmp_path):
    save_bpe(tmp_path / "tokenizer", WITH_GENERATION)
    vocabulary = Tokenizer.from_file(str(tmp_path / "tokenizer/tokenizer.json")).get_vocab()
    config = dataclasses.replace(CONFIG, vocab_size=1 + max(vocabulary.values()), max_length=256)
    folder = saved(tmp_path / "model", config, "tokenizer.json")
    shutil.copytree(tmp_path / "tokenizer", folder, dirs_exist_ok=True)
    ask = question_encoder(str(folder), "tokenizer")
    said = ask([{"role": "system", "content": "Be brief"}, {"role": "user", "content": "Hello?"}])
    count, options = 30, ("--temperature", 0, "--tokens", 30, "--template", "tokenizer", "--system", "Be brief")
    wanted = list(stream(built(config), torch.from_numpy(said), count, Sampling(0), context=256))
    status, out, err = generate(folder, "--prompt", "Hello?", *options, "--ignore-eos")
    assert status == 0
    assert f"{len(said)} tokens read" in err
    tokens = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert out.rstrip("\n") in tokens.decode(wanted)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [wanted[2], 10**6]}))
    _, short, _ = generate(folder, "--prompt", "Hello?", *options)
    assert len(short) < len(out)
    assert generate(folder, "--prompt", "<|im_end|>", "--template", "tokenizer")[0] == 2


@pytest.mark.parametrize("adds", [True, False])
def test_a_text_begins_as_its_tokenizer_begins_it(adds, generate, tmp_path):
    folder = saved(tmp_path / "model", dataclasses.replace(CONFIG, vocab_size=4))
    (folder / "train_state.json").unlink()
    (folder / "manifest.json").unlink()
    words = Tokenizer(models.WordLevel({"a": 0, "b": 1, "<s>": 2, "c": 3}, "a"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    if adds:
        words.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 2)])
    words.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"bos_token": "<s>"}')
    assert f"{2 + adds} tokens read" in generate(folder, "--prompt", "a b", "--tokens", 2)[2]


def on_ranks(*arguments):
    import contextlib
    import sys

    sys.path.insert(0, str(ROOT / "tools"))
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        status = importlib.import_module("generate").main([*map(str, arguments)])
    return status, out.getvalue()


@pytest.mark.parametrize("config", [CONFIG, EXPERTS], ids=["dense", "experts"])
def test_tensor_ranks_write_the_same_text_once(config, ranks, tmp_path):
    folder = saved(tmp_path / "model", config)
    arguments = (folder, "--prompt", "Hello", "--tokens", 24, "--dtype", "float64", "--ignore-eos")
    (alone,) = ranks(1, on_ranks, *arguments)
    first, second = ranks(2, on_ranks, *arguments)
    assert alone[0] == first[0] == second[0] == 0
    assert alone[1] == first[1]
    assert second[1] == ""


BAD = {
    "no model": (lambda folder: shutil.rmtree(folder / "optimizer", ignore_errors=True), ["--prompt", "x"], "neither"),
    "no prompt": (None, [], "give one of --prompt and --prompt-file"),
    "two prompts": (None, ["--prompt", "x", "--prompt-file", "y"], "give one of"),
    "no such file": (None, ["--prompt-file", "missing"], "missing"),
    "too long": (None, ["--prompt", "x" * 30, "--tokens", "40"], "the most is --tokens 34"),
    "no tokens": (None, ["--prompt", "x", "--tokens", "0"], "write at least one"),
    "no conversation": (None, ["--prompt", "x", "--system", "y"], "--template"),
    "cold": (None, ["--prompt", "x", "--temperature", "-1"], "temperature=-1"),
    "broken": (lambda folder: (folder / "config.json").write_text("{"), ["--prompt", "x"], "no model's configuration"),
    "unknown": (lambda f: (f / "config.json").write_text('{"model_type": "gpt2"}'), ["--prompt", "x"], "gpt2"),
    "damaged": (
        lambda folder: next(folder.glob("*.safetensors")).write_bytes(b"x"),
        ["--prompt", "x", "--tokens", "2"],
        "safetensors",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_work_is_one_line(name, generate, tmp_path):
    change, options, words = BAD[name]
    folder = saved(tmp_path / "model")
    if change is not None:
        change(folder)
    if name == "no model":
        (folder / "config.json").unlink()
    status, out, err = generate(folder, *options)
    assert status == 2
    assert out == ""
    lines = err.splitlines()
    assert lines[-1].startswith("error: ")
    assert len(lines) == 1
    assert words in lines[0]
