"""Files written and read at offsets, much of them past the page cache.

What is written or read once goes faster around the page cache (`page_cache` brings new checkpoints into it later).
Large reads and writes use `O_DIRECT` where the file system has it (reads where the bytes are not in the cache already).
It wants page-aligned memory, offsets and lengths, so bytes go through a small aligned buffer, one per thread.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from composable.checkpoint.remote import Folder, RemotePath

LARGE = 1 << 20  # bytes: smaller reads and writes take the ordinary way
PIECE = 256 << 10  # bytes of one write through the page cache: no writer waits long for the file's lock
STEP = 8 << 20  # bytes of the aligned buffer, one per thread
PAGE = max(4096, mmap.PAGESIZE)
REMOTE_PIECE = 8 << 20  # bytes of one read from a store


@dataclass(frozen=True)
class File:
    """An open file: a descriptor, and another past the page cache where the file system has such."""

    handle: int
    direct: int | None


Readable = File | RemotePath


class _Buffers(threading.local):
    """One aligned buffer of STEP bytes for each thread, given back at the thread's end."""

    def __init__(self) -> None:
        self.aligned = memoryview(huge_pages(STEP))


@contextlib.contextmanager
def opened(path: Path, flags: int) -> Iterator[File]:
    """The file at `path`, closed at the end; `flags` as for `os.open`."""
    with contextlib.ExitStack() as stack:
        handle = os.open(path, flags, 0o666)
        stack.callback(os.close, handle)
        direct = None
        with contextlib.suppress(OSError, AttributeError):  # no O_DIRECT on this system, or on this file system
            direct = os.open(path, flags & ~(os.O_CREAT | os.O_EXCL) | os.O_DIRECT)
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

    Measured on 2.5 GB by two ranks, ext4: past the page cache 0.9 to 1.0 s into common files and into own ones, through
    it 1.4 to 4.5 s.
    """
    if file.direct is not None and len(data) >= LARGE:
        head = -offset % PAGE
        _write(file.handle, data[:head], offset)
        position = head + _write_direct(file.direct, data[head:], offset + head)
        data, offset = data[position:], offset + position
    _write(file.handle, data, offset)


def _write_direct(handle: int, data: memoryview, offset: int) -> int:
    """Write whole pages of `data` at `offset`, a multiple of a page; returns how many bytes."""
    position = 0
    while whole := min(STEP, (len(data) - position) // PAGE * PAGE):
        part = _buffers.aligned[:whole]
        _copy(part, data[position : position + whole])
        try:
            written = os.pwrite(handle, part, offset + position)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            written = 0
        position += written
        if written < whole:  # a stricter alignment than a page's; a disk that becomes full, as the next write will say
            break
    return position


def _write(handle: int, data: memoryview, offset: int) -> None:
    while data:
        written = os.pwrite(handle, data[:PIECE], offset)
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
    while position < len(data):
        skip = (offset + position) % PAGE
        size = min(STEP - skip, len(data) - position)
        if _in_cache(file.handle, offset + position) and _in_cache(file.handle, offset + position + size - 1):
            _read(file.handle, data[position : position + size], offset + position)
            position += size
            continue
        got = _try_read(file.direct, _buffers.aligned[: -(-(skip + size) // PAGE) * PAGE], offset + position - skip)
        if got < skip + size:  # a stricter alignment than a page's, a short read, a file that ends too early
            return _read(file.handle, data[position:], offset + position)
        _copy(data[position : position + size], _buffers.aligned[skip : skip + size])
        position += size
    return None


def _read_remote(file: RemotePath, data: memoryview, offset: int) -> None:
    while data:
        got = file.read_bytes(offset, offset + min(len(data), REMOTE_PIECE))
        if not got:
            raise OSError(errno.EIO, f"the file ends at byte {offset}, {len(data)} bytes too early")
        _copy(data[: len(got)], memoryview(got))
        data, offset = data[len(got) :], offset + len(got)


def huge_pages(size: int) -> mmap.mmap:
    """So many bytes, page-aligned, in huge pages where the system has them: new memory costs a fault for each page."""
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError, AttributeError):  # no huge pages in this kernel, or another system
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


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


_buffers = _Buffers()
