import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from composable.data.packing import IGNORE, make_row, row_starts
from composable.data.tokens import Tokens


def documents_of(*lengths):
    """Documents of these lengths; token ids count up from 1 over all of them."""
    offsets = np.cumsum([0, *lengths])
    return Tokens(np.arange(1, offsets[-1] + 1, dtype=np.uint16), offsets, 65536)


def test_ignored_labels_are_those_that_cross_entropy_skips():
    assert IGNORE == -100


def test_labels_are_the_next_tokens_and_no_token_is_lost():
    tokens = documents_of(10)
    rows = [make_row(tokens, index, 4, False) for index in range(len(row_starts(tokens, 4)))]
    assert [row.tokens.tolist() for row in rows] == [[1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 0, 0]]
    assert [row.labels.tolist() for row in rows] == [[2, 3, 4, 5], [6, 7, 8, 9], [10, -100, -100, -100]]
    assert rows[0].positions is None
    assert rows[0].documents is None


def test_the_last_token_of_a_full_last_row_has_no_label():
    assert make_row(documents_of(8), 1, 4, False).labels.tolist() == [6, 7, 8, -100]


@pytest.mark.parametrize(("mask", "places"), [(True, 30), (False, 31)])
def test_documents_of_12_and_20_in_a_row_of_32(mask, places):
    row = make_row(documents_of(12, 20), 0, 32, mask)
    assert int((row.labels != IGNORE).sum()) == places
    if mask:
        assert row.labels[11] == IGNORE
        assert row.documents.tolist() == [0] * 12 + [1] * 20
        assert row.positions.tolist() == [*range(12), *range(20)]


def test_no_label_crosses_a_border_at_the_end_of_a_row():
    tokens = documents_of(4, 4)
    assert make_row(tokens, 0, 4, True).labels.tolist() == [2, 3, 4, -100]
    assert make_row(tokens, 0, 4, False).labels.tolist() == [2, 3, 4, 5]


def test_a_document_longer_than_a_row_goes_on_from_position_zero():
    tokens = documents_of(10, 2)
    first, second = (make_row(tokens, index, 8, True) for index in range(2))
    assert first.labels.tolist() == [2, 3, 4, 5, 6, 7, 8, 9]
    assert first.documents.tolist() == [0] * 8
    assert second.labels.tolist() == [10, -100, 12, -100, -100, -100, -100, -100]
    assert second.documents.tolist() == [0, 0, 1, 1, 2, 2, 2, 2]
    assert second.positions.tolist() == [0, 1, 0, 1, 0, 1, 2, 3]


def test_documents_of_one_token_have_no_label():
    row = make_row(documents_of(1, 1, 2, 1), 0, 8, True)
    assert row.labels.tolist() == [-100, -100, 4, -100, -100, -100, -100, -100]
    assert row.documents.tolist() == [0, 1, 2, 2, 3, 4, 4, 4]


@pytest.mark.parametrize("tokens", [documents_of(4), documents_of(3, 2), documents_of()])
@pytest.mark.parametrize("mask", [False, True])
def test_a_padding_row_has_no_labels(tokens, mask):
    row = make_row(tokens, -1, 4, mask)
    assert row.tokens.tolist() == [0] * 4
    assert row.labels.tolist() == [IGNORE] * 4
    if mask:
        assert row.documents.tolist() == [0] * 4
        assert row.positions.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("index", [-2, 3])
def test_a_row_that_is_not_there_is_refused(index):
    with pytest.raises(IndexError, match=f"3 rows of 4 tokens; there is no row {index}"):
        make_row(documents_of(10), index, 4, False)


def test_token_ids_beyond_the_vocabulary_are_refused():
    tokens = Tokens(np.array([1, 9, 2], np.uint8), np.array([0, 3]), 9, source="here")
    with pytest.raises(ValueError, match="row 0 of here holds token id 9, outside of its vocabulary of 9"):
        make_row(tokens, 0, 4, False)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=12), st.integers(1, 11))
def test_rows_hold_each_token_and_each_pair_within_a_document_once(lengths, seq_len):
    tokens = documents_of(*lengths)
    document_of = np.repeat(np.arange(len(lengths)), lengths)
    seen, pairs = [], []
    for index in range(len(row_starts(tokens, seq_len))):
        row = make_row(tokens, index, seq_len, True)
        real = row.tokens > 0
        seen += row.tokens[real].tolist()
        pairs += [(a, b) for a, b in zip(row.tokens.tolist(), row.labels.tolist(), strict=True) if b != IGNORE]
        ids = document_of[row.tokens[real] - 1]
        # Two places of a row share a document id exactly when they belong to one document; padding shares with none.
        assert np.array_equal(np.equal.outer(row.documents[real], row.documents[real]), np.equal.outer(ids, ids))
        assert not np.isin(row.documents[~real], row.documents[real]).any()
        for document in set(row.documents.tolist()):
            place = row.positions[row.documents == document]
            assert place.tolist() == list(range(len(place)))
    assert seen == tokens.tokens.tolist()
    expected = [(a, a + 1) for a in range(1, len(tokens)) if document_of[a - 1] == document_of[a]]
    assert pairs == expected
