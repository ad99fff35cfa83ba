"""A checkpoint's folder: the manifest that makes it complete, the newest complete one, and retention.

A folder in the making holds `manifest.json.partial`; the last act of a save renames it to `manifest.json`. So a folder
is complete or it is not, whenever the job dies. At a URL, where nothing is renamed, the manifest is put: a store's
files are there wholly or not at all.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any

import xxhash

from composable.checkpoint.format import read_head
from composable.checkpoint.remote import Folder, RemotePath, as_folder
from composable.checkpoint.shards import Box

FORMAT = "composable.checkpoint"
VERSION = 2  # 2: tensors in parts
MANIFEST = "manifest.json"
PARTIAL = "manifest.json.partial"
LATEST = "latest"
STEP = re.compile(r"step-(\d{8,})")

Checksums = Mapping[str, tuple[tuple[Box, str], ...]]  # tensor name -> (box, hexadecimal xxh3_64 of its bytes)


@dataclass(frozen=True)
class Manifest:
    """What a complete checkpoint holds.

    `files`: relative path -> (size in bytes, xxh3_64 of the content; None for a tensor file: its boxes have checksums).
    `checksums`: section (`weights`, `optimizer`) -> tensor name -> its boxes, their bytes taken in row-major order.
    `headers`: tensor file -> xxh3_64 of its header with the length before it; checkpoints of old have none.
    """

    files: Mapping[str, tuple[int, str | None]]
    checksums: Mapping[str, Checksums]
    headers: Mapping[str, str] = field(default_factory=dict)


def step_folder(root: Folder, step: int) -> Folder:
    """The folder of a step's checkpoint: `root/step-%08d`."""
    return root / f"step-{step:08d}"


def step_of(folder: Folder) -> int | None:
    """The step in a folder's name, None if it is not the folder of a step."""
    match = STEP.fullmatch(folder.name)
    return int(match[1]) if match else None


def is_complete(folder: Folder | str) -> bool:
    """Whether the folder's save came to its end (files that were damaged later are found by `load`)."""
    return (as_folder(folder) / MANIFEST).is_file()


def steps(root: Folder) -> list[tuple[int, Folder]]:
    """(step, folder) of every step folder under `root`, complete or not, newest first."""
    named = [(step_of(path), path) for path in root.iterdir()] if root.is_dir() else []
    found = [(step, path) for step, path in named if step is not None and path.is_dir()]
    return sorted(found, key=lambda entry: (entry[0], entry[1].name), reverse=True)


def latest(root: Folder) -> Folder | None:
    """The complete checkpoint of the highest step under `root`, None if there is none.

    The folders decide. The text file `latest` beside them is written for people and scripts, and is not read.
    """
    return next((path for _, path in steps(root) if is_complete(path)), None)


def prune(root: Folder, keep: int) -> list[Folder]:
    """Delete all but the `keep` newest complete checkpoints (0: keep all), and incomplete ones older than the newest.

    Call it on one rank, after a save. The newest complete checkpoint is never deleted, nor an incomplete folder while a
    process writes to it. Returns the deleted folders. Raises ValueError for a negative `keep`.
    """
    if keep < 0:
        raise ValueError(f"keep is {keep}; give the number of checkpoints to keep, or 0 to keep all")
    found = steps(root)
    complete = [path for _, path in found if is_complete(path)]
    if not complete:
        return []
    newest = found.index(next(entry for entry in found if entry[1] == complete[0]))
    old = complete[keep:] if keep else []
    old += [path for _, path in found[newest:] if not is_complete(path)]
    removed = []
    for folder in old:
        with contextlib.suppress(BlockingIOError), locked(folder):
            if is_complete(folder):  # no longer complete before the first file goes
                uncommit(folder)
            remove(folder, must=True)
            removed.append(folder)
    return removed


def uncommit(folder: Folder) -> None:
    """Make a complete checkpoint an incomplete one."""
    if isinstance(folder, RemotePath):
        write_file(folder / PARTIAL, b"")
        (folder / MANIFEST).unlink()
    else:
        os.replace(folder / MANIFEST, folder / PARTIAL)
        sync_folder(folder)


def remove(folder: Folder, *, must: bool = False) -> None:
    """Delete a folder with all that is in it; what does not go stays where it is unless it must."""
    if isinstance(folder, RemotePath):
        folder.rmtree()
    else:
        shutil.rmtree(folder, ignore_errors=not must)


@contextlib.contextmanager
def locked(folder: Folder) -> Iterator[None]:
    """Hold the folder's lock; BlockingIOError if another process has it. The kernel frees it when a process dies.

    File systems without locks are taken as they are, and so are stores.
    """
    if isinstance(folder, RemotePath):
        yield
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise BlockingIOError(f"{folder} is being written by another process; give each job a folder") from error
        except OSError:
            pass
        yield
    finally:
        os.close(handle)


