"""The writer for stores that take no ranged writes: each rank its own safetensors files, from their start to their end.

No rank waits for another's bytes, and none writes into a file that another has made.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from composable.checkpoint.owners import LARGE
from composable.checkpoint.plan import Parts, SectionPlan
from composable.checkpoint.remote import Folder, RemotePath
from composable.checkpoint.shards import Box, chunk_boxes
from composable.checkpoint.storage import naming, opened, write_all
from composable.checkpoint.transfer import stream_box


def write_own_files(
    folder: Folder, sections: Sequence[SectionPlan], parts: Parts, rank: int
) -> list[tuple[str, str, Box, str]]:
    """Write and sync the files that the plan gives to this rank; returns (section, name, box, checksum) of their boxes.

    A box has at most 64 MiB: a checksum covers no more, so that a reader can share them out.
    """
    checksums: list[tuple[str, str, Box, str]] = []
    for section in sections:
        for file in section.files:
            if file.writer != rank:
                continue
            path = folder / section.folder / file.name
            with naming(path), created(path) as write:
                write(memoryview(file.header))
                for place in file.places:
                    piece = parts[section.name, place.name, place.box]
                    for box in chunk_boxes(place.box, place.spec.dtype.itemsize, LARGE):
                        checksums.append((section.name, place.name, box, stream_box(write, piece, box)))
    return checksums


@contextlib.contextmanager
def created(path: Folder) -> Iterator[Callable[[memoryview], None]]:
    """A new file, as what writes its next bytes; on the disk, or in the store, at the end."""
    if isinstance(path, RemotePath):
        with path.create() as remote:
            yield lambda data: _put(remote.write, data)
        return
    with opened(Path(path), os.O_WRONLY | os.O_CREAT | os.O_EXCL) as file:
        position = 0

        def append(data: memoryview) -> None:
            nonlocal position
            write_all(file, data, position)
            position += len(data)

        yield append
        os.fsync(file.handle)


def _put(write: Callable[[memoryview], int | None], data: memoryview) -> None:
    """Hand over all of `data`: a store's file may take less at a time."""
    while data:
        taken = write(data)
        data = data[len(data) if taken is None else taken :]
