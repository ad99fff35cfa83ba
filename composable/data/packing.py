"""Rows of equal length, cut from documents laid end to end."""

from typing import Literal, NamedTuple

import numpy as np

from composable.data.answers import inside
from composable.data.tokens import Tokens
from composable.models.loss import IGNORE

Packing = Literal["cut", "whole"]
Starts = range | np.ndarray
"""[rows]: the token at which each row begins"""


class Row(NamedTuple):
    """One sample, four vectors of length S (int64); the last two are None without a document mask.

    `labels` is the token that follows each token, or IGNORE. `positions` counts from 0 within each document,
    `documents` numbers the documents within the row.
    """

    tokens: np.ndarray
    labels: np.ndarray
    positions: np.ndarray | None
    documents: np.ndarray | None


def row_starts(tokens: Tokens, seq_len: int, packing: Packing = "cut") -> Starts:
    """Where each row begins; as many as there are rows. A function of the borders of documents alone.

    `cut`: every `seq_len` tokens, whatever lies there; the last row may be short, and no token is lost. `whole`: where
    a document begins, and a row takes as many documents as fit into it one after another, so that none is torn from
    its beginning; the rest of the row is padding. Of a document longer than a row the first `seq_len` tokens are read.
    """
    if packing == "cut":
        return range(0, len(tokens), seq_len)
    offsets = np.asarray(tokens.offsets, np.int64)
    documents = np.arange(1, len(offsets))
    # For each document: the first one that no longer fits into a row that it begins.
    following = np.maximum(np.searchsorted(offsets, offsets[:-1] + seq_len, side="right") - 1, documents).tolist()
    starts, document = [], 0
    while document < len(following):
        starts.append(document)
        document = following[document]
    return offsets[starts]


def tokens_cut_off(tokens: Tokens, seq_len: int) -> tuple[int, int]:
    """(documents longer than a row, tokens of them that rows of whole documents leave out)."""
    beyond = np.diff(tokens.offsets) - seq_len
    return int((beyond > 0).sum()), int(beyond[beyond > 0].sum())


def make_row(tokens: Tokens, index: int, seq_len: int, document_mask: bool, starts: Starts | None = None) -> Row:
    """Row `index` of the data: inputs are S tokens from starts[index] on, labels are the same shifted by one.

    Rows begin where `row_starts` says; every S tokens if `starts` is not given. The last token of the data has no
    label. A row that ends before S tokens, where the next one begins, is filled up with token 0 without labels. Index
    -1 gives a row of nothing but such padding. In data with answers only a token of one is a label.

    With `document_mask`, documents do not see each other: no label crosses a border (the last token of a document has
    none), and `documents` and `positions` say what attention and rotary embedding need. Padding is a document of its
    own. A document that continues from the row before begins there at position 0: the row cannot see its beginning.

    Raises IndexError where there is no such row, and ValueError where a token id is not below vocab_size.
    """
    starts = range(0, len(tokens), seq_len) if starts is None else starts
    count = len(starts)
    if not -1 <= index < count:
        raise IndexError(f"the data has {count} rows of {seq_len} tokens; there is no row {index}")
    start = int(starts[index]) if index >= 0 else len(tokens)
    stop = min(start + seq_len, int(starts[index + 1]) if index + 1 < count and index >= 0 else len(tokens))
    length = stop - start

    inputs = np.zeros(seq_len, np.int64)
    inputs[:length] = tokens.tokens[start:stop]
    if length and inputs.max() >= tokens.vocab_size:
        raise ValueError(
            f"row {index} of {tokens.path or tokens.source} holds token id {inputs.max()}, outside of its vocabulary "
            f"of {tokens.vocab_size} tokens: the file is damaged or its vocab_size is wrong"
        )
    labels = np.full(seq_len, IGNORE, np.int64)
    following = tokens.tokens[start + 1 : stop + 1]  # one short where the data ends
    labels[: len(following)] = following
    if tokens.answers is not None:
        counted = inside(tokens.answers, start + 1, start + 1 + len(following))
        labels[: len(following)][~counted] = IGNORE
    if not document_mask:
        return Row(inputs, labels, None, None)

    # Document starts after the row's first token, up to and with the token that follows the row.
    first = np.searchsorted(tokens.offsets, start, side="right")
    last = np.searchsorted(tokens.offsets, stop, side="right")
    borders = np.unique(tokens.offsets[first:last]) - start
    labels[borders - 1] = IGNORE
    begins = borders[borders < seq_len]
    is_start = np.zeros(seq_len, np.int64)
    is_start[begins] = 1
    documents = np.cumsum(is_start)
    first_places = np.concatenate([[0], begins])
    positions = np.arange(seq_len) - first_places[documents]
    return Row(inputs, labels, positions, documents)