def write_manifest(folder: Folder, manifest: Manifest, *, version: int) -> None:
    """Make the folder complete: all else must be on the disk. `version`: the lowest that tells what is there."""
    document = {
        "format": FORMAT,
        "version": version,
        "files": {
            name: {"size": size}
            | ({"xxh3_64": digest} if digest else {})
            | ({"header_xxh3_64": manifest.headers[name]} if name in manifest.headers else {})
            for name, (size, digest) in manifest.files.items()
        },
        "checksums": {
            "algorithm": "xxh3_64",
            **{
                section: {
                    name: [{"offsets": box.offsets, "sizes": box.sizes, "xxh3_64": digest} for box, digest in boxes]
                    for name, boxes in tensors.items()
                }
                for section, tensors in manifest.checksums.items()
            },
        },
    }
    content = json.dumps(document, separators=(",", ":")).encode()
    if isinstance(folder, RemotePath):
        write_file(folder / MANIFEST, content)
        (folder / PARTIAL).unlink()
        return
    write_file(folder / PARTIAL, content)
    os.replace(folder / PARTIAL, folder / MANIFEST)
    sync_folder(folder)


def read_manifest(folder: Folder) -> Manifest | None:
    """The folder's manifest; None for a plain safetensors folder.

    Raises ValueError for an incomplete checkpoint, a manifest of a newer version, or one of something else.
    """
    path = folder / MANIFEST
    if not path.is_file():
        if (path.parent / PARTIAL).is_file():
            raise ValueError(f"{folder} is an incomplete checkpoint: its save did not come to an end; use another one")
        return None
    try:
        document = json.loads(path.read_bytes())
        form, version = document["format"], document["version"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is not a checkpoint's manifest: {error!r}") from error
    if form != FORMAT:
        raise ValueError(f"{path} has the format {form!r}, not {FORMAT!r}")
    if type(version) is not int or version < 1:
        raise ValueError(f"{path} has version {version!r}; versions are numbers from 1 on: the manifest was changed")
    if version > VERSION:
        raise ValueError(f"{path} has version {version}, this composable reads up to {VERSION}; update composable")
    try:
        return _manifest(document)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is not a checkpoint's manifest: {error!r}") from error


def check_inside(name: object) -> str:
    """The relative name of a file that a folder's own files tell of; ValueError if it leads out of the folder.

    What copies such files would write them outside of its target.
    """
    if not isinstance(name, str) or not name or PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
        raise ValueError(f"{name!r} is no name of a file within the folder")
    return name


def _manifest(document: Mapping[str, Any]) -> Manifest:
    files = document["files"]
    for name, entry in files.items():
        check_inside(name)
        if type(entry["size"]) is not int or not isinstance(entry.get("xxh3_64"), (str, type(None))):
            raise ValueError(f"{name} has the size {entry['size']!r} and the checksum {entry.get('xxh3_64')!r}")
    return Manifest(
        {name: (entry["size"], entry.get("xxh3_64")) for name, entry in files.items()},
        {
            section: {
                name: tuple((Box(_sizes(e["offsets"]), _sizes(e["sizes"])), e["xxh3_64"]) for e in boxes)
                for name, boxes in tensors.items()
            }
            for section, tensors in document["checksums"].items()
            if section != "algorithm"
        },
        {name: entry["header_xxh3_64"] for name, entry in files.items() if "header_xxh3_64" in entry},
    )


def _sizes(values: list[Any]) -> tuple[int, ...]:
    if any(type(value) is not int or value < 0 for value in values):
        raise ValueError(f"{values} are no offsets or sizes")
    return tuple(values)


def check_files(folder: Folder, manifest: Manifest) -> None:
    """Raise ValueError naming the first file of the manifest that is missing or has another size."""
    sizes = folder.sizes() if isinstance(folder, RemotePath) else None
    for name, (size, _) in manifest.files.items():
        path = folder / name
        if name not in sizes if sizes is not None else not path.is_file():
            raise ValueError(f"{path} is missing, its checkpoint's manifest lists it; use another checkpoint")
        if (found := sizes[name] if sizes is not None else os.stat(str(path)).st_size) != size:
            raise ValueError(f"{path} has {found} bytes, its checkpoint's manifest says {size}; use another checkpoint")


def check_content(folder: Folder, manifest: Manifest) -> None:
    """Raise ValueError naming the first of the small files, and of the headers, that is not what was saved."""
    for name, (_, digest) in manifest.files.items():
        if digest and xxhash.xxh3_64_hexdigest((folder / name).read_bytes()) != digest:
            raise ValueError(f"{folder / name} was changed since it was saved: its checksum does not match")
    for name, digest in manifest.headers.items():
        if xxhash.xxh3_64_hexdigest(read_head(folder / name)[1]) != digest:
            raise ValueError(f"{folder / name}: the header was changed since it was saved: its checksum does not match")


def write_latest(folder: Folder) -> None:
    """Point `latest` beside a step's folder at it, atomically; other folders have no such file."""
    if step_of(folder) is None:
        return
    if isinstance(folder, RemotePath):
        write_file(folder.parent / LATEST, f"{folder.name}\n".encode())
        return
    temporary = folder.parent / f".{LATEST}.partial"
    write_file(temporary, f"{folder.name}\n".encode())
    os.replace(temporary, folder.parent / LATEST)
    sync_folder(folder.parent)


def write_file(path: Folder, content: bytes) -> None:
    """Write a small file and bring it to the disk."""
    if isinstance(path, RemotePath):
        with path.create() as remote:
            remote.write(content)
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(folder: Folder) -> None:
    """Bring a folder's entries to the disk; a store has them when it says so."""
    if isinstance(folder, RemotePath):
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
