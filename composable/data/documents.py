"""Documents in source files: text files, and JSON records, one a line."""

import gzip
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import zstandard

_CHUNK = 1 << 20
RECORD_SUFFIXES = (".jsonl", ".jsonl.gz", ".jsonl.zst")


@dataclass(frozen=True)
class Document:
    """One document of a source file, or the reason why a record gives none.

    `text`: bytes of a text file as they are, or the str of a JSON record. `line` counts from 1 (0: the whole file).
    `undecodable` counts bytes that are not UTF-8 (and halves of surrogate pairs): U+FFFD takes their place in a str.
    `read`: bytes of the source file consumed since the document before. `skipped`: why there is no text, else "".
    """

    text: str | bytes
    file: str
    line: int
    read: int
    undecodable: int = 0
    skipped: str = ""


def source_files(path: str | os.PathLike[str], suffixes: Sequence[str] = ()) -> list[Path]:
    """The files that `path` stands for: itself, or, sorted, all files below a folder that `read_documents` can read.

    With `suffixes` a folder gives just files that end with one of them. Hidden files and folders are left out.
    Raises FileNotFoundError where there is nothing, ValueError for a file of unknown kind.
    """
    path = Path(path)
    wanted = tuple(suffixes) or (".txt", *RECORD_SUFFIXES)
    if path.is_file():
        if not path.name.endswith((*wanted, ".txt", *RECORD_SUFFIXES)):
            raise ValueError(
                f"{path}: of unknown kind; .txt, .jsonl, .jsonl.gz and .jsonl.zst are read, and with --suffix "
                f"{path.suffix} files with that ending, each as one document"
            )
        return [path]
    if not path.is_dir():
        raise FileNotFoundError(f"{path}: no such file or folder")
    found = []
    for folder, folders, files in os.walk(path):
        folders[:] = [name for name in folders if not name.startswith(".")]
        found += [Path(folder) / name for name in files if name.endswith(wanted) and not name.startswith(".")]
    if not found:
        raise FileNotFoundError(f"{path}: no file below it ends with {' or '.join(wanted)}")
    return sorted(found, key=lambda file: file.relative_to(path).as_posix())


def other_files(path: str | os.PathLike[str], suffixes: Sequence[str] = ()) -> int:
    """How many files below a folder `source_files` leaves out; 0 for a file."""
    if not Path(path).is_dir():
        return 0
    return sum(len(files) for _, _, files in os.walk(path)) - len(source_files(path, suffixes))


def read_documents(
    path: str | os.PathLike[str], suffixes: Sequence[str] = (), field: str | None = "text", strict: bool = False
) -> Iterator[Document]:
    """The documents of a file or of all files below a folder, in an order that never changes.

    `.jsonl` (also `.gz`, `.zst`): a document for each line, its `field`, or with None the line itself, to be read as a
    conversation; blank lines are no documents. All other files: one document each, byte for byte. A record that is no
    JSON object or has no such str is yielded with `skipped` set; with `strict` it raises ValueError, as a damaged
    archive always does. `source_files` says which files are read.
    """
    for file in source_files(path, suffixes):
        if file.name.endswith(RECORD_SUFFIXES):
            yield from _records(file, field, strict)
        else:
            text = file.read_bytes()
            yield Document(text, str(file), 0, len(text), _decode(text)[1])


def clean(text: str) -> tuple[str, int]:
    """The text with U+FFFD for each half of a surrogate pair (JSON may hold one, UTF-8 cannot), and their number."""
    try:
        text.encode()
    except UnicodeEncodeError:
        wrong = sum(0xD800 <= ord(character) <= 0xDFFF for character in text)
        return "".join("\ufffd" if 0xD800 <= ord(character) <= 0xDFFF else character for character in text), wrong
    return text, 0


def _decode(raw: bytes) -> tuple[str, int]:
    try:
        return raw.decode(), 0
    except UnicodeDecodeError:
        # This error handler makes each byte that does not decode one half of a surrogate pair.
        return clean(raw.decode("utf-8", "surrogateescape"))


def _records(path: Path, field: str | None, strict: bool) -> Iterator[Document]:
    with open(path, "rb") as raw:
        consumed = 0
        for number, line in enumerate(_lines(_chunks(raw, path)), start=1):
            if not line.strip():
                continue
            read, consumed = raw.tell() - consumed, raw.tell()
            if number == 1:
                line = line.removeprefix(b"\xef\xbb\xbf")  # a byte order mark is no part of the record
            decoded, undecodable = _decode(line)
            text, reason = (decoded, "") if field is None else _field(decoded, field)
            if reason and strict:
                raise ValueError(f"{path}:{number}: {reason}")
            text, halves = clean(text)
            yield Document(text, str(path), number, read, undecodable + halves, reason)


def _field(line: str, field: str) -> tuple[str, str]:
    """(text, "") or ("", why there is none)."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        return "", f"not JSON ({error})"
    if not isinstance(record, dict):
        return "", f"a JSON {type(record).__name__} where an object with {field!r} should be"
    if field not in record:
        chat = " (a conversation is read with --template)" if {"messages", "conversations"} & record.keys() else ""
        return "", f"no field {field!r}{chat}"
    text = record[field]
    if not isinstance(text, str):
        return "", f"field {field!r} is {'null' if text is None else type(text).__name__}, not a string"
    return text, ""


def _lines(chunks: Iterable[bytes]) -> Iterator[bytes]:
    """Lines without their line feeds, in time linear in their length; the last needs none."""
    pieces: list[bytes] = []
    for chunk in chunks:
        first, *others = chunk.split(b"\n")
        pieces.append(first)
        for other in others:
            yield b"".join(pieces)
            pieces = [other]
    if any(pieces):
        yield b"".join(pieces)


def _chunks(raw: BinaryIO, path: Path) -> Iterator[bytes]:
    """The content of a file, decompressed by its suffix. Raises ValueError where an archive is cut off or damaged."""
    try:
        if path.name.endswith(".zst"):
            yield from _zstandard_chunks(raw)
        elif path.name.endswith(".gz"):
            with gzip.open(raw) as file:
                while chunk := file.read(_CHUNK):
                    yield chunk
        else:
            while chunk := raw.read(_CHUNK):
                yield chunk
    except (EOFError, gzip.BadGzipFile, zstandard.ZstdError) as error:
        raise ValueError(f"{path}: the archive is damaged or cut off ({error})") from error


def _zstandard_chunks(raw: BinaryIO) -> Iterator[bytes]:
    """All frames of a file. The library's own reader takes a file that is cut off for a complete one."""
    frame = None
    while data := raw.read(_CHUNK):
        while data:
            frame = frame or zstandard.ZstdDecompressor().decompressobj()
            yield frame.decompress(data)
            data = b""
            if frame.eof:
                data, frame = frame.unused_data, None
    if frame is not None:
        raise EOFError("the last frame does not end")
