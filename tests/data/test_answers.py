"""A mask over tokens: in a file, in its parts, and in the labels that a model is given."""

import pickle
from itertools import islice

import numpy as np
import pytest
import safetensors
from hypothesis import given, settings
from hypothesis import strategies as st

from composable.data.answers import cut, inside, ranges_of, total
from composable.data.loader import DataConfig, build_loader, validation_loader
from composable.data.packing import IGNORE, make_row, row_starts, tokens_cut_off
from composable.data.token_writer import TokenWriter
from composable.data.tokens import Tokens, open_tokens


@settings(deadline=None)
@given(st.lists(st.booleans(), max_size=30), st.data())
def test_ranges_say_of_each_place_whether_it_counts_also_in_a_part(flags, data):
    flags = np.array(flags, bool)
    start = data.draw(st.integers(0, len(flags)))
    stop = data.draw(st.integers(start, len(flags)))
    ranges = ranges_of(flags)
    assert total(ranges) == flags.sum()
    assert inside(ranges, start, stop).tolist() == flags[start:stop].tolist()
    assert ranges_of(flags[start:stop]).tolist() == cut(ranges, start, stop).tolist()


def test_ranges_that_touch_are_two_or_one_alike():
    assert inside(np.array([1, 3, 3, 5]), 0, 6).tolist() == inside(np.array([1, 5]), 0, 6).tolist()


DOCUMENTS = [([5, 6, 7], [0, 1, 1]), ([8], [1]), ([9, 10, 11, 12], [0, 0, 1, 0])]
FLAGS = [flag for _, flags in DOCUMENTS for flag in flags]


@pytest.fixture
def chats(tmp_path):
    with TokenWriter(tmp_path / "chats", 300, eos=2, answers=True) as writer:
        for ids, flags in DOCUMENTS:
            writer.add(np.array(ids), np.array(flags, bool))
    return open_tokens(tmp_path / "chats")


def flags_of(tokens):
    return inside(tokens.answers, 0, len(tokens)).astype(int).tolist()


def test_answers_are_kept_in_a_file_that_any_safetensors_reader_opens(chats):
    assert chats.tokens.tolist() == list(range(5, 13))
    assert flags_of(chats) == FLAGS
    with safetensors.safe_open(chats.path, "np") as file:
        assert set(file.keys()) == {"tokens", "offsets", "answers"}
        assert file.metadata()["version"] == "2"


def test_a_file_without_answers_is_of_version_one_and_has_none(tmp_path):
    with TokenWriter(tmp_path / "a", 300) as writer:
        writer.add(np.array([1, 2]))
    with safetensors.safe_open(tmp_path / "a", "np") as file:
        assert set(file.keys()) == {"tokens", "offsets"}
        assert file.metadata()["version"] == "1"
    assert open_tokens(tmp_path / "a").answers is None


def test_data_without_any_answer_still_has_a_mask(tmp_path):
    with TokenWriter(tmp_path / "a", 300, answers=True) as writer:
        writer.add(np.array([1, 2]), np.zeros(2, bool))
    assert flags_of(open_tokens(tmp_path / "a")) == [0, 0]


def test_every_slice_keeps_its_answers_also_in_another_process(chats):
    for start in range(9):
        for stop in range(start, 9):
            part = chats.slice(start, stop)
            assert flags_of(part) == FLAGS[start:stop]
            assert flags_of(pickle.loads(pickle.dumps(part))) == FLAGS[start:stop]
    memory = Tokens(chats.tokens.copy(), chats.offsets.copy(), 300, answers=chats.answers.copy())
    assert flags_of(pickle.loads(pickle.dumps(memory))) == FLAGS


@pytest.mark.parametrize(("holdout", "held"), [(0.0, 0), (0.25, 0), (0.5, 4), (0.6, 4), (0.7, 5), (0.99, 5)])
def test_conversations_are_held_out_whole(chats, holdout, held):
    train, tail = chats.split(holdout)
    assert len(tail) == held
    assert flags_of(train) + flags_of(tail) == FLAGS


def test_the_fingerprint_tells_changed_answers(chats):
    def tokens(answers):
        return Tokens(chats.tokens, chats.offsets, 300, eos=2, answers=answers).fingerprint()

    prints = [tokens(None), tokens(np.array([], np.int64)), tokens(np.array([0, 2])), tokens(np.array([0, 3]))]
    assert len(set(prints)) == 4
    assert tokens(chats.answers) == chats.fingerprint()


@pytest.mark.parametrize("answers", [[0], [3, 2], [-1, 2], [0, 9]])
def test_answers_rise_in_pairs_within_the_tokens(chats, answers):
    with pytest.raises(ValueError, match="answers must be start, stop"):
        Tokens(chats.tokens, chats.offsets, 300, answers=np.array(answers))


@pytest.mark.parametrize(
    ("answers", "counted", "reason"),
    [
        (True, None, "TokenWriter\\(answers=True\\)"),
        (False, np.ones(2, bool), "TokenWriter\\(answers=True\\)"),
        (True, np.ones(3, bool), "one bool a token"),
        (True, np.ones(2, int), "one bool a token"),
    ],
)
def test_flags_are_given_where_they_are_kept(tmp_path, answers, counted, reason):
    with pytest.raises(ValueError, match=reason), TokenWriter(tmp_path / "a", 300, answers=answers) as writer:
        writer.add(np.array([1, 2]), counted)


