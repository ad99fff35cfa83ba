"""What each rank would write of a checkpoint: the real plan, made of what one rank of each pipeline stage holds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Placement

from composable.checkpoint.plan import SectionPlan, Table, Writer, plan_sections
from composable.checkpoint.shards import Piece, full_box, placed_box
from composable.mesh import Mesh
from composable.models.config import DecoderConfig
from composable.models.names import in_file

MAX_FILE_SIZE = 5 * 10**9
"""bytes, as `checkpoint.save` has it"""


@dataclass(frozen=True)
class Held:
    """A tensor of a rank, as all ranks of its pipeline stage have it, each its own part."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    placements: tuple[Placement, ...] = ()
    dims: tuple[str, ...] = ()
    """of the mesh that `placements` are on"""
    sizes: tuple[int, ...] = ()
    """of those dimensions"""


@dataclass(frozen=True)
class Share:
    """What a rank writes of a checkpoint."""

    files: int
    bytes: int
    """of tensors"""


Stage = Mapping[str, Mapping[str, Held]]
"""section -> name of the model's own -> what a rank of a stage holds"""


def held(tensors: Mapping[str, Tensor]) -> dict[str, Held]:
    """What a rank holds, without the tensors."""
    found = {}
    for name, tensor in tensors.items():
        places: tuple[tuple, ...] = ()
        if isinstance(tensor, DTensor):
            mesh = tensor.device_mesh
            places = (tuple(tensor.placements), tuple(mesh.mesh_dim_names or ()), tuple(mesh.shape))
        found[name] = Held(tensor.dtype, tuple(tensor.shape), *places)
    return found


def shares(
    stages: Sequence[Stage], mesh: Mesh, config: DecoderConfig, writer: Writer, *, replicate: bool
) -> tuple[list[Share], list[SectionPlan]]:
    """What every rank writes, and the plan that says so.

    Args:
        stages: what a rank of each stage of the pipeline holds.
        mesh: resolved.
        replicate: as in `Mesh.views`.

    Raises:
        ValueError: what cannot be saved.
    """
    tables = [
        _table(stages[rank // mesh.stage_ranks], coordinates(mesh, rank, replicate=replicate), config)
        for rank in range(mesh.world)
    ]
    sections = plan_sections(tables, MAX_FILE_SIZE, writer)
    return shares_of(sections, mesh.world), sections


def shares_of(sections: Sequence[SectionPlan], world: int) -> list[Share]:
    """What every rank writes by a plan."""
    sizes, files = [0] * world, [set[tuple[str, str]]() for _ in range(world)]
    for section in sections:
        for file in section.files:
            if file.writer is not None:
                files[file.writer].add((section.name, file.name))
                sizes[file.writer] += sum(place.spec.nbytes for place in file.places)
                continue
            for place in file.places:
                for rank, box in section.owners[place.spec.name]:
                    files[rank].add((section.name, file.name))
                    sizes[rank] += box.numel * place.spec.dtype.itemsize
    return [Share(len(names), size) for names, size in zip(files, sizes, strict=True)]


def coordinates(mesh: Mesh, rank: int, *, replicate: bool) -> dict[str, int]:
    """Name of a dimension of `Mesh.views` -> the rank's place in it; `dp_replicate` of experts is that of the others
    where the two views have the same."""
    inside = rank % mesh.stage_ranks
    tp, rest = inside % mesh.tp, inside // mesh.tp
    cp, rest = rest % mesh.cp, rest // mesh.cp
    shard, replica = rest % mesh.dp_shard, rest // mesh.dp_shard
    of_replica = inside % (mesh.dp_shard * mesh.cp * mesh.tp)
    etp, group = of_replica % mesh.etp, of_replica // mesh.etp
    found = {
        "pp": rank // mesh.stage_ranks,
        "dp_replicate": replica,
        "dp_shard": shard,
        "cp": cp,
        "tp": tp,
        "fsdp": shard * mesh.cp + cp,
        "efsdp": group // mesh.ep,
        "ep": group % mesh.ep,
        "etp": etp,
    }
    # In plain data parallelism nothing is sharded over copies, so that the place among them cuts nothing.
    return found | ({"fsdp": shard, "efsdp": 0} if replicate else {})


def _table(stage: Stage, place: Mapping[str, int], config: DecoderConfig) -> Table:
    """What the rank at a place of a stage holds, as its checkpoint names it."""
    table: dict[str, dict] = {}
    for section, tensors in stage.items():
        pieces = in_file(dict(_pieces(tensors, place)), config)
        table[section] = {
            name: (piece.local.dtype, piece.shape, piece.box)
            if isinstance(piece, Piece)
            else (piece.dtype, tuple(piece.shape), full_box(piece.shape))
            for name, piece in pieces.items()
        }
    return table


def _pieces(tensors: Mapping[str, Held], place: Mapping[str, int]) -> Iterator[tuple[str, Tensor | Piece]]:
    for name, tensor in tensors.items():
        if not tensor.shape:
            yield name, torch.empty((), dtype=tensor.dtype, device="meta")
            continue
        box = full_box(tensor.shape)
        if tensor.placements:
            box = placed_box(tensor.shape, tensor.placements, tensor.sizes, tuple(place[dim] for dim in tensor.dims))
        yield name, Piece(torch.empty(box.sizes, dtype=tensor.dtype, device="meta"), tensor.shape, box)
