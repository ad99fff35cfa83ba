"""Rows of equal length, cut from documents laid end to end."""

from typing import NamedTuple

import numpy as np

from composable.data.tokens import Tokens
from composable.models.loss import IGNORE


class Row(NamedTuple):
    """One sample, four vectors of length S (int64); the last two are None without a document mask.

    `labels` is the token that follows each token, or IGNORE. `positions` counts from 0 within each document,
    `documents` numbers the documents within the row.
    """

    tokens: np.ndarray
    labels: np.ndarray
    positions: np.ndarray | None
    documents: np.ndarray | None


def sample_count(n_tokens: int, seq_len: int) -> int:
    """The number of rows of `seq_len` that hold `n_tokens`: the last may be short, and no token is lost."""
    return -(-n_tokens // seq_len)


def make_row(tokens: Tokens, index: int, seq_len: int, document_mask: bool) -> Row:
    """Row `index` of the data: inputs are tokens[index * S : (index + 1) * S], labels are the same shifted by one.

    The last token of the data has no label. A short last row is filled up with token 0 without labels. Index -1 gives
    a row of nothing but such padding.

    With `document_mask`, documents do not see each other: no label crosses a border (the last token of a document has
    none), and `documents` and `positions` say what attention and rotary embedding need. Padding is a document of its
    own. A document that continues from the row before begins there at position 0: the row cannot see its beginning.

    Raises IndexError where there is no such row, and ValueError where a token id is not below vocab_size.
    """
    count = sample_count(len(tokens), seq_len)
    if not -1 <= index < count:
        raise IndexError(f"the data has {count} rows of {seq_len} tokens; there is no row {index}")
    start = index * seq_len if index >= 0 else len(tokens)
    stop = min(start + seq_len, len(tokens))
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
    starts = np.concatenate([[0], begins])
    positions = np.arange(seq_len) - starts[documents]
    return Row(inputs, labels, positions, documents)
