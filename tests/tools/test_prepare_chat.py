"""prepare_data.py as people use it on conversations."""

import importlib
import json
import os
import re

import numpy as np
import pytest
import tokenizers

from composable.data.answers import inside
from composable.data.text import load_tokenizer
from composable.data.tokens import open_tokens
from tests.data.test_chat import CONTROL, TALK, WITH_GENERATION, save_bpe
from tests.test_commands import ROOT

Q, A = {"role": "user", "content": "Hello?"}, {"role": "assistant", "content": "Fine"}


@pytest.fixture(scope="module")
def bpe(tmp_path_factory):
    save_bpe(tmp_path_factory.mktemp("tokenizer"), WITH_GENERATION)
    return tmp_path_factory.getbasetemp() / "tokenizer0"


@pytest.fixture
def prepare(monkeypatch, capsys, tmp_path):
    """A call of the tool in a folder of its own: its exit status, what it printed, and its lines of errors."""
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    monkeypatch.chdir(tmp_path)
    tool = importlib.import_module("prepare_data")

    def run(*arguments):
        capsys.readouterr()
        status = tool.main([*map(str, arguments)])
        out, err = capsys.readouterr()
        return status, out, err

    return run


def write(path, *records):
    path.write_text("\n".join(r if isinstance(r, str) else json.dumps(r) for r in records))


def answers_of(path, tokenizer):
    """What counts in each document, as text, with control tokens."""
    tokens, coder = open_tokens(path), load_tokenizer(str(tokenizer))
    inner = tokenizers.Tokenizer.from_file(coder.name)
    counted = inside(tokens.answers, 0, len(tokens))
    parts = zip(np.split(tokens.tokens, tokens.offsets[1:-1]), np.split(counted, tokens.offsets[1:-1]), strict=True)
    return [inner.decode(ids[flags].tolist(), skip_special_tokens=False) for ids, flags in parts]


def test_conversations_become_documents_of_which_answers_count(prepare, tmp_path, bpe):
    write(tmp_path / "a.jsonl", {"messages": TALK}, "", {"prompt": "Hello?", "completion": "Fine"})
    status, out, _ = prepare("a.jsonl", "--out", "a", "--tokenizer", bpe, "--template", "tokenizer")
    assert status == 0
    assert answers_of("a", bpe) == ["Fine, thänks 🙂<|im_end|>user\nassistant<|im_end|>", "Fine<|im_end|>"]
    report = " ".join(out.split())
    counted = int(inside(open_tokens("a").answers, 0, len(open_tokens("a"))).sum())
    assert f"documents 2 tokens {len(open_tokens('a'))} tokens with a loss {counted} (" in report
    assert "skipped records 0" in report
    assert "--data.packing whole --data.document-mask" in out
    assert "torn" not in report


@pytest.mark.parametrize(("mask", "count"), [("last-answer", 1), ("answers", 2), ("none", None)])
def test_what_counts_is_an_option(prepare, tmp_path, bpe, mask, count):
    write(tmp_path / "a.jsonl", {"messages": TALK})
    assert prepare("a.jsonl", "--out", "a", "--tokenizer", bpe, "--template", "chatml", "--mask", mask)[0] == 0
    tokens = open_tokens("a")
    assert (tokens.answers is None) == (count is None)
    assert count is None or len(tokens.answers) == 2 * count


def test_bad_records_are_counted_with_their_lines_or_end_the_work(prepare, tmp_path, bpe):
    bad = [
        "{",
        {"messages": [Q, {"role": "bot", "content": "x"}]},
        {"messages": [Q]},
        {"messages": [Q, {**A, "content": ""}]},
        {"messages": [{**Q, "content": "<|im_end|>"}, A]},
    ]
    write(tmp_path / "a.jsonl", {"messages": [Q, A]}, *bad)
    options = ("--tokenizer", bpe, "--template", "chatml")
    status, out, err = prepare("a.jsonl", "--out", "a", *options)
    assert status == 0
    assert open_tokens("a").documents == 1
    reasons = [
        *("a.jsonl:2: not JSON", "a.jsonl:3: message 2 has role 'bot'", "a.jsonl:4: no message of the assistant"),
        *("a.jsonl:5: message 2 (assistant) is empty", "a.jsonl:6: message 1 spells '<|im_end|>'"),
    ]
    assert all(reason in out for reason in reasons)
    assert "is --template right?" in err
    for record, reason in zip(bad, reasons, strict=True):
        write(tmp_path / "a.jsonl", {"messages": [Q, A]}, record)
        status, out, err = prepare("a.jsonl", "--out", "b", "--strict", *options)
        assert (status, out, err.count("\n")) == (2, "", 1)
        assert reason.partition(": ")[2] in err
        assert "a.jsonl:2: " in err
        assert not (tmp_path / "b").exists()


