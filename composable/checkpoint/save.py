"""Saving: all ranks write their own bytes into one standard safetensors folder, and the manifest comes last.

Two writers make the files. `shared`: common files, made at their full size by rank 0, into which each rank writes
ranges; they do not depend on the layout. `per_rank`: each rank its own files, from start to end (`per_rank.py`).
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import cast

import torch.distributed as dist
import xxhash
from torch import Tensor

from composable.checkpoint import folder as folders
from composable.checkpoint.format import TensorSpec, check_specs, encode_index
from composable.checkpoint.page_cache import read_back
from composable.checkpoint.per_rank import write_own_files
from composable.checkpoint.plan import SECTIONS, Parts, SectionPlan, Table, Writer, owned_parts, plan_sections, table_of
from composable.checkpoint.remote import Folder, RemotePath, as_folder
from composable.checkpoint.shards import Box, Piece, pieces_of
from composable.checkpoint.storage import File, naming, opened, write_all
from composable.checkpoint.together import rank_of, together
from composable.checkpoint.transfer import run_all, write_box


def save(
    folder: Folder | str,
    weights: Mapping[str, Tensor | Piece],
    optimizer: Mapping[str, Tensor | Piece],
    files: Mapping[str, str | bytes],
    *,
    max_file_size: int = 5 * 10**9,
    writer: Writer = "shared",
    overwrite: bool = False,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Save a checkpoint; collective over the group (default: all ranks; a single process needs no process group).

    Each rank gives the tensors that it holds under their global names: plain tensors (the same on every rank that gives
    the name), DTensors, or `Piece`s. Tensors lie in the files in the natural order of their names, whatever the layout.
    `files` (relative name -> content; rank 0's are written) go beside the weights. `max_file_size` is in bytes. A
    folder given as a URL (`s3://bucket/run/step-00000001`) takes the writer `per_rank`.

    A left-over of a save that did not finish is replaced. A complete checkpoint, or tensor files that no save of ours
    began, are refused with FileExistsError unless `overwrite`: a run that goes back to an earlier step deletes the
    later ones, or says so. Raises ValueError, before anything is written, for a dtype that safetensors lacks, a shape
    or dtype on which ranks disagree, parts that do not cover a tensor exactly once, and common files at a URL. What
    fails on one rank (a full disk) raises on all; then the folder has no manifest, its tensor files are removed, other
    checkpoints are as they were.
    """
    pieces: dict[str, dict[str, Piece]] = {}

    def describe() -> Table:
        pieces.update(described(weights, optimizer, files))
        return table_of(pieces)

    sections = plan_sections(together(group, describe), max_file_size, writer)
    commit(folder, sections, owned_parts(sections, pieces, rank_of(group)), files, overwrite=overwrite, group=group)


def described(
    weights: Mapping[str, Tensor | Piece], optimizer: Mapping[str, Tensor | Piece], files: Mapping[str, str | bytes]
) -> dict[str, dict[str, Piece]]:
    """Section -> name -> what this rank holds; ValueError for what this rank alone sees that it cannot be saved."""
    _check_names(files)
    pieces = {"weights": pieces_of(weights), "optimizer": pieces_of(optimizer)}
    for section in pieces.values():
        check_specs(TensorSpec(name, piece.local.dtype, piece.shape) for name, piece in section.items())
    return pieces


