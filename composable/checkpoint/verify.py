"""What is broken in a checkpoint, by its manifest: every file and tensor that is not what was saved."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

import xxhash

from composable.checkpoint import folder as folders
from composable.checkpoint.format import Place, read_head, read_header
from composable.checkpoint.plan import SECTIONS
from composable.checkpoint.remote import Folder, RemotePath
from composable.checkpoint.shards import Box
from composable.checkpoint.storage import naming, opened_files
from composable.checkpoint.transfer import hash_file, run_all

TENSORS = ".safetensors"


@dataclass(frozen=True)
class Damage:
    """A file that is not what was saved: what is wrong with it, and the tensors that are lost by that."""

    file: str
    reason: str
    tensors: tuple[str, ...] = ()


def find_damage(
    folder: Folder,
    manifest: folders.Manifest,
    advance: Callable[[int], object] = lambda size: None,
    sections: Sequence[str] = tuple(SECTIONS),
) -> list[Damage]:
    """Everything in a checkpoint that its manifest does not agree with, in the order of the files.

    Sizes and headers of all files are checked, the content of small files, and every box of every tensor of `sections`
    in the files that are whole otherwise. `advance` is told of bytes that have been read. Takes no more than 64 MiB.
    """
    damage = {file: reason for file in manifest.files if (reason := _wrong(folder, manifest, file))}
    names = {file: _names_in(folder, file) for file in damage if file.endswith(TENSORS)}
    changed: dict[str, set[str]] = {}
    for section in (section for section in sections if section in manifest.checksums):
        base, checksums = PurePosixPath(SECTIONS[section][0]), manifest.checksums[section]
        files = [f for f in manifest.files if f.endswith(TENSORS) and PurePosixPath(f).parent == base]
        whole = [file for file in files if file not in damage]
        places = _places(folder, whole)
        tasks: list[tuple[Place, Box, str]] = []
        for name, boxes in checksums.items():
            for box, digest in boxes:
                place = next((place for place in places.get(name, ()) if place.box.contains(box)), None)
                if place is not None:
                    tasks.append((place, box, digest))
                elif len(whole) == len(files):
                    changed.setdefault(folders.MANIFEST, set()).add(name)
        for place, _, _ in _mismatches(folder, tasks, advance):
            changed.setdefault(place.file, set()).add(place.name)
    found = [Damage(file, reason, tuple(names.get(file, ()))) for file, reason in damage.items()]
    for file, tensors in changed.items():
        reason = "has checksums of what no file holds" if file == folders.MANIFEST else "has bytes that were changed"
        found.append(Damage(file, reason, tuple(sorted(tensors))))
    return sorted(found, key=lambda entry: entry.file)


def check_weights(folder: Folder, manifest: folders.Manifest, advance: Callable[[int], object]) -> None:
    """Raise ValueError, naming file and tensors, if `find_damage` finds something in weights or small files."""
    for entry in find_damage(folder, manifest, advance, ["weights"]):
        names = ", ".join(entry.tensors[:3]) + (", ..." if entry.tensors[3:] else "")
        tensors = f" (tensors: {names})" if names else ""
        raise ValueError(f"{folder / entry.file} {entry.reason}{tensors}; use another checkpoint")


def _mismatches(
    folder: Folder, tasks: Iterable[tuple[Place, Box, str]], advance: Callable[[int], object]
) -> list[tuple[Place, Box, str]]:
    """Those boxes whose bytes in the file have another checksum, or cannot be read."""
    wrong: list[tuple[Place, Box, str]] = []

    def check(place: Place, box: Box, digest: str) -> None:
        try:
            with naming(folder / place.file), opened_files(folder, [place.file]) as opens:
                found = hash_file(opens[place.file], place, box.within(place.box))
        except OSError:
            found = ""
        if found != digest:
            wrong.append((place, box, digest))
        advance(box.numel * place.spec.dtype.itemsize)

    run_all(check, tasks)
    return wrong


def _wrong(folder: Folder, manifest: folders.Manifest, file: str) -> str:
    """What is wrong with a file as far as size, header and small content tell; empty if nothing."""
    path, (size, digest) = folder / file, manifest.files[file]
    if not path.is_file():
        return "is missing"
    found = path.size() if isinstance(path, RemotePath) else path.stat().st_size
    if found != size:
        return f"has {found:,} bytes, not {size:,}"
    try:
        if digest and xxhash.xxh3_64_hexdigest(path.read_bytes()) != digest:
            return "was changed"
        if file.endswith(TENSORS):
            header = xxhash.xxh3_64_hexdigest(read_head(path)[1])
            if manifest.headers.get(file, header) != header:
                return "has a header that was changed"
            read_header(path, file)
    except (ValueError, OSError) as error:
        return f"cannot be read ({error})"
    return ""


def _places(folder: Folder, files: Iterable[str]) -> dict[str, list[Place]]:
    places: dict[str, list[Place]] = {}
    for file in files:
        for place in read_header(folder / file, file).values():
            places.setdefault(place.name, []).append(place)
    return places


def _names_in(folder: Folder, file: str) -> list[str]:
    """What the index beside a file says that it holds; nothing where no index can be read."""
    path = PurePosixPath(file)
    base = folder / str(path.parent) if path.parent.name else folder
    indices: list[Folder] = sorted(base.glob("*.safetensors.index.json"), key=str)
    for index in indices:
        try:
            weight_map: Mapping[str, str] = json.loads(index.read_bytes())["weight_map"]
            return sorted(name for name, holder in weight_map.items() if holder == path.name)
        except (ValueError, KeyError, TypeError, AttributeError, OSError):
            continue
    return []
