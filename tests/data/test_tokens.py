import json
import multiprocessing
import os
import pickle
import struct

import numpy as np
import pytest
import safetensors
import safetensors.numpy
import safetensors.torch

from composable.data.token_writer import TokenWriter
from composable.data.tokens import Tokens, load_tokens, open_tokens

DOCUMENTS = [[5, 6, 7], [8], [9, 10, 11, 12]]


def write(path, documents=DOCUMENTS, vocab_size=300, **more):
    with TokenWriter(path, vocab_size, **more) as writer:
        for document in documents:
            writer.add(np.array(document))
    return path


def test_what_is_written_is_what_is_opened(tmp_path):
    tokens = open_tokens(write(tmp_path / "a", eos=2, bos=None, tokenizer="t", source="s"))
    assert tokens.tokens.tolist() == [5, 6, 7, 8, 9, 10, 11, 12]
    assert tokens.offsets.tolist() == [0, 3, 4, 8]
    assert (len(tokens), tokens.documents, tokens.vocab_size) == (8, 3, 300)
    assert (tokens.eos, tokens.bos, tokens.tokenizer, tokens.source) == (2, None, "t", "s")


@pytest.mark.parametrize("load", [safetensors.numpy.load_file, safetensors.torch.load_file])
def test_any_safetensors_reader_opens_a_token_file(tmp_path, load):
    tensors = load(write(tmp_path / "a"))
    assert {name: tensor.tolist() for name, tensor in tensors.items()} == {
        "tokens": [5, 6, 7, 8, 9, 10, 11, 12],
        "offsets": [0, 3, 4, 8],
    }
    with safetensors.safe_open(tmp_path / "a", "np") as file:
        assert file.metadata()["format"] == "composable.tokens"


@pytest.mark.parametrize(
    ("vocab_size", "dtype"), [(256, "u1"), (257, "<u2"), (65536, "<u2"), (65537, "<u4"), (1 << 32, "<u4")]
)
def test_the_smallest_dtype_that_holds_the_vocabulary(tmp_path, vocab_size, dtype):
    tokens = open_tokens(write(tmp_path / "a", [[0, vocab_size - 1]], vocab_size))
    assert tokens.tokens.dtype == np.dtype(dtype)
    assert tokens.tokens.tolist() == [0, vocab_size - 1]


def test_offsets_are_exact_whatever_their_place_in_the_file(tmp_path):
    for count in range(9):  # bytes of tokens before the offsets: all alignments
        tokens = open_tokens(write(tmp_path / "a", [[1]] * count, 256))
        assert tokens.offsets.tolist() == list(range(count + 1))
        assert tokens.offsets.flags.aligned


def test_a_document_without_tokens_is_no_document(tmp_path):
    tokens = open_tokens(write(tmp_path / "a", [[], [1, 2], [], []]))
    assert tokens.offsets.tolist() == [0, 2]
    assert len(open_tokens(write(tmp_path / "b", []))) == 0


@pytest.mark.parametrize("document", [[300], [-1], [1 << 20]])
def test_ids_outside_of_the_vocabulary_are_refused(tmp_path, document):
    with pytest.raises(ValueError, match=f"token id {document[0]} .* 300 tokens"):
        write(tmp_path / "a", [[1], document])
    assert os.listdir(tmp_path) == []


def test_ids_are_integers(tmp_path):
    with pytest.raises(ValueError, match="vector of integers; got float64"):
        write(tmp_path / "a", [[0.5]])


def test_a_file_is_complete_or_absent(tmp_path):
    write(tmp_path / "a")
    before = (tmp_path / "a").read_bytes()

    def interrupted():
        with TokenWriter(tmp_path / "a", 10) as writer:
            writer.add(np.array([1]))
            assert (tmp_path / "a").read_bytes() == before
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert os.listdir(tmp_path) == ["a"]
    assert (tmp_path / "a").read_bytes() == before


def test_every_truncation_is_named(tmp_path):
    whole = write(tmp_path / "a").read_bytes()
    for size in range(len(whole)):
        (tmp_path / "cut").write_bytes(whole[:size])
        with pytest.raises(ValueError, match=r"cut is not a usable token file: .*prepare_data.py"):
            open_tokens(tmp_path / "cut")
    (tmp_path / "cut").write_bytes(whole[:-1])
    with pytest.raises(ValueError, match=f"truncated: {len(whole) - 1} bytes .* {len(whole)}"):
        open_tokens(tmp_path / "cut")


def reheader(path, change):
    raw = path.read_bytes()
    length = struct.unpack("<Q", raw[:8])[0]
    header = json.loads(raw[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + raw[8 + length :])


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (
            lambda header: header["__metadata__"].update(version="3"),
            "version 3, and this release reads versions 1 to 2",
        ),
        (lambda header: header["__metadata__"].update(format="other"), "another kind"),
        (lambda header: header.pop("__metadata__"), "another kind"),
        (lambda header: header["__metadata__"].pop("vocab_size"), "incomplete or damaged .*vocab_size"),
        (lambda header: header["tokens"].update(dtype="F32"), "incomplete or damaged"),
        (lambda header: header["tokens"].update(shape=[7]), "do not fill"),
        (lambda header: header["tokens"].update(shape=[4, 2]), "incomplete or damaged"),
    ],
)
def test_a_foreign_or_newer_file_is_refused_with_the_reason(tmp_path, change, reason):
    path = write(tmp_path / "a")
    reheader(path, change)
    with pytest.raises(ValueError, match=f"a is not a usable token file: .*{reason}"):
        open_tokens(path)


