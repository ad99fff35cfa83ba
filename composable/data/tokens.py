"""Token files: a data set as one array of token ids and the place where each document begins.

A token file is a safetensors file, so any safetensors reader opens it. It holds these tensors:

* `tokens` [N]: uint8, uint16 or uint32, the smallest that holds `vocab_size`; documents one after another, nothing
  between;
* `offsets` [D + 1] int64: where each of the D documents begins; the first is 0 and the last is N;

where only some tokens have a loss (answers in conversations) a third:

* `answers` [2A] int64: borders of the ranges of tokens that have one, rising: start, stop, start, stop...;

and this metadata, all of it strings, as the format demands:

* `format` = "composable.tokens", `version` = "1", or "2" with `answers`, which a reader of version 1 would overlook;
* `vocab_size`, and `eos` and `bos`: token ids, or "" where there is none;
* `tokenizer`: the name of what made the ids; `source`: what they were made from.

Files are written by `tools/prepare_data.py`, or with `token_writer.TokenWriter`, and mapped into memory by
`open_tokens`: opening one costs no reading of tokens, and all processes of a machine share its pages.
"""

import json
import os
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import xxhash

from composable.data.answers import cut

FORMAT = "composable.tokens"
VERSION = 2
PYTHON_STDLIB = "python-stdlib"

DTYPES: dict[str, np.dtype[Any]] = {"U8": np.dtype("u1"), "U16": np.dtype("<u2"), "U32": np.dtype("<u4")}
"""of tokens, by the name that safetensors gives them"""
_BORDERS: dict[str, np.dtype[Any]] = {"I64": np.dtype("<i8")}
MAX_HEADER = 1 << 20  # ours is below one KiB but for a long source; a foreign file's first 8 bytes are any number


@dataclass(frozen=True, eq=False)
class Tokens:
    """A data set: token ids and the borders of its documents.

    `tokens` [N] unsigned integers; `offsets` [D + 1] int64, the start of each document, the last being N. `eos` and
    `bos` are token ids or None. `path` and `start` say which file, and which token of it, the first token is (None
    and 0 in memory): a mapped data set travels to another process as its path, not as its bytes. `answers` [2A] int64
    are the borders of the ranges of tokens that have a loss, None where all have one. Raises ValueError when offsets
    do not span tokens, and when answers do not rise within them.
    """

    tokens: np.ndarray
    offsets: np.ndarray
    vocab_size: int
    eos: int | None = None
    bos: int | None = None
    tokenizer: str = ""
    source: str = ""
    path: str | None = None
    start: int = 0
    answers: np.ndarray | None = None

    def __post_init__(self) -> None:
        if len(self.offsets) == 0 or self.offsets[0] != 0 or self.offsets[-1] != len(self.tokens):
            raise ValueError(
                f"offsets must begin with 0 and end with the number of tokens, {len(self.tokens)}; "
                f"got {self.offsets[:1]} ... {self.offsets[-1:]}"
            )
        if self.answers is not None and not _rising_pairs(self.answers, len(self.tokens)):
            raise ValueError(
                f"answers must be start, stop, start, stop... rising from 0 to at most the number of tokens, "
                f"{len(self.tokens)}; got {len(self.answers)} borders: {self.answers[:4]} ... {self.answers[-2:]}"
            )

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def documents(self) -> int:
        """The number of documents."""
        return len(self.offsets) - 1

    def slice(self, start: int, stop: int) -> "Tokens":
        """The tokens start..stop (0 <= start <= stop <= N); a document that the range cuts is one on both sides."""
        if not 0 <= start <= stop <= len(self):
            raise ValueError(f"a slice needs 0 <= start <= stop <= {len(self)}; got start {start}, stop {stop}")
        first = int(np.searchsorted(self.offsets, start, side="right"))
        last = int(np.searchsorted(self.offsets, stop, side="left"))
        inner = np.asarray(self.offsets[first:last], dtype=np.int64) - start
        ends = [stop - start] if stop > start else []
        return Tokens(
            self.tokens[start:stop],
            np.concatenate([[0], inner, ends]).astype(np.int64),
            self.vocab_size,
            self.eos,
            self.bos,
            self.tokenizer,
            self.source,
            self.path,
            self.start + start,
            None if self.answers is None else cut(self.answers, start, stop),
        )

    def split(self, holdout: float) -> tuple["Tokens", "Tokens"]:
        """(train, held out): the held-out part is the tail that holds this share of the tokens, rounded down.

        Data with answers is cut where a document begins, as an answer says little without its question.
        """
        if not 0.0 <= holdout < 1.0:
            raise ValueError(f"holdout is a share of the tokens, at least 0 and below 1; got {holdout}")
        border = len(self) - int(len(self) * holdout)
        if self.answers is not None:
            border = int(self.offsets[np.searchsorted(self.offsets, border, side="left")])
        return self.slice(0, border), self.slice(border, len(self))

    def fingerprint(self) -> str:
        """A short name of this data, the same on every machine: a run that resumes on other data can tell.

        It covers the sizes, the tokenizer, every border of documents and answers, and the first and last 64 KiB of
        tokens, not each token.
        """
        edge = (64 << 10) // self.tokens.itemsize
        digest = xxhash.xxh3_128()
        facts = (len(self), self.documents, self.vocab_size, self.eos, self.bos, self.tokenizer, self.tokens.itemsize)
        digest.update(repr(facts).encode())
        answers = () if self.answers is None else (np.array([-1]), self.answers)
        for part in (self.offsets, self.tokens[:edge], self.tokens[max(0, len(self) - edge) :], *answers):
            digest.update(np.ascontiguousarray(part).view(np.uint8).data)
        return digest.hexdigest()

    def __reduce__(self) -> tuple[Callable[..., "Tokens"], tuple[Any, ...]]:
        if self.path is not None:
            return _reopen, (self.path, self.start, self.start + len(self))
        fields = (self.tokens, self.offsets, self.vocab_size, self.eos, self.bos, self.tokenizer, self.source)
        return Tokens, (*fields, None, 0, self.answers)


