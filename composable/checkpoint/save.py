"""Saving: all ranks write their own bytes into one standard safetensors folder, and the manifest comes last."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath

import torch.distributed as dist
import xxhash
from torch import Tensor

from composable.checkpoint import folder as folders
from composable.checkpoint.format import TensorSpec, check_specs, encode_index
from composable.checkpoint.plan import SECTIONS, SectionPlan, Table, plan_sections, table_of
from composable.checkpoint.shards import Box, Piece, pieces_of
from composable.checkpoint.storage import File, naming, opened, write_all
from composable.checkpoint.together import rank_of, together
from composable.checkpoint.transfer import run_all, write_box


def save(
    folder: Path,
    weights: Mapping[str, Tensor | Piece],
    optimizer: Mapping[str, Tensor | Piece],
    files: Mapping[str, str | bytes],
    *,
    max_file_size: int = 5 * 10**9,
    overwrite: bool = False,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Save a checkpoint; collective over the group (default: all ranks; a single process needs no process group).

    Each rank gives the tensors that it holds under their global names: plain tensors (the same on every rank that gives
    the name), DTensors, or `Piece`s. Tensors lie in the files in the natural order of their names, whatever the layout.
    `files` (relative name -> content; rank 0's are written) go beside the weights. `max_file_size` is in bytes.

    A left-over of a save that did not finish is replaced. A complete checkpoint, or tensor files that no save of ours
    began, are refused with FileExistsError unless `overwrite`: a run that goes back to an earlier step deletes the
    later ones, or says so. Raises ValueError, before anything is written, for a dtype that safetensors lacks, a shape
    or dtype on which ranks disagree, and parts that do not cover a tensor exactly once. What fails on one rank (a full
    disk) raises on all; then the folder has no manifest, its tensor files are removed, other checkpoints are as they
    were.
    """
    folder, rank = Path(folder), rank_of(group)
    pieces: dict[str, dict[str, Piece]] = {}

    def describe() -> Table:
        _check_names(files)
        for section, tensors in (("weights", weights), ("optimizer", optimizer)):
            pieces[section] = pieces_of(tensors)
            check_specs(TensorSpec(name, piece.local.dtype, piece.shape) for name, piece in pieces[section].items())
        return table_of(pieces)

    sections = plan_sections(together(group, describe), max_file_size)
    with contextlib.ExitStack() as stack:
        together(group, lambda: _claim(stack, folder, overwrite) if rank == 0 else None)
        try:
            together(group, lambda: _create(folder, sections) if rank == 0 else None)
            checksums = together(group, lambda: _write(folder, sections, pieces, rank))
            together(group, lambda: _finish(folder, sections, files, checksums) if rank == 0 else None)
        except Exception:
            # Every rank has stopped writing: the exchange of errors is a barrier.
            if rank == 0 and not folders.is_complete(folder):
                with contextlib.suppress(OSError):
                    clear(folder)
            raise


def clear(folder: Path) -> None:
    """Remove a checkpoint's tensors from a folder, after making it incomplete; other files stay."""
    if folders.is_complete(folder):
        os.replace(folder / folders.MANIFEST, folder / folders.PARTIAL)
        folders.sync_folder(folder)
    for pattern in ("*.safetensors", "*.safetensors.index.json"):
        for path in folder.glob(pattern):
            path.unlink()
    shutil.rmtree(folder / SECTIONS["optimizer"][0], ignore_errors=True)


def _claim(stack: contextlib.ExitStack, folder: Path, overwrite: bool) -> None:
    """Make the folder ours: refuse what must not be lost, take its lock, clear it, mark it as being written."""
    folder.mkdir(parents=True, exist_ok=True)
    stack.enter_context(folders.locked(folder))
    if folders.is_complete(folder) and not overwrite:
        raise FileExistsError(
            f"{folder} holds a complete checkpoint; save to another folder, delete it, or pass overwrite=True"
        )
    begun = (folder / folders.PARTIAL).exists() or folders.step_of(folder) is not None
    if not (begun or overwrite) and any(folder.glob("*.safetensors")):
        raise FileExistsError(
            f"{folder} holds safetensors files that are no unfinished checkpoint; save to another folder, "
            "or pass overwrite=True to replace them"
        )
    clear(folder)
    folders.write_file(folder / folders.PARTIAL, b"")


def _create(folder: Path, sections: Sequence[SectionPlan]) -> None:
    """Create every tensor file at its full size with its header, if the disk has room for all of them."""
    needed, free = sum(file.size for section in sections for file in section.files), shutil.disk_usage(folder).free
    if needed > free:
        raise OSError(errno.ENOSPC, f"{folder}: the checkpoint needs {needed:,} bytes, and the disk has {free:,} free")
    for section in sections:
        (folder / section.folder).mkdir(exist_ok=True)
        for file in section.files:
            path = folder / section.folder / file.name
            with naming(path), opened(path, os.O_RDWR | os.O_CREAT | os.O_EXCL) as target:
                os.ftruncate(target.handle, file.size)
                write_all(target, memoryview(file.header), 0)


def _write(
    folder: Path, sections: Sequence[SectionPlan], pieces: Mapping[str, Mapping[str, Piece]], rank: int
) -> list[tuple[str, str, Box, str]]:
    """Write and sync this rank's boxes; returns (section, name, box, checksum) of each. Rank 0 syncs every file."""
    checksums: list[tuple[str, str, Box, str]] = []
    with contextlib.ExitStack() as stack:
        opens: dict[Path, File] = {}

        def write(section: SectionPlan, name: str, box: Box, path: Path) -> None:
            with naming(path):
                digest = write_box(opens[path], section.places[name], pieces[section.name][name], box)
            checksums.append((section.name, name, box, digest))

        def sync(path: Path) -> None:
            with naming(path):
                os.fsync(opens[path].handle)

        tasks = []
        for section in sections:
            for file in section.files:
                path = folder / section.folder / file.name
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


def _finish(
    folder: Path,
    sections: Sequence[SectionPlan],
    files: Mapping[str, str | bytes],
    checksums: Sequence[Sequence[tuple[str, str, Box, str]]],
) -> None:
    """Write the small files, then the manifest, then `latest`, each on the disk before the next."""
    entries: dict[str, tuple[int, str | None]] = {}
    contents = {name: text.encode() if isinstance(text, str) else text for name, text in files.items()}
    for section in sections:
        base = PurePosixPath(section.folder)
        entries |= {str(base / file.name): (file.size, None) for file in section.files}
        contents[str(base / f"{section.prefix}.safetensors.index.json")] = encode_index(section.files).encode()
    for name, content in contents.items():
        folders.write_file(folder / name, content)
        entries[name] = (len(content), xxhash.xxh3_64_hexdigest(content))
    for path in {(folder / name).parent for name in entries} | {folder, folder.parent}:
        folders.sync_folder(path)
    boxes: dict[str, dict[str, list[tuple[Box, str]]]] = {s.name: {name: [] for name in s.places} for s in sections}
    for section_name, name, box, digest in sorted(
        (entry for entries_of_rank in checksums for entry in entries_of_rank), key=lambda entry: entry[2].offsets
    ):
        boxes[section_name][name].append((box, digest))
    frozen = {section: {name: tuple(b) for name, b in tensors.items()} for section, tensors in boxes.items()}
    folders.write_manifest(folder, folders.Manifest(entries, frozen))
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