def test_a_mask_belongs_to_the_predicted_token(chats):
    rows = [make_row(chats, index, 4, False) for index in range(2)]
    assert [row.labels.tolist() for row in rows] == [[6, 7, 8, IGNORE], [IGNORE, 11, IGNORE, IGNORE]]
    # With a document mask 8 is the first of its document: nothing before it predicts it.
    rows = [make_row(chats, index, 4, True) for index in range(2)]
    assert [row.labels.tolist() for row in rows] == [[6, 7, IGNORE, IGNORE], [IGNORE, 11, IGNORE, IGNORE]]


@pytest.mark.parametrize("seq_len", [1, 2, 3, 5, 8, 50])
def test_each_answer_token_is_a_label_once_whatever_the_length_of_rows(chats, seq_len):
    rows = [make_row(chats, index, seq_len, False) for index in range(len(row_starts(chats, seq_len)))]
    labels = [label for row in rows for label in row.labels.tolist() if label != IGNORE]
    assert labels == [6, 7, 8, 11]


def lengths(*sizes):
    offsets = np.cumsum([0, *sizes])
    return Tokens(np.arange(1, offsets[-1] + 1, dtype=np.uint16), offsets, 65536)


def test_rows_of_whole_documents_begin_where_documents_do():
    tokens = lengths(3, 2, 4, 1, 9, 2, 6)
    starts = row_starts(tokens, 6, "whole")
    assert starts.tolist() == [0, 5, 10, 19, 21]
    rows = [make_row(tokens, index, 6, True, starts) for index in range(len(starts))]
    assert [row.tokens.tolist() for row in rows] == [
        [1, 2, 3, 4, 5, 0],
        [6, 7, 8, 9, 10, 0],
        [11, 12, 13, 14, 15, 16],  # of 9 tokens, the first 6
        [20, 21, 0, 0, 0, 0],
        [22, 23, 24, 25, 26, 27],
    ]
    assert rows[0].labels.tolist() == [2, 3, IGNORE, 5, IGNORE, IGNORE]
    assert rows[0].positions.tolist() == [0, 1, 2, 0, 1, 0]
    assert rows[2].labels.tolist() == [12, 13, 14, 15, 16, 17]
    assert tokens_cut_off(tokens, 6) == (1, 3)


@settings(deadline=None)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=20), st.integers(1, 10))
def test_rows_of_whole_documents_hold_each_document_once_and_as_many_as_fit(sizes, seq_len):
    tokens = lengths(*sizes)
    starts = row_starts(tokens, seq_len, "whole")
    rows = [make_row(tokens, index, seq_len, True, starts).tokens for index in range(len(starts))]
    seen = [token for row in rows for token in row.tolist() if token]
    kept = [range(a + 1, min(b, a + seq_len) + 1) for a, b in zip(tokens.offsets[:-1], tokens.offsets[1:], strict=True)]
    assert seen == [token for part in kept for token in part]
    assert set(starts.tolist()) <= set(tokens.offsets.tolist())
    filled = [int((row > 0).sum()) for row in rows]
    sizes_of_first = [int(tokens.offsets[np.searchsorted(tokens.offsets, s) + 1] - s) for s in starts[1:]]
    assert all(room + first > seq_len for room, first in zip(filled[:-1], sizes_of_first, strict=True))


def test_rows_of_whole_documents_are_shuffled_resumed_and_shared_like_all_rows():
    generator = np.random.default_rng(3)
    tokens = lengths(*generator.integers(1, 12, 60))
    data = DataConfig(seq_len=16, global_batch=4, micro_batch=1, packing="whole", document_mask=True, epochs=2)

    def read(ranks=1, position=0, workers=0):
        config = DataConfig(**{**vars(data), "workers": workers})
        loaders = [
            list(build_loader(tokens, config, seed=5, data_rank=rank, data_ranks=ranks, position=position))
            for rank in range(ranks)
        ]
        return [batch.tokens.tolist() for together in zip(*loaders, strict=True) for batch in together]

    straight = read()
    assert read(2) == read(1, workers=2) == straight
    assert straight[:8] + read(4, position=8) == straight
    firsts = [row[0][0] for row in straight]
    rows = len(row_starts(tokens, 16, "whole"))
    assert sorted(firsts[:rows]) == [int(start) + 1 for start in row_starts(tokens, 16, "whole")]
    assert firsts[:rows] != firsts[rows : 2 * rows]
    held = validation_loader(tokens, data, data_rank=0, data_ranks=1)
    assert [batch.tokens[0, 0].item() for batch in islice(held, rows)] == sorted(firsts[:rows])


def test_documents_that_are_cut_are_counted_in_a_warning():
    data = DataConfig(seq_len=4, global_batch=1, micro_batch=1, packing="whole")
    with pytest.warns(UserWarning, match=r"2 of 3 documents are longer than data.seq_len 4 .* 5 of 15 tokens"):
        build_loader(lengths(6, 2, 7), data, seed=1, data_rank=0, data_ranks=1)