def _rising_pairs(borders: np.ndarray, end: int) -> bool:
    if len(borders) == 0:
        return True
    in_range = borders[0] >= 0 and borders[-1] <= end
    return len(borders) % 2 == 0 and bool(in_range) and not bool((np.diff(borders) < 0).any())


def _reopen(path: str, start: int, stop: int) -> Tokens:
    return open_tokens(path).slice(start, stop)


def load_tokens(path: str) -> Tokens:
    """The data set that `path` names: a token file, or "python-stdlib" for the text of Python's standard library.

    Raises FileNotFoundError where there is no such file, ValueError where it is no token file.
    """
    if path == PYTHON_STDLIB:
        from composable.data.text import python_stdlib  # text makes Tokens, so it imports this module

        return python_stdlib()
    if not os.path.exists(path):
        raise FileNotFoundError(
            f"data path {path!r} is neither {PYTHON_STDLIB!r} nor a file: make a token file with "
            f"`python tools/prepare_data.py TEXT... --out {path}`, or write --data.path {PYTHON_STDLIB}"
        )
    return open_tokens(path)


def open_tokens(path: str | os.PathLike[str]) -> Tokens:
    """Map a token file into memory.

    Raises ValueError, naming the file, where it is truncated, foreign, of a newer version or damaged, and OSError
    where it cannot be read.
    """
    path = os.path.abspath(path)
    if os.path.isdir(path):
        raise _bad(path, "it is a folder")
    header, data_start = _read_header(path)
    metadata = header.get("__metadata__")
    if not isinstance(metadata, dict) or metadata.get("format") != FORMAT:
        raise _bad(path, f"it is a safetensors file of another kind (its metadata has no format={FORMAT!r})")
    version = str(metadata.get("version"))
    if version not in ("1", str(VERSION)):
        raise _bad(path, f"it is of format version {version}, and this release reads versions 1 to {VERSION}")
    try:
        tokens = _map(path, data_start, header["tokens"], DTYPES)
        offsets = _map(path, data_start, header["offsets"], _BORDERS)
        answers = _map(path, data_start, header["answers"], _BORDERS) if version == "2" else None
        vocab_size, eos, bos = int(metadata["vocab_size"]), _optional(metadata["eos"]), _optional(metadata["bos"])
        tokenizer, source = metadata["tokenizer"], metadata["source"]
    except (KeyError, TypeError, ValueError) as error:
        raise _bad(path, f"its header is incomplete or damaged ({type(error).__name__}: {error})") from error
    offsets = _aligned(offsets)
    answers = None if answers is None else _aligned(answers)
    if len(offsets) == 0 or offsets[0] != 0 or offsets[-1] != len(tokens) or bool((np.diff(offsets) < 0).any()):
        raise _bad(path, f"its offsets do not rise from 0 to its {len(tokens)} tokens")
    if answers is not None and not _rising_pairs(answers, len(tokens)):
        raise _bad(path, f"its answers do not rise in pairs within its {len(tokens)} tokens")
    return Tokens(tokens, offsets, vocab_size, eos, bos, tokenizer, source, path, 0, answers)


def _aligned(borders: np.ndarray) -> np.ndarray:
    """The same where elements lie at multiples of their size: searching others would copy them at each call."""
    return borders if borders.flags.aligned else np.array(borders)


def _bad(path: str, reason: str) -> ValueError:
    return ValueError(
        f"{path} is not a usable token file: {reason}. Make one with `python tools/prepare_data.py TEXT... --out FILE`."
    )


def _optional(text: str) -> int | None:
    return int(text) if text else None


def _read_header(path: str) -> tuple[dict[str, Any], int]:
    """The safetensors header and where the tensors' bytes begin; the file is checked to be as long as it says."""
    size = os.path.getsize(path)
    with open(path, "rb") as file:
        prefix = file.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
        if not 2 <= length <= MAX_HEADER:
            raise _bad(path, "it is not a safetensors file")
        text = file.read(length)
    if len(text) < length:
        raise _bad(path, f"it is truncated: {size} bytes, and its header alone has {length}")
    try:
        header = json.loads(text)
        end = max((entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"), default=0)
        expected = 8 + length + int(end)
    except (ValueError, TypeError, KeyError, AttributeError, IndexError, RecursionError) as error:
        raise _bad(path, "it is not a safetensors file") from error
    if size != expected:
        state = "truncated" if size < expected else "longer than its header says"
        raise _bad(path, f"it is {state}: {size} bytes where the header asks for {expected}")
    return header, 8 + length


def _map(path: str, data_start: int, entry: dict[str, Any], dtypes: dict[str, np.dtype]) -> np.ndarray:
    dtype = dtypes[entry["dtype"]]
    (count,) = entry["shape"]
    begin, end = entry["data_offsets"]
    if end - begin != count * dtype.itemsize or begin < 0:
        raise ValueError(f"{count} elements of {dtype} do not fill the bytes {begin}..{end}")
    if count == 0:
        return np.empty(0, dtype)  # nothing to map: the system refuses an empty range
    # A plain view: slicing a memmap object itself is several times slower.
    return np.asarray(np.memmap(path, dtype, mode="r", offset=data_start + begin, shape=(count,)))
