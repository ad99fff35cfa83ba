"""Loading: each rank reads the byte ranges that its own layout needs, whatever layout wrote them."""

from __future__ import annotations

import fnmatch
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from composable.checkpoint import folder as folders
from composable.checkpoint.format import Place, read_header
from composable.checkpoint.owners import LARGE, least_loaded
from composable.checkpoint.plan import SECTIONS, Table, table_of
from composable.checkpoint.shards import Box, Piece, chunk_boxes, pieces_of
from composable.checkpoint.storage import File, naming, opened_files
from composable.checkpoint.together import rank_of, together
from composable.checkpoint.transfer import hash_file, hash_memory, read_box, run_all


@dataclass(frozen=True)
class Listing:
    """What a folder holds: section (`weights`, `optimizer`) -> tensor name -> place, and the manifest if it has one.

    A place's file is relative to the folder.
    """

    places: Mapping[str, Mapping[str, Place]]
    manifest: folders.Manifest | None


def load(
    folder: Path,
    weights: Mapping[str, Tensor | Piece],
    optimizer: Mapping[str, Tensor | Piece] | None = None,
    *,
    allow_missing: Iterable[str] = (),
    allow_extra: Iterable[str] = (),
    allow_cast: bool = False,
    verify: bool = True,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Fill the given tensors in place from a checkpoint or any safetensors folder; collective like `save`.

    Each rank gives the tensors that it holds (plain, DTensor or `Piece`; any layout, any strides, any device). Without
    `optimizer` the optimizer's files are not looked at. All ranks together must ask for exactly the names in the
    folder: the patterns `allow_missing` (asked for, not in the folder: left as they are) and `allow_extra` (in the
    folder, not asked for) lift that by name or wildcard. A cast that keeps every value is made; any other needs
    `allow_cast`. `verify` checks the checksums of all boxes, each by one rank, and of the small files; a plain folder
    has none.

    Raises ValueError on all ranks: for an incomplete checkpoint, a missing, truncated or changed file (naming it),
    missing and extra names, shapes that differ, a cast that loses values, a checksum that does not match (the tensors
    are filled by then). FileNotFoundError where the folder holds no safetensors at all.
    """
    folder = Path(folder)
    pieces: dict[str, dict[str, Piece]] = {}
    listings: list[Listing] = []

    def describe() -> Table:
        for section, tensors in (("weights", weights), ("optimizer", optimizer)):
            if tensors is not None:
                pieces[section] = pieces_of(tensors)
        listings.append(list_folder(folder, list(pieces)))
        return table_of(pieces)

    tables = together(group, describe)
    listing = listings[0]

    def fill() -> None:
        missing, extra = tuple(allow_missing), tuple(allow_extra)
        _check(folder, listing, tables, missing, extra, allow_cast)
        sharing = _sharing(tables, rank_of(group))
        tasks = [
            (place, piece, box, sharing[section, name][1] > 1)
            for section, tensors in pieces.items()
            for name, piece in tensors.items()
            if (place := listing.places[section].get(name))
            for box in chunk_boxes(piece.box, piece.local.element_size(), LARGE)
        ]
        with opened_files(folder, {place.file for place, *_ in tasks}) as opens:
            run_all(partial(_read, folder, opens), tasks)

    together(group, fill)
    if verify and listing.manifest:
        _verify(folder, listing, listing.manifest, tables, pieces, group)


def _read(folder: Path, opens: Mapping[str, File], place: Place, piece: Piece, box: Box, shared: bool) -> None:
    with naming(folder / place.file):
        read_box(opens[place.file], place, piece, box, shared)


def list_folder(folder: Path, sections: Sequence[str] = tuple(SECTIONS)) -> Listing:
    """The tensors of a checkpoint or of a plain safetensors folder, from the files' headers; no tensor is read.

    Raises ValueError that names the file for an incomplete checkpoint, a missing or truncated file, a name that stands
    in two files or not where the index says; FileNotFoundError where there are no weights.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise FileNotFoundError(f"there is no folder {folder}")
    manifest = folders.read_manifest(folder)
    if manifest:
        folders.check_files(folder, manifest)
    return Listing({section: _list_section(folder, *SECTIONS[section]) for section in sections}, manifest)


def _list_section(folder: Path, subfolder: str, prefix: str) -> dict[str, Place]:
    base = folder / subfolder
    indices = sorted(base.glob("*.safetensors.index.json"))
    preferred = base / f"{prefix}.safetensors.index.json"
    index = preferred if preferred in indices else indices[0] if len(indices) == 1 else None
    weight_map: dict[str, str] = json.loads(index.read_bytes())["weight_map"] if index else {}
    whole = base / f"{prefix}.safetensors"
    if index:
        files = sorted(set(weight_map.values()))
    elif whole.is_file():
        files = [whole.name]
    else:
        files = sorted(path.name for path in base.glob("*.safetensors"))
    if not files and not index:
        if subfolder:
            return {}
        raise FileNotFoundError(f"{folder} holds no safetensors files")
    places: dict[str, Place] = {}
    for file in files:
        if not (base / file).is_file():
            raise ValueError(f"{base / file} is missing, {index} names it; copy the folder again")
        for name, place in read_header(base / file, os.path.join(subfolder, file)).items():
            if name in places:
                raise ValueError(
                    f"{name} stands in two files of {base}: {places[name].file} and {place.file}; remove one"
                )
            places[name] = place
    for name, file in weight_map.items():
        if name not in places or places[name].file != os.path.join(subfolder, file):
            raise ValueError(f"{index} says that {name} is in {file}, it is not; write the index anew or remove it")
    return places


def _check(
    folder: Path,
    listing: Listing,
    tables: Sequence[Table],
    allow_missing: Sequence[str],
    allow_extra: Sequence[str],
    allow_cast: bool,
) -> None:
    """Names, shapes and casts, from what all ranks ask for: so every rank comes to the same result."""
    for section, places in listing.places.items():
        wanted = {name for table in tables for name in table[section]}
        missing = [name for name in sorted(wanted - places.keys()) if not _matches(name, allow_missing)]
        extra = [name for name in sorted(places.keys() - wanted) if not _matches(name, allow_extra)]
        if missing or extra:
            raise ValueError(
                f"the {section} in {folder} are not the ones asked for: {_some('missing there', missing)}, "
                f"{_some('not asked for', extra)}; allow_missing and allow_extra take names or patterns"
            )
        for table in tables:
            for name, (dtype, shape, _) in table[section].items():
                place = places.get(name)
                if place and place.spec.shape != shape:
                    raise ValueError(f"{name} has shape {place.spec.shape} in {folder}, {shape} is asked for")
                if place and not allow_cast and not widens(place.spec.dtype, dtype):
                    raise ValueError(
                        f"{name} is {place.spec.dtype} in {folder}: {dtype} does not hold all its values; "
                        "pass allow_cast=True to round"
                    )


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(name == pattern or fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def _some(text: str, names: Sequence[str]) -> str:
    return f"{len(names)} {text}" + (f" ({', '.join(names[:10])}{', ...' if len(names) > 10 else ''})" if names else "")


def widens(source: torch.dtype, target: torch.dtype) -> bool:
    """Whether `target` holds every value of `source` of the same kind (floating, integer, complex) exactly."""
    if source == target:
        return True
    kinds = [(d.is_complex, d.is_floating_point) for d in (source, target)]
    opaque = (torch.bool, torch.float4_e2m1fn_x2, torch.float8_e8m0fnu)
    if kinds[0] != kinds[1] or source in opaque or target in opaque:
        return False
    if source.is_floating_point or source.is_complex:
        a, b = torch.finfo(source), torch.finfo(target)
        return b.eps <= a.eps and b.max >= a.max and b.smallest_normal * b.eps <= a.smallest_normal * a.eps
    i, j = torch.iinfo(source), torch.iinfo(target)
    return j.min <= i.min and j.max >= i.max


def _verify(
    folder: Path,
    listing: Listing,
    manifest: folders.Manifest,
    tables: Sequence[Table],
    pieces: Mapping[str, Mapping[str, Piece]],
    group: dist.ProcessGroup | None,
) -> None:
    """Check each saved box once: in the memory of a rank that loaded it whole, else in the file, shared out evenly."""
    rank = rank_of(group)
    boxes = [
        (listing.places[section][name], section, box, digest)
        for section, places in listing.places.items()
        for name in sorted(places.keys() & {name for table in tables for name in table[section]})
        for box, digest in manifest.checksums.get(section, {}).get(name, ())
    ]

    def check(number: int, opens: Mapping[str, File] | None) -> None:
        place, section, box, digest = boxes[number]
        with naming(folder / place.file):
            if opens is None:
                found = hash_memory(pieces[section][place.spec.name], box)
            else:
                found = hash_file(opens[place.file], place, box)
        if found != digest:
            raise ValueError(
                f"{folder / place.file}: the bytes of {place.spec.name}, {box}, were changed since they were saved: "
                "their checksum does not match; use another checkpoint"
            )

    def in_memory() -> list[int]:
        if rank == 0:
            folders.check_content(folder, manifest)
        mine = _loaded_whole([(place, section, box) for place, section, box, _ in boxes], tables, rank)
        run_all(check, [(number, None) for number in mine])
        return mine

    checked = {number for numbers in together(group, in_memory) for number in numbers}

    def in_files() -> None:
        rest = [number for number in range(len(boxes)) if number not in checked]
        owners = least_loaded([boxes[n][2].numel * boxes[n][0].spec.dtype.itemsize for n in rest], len(tables))
        mine = [number for number, owner in zip(rest, owners, strict=True) if owner == rank]
        with opened_files(folder, {boxes[number][0].file for number in mine}) as opens:
            run_all(check, [(number, opens) for number in mine])

    together(group, in_files)


def _sharing(tables: Sequence[Table], rank: int) -> dict[tuple[str, str], tuple[int, int]]:
    """(section, name) of what this rank holds -> its turn among the ranks that hold the same part, and their number."""
    sharing = {}
    for section, tensors in tables[rank].items():
        for name, held in tensors.items():
            same = [r for r, table in enumerate(tables) if table[section].get(name) == held]
            sharing[section, name] = (same.index(rank), len(same))
    return sharing


def _loaded_whole(boxes: Sequence[tuple[Place, str, Box]], tables: Sequence[Table], rank: int) -> list[int]:
    """Numbers of the boxes that this rank has whole in memory, without a cast; ranks with equal parts take turns."""
    sharing = _sharing(tables, rank)
    mine = []
    for number, (place, section, box) in enumerate(boxes):
        key = (section, place.spec.name)
        if key in sharing:
            dtype, _, held_box = tables[rank][section][place.spec.name]
            turn, holders = sharing[key]
            if dtype == place.spec.dtype and held_box.contains(box) and number % holders == turn:
                mine.append(number)
    return mine
