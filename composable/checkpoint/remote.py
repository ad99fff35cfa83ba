"""Checkpoint folders behind URLs (`s3://bucket/run`, `gs://...`, `memory://...`): whole files put, ranges of them read.

A `RemotePath` has those methods of `pathlib.Path` that checkpoints need, over fsspec
(https://filesystem-spec.readthedocs.io).
What is asked of the store is what object stores give: a file is there wholly or not at all, and what was put is seen by
the next who looks.
"""

from __future__ import annotations

import fnmatch
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

import fsspec

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/+")


@dataclass(frozen=True)
class RemotePath:
    """A file or folder of a store: the store, and the path in it without the protocol."""

    system: fsspec.AbstractFileSystem
    path: str

    def __str__(self) -> str:
        return str(self.system.unstrip_protocol(self.path))

    def __truediv__(self, name: str) -> RemotePath:
        return RemotePath(self.system, f"{self.path}/{name}" if name else self.path)

    @property
    def name(self) -> str:
        """The last part of the path."""
        return self.path.rpartition("/")[2]

    @property
    def parent(self) -> RemotePath:
        """The folder that holds it."""
        return RemotePath(self.system, self.path.rpartition("/")[0])

    def is_file(self) -> bool:
        """Whether there is such a file now."""
        self.system.invalidate_cache()
        return bool(self.system.isfile(self.path))

    def is_dir(self) -> bool:
        """Whether anything lies under this path."""
        self.system.invalidate_cache()
        return bool(self.system.isdir(self.path))

    def iterdir(self) -> Iterator[RemotePath]:
        """What lies right under this path; nothing if there is no such folder."""
        self.system.invalidate_cache()
        try:
            names = self.system.ls(self.path, detail=False)
        except FileNotFoundError:
            return iter(())
        return (RemotePath(self.system, name.rstrip("/")) for name in names if name.rstrip("/") != self.path)

    def glob(self, pattern: str) -> list[RemotePath]:
        """What lies right under this path under a name of this pattern, as `fnmatch` has it."""
        return [path for path in self.iterdir() if fnmatch.fnmatchcase(path.name, pattern)]

    def sizes(self) -> dict[str, int]:
        """Relative path -> bytes of every file under this path."""
        self.system.invalidate_cache()
        found = cast(dict[str, Any], self.system.find(self.path, detail=True))
        return {path[len(self.path) + 1 :]: entry["size"] for path, entry in found.items()}

    def size(self) -> int:
        """Bytes of the file."""
        return int(self.system.info(self.path)["size"])

    def read_bytes(self, start: int | None = None, stop: int | None = None) -> bytes:
        """The file's content, or the bytes from `start` up to `stop` (fewer where it ends before)."""
        return bytes(self.system.cat_file(self.path, start=start, end=stop))

    def read_text(self) -> str:
        """The file's content as text."""
        return self.read_bytes().decode()

    def create(self) -> IO[bytes]:
        """The file, to be written from its start; it is there when closed. Its folder is made where there are such."""
        try:
            return cast(IO[bytes], self.system.open(self.path, "wb"))
        except FileNotFoundError:
            self.system.makedirs(self.parent.path, exist_ok=True)
            return cast(IO[bytes], self.system.open(self.path, "wb"))

    def unlink(self) -> None:
        """Remove the file."""
        self.system.rm_file(self.path)

    def rmtree(self) -> None:
        """Remove everything under this path, which need not be there."""
        if self.is_dir():
            self.system.rm(self.path, recursive=True)


Folder = Path | RemotePath


def as_folder(folder: str | os.PathLike[str] | RemotePath) -> Folder:
    """A folder as it is given: a path, or the URL of one; `file://` is the path after it.

    Raises:
        ValueError: a URL that went through `Path`, which makes one slash of two; a protocol that fsspec does not know,
            or whose package is not installed.
    """
    if isinstance(folder, RemotePath):
        return folder
    if not isinstance(folder, str) or "://" not in folder:
        if _URL.match(str(folder)):
            raise ValueError(f"{folder} is a URL that lost a slash in a Path; give it as the text it was")
        return Path(folder)
    try:
        system, path = fsspec.core.url_to_fs(folder)
    except (ImportError, ValueError) as error:
        raise ValueError(f"{folder} cannot be opened: {error}") from error
    if folder.startswith(("file://", "local://")):
        return Path(path)
    return RemotePath(system, path.rstrip("/"))


def is_url(folder: str) -> bool:
    """Whether a folder, as it is given, is one of a store that takes no ranged writes."""
    return "://" in folder and not folder.startswith(("file://", "local://"))
