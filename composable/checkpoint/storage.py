"""Files written and read at offsets, large reads past the page cache.

A checkpoint that is read once, by a job that starts, need not push other data out of the page cache, and reads faster
around it: large reads use `O_DIRECT` where the file system has it and the bytes are not in the cache already. It wants
page-aligned memory, offsets and lengths, so bytes go through a small aligned buffer.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from composable.checkpoint.remote import Folder, RemotePath

LARGE = 1 << 20  # bytes: smaller reads take the ordinary way
PIECE = 256 << 10  # bytes of one write
STEP = 8 << 20  # bytes of the aligned buffer, one per thread
PAGE = max(4096, mmap.PAGESIZE)
REMOTE_PIECE = 8 << 20  # bytes of one read from a store


@dataclass(frozen=True)
class File:
    """An open file: a descriptor, and another past the page cache where the file system has such."""

    handle: int
    direct: int | None


Readable = File | RemotePath


@contextlib.contextmanager
def opened(path: Path, flags: int) -> Iterator[File]:
    """The file at `path`, closed at the end; `flags` as for `os.open`."""
    with contextlib.ExitStack() as stack:
        handle = os.open(path, flags, 0o666)
        stack.callback(os.close, handle)
        direct = None
        if flags == os.O_RDONLY:
            with contextlib.suppress(OSError, AttributeError):  # no O_DIRECT on this system, or on this file system
                direct = os.open(path, flags | os.O_DIRECT)
                stack.callback(os.close, direct)
        yield File(handle, direct)


@contextlib.contextmanager
def opened_files(folder: Folder, names: Iterable[str]) -> Iterator[dict[str, Readable]]:
    """Some files of a folder, to read from."""
    with contextlib.ExitStack() as stack:
        if isinstance(folder, RemotePath):
            yield {name: folder / name for name in names}
            return
        yield {name: stack.enter_context(opened(folder / name, os.O_RDONLY)) for name in names}


@contextlib.contextmanager
def naming(path: Folder) -> Iterator[None]:
    """Add the file's name to a system error that has none."""
    try:
        yield
    except OSError as error:
        if error.filename is not None:
            raise
        raise OSError(f"{path}: {error}") from error


def write_all(file: File, data: memoryview, offset: int) -> None:
    """Write `data` at `offset`, all of it; OSError if the disk is full.

    In small pieces, through the page cache, into space that is not reserved before: measured on 2.5 GB by two ranks
    into common files, that is half the time of pieces of 64 MiB, as no writer waits long for the file's lock or for the
    kernel's write-back; past the page cache takes as long, and leaves the files cold for whoever reads them next.
    """
    while data:
        written = os.pwrite(file.handle, data[:PIECE], offset)
        if not written:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        data, offset = data[written:], offset + written


def read_all(file: Readable, data: memoryview, offset: int, *, cached: bool = False) -> None:
    """Fill `data` from `offset`; OSError where the file ends first. `cached`: other processes read the same bytes.

    What the page cache has already (a file just downloaded, say) is taken from there.
    """
    if isinstance(file, RemotePath):
        return _read_remote(file, data, offset)
    if cached or file.direct is None or len(data) < LARGE:
        return _read(file.handle, data, offset)
    position = 0
    with mmap.mmap(-1, STEP) as aligned, memoryview(aligned) as buffer:
        while position < len(data):
            skip = (offset + position) % PAGE
            size = min(STEP - skip, len(data) - position)
            if _in_cache(file.handle, offset + position) and _in_cache(file.handle, offset + position + size - 1):
                _read(file.handle, data[position : position + size], offset + position)
                position += size
                continue
            with buffer[: -(-(skip + size) // PAGE) * PAGE] as part:
                got = _try_read(file.direct, part, offset + position - skip)
            if got < skip + size:  # a stricter alignment than a page's, a short read, a file that ends too early
                return _read(file.handle, data[position:], offset + position)
            _copy(data[position : position + size], buffer[skip : skip + size])
            position += size
    return None


def _read_remote(file: RemotePath, data: memoryview, offset: int) -> None:
    while data:
        got = file.read_bytes(offset, offset + min(len(data), REMOTE_PIECE))
        if not got:
            raise OSError(errno.EIO, f"the file ends at byte {offset}, {len(data)} bytes too early")
        _copy(data[: len(got)], memoryview(got))
        data, offset = data[len(got) :], offset + len(got)


def _copy(target: memoryview, source: memoryview) -> None:
    """Copy bytes without the interpreter's lock, which a memoryview's own assignment holds."""
    np.copyto(np.frombuffer(target, dtype=np.uint8), np.frombuffer(source, dtype=np.uint8))


def _in_cache(handle: int, offset: int) -> bool:
    """Whether the page cache has the byte at `offset`: a read that may not wait tells."""
    try:
        return os.preadv(handle, [bytearray(1)], offset, os.RWF_NOWAIT) == 1
    except (OSError, AttributeError):  # not there, or a system without such reads
        return False


def _try_read(handle: int, data: memoryview, offset: int) -> int:
    try:
        return os.preadv(handle, [data], offset)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return 0


def _read(handle: int, data: memoryview, offset: int) -> None:
    while data:
        got = os.preadv(handle, [data], offset)
        if not got:
            raise OSError(errno.EIO, f"the file ends at byte {offset}, {len(data)} bytes too early")
        data, offset = data[got:], offset + got