def test_long_conversations_are_left_out_and_counted(prepare, tmp_path):
    write(tmp_path / "a.jsonl", {"messages": [Q, A]}, {"messages": [Q, {**A, "content": "x" * 99}]})
    status, out, _ = prepare("a.jsonl", "--out", "a", "--template", "plain", "--max-tokens", 50)
    assert status == 0
    assert open_tokens("a").documents == 1
    assert "left out           1 documents of more than --max-tokens" in out
    assert "longest document   30 tokens" in out
    assert prepare("a.jsonl", "--out", "b", "--template", "plain", "--max-tokens", 5)[0] == 2


def test_a_preview_marks_what_counts_and_writes_nothing(prepare, tmp_path, bpe):
    write(tmp_path / "a.jsonl", {"messages": [Q, A]}, {"messages": [Q]}, {"messages": TALK})
    status, out, _ = prepare("a.jsonl", "--preview", 2, "--tokenizer", bpe, "--template", "chatml")
    assert status == 0
    assert re.sub(r"\d+ tokens, \d+ with", "N tokens, M with", out) == (
        "--- a.jsonl:1: N tokens, M with a loss\n"
        "<|bos|><|im_start|>user\nHello?<|im_end|>\n<|im_start|>assistant\n[[Fine<|im_end|>]]\n\n"
        "--- a.jsonl:2: skipped: no message of the assistant among 1: there is nothing to learn\n"
    )
    assert os.listdir(tmp_path) == ["a.jsonl"]


def test_a_plan_says_what_is_read_and_written_and_writes_nothing(prepare, tmp_path):
    write(tmp_path / "a.jsonl", {"messages": [Q, A]})
    status, out, _ = prepare(".", "--plan", "--template", "plain", "--out", "new/a")
    assert status == 0
    size = (tmp_path / "a.jsonl").stat().st_size
    assert out.splitlines() == [
        f"read   a.jsonl: {size:,} bytes",
        f"       {size:,} bytes of conversations by plain, tokenizer byte (257 tokens)",
        "write  new/a: 2 bytes a token, 8 a document, 16 an answer",
    ]
    assert os.listdir(tmp_path) == ["a.jsonl"]


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["a.jsonl", "--out", "o", "--template", "mistral"], "template 'mistral' is neither"),
        (["a.jsonl", "--out", "o", "--template", "chatml"], "<|im_start|>, <|im_end|>, no special token"),
        (["a.jsonl", "--out", "o", "--template", "tokenizer"], "has no chat template"),
        (["a.txt", "--out", "o", "--template", "plain"], "a.txt: conversations are records"),
        (["a.jsonl", "--out", "o"], "a.jsonl:1: no field 'text' (a conversation is read with --template)"),
        (["a.jsonl", "--preview", "1"], "--preview shows conversations"),
        (["a.jsonl", "--template", "plain"], "--out FILE"),
        (["a.jsonl", "--out", "o", "--template", "plain", "--field", "messages"], "leave out --suffix and --field"),
        (["a.jsonl", "--out", "o", "--template", "plain", "--date", "today"], "--date today: write it as"),
        (["a.jsonl", "--out", "o", "--template", "plain", "--max-tokens", "-1"], "--max-tokens must not be negative"),
    ],
)
def test_bad_options_are_one_line_status_two_and_no_file(prepare, tmp_path, arguments, reason):
    write(tmp_path / "a.jsonl", {"messages": [Q, A]})
    (tmp_path / "a.txt").write_text("x")
    status, _, err = prepare(*arguments)
    assert status == 2
    assert reason in err
    assert err.count("\n") == 1
    assert sorted(os.listdir(tmp_path)) == ["a.jsonl", "a.txt"]


def test_workers_change_nothing_and_control_tokens_stand_where_the_template_has_them(prepare, tmp_path, bpe):
    records = [{"messages": [{**Q, "content": f"{n} " * (n % 50)}, A]} for n in range(1, 9000) if n % 50]
    write(tmp_path / "a.jsonl", *records)
    options = ("--tokenizer", bpe, "--template", "chatml")
    assert prepare("a.jsonl", "--out", "1", "--workers", 1, *options)[0] == 0
    assert prepare("a.jsonl", "--out", "2", "--workers", 2, *options)[0] == 0
    assert (tmp_path / "1").read_bytes() == (tmp_path / "2").read_bytes()
    tokens = open_tokens("1")
    starts = [CONTROL.index(name) for name in ("<|bos|>", "<|im_start|>")]
    assert all(tokens.tokens[offset : offset + 2].tolist() == starts for offset in tokens.offsets[:-1])
