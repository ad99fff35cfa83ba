"""The plan of a checkpoint: from what every rank holds, the files, every tensor's place, and who writes which box."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from composable.checkpoint.format import FilePlan, Place, TensorSpec, plan_files
from composable.checkpoint.owners import Owned, plan_owners
from composable.checkpoint.shards import Box, Piece

# Section -> (sub-folder, prefix of the files).
SECTIONS: Mapping[str, tuple[str, str]] = {"weights": ("", "model"), "optimizer": ("optimizer", "optimizer")}

Table = Mapping[str, Mapping[str, tuple[torch.dtype, tuple[int, ...], Box]]]  # section -> name -> what one rank holds


@dataclass(frozen=True)
class SectionPlan:
    """One section of a checkpoint: its files, every tensor's place, and who writes which box of it."""

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


def plan_sections(tables: Sequence[Table], max_file_size: int) -> list[SectionPlan]:
    """The whole plan of a save from what every rank holds: the same on every rank, and no file is touched."""
    plans, load = [], [0] * len(tables)
    for section, (subfolder, prefix) in SECTIONS.items():
        specs = merge_specs(tables, section)
        if section == "optimizer" and not specs:
            continue
        held = [{name: box for name, (_, _, box) in table[section].items()} for table in tables]
        owners = plan_owners(specs, held, load)
        for spec in specs:
            for rank, box in owners[spec.name]:
                load[rank] += box.numel * spec.dtype.itemsize
        files = tuple(plan_files(specs, max_file_size, prefix))
        places = {place.spec.name: place for file in files for place in file.places}
        plans.append(SectionPlan(section, subfolder, prefix, files, places, owners))
    return plans


def _natural(name: str) -> list[int | str]:
    """A sort key by which layer 10 comes after layer 9."""
    return [int(part) if part.isdigit() else part for part in re.split(r"([0-9]+)", name)]
