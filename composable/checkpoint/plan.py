"""The plan of a checkpoint: from what every rank holds, the files, every tensor's place, and who writes which box."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from composable.checkpoint.format import FilePlan, Part, Place, TensorSpec, plan_files, plan_rank_files
from composable.checkpoint.owners import Owned, plan_owners
from composable.checkpoint.shards import Box, Piece, full_box

# Section -> (sub-folder, prefix of the files).
SECTIONS: Mapping[str, tuple[str, str]] = {"weights": ("", "model"), "optimizer": ("optimizer", "optimizer")}

Writer = Literal["shared", "per_rank"]
"""`shared`: all ranks write into common files. `per_rank`: each writes files of its own, from start to end."""

Table = Mapping[str, Mapping[str, tuple[torch.dtype, tuple[int, ...], Box]]]  # section -> name -> what one rank holds
PartKey = tuple[str, str, Box]  # (section, name, a box that this rank writes)
Parts = Mapping[PartKey, Piece]  # -> a piece that contains the box


@dataclass(frozen=True)
class SectionPlan:
    """One section of a checkpoint: its files, the place of every entry, and who writes which box of every tensor."""

    name: str
    folder: str
    prefix: str
    files: tuple[FilePlan, ...]
    places: Mapping[str, Place]
    owners: Mapping[str, Sequence[Owned]]


def table_of(pieces: Mapping[str, Mapping[str, Piece]]) -> Table:
    """What this rank holds, as values that other ranks can be told."""
    return {
        section: {name: (piece.local.dtype, piece.shape, piece.box) for name, piece in tensors.items()}
        for section, tensors in pieces.items()
    }


def merge_specs(tables: Sequence[Table], section: str) -> list[TensorSpec]:
    """The tensors of a section that any rank holds, in natural order; ValueError if ranks disagree about one."""
    specs: dict[str, TensorSpec] = {}
    for rank, table in enumerate(tables):
        for name, (dtype, shape, _) in table.get(section, {}).items():
            spec = specs.setdefault(name, TensorSpec(name, dtype, shape))
            if (spec.dtype, spec.shape) != (dtype, shape):
                raise ValueError(
                    f"{name}: rank {rank} has shape {shape}, {dtype}, a rank before it {spec.shape}, {spec.dtype}; "
                    "one name is one tensor on all ranks"
                )
    return [specs[name] for name in sorted(specs, key=_natural)]


def plan_sections(tables: Sequence[Table], max_file_size: int, writer: Writer = "shared") -> list[SectionPlan]:
    """The whole plan of a save from what every rank holds: the same on every rank, and no file is touched.

    Raises:
        ValueError: ranks that disagree about a tensor, parts that do not make up one, an unknown writer.
    """
    if writer not in ("shared", "per_rank"):
        raise ValueError(f"checkpoint.writer={writer!r}: write shared or per_rank")
    plans, load = [], [0] * len(tables)
    for section, (subfolder, prefix) in SECTIONS.items():
        specs = merge_specs(tables, section)
        if section == "optimizer" and not specs:
            continue
        held = [{name: box for name, (_, _, box) in table[section].items()} for table in tables]
        owners = plan_owners(specs, held, load, whole=writer == "per_rank")
        for spec in specs:
            for rank, box in owners[spec.name]:
                load[rank] += box.numel * spec.dtype.itemsize
        if writer == "shared":
            files = tuple(plan_files(specs, max_file_size, prefix))
        else:
            files = tuple(_rank_files(specs, held, owners, max_file_size, prefix))
        places = {place.spec.name: place for file in files for place in file.places}
        plans.append(SectionPlan(section, subfolder, prefix, files, places, owners))
    return plans


def _rank_files(
    specs: Sequence[TensorSpec],
    held: Sequence[Mapping[str, Box]],
    owners: dict[str, list[Owned]],
    max_file_size: int,
    prefix: str,
) -> list[FilePlan]:
    """Each rank's files with the boxes that it owns; tensors without elements, which no rank owns, find an owner."""
    entries: list[list[TensorSpec]] = [[] for _ in held]
    parts: dict[str, Part] = {}
    for spec in specs:
        whole = full_box(spec.shape)
        if not owners[spec.name]:
            owners[spec.name] = [(next(rank for rank, boxes in enumerate(held) if spec.name in boxes), whole)]
        for rank, box in owners[spec.name]:
            if box == whole:
                entries[rank].append(spec)
                continue
            entry = TensorSpec(part_name(spec.name, box), spec.dtype, box.sizes)
            parts[entry.name] = Part(spec.name, spec.shape, box.offsets)
            entries[rank].append(entry)
    if taken := sorted(parts.keys() & {spec.name for spec in specs}):
        raise ValueError(f"{taken[0]} is what a part of another tensor is called; rename the tensor")
    return plan_rank_files(entries, parts, max_file_size, prefix)


def part_name(name: str, box: Box) -> str:
    """What the entry of a part is called, as Python writes the slice: `w[0:4,8:16]`."""
    return f"{name}[{','.join(f'{o}:{o + n}' for o, n in zip(box.offsets, box.sizes, strict=True))}]"


def owned_parts(
    sections: Sequence[SectionPlan], pieces: Mapping[str, Mapping[str, Piece]], rank: int
) -> dict[PartKey, Piece]:
    """The boxes that a plan gives to this rank, each with the piece of its own that contains it."""
    return {
        (section.name, name, box): pieces[section.name][name]
        for section in sections
        for name, owners in section.owners.items()
        for owner, box in owners
        if owner == rank
    }


def _natural(name: str) -> list[int | str]:
    """A sort key by which layer 10 comes after layer 9."""
    return [int(part) if part.isdigit() else part for part in re.split(r"([0-9]+)", name)]
