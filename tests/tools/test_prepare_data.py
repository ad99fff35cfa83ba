import gzip
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from composable.data.tokens import open_tokens
from tests.data.test_text import save

TOOL = Path(__file__).parents[2] / "tools" / "prepare_data.py"


def prepare(*arguments, folder):
    return subprocess.run(
        [sys.executable, str(TOOL), *map(str, arguments)],
        cwd=folder,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(TOOL.parents[1])},
    )


def documents(path):
    tokens = open_tokens(path)
    return [part.tolist() for part in np.split(tokens.tokens, tokens.offsets[1:-1])]


def write_lines(path, *rows):
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))


def test_each_document_becomes_its_bytes_and_one_end(tmp_path):
    rows = [{"text": ""}, {"text": "a"}, {"text": "   "}, '{"x": 1}', {"text": None}, "", {"text": "bc"}, {"text": ""}]
    write_lines(tmp_path / "a.jsonl", *rows)
    done = prepare("a.jsonl", "--out", "new/a.tokens", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert documents(tmp_path / "new" / "a.tokens") == [[97, 256], [32, 32, 32, 256], [98, 99, 256]]
    report = " ".join(done.stdout.split())
    assert "documents 3 tokens 9 bytes of text 6 empty texts 2 skipped records 2" in report
    assert "a.jsonl:4: no field 'text'" in report
    assert "a.jsonl:5: field 'text' is null" in report
    tokens = open_tokens(tmp_path / "new" / "a.tokens")
    assert (tokens.vocab_size, tokens.eos, tokens.bos, tokens.tokenizer) == (257, 256, None, "byte")
    assert os.listdir(tmp_path / "new") == ["a.tokens"]


@pytest.mark.parametrize("flags", [[], ["--no-bos"], ["--no-eos"], ["--no-bos", "--no-eos"]])
def test_a_document_has_one_beginning_and_one_end_whatever_it_says(tmp_path, flags):
    save(tmp_path / "small")
    write_lines(tmp_path / "a.jsonl", {"text": "<bos>hello"}, {"text": "x<eos>"})
    done = prepare("a.jsonl", "--out", "a.tokens", "--tokenizer", "small", *flags, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    found = documents(tmp_path / "a.tokens")
    assert len(found) == 2
    for ids in found:
        assert ids.count(1) == ("--no-bos" not in flags)
        assert ids.count(2) == ("--no-eos" not in flags)
        assert "--no-bos" in flags or ids[0] == 1
        assert "--no-eos" in flags or ids[-1] == 2


def test_a_token_that_is_beginning_and_end_stands_once_at_each(tmp_path):
    save(tmp_path / "small", {"bos_token": "<eos>", "eos_token": "<eos>"})
    write_lines(tmp_path / "a.jsonl", {"text": "ab"})
    assert prepare("a.jsonl", "--out", "a.tokens", "--tokenizer", "small", folder=tmp_path).returncode == 0
    assert documents(tmp_path / "a.tokens") == [[2, 3, 4, 2]]


def test_the_file_is_the_same_for_any_number_of_workers(tmp_path):
    for name in "abcd":  # about 12 MiB: more batches than are held at once
        rows = [json.dumps({"text": f"{name} {number} " + "x" * (number * 37 % 4000)}) for number in range(1500)]
        (tmp_path / f"{name}.jsonl.gz").write_bytes(gzip.compress("\n".join(rows).encode()))
    (tmp_path / "e.txt").write_bytes(b"text" * 300_000)
    outputs = []
    for workers in (1, 2):
        done = prepare(".", "--out", f"../{workers}", "--workers", workers, folder=tmp_path)
        assert done.returncode == 0, done.stderr
        outputs.append((tmp_path.parent / str(workers)).read_bytes())
        (tmp_path.parent / str(workers)).unlink()
    assert outputs[0] == outputs[1]
    assert "documents          6,001" in done.stdout


@pytest.mark.parametrize("kind", ["strict", "damaged", "missing", "empty", "tokenizer", "nothing", "workers"])
def test_bad_input_is_one_line_status_two_and_no_file(tmp_path, kind):
    write_lines(tmp_path / "a.jsonl", {"text": "a"}, '{"text": null}')
    write_lines(tmp_path / "empty.jsonl", {"text": ""}, "{}")
    (tmp_path / "cut.jsonl.gz").write_bytes(gzip.compress(b'{"text": "a"}\n' * 99)[:-9])
    arguments, message = {
        "strict": (["a.jsonl", "--strict"], "a.jsonl:2: field 'text' is null"),
        "damaged": (["a.jsonl", "cut.jsonl.gz"], "cut.jsonl.gz: the archive is damaged or cut off"),
        "missing": (["a.jsonl", "b.jsonl"], "b.jsonl: no such file"),
        "empty": (["empty.jsonl"], "no document with text (1 empty, 1 skipped)"),
        "tokenizer": (["a.jsonl", "--tokenizer", "gpt"], "tokenizer 'gpt' is neither"),
        "nothing": ([], "at least one source"),
        "workers": (["a.jsonl", "--workers", "-1"], "workers must not be negative"),
    }[kind]
    done = prepare(*arguments, "--out", "out", folder=tmp_path)
    assert done.returncode == 2
    assert message in done.stderr
    assert done.stderr.count("\n") == 1
    assert sorted(os.listdir(tmp_path)) == ["a.jsonl", "cut.jsonl.gz", "empty.jsonl"]


def test_an_existing_file_is_replaced_only_when_asked(tmp_path):
    (tmp_path / "a.txt").write_text("new")
    (tmp_path / "out").write_text("old")
    done = prepare("a.txt", "--out", "out", folder=tmp_path)
    assert (done.returncode, (tmp_path / "out").read_text()) == (2, "old")
    assert "out exists" in done.stderr
    assert prepare("a.txt", "--out", "out", "--overwrite", folder=tmp_path).returncode == 0
    assert documents(tmp_path / "out") == [[*b"new", 256]]


def test_undecodable_bytes_are_kept_by_the_byte_tokenizer_and_counted(tmp_path):
    (tmp_path / "a.py").write_bytes(b"x = '\xe9'\r\n")
    done = prepare(".", "--suffix", ".py", "--out", "out", folder=tmp_path)
    assert documents(tmp_path / "out") == [[*b"x = '\xe9'\r\n", 256]]
    assert "undecodable bytes  1" in done.stdout
