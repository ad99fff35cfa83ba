"""What was written past the page cache is brought into it afterwards: the next reader is often on the same machine.

A job that starts again, a conversion, an evaluation then read the newest checkpoint from memory, as they would after an
ordinary write, and no save waits for memory to write through.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from composable.checkpoint.plan import SectionPlan
from composable.checkpoint.shards import byte_runs
from composable.checkpoint.storage import LARGE

LOCAL = {"btrfs", "ext2", "ext3", "ext4", "f2fs", "overlay", "xfs", "zfs"}
"""File systems of disks in this machine: reading back from others costs the network, and others' time."""
MOST = 0.25  # of the memory that is available: a larger checkpoint is left on the disk
BUFFER = 128 << 10  # bytes: small enough for a core's own cache
STEP = 8 << 20  # bytes of one read, into one buffer again and again
LAST = 19  # the priority of what nothing waits for
AT_EXIT = 5.0  # seconds that a program which is otherwise done goes on reading

Span = tuple[Path, int, int]  # a file, the first byte, the end


def read_back(folder: Path, sections: Sequence[SectionPlan], rank: int) -> None:
    """Start to read what this rank has written into the page cache, if the disk is local and memory holds it.

    Nothing waits for it and nothing depends on it: the program's own work goes first on the cores, files that are
    deleted meanwhile are passed over, the next checkpoint ends it, and a program that is done gives it five seconds.
    """
    global _newest
    _newest = this = object()

    def read() -> None:
        size = sum(file.size for section in sections for file in section.files)
        if size > MOST * _available() or not _is_local(folder):
            return
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LAST)  # of this thread alone
        until = math.inf
        for _ in _read(span for section in sections for span in _written(folder, section, rank)):
            if not threading.main_thread().is_alive():
                until = min(until, time.monotonic() + AT_EXIT)
            if _newest is not this or time.monotonic() > until:
                return

    with contextlib.suppress(RuntimeError):  # no more threads to be had: the checkpoint is complete all the same
        threading.Thread(target=read, name="reading back", daemon=False).start()


def file_system(path: Path, mounts: bytes) -> str:
    """The kind of file system that a path lies on, by the lines of `/proc/self/mounts`; "" if none has it."""
    found, longest = "", -1
    for fields in map(bytes.split, mounts.splitlines()):
        # A blank in a name is \040 there.
        point = os.fsdecode(re.sub(rb"\\([0-3][0-7]{2})", lambda match: bytes([int(match[1], 8)]), fields[1]))
        if path.is_relative_to(point) and len(point) >= longest:  # of two on one point the later one is seen
            found, longest = os.fsdecode(fields[2]), len(point)
    return found


def _is_local(path: Path) -> bool:
    with contextlib.suppress(OSError):
        return file_system(path.resolve(), Path("/proc/self/mounts").read_bytes()) in LOCAL
    return False


def _written(folder: Path, section: SectionPlan, rank: int) -> Iterator[Span]:
    """Where the boxes lie that this rank wrote past the cache."""
    for file in section.files:
        path = folder / section.folder / file.name
        for place in file.places:
            boxes = [box for owner, box in section.owners[place.name] if owner == rank and place.box.contains(box)]
            for box in boxes:
                for at, _, size in byte_runs(box.within(place.box), place.spec.shape, place.spec.dtype.itemsize):
                    if size < LARGE:  # and so are all runs of the box: written through the cache
                        break
                    yield path, place.offset + at, place.offset + at + size


def _available() -> int:
    """Bytes of memory that new pages may take; 0 on systems that do not say."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) << 10
    return 0


def _read(spans: Iterable[Span]) -> Iterator[int]:
    """Read them, all bytes, and not only ask the kernel to read ahead; yields how many, read after read.

    In a virtual machine new memory costs whoever touches it first, and the disk that fills it does not: loads of 2.5
    GB by two ranks took 0.25 to 1.6 s from pages that were only read ahead, and 0.23 to 0.33 s from those read here.
    """
    buffers = [bytearray(BUFFER)] * (STEP // BUFFER)
    for path, start, end in spans:
        with contextlib.suppress(OSError):
            handle = os.open(path, os.O_RDONLY)
            try:
                for offset in range(start, end, STEP):
                    yield os.preadv(handle, buffers[: -((offset - end) // BUFFER)], offset)
            finally:
                os.close(handle)


_newest: object = None
"""Stands for the checkpoint that was written last."""
