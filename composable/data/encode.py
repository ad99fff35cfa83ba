"""Documents as batches of tokens, and what became of each record: the work of `tools/prepare_data.py`."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import date
from typing import NamedTuple

import numpy as np

from composable.data.chat import Mask, chat_encoder
from composable.data.conversations import conversation_of
from composable.data.documents import Document
from composable.data.text import load_tokenizer

SHOWN = 5
"""skipped records that a report shows; it counts all"""


@dataclass(frozen=True)
class How:
    """How documents become tokens."""

    tokenizer: str
    """as `load_tokenizer` takes it"""
    bos: bool = True
    """whether a text begins with the tokenizer's beginning of text, if it has one"""
    eos: bool = True
    """and ends with its end of text"""
    template: str = ""
    """records are conversations, written so (`chat_encoder`); empty: they are texts"""
    mask: Mask = "answers"
    """of a conversation, what has a loss"""
    today: date = date(2024, 7, 26)
    """what templates that write the date write"""
    max_tokens: int = 0
    """documents of more are left out; 0: none"""
    strict: bool = False
    """a record that gives no document is an error"""

    @property
    def answers(self) -> bool:
        """Whether only some tokens have a loss."""
        return bool(self.template) and self.mask != "none"


class Piece(NamedTuple):
    """A document as ids, and what is known of it."""

    ids: np.ndarray
    counted: np.ndarray | None
    text_bytes: int
    torn: int = 0
    endless: int = 0


@dataclass(frozen=True)
class Encoded:
    """A batch of documents as ids: `ids` end to end, `lengths` [documents]; and what became of its records."""

    ids: np.ndarray
    lengths: np.ndarray
    counted: np.ndarray | None
    """which ids have a loss; None: all"""
    read: int
    text_bytes: int = 0
    empty: int = 0
    undecodable: int = 0
    torn: int = 0
    endless: int = 0
    long: int = 0
    skipped: tuple[str, ...] = ()


@dataclass
class Report:
    """What the sources gave."""

    documents: int = 0
    tokens: int = 0
    counted: int = 0
    text_bytes: int = 0
    empty: int = 0
    undecodable: int = 0
    skipped: int = 0
    torn: int = 0
    endless: int = 0
    long: int = 0
    longest: int = 0
    reasons: list[str] = field(default_factory=list)
    others: int = 0
    """files in folders that are of another kind"""

    def add(self, batch: Encoded) -> None:
        self.documents += len(batch.lengths)
        self.tokens += len(batch.ids)
        self.counted += len(batch.ids) if batch.counted is None else int(batch.counted.sum())
        self.longest = max(self.longest, int(batch.lengths.max(initial=0)))
        for name in ("text_bytes", "empty", "undecodable", "torn", "endless", "long"):
            setattr(self, name, getattr(self, name) + getattr(batch, name))
        self.skipped += len(batch.skipped)
        self.reasons += batch.skipped[: SHOWN - len(self.reasons)]

    def lines(self) -> Iterator[str]:
        yield f"documents          {self.documents:,}"
        yield f"tokens             {self.tokens:,}"
        if self.counted != self.tokens:
            yield f"tokens with a loss {self.counted:,} ({self.counted / self.tokens:.1%})"
        yield f"bytes of text      {self.text_bytes:,}"
        yield f"empty texts        {self.empty:,}"
        yield f"skipped records    {self.skipped:,}"
        yield from (f"    {reason}" for reason in self.reasons)
        if self.skipped > len(self.reasons):
            yield f"    and {self.skipped - len(self.reasons):,} more"
        yield f"undecodable bytes  {self.undecodable:,}"
        yield f"longest document   {self.longest:,} tokens"
        if self.long:
            yield f"left out           {self.long:,} documents of more than --max-tokens"
        if self.torn:
            yield f"torn beginnings    {self.torn:,} answers follow other tokens here than when a model is asked"
        if self.endless:
            yield f"endless answers    {self.endless:,} have no token that ends them: a model will not learn to stop"
        if self.others:
            yield f"files not read     {self.others:,} of other kinds in folders; --suffix .py reads those that end so"


def document_encoder(how: How) -> Callable[[Document], Piece | None]:
    """A function from a document to its tokens, None for an empty text; raises ValueError for what gives none.

    Raises:
        ValueError, FileNotFoundError: no such tokenizer or template, or they do not go together.
    """
    return _chat_encoder(how) if how.template else _text_encoder(how)


def _chat_encoder(how: How) -> Callable[[Document], Piece]:
    encode = chat_encoder(how.tokenizer, how.template, how.mask, how.today)

    def piece(document: Document) -> Piece:
        found = encode(conversation_of(str(document.text)))
        return Piece(found.ids, found.counted, len(found.text.encode()), found.torn, found.endless)

    return piece


def _text_encoder(how: How) -> Callable[[Document], Piece | None]:
    coder = load_tokenizer(how.tokenizer)
    before = [coder.bos] if how.bos and coder.bos is not None else []
    after = [coder.eos] if how.eos and coder.eos is not None else []

    def piece(document: Document) -> Piece | None:
        if not document.text:
            return None
        ids = coder.encode(document.text)
        text = document.text if isinstance(document.text, bytes) else document.text.encode("utf-8", "replace")
        return Piece(np.concatenate([before, ids, after]).astype(np.int64), None, len(text))

    return piece


def encode_batch(batch: list[Document], how: How, encode: Callable[[Document], Piece | None]) -> Encoded:
    """Encode documents with the function that `document_encoder` gives for `how`.

    Raises:
        ValueError: a record that gives no document, where `how.strict` forbids it; the file and line are named.
    """
    parts: list[Piece] = []
    skipped: list[str] = []
    empty = long = 0
    for document in batch:
        place = f"{document.file}:{document.line}" if document.line else document.file
        if document.skipped:
            skipped.append(f"{place}: {document.skipped}")
            continue
        try:
            piece = encode(document)
        except ValueError as error:
            if how.strict:
                raise ValueError(f"{place}: {error}") from error
            skipped.append(f"{place}: {error}")
            continue
        if piece is None:
            empty += 1
        elif how.max_tokens and len(piece.ids) > how.max_tokens:
            long += 1
        else:
            parts.append(piece)
    counted = [part.counted for part in parts if part.counted is not None]
    return Encoded(
        np.concatenate([np.empty(0, np.int64), *(part.ids for part in parts)]),
        np.array([len(part.ids) for part in parts], np.int64),
        np.concatenate([np.empty(0, bool), *counted]) if how.answers else None,
        read=sum(document.read for document in batch),
        text_bytes=sum(part.text_bytes for part in parts),
        empty=empty,
        undecodable=sum(document.undecodable for document in batch),
        torn=sum(part.torn for part in parts),
        endless=sum(part.endless for part in parts),
        long=long,
        skipped=tuple(skipped),
    )