def commit(
    folder: Folder | str,
    sections: Sequence[SectionPlan],
    parts: Parts,
    files: Mapping[str, str | bytes],
    *,
    overwrite: bool = False,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Write what was planned, the manifest last: the second half of `save`, which says what fails and how; collective.

    `sections` are the same on every rank; `parts` are the boxes that they give to this rank, with the memory that holds
    each.
    """
    folder, rank = as_folder(folder), rank_of(group)
    own = all(file.writer is not None for section in sections for file in section.files)
    if isinstance(folder, RemotePath) and not own:
        raise ValueError(f"{folder} takes no ranged writes into common files; write checkpoint.writer=per_rank")
    with contextlib.ExitStack() as stack:
        together(group, lambda: _claim(stack, folder, overwrite) if rank == 0 else None)
        try:
            together(group, lambda: _create(folder, sections) if rank == 0 else None)
            write = write_own_files if own else _write
            checksums = together(group, lambda: write(folder, sections, parts, rank))
            together(group, lambda: finish(folder, sections, files, checksums) if rank == 0 else None)
        except Exception:
            # Every rank has stopped writing: the exchange of errors is a barrier.
            if rank == 0 and not folders.is_complete(folder):
                with contextlib.suppress(OSError):
                    clear(folder)
            raise
    if isinstance(folder, Path):
        read_back(folder, sections, rank)


def clear(folder: Folder) -> None:
    """Remove a checkpoint's tensors from a folder, after making it incomplete; other files stay."""
    if folders.is_complete(folder):
        folders.uncommit(folder)
    for pattern in ("*.safetensors", "*.safetensors.index.json"):
        for path in folder.glob(pattern):
            path.unlink()
    folders.remove(folder / SECTIONS["optimizer"][0])


def _claim(stack: contextlib.ExitStack, folder: Folder, overwrite: bool) -> None:
    """Make the folder ours: refuse what must not be lost, take its lock, clear it, mark it as being written."""
    if isinstance(folder, Path):
        folder.mkdir(parents=True, exist_ok=True)
    stack.enter_context(folders.locked(folder))
    if folders.is_complete(folder) and not overwrite:
        raise FileExistsError(
            f"{folder} holds a complete checkpoint; save to another folder, delete it, or pass overwrite=True"
        )
    begun = (folder / folders.PARTIAL).is_file() or folders.step_of(folder) is not None
    if not (begun or overwrite) and any(folder.glob("*.safetensors")):
        raise FileExistsError(
            f"{folder} holds safetensors files that are no unfinished checkpoint; save to another folder, "
            "or pass overwrite=True to replace them"
        )
    clear(folder)
    folders.write_file(folder / folders.PARTIAL, b"")


def _create(folder: Folder, sections: Sequence[SectionPlan]) -> None:
    """Create every common file at its full size with its header, if the disk has room for all files."""
    if isinstance(folder, RemotePath):
        return
    needed, free = sum(file.size for section in sections for file in section.files), shutil.disk_usage(folder).free
    if needed > free:
        raise OSError(errno.ENOSPC, f"{folder}: the checkpoint needs {needed:,} bytes, and the disk has {free:,} free")
    for section in sections:
        (folder / section.folder).mkdir(exist_ok=True)
        for file in section.files:
            if file.writer is not None:
                continue
            path = folder / section.folder / file.name
            with naming(path), opened(path, os.O_RDWR | os.O_CREAT | os.O_EXCL) as target:
                os.ftruncate(target.handle, file.size)
                write_all(target, memoryview(file.header), 0)


def _write(folder: Folder, sections: Sequence[SectionPlan], parts: Parts, rank: int) -> list[tuple[str, str, Box, str]]:
    """Write and sync this rank's boxes; returns (section, name, box, checksum) of each. Rank 0 syncs every file."""
    checksums: list[tuple[str, str, Box, str]] = []
    root = cast(Path, folder)  # no URL: those have writers of whole files
    with contextlib.ExitStack() as stack:
        opens: dict[Path, File] = {}

        def write(section: SectionPlan, name: str, box: Box, path: Path) -> None:
            with naming(path):
                digest = write_box(opens[path], section.places[name], parts[section.name, name, box], box)
            checksums.append((section.name, name, box, digest))

        def sync(path: Path) -> None:
            with naming(path):
                os.fsync(opens[path].handle)

        tasks = []
        for section in sections:
            for file in section.files:
                path = root / section.folder / file.name
                mine = [
                    (section, place.spec.name, box, path)
                    for place in file.places
                    for owner, box in section.owners[place.spec.name]
                    if owner == rank
                ]
                if mine or rank == 0:
                    opens[path] = stack.enter_context(opened(path, os.O_WRONLY))
                tasks += mine
        for task in tasks:
            write(*task)
        run_all(sync, [(path,) for path in opens])
    return checksums


def finish(
    folder: Folder,
    sections: Sequence[SectionPlan],
    files: Mapping[str, str | bytes],
    checksums: Sequence[Sequence[tuple[str, str, Box, str]]],
) -> None:
    """Write the small files, then the manifest, then `latest`, each on the disk before the next."""
    entries: dict[str, tuple[int, str | None]] = {}
    headers: dict[str, str] = {}
    contents = {name: text.encode() if isinstance(text, str) else text for name, text in files.items()}
    for section in sections:
        base = PurePosixPath(section.folder)
        entries |= {str(base / file.name): (file.size, None) for file in section.files}
        headers |= {str(base / file.name): xxhash.xxh3_64_hexdigest(file.header) for file in section.files}
        contents[str(base / f"{section.prefix}.safetensors.index.json")] = encode_index(section.files).encode()
    for name, content in contents.items():
        folders.write_file(folder / name, content)
        entries[name] = (len(content), xxhash.xxh3_64_hexdigest(content))
    for path in {(folder / name).parent for name in entries} | {folder, folder.parent}:
        folders.sync_folder(path)
    boxes: dict[str, dict[str, list[tuple[Box, str]]]] = {s.name: {name: [] for name in s.owners} for s in sections}
    for section_name, name, box, digest in sorted(
        (entry for entries_of_rank in checksums for entry in entries_of_rank), key=lambda entry: entry[2].offsets
    ):
        boxes[section_name][name].append((box, digest))
    frozen = {section: {name: tuple(b) for name, b in tensors.items()} for section, tensors in boxes.items()}
    in_parts = any(place.part for section in sections for place in section.places.values())
    folders.write_manifest(folder, folders.Manifest(entries, frozen, headers), version=2 if in_parts else 1)
    folders.write_latest(folder)


def _check_names(files: Mapping[str, str | bytes]) -> None:
    for name in files:
        path = PurePosixPath(name)
        ours = name.startswith(folders.MANIFEST) or path.parts[:1] == (SECTIONS["optimizer"][0],)
        tensors = name.endswith((".safetensors", ".safetensors.index.json"))
        if not name or path.is_absolute() or ".." in path.parts or ours or tensors:
            raise ValueError(
                f"an extra file cannot be called {name!r}; give a path inside the folder that is no tensor file, "
                f"no index, not {folders.MANIFEST} and not in {SECTIONS['optimizer'][0]}/"
            )