@pytest.mark.parametrize("offsets", [[0, 3, 2, 8], [1, 3, 4, 8], [0, 3, 4, 7]])
def test_offsets_that_do_not_rise_to_the_end_are_refused(tmp_path, offsets):
    path = write(tmp_path / "a")
    raw = path.read_bytes()
    path.write_bytes(raw[:-32] + np.array(offsets, "<i8").tobytes())
    with pytest.raises(ValueError, match="offsets do not rise from 0 to its 8 tokens"):
        open_tokens(path)


@pytest.mark.parametrize(
    "content", [b"", b"hello", b"x" * 100, struct.pack("<Q", 4) + b"[1]]", struct.pack("<Q", 2) + b"{}"]
)
def test_what_is_no_token_file_is_refused(tmp_path, content):
    (tmp_path / "a").write_bytes(content)
    with pytest.raises(ValueError, match="a is not a usable token file"):
        open_tokens(tmp_path / "a")
    with pytest.raises(ValueError, match="it is a folder"):
        open_tokens(tmp_path)


def test_a_missing_path_names_both_possibilities(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"missing.* neither 'python-stdlib' nor a file.*prepare_data.py"):
        load_tokens(str(tmp_path / "missing"))


def test_a_slice_cuts_documents_at_its_ends(tmp_path):
    tokens = open_tokens(write(tmp_path / "a"))
    part = tokens.slice(1, 6)
    assert (part.tokens.tolist(), part.offsets.tolist()) == ([6, 7, 8, 9, 10], [0, 2, 3, 5])
    assert tokens.slice(3, 4).offsets.tolist() == [0, 1]
    assert tokens.slice(3, 3).offsets.tolist() == [0]
    assert part.slice(2, 5).tokens.tolist() == [8, 9, 10]
    with pytest.raises(ValueError, match="start 2, stop 9"):
        tokens.slice(2, 9)


def test_every_slice_keeps_tokens_and_inner_borders(tmp_path):
    tokens = open_tokens(write(tmp_path / "a"))
    for start in range(9):
        for stop in range(start, 9):
            part = tokens.slice(start, stop)
            assert part.tokens.tolist() == tokens.tokens[start:stop].tolist()
            inner = {border - start for border in [0, 3, 4, 8] if start < border < stop}
            assert part.offsets.tolist() == sorted(inner | {0, stop - start})


@pytest.mark.parametrize(("holdout", "held"), [(0.0, 0), (0.02, 0), (0.25, 2), (0.5, 4), (0.99, 7)])
def test_the_held_out_part_is_the_tail(tmp_path, holdout, held):
    train, tail = open_tokens(write(tmp_path / "a")).split(holdout)
    assert len(tail) == held
    assert train.tokens.tolist() + tail.tokens.tolist() == [5, 6, 7, 8, 9, 10, 11, 12]


@pytest.mark.parametrize("holdout", [-0.1, 1.0])
def test_a_holdout_is_a_share(tmp_path, holdout):
    with pytest.raises(ValueError, match="holdout"):
        open_tokens(write(tmp_path / "a")).split(holdout)


def test_mapped_tokens_travel_as_their_path(tmp_path):
    part = open_tokens(write(tmp_path / "a", [list(range(200))] * 1000)).slice(100, 150_100)
    parcel = pickle.dumps(part)
    assert len(parcel) < 1000
    copy = pickle.loads(parcel)
    assert np.array_equal(copy.tokens, part.tokens)
    assert np.array_equal(copy.offsets, part.offsets)
    assert copy.fingerprint() == part.fingerprint()
    tail = pickle.loads(pickle.dumps(copy.slice(7, 10)))
    assert tail.tokens.tolist() == [107, 108, 109]


def test_a_spawned_process_reads_the_same(tmp_path):
    part = open_tokens(write(tmp_path / "a")).slice(1, 7)
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.apply(Tokens.fingerprint, (part,)) == part.fingerprint()


def test_tokens_in_memory_travel_whole():
    tokens = Tokens(np.arange(5, dtype=np.uint8), np.array([0, 2, 5]), 256, 1, 2, "t", "s")
    copy = pickle.loads(pickle.dumps(tokens))
    assert copy.tokens.tolist() == [0, 1, 2, 3, 4]
    assert (copy.eos, copy.bos, copy.fingerprint()) == (1, 2, tokens.fingerprint())


def test_the_fingerprint_tells_changed_data():
    def tokens(values, offsets, vocab_size=256, tokenizer="t"):
        return Tokens(np.array(values, np.uint8), np.array(offsets), vocab_size, tokenizer=tokenizer)

    changed = [
        tokens([1, 2, 3], [0, 3]),
        tokens([1, 2, 4], [0, 3]),
        tokens([0, 2, 3], [0, 3]),
        tokens([1, 2, 3], [0, 1, 3]),
        tokens([1, 2, 3], [0, 2, 3]),
        tokens([1, 2, 3, 0], [0, 4]),
        tokens([1, 2, 3], [0, 3], 255),
        tokens([1, 2, 3], [0, 3], tokenizer="u"),
    ]
    assert len({one.fingerprint() for one in changed}) == len(changed)
    assert tokens([1, 2, 3], [0, 3]).fingerprint() == changed[0].fingerprint()


def test_a_fingerprint_is_the_same_in_memory_and_mapped(tmp_path):
    mapped = open_tokens(write(tmp_path / "a", tokenizer="t", source="one"))
    memory = Tokens(mapped.tokens.copy(), mapped.offsets.copy(), 300, tokenizer="t", source="two")
    assert mapped.fingerprint() == memory.fingerprint()


def test_offsets_span_the_tokens():
    with pytest.raises(ValueError, match="end with the number of tokens, 3"):
        Tokens(np.zeros(3, np.uint8), np.array([0, 2]), 256)
