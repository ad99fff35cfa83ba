"""Writing token files, of the form that `tokens.py` reads."""

import contextlib
import json
import os
import struct
from array import array
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self

import numpy as np

from composable.data.answers import ranges_of
from composable.data.tokens import DTYPES, FORMAT, MAX_HEADER

_WRITE_BUFFER = 1 << 20


class TokenWriter:
    """Writes a token file document by document; use it in a `with` block.

    Tokens go to a temporary file beside `path`, which takes its name only when the block ends without an error: the
    file is complete or absent. Only borders are held in memory: 8 bytes a document, 16 an answer. An existing file is
    replaced. With `answers`, each document says which of its tokens have a loss; without, all have.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        vocab_size: int,
        *,
        eos: int | None = None,
        bos: int | None = None,
        tokenizer: str = "",
        source: str = "",
        answers: bool = False,
    ):
        if not 1 <= vocab_size <= 1 << 32:
            raise ValueError(f"vocab_size must be from 1 to {1 << 32}; got {vocab_size}")
        for name, token in (("eos", eos), ("bos", bos)):
            if token is not None and not 0 <= token < vocab_size:
                raise ValueError(f"{name} must be below vocab_size {vocab_size} and not negative; got {token}")
        self.path = Path(path)
        self.vocab_size = vocab_size
        self._code = "U8" if vocab_size <= 1 << 8 else "U16" if vocab_size <= 1 << 16 else "U32"
        self._metadata = {
            "format": FORMAT,
            "version": "2" if answers else "1",
            "vocab_size": str(vocab_size),
            "eos": "" if eos is None else str(eos),
            "bos": "" if bos is None else str(bos),
            "tokenizer": tokenizer,
            "source": source,
        }
        # The header comes first in the file and its numbers are known last: room is kept for the largest they can be.
        self._offsets = array("q", [0])
        self._answers = array("q") if answers else None
        room = len(self._header(1 << 62, 1 << 62, 1 << 62))
        self._room = room + -room % 8
        if self._room > MAX_HEADER:
            raise ValueError(f"tokenizer and source must be shorter than {MAX_HEADER} bytes together; shorten source")
        self._temporary = self.path.with_name(f".{self.path.name}.{os.getpid()}.tmp")
        self._file: BinaryIO | None = None

    def _header(self, tokens: int, documents: int, borders: int) -> bytes:
        middle = tokens * DTYPES[self._code].itemsize
        end = middle + 8 * (documents + 1)
        header = {
            "__metadata__": self._metadata,
            "tokens": {"dtype": self._code, "shape": [tokens], "data_offsets": [0, middle]},
            "offsets": {"dtype": "I64", "shape": [documents + 1], "data_offsets": [middle, end]},
        }
        if self._answers is not None:
            header["answers"] = {"dtype": "I64", "shape": [borders], "data_offsets": [end, end + 8 * borders]}
        return json.dumps(header, separators=(",", ":")).encode()

    def __enter__(self) -> Self:
        self._file = open(self._temporary, "wb", buffering=_WRITE_BUFFER)
        self._file.write(bytes(8 + self._room))
        return self

    def add(self, tokens: np.ndarray, counted: np.ndarray | None = None) -> None:
        """Append one document: [n] integer ids below vocab_size. One without tokens adds no document.

        `counted` [n] bool: which of them have a loss, in a file with answers.
        """
        if self._file is None:
            raise RuntimeError("TokenWriter.add works inside of a `with TokenWriter(...) as writer:` block")
        if tokens.ndim != 1 or (len(tokens) and tokens.dtype.kind not in "ui"):
            raise ValueError(f"a document is a vector of integers; got {tokens.dtype} of shape {tokens.shape}")
        if (counted is None) != (self._answers is None):
            raise ValueError("`counted` is given with each document of a TokenWriter(answers=True), and only there")
        if counted is not None and (counted.dtype != bool or counted.shape != tokens.shape):
            raise ValueError(f"counted is one bool a token, {tokens.shape}; got {counted.dtype} of {counted.shape}")
        if len(tokens) == 0:
            return
        low, high = int(tokens.min()), int(tokens.max())
        if low < 0 or high >= self.vocab_size:
            wrong = low if low < 0 else high
            raise ValueError(f"token id {wrong} is outside of the vocabulary of {self.vocab_size} tokens")
        self._file.write(np.ascontiguousarray(tokens, dtype=DTYPES[self._code]).data)
        if counted is not None and self._answers is not None:
            self._answers.extend((ranges_of(counted) + self._offsets[-1]).tolist())
        self._offsets.append(self._offsets[-1] + len(tokens))

    @property
    def token_bytes(self) -> int:
        """Bytes that a token takes in the file."""
        return DTYPES[self._code].itemsize

    @property
    def tokens(self) -> int:
        """The number of tokens added."""
        return self._offsets[-1]

    @property
    def documents(self) -> int:
        """The number of documents added."""
        return len(self._offsets) - 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        file, self._file = self._file, None
        assert file is not None
        try:
            with file:
                if error is None:
                    for borders in filter(None, (self._offsets, self._answers)):
                        file.write(np.asarray(borders, dtype="<i8").data)
                    file.seek(0)
                    file.write(struct.pack("<Q", self._room))
                    header = self._header(self.tokens, self.documents, len(self._answers or ()))
                    file.write(header.ljust(self._room))
                    file.flush()
                    os.fsync(file.fileno())
            if error is None:
                os.replace(self._temporary, self.path)
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._temporary)  # gone already when it was renamed
