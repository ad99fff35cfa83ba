"""Folders of `torch.distributed.checkpoint`: read where their bytes lie, and written by its own writer in pieces.

Weights are at `model.<name>`, the state of the optimizer at `optimizer.state.<weight>.<state>`: what
`dcp.load({"model": {name: tensor}, "optimizer": {"state": {weight: {state: tensor}}}}, checkpoint_id=folder)` fills.
config.json, tokenizer and `train_state.json` (step, place in the data, seed) lie beside them as they are, where that
library takes no notice of them. Nothing is lost but a checkpoint's checksums, which are made anew when it is read back.

The library's metadata is a pickle, and is read with its own few classes alone.
"""

from __future__ import annotations

import contextlib
import math
import pickle
import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from composable._torch import read_dcp_metadata
from composable.checkpoint import folder as folders
from composable.checkpoint.format import Part, Place, Stored, TensorSpec
from composable.checkpoint.formats.source import Entry, Source, Target, Values, stored_entries
from composable.checkpoint.formats.state_dict import Leaf, arranged, leaves, nested
from composable.checkpoint.formats.torch_file import loaded
from composable.checkpoint.owners import check_cover
from composable.checkpoint.rewrite import Unit, small_files
from composable.checkpoint.shards import Box, full_box

METADATA = ".metadata"
SUFFIX = ".distcp"
FILE = "__0_0.distcp"
PIECE_OVERHEAD = 1900  # bytes that a piece takes in a file beside its own, and in the metadata
MAX_OBJECT = 1 << 20  # bytes: a larger object is no number of an optimizer


def is_one(folder: Path) -> bool:
    """Whether there is such a checkpoint, or what is left of one."""
    return (folder / METADATA).is_file() or any(folder.glob(f"*{SUFFIX}"))


def source(folder: Path, *, weights_only: bool = False) -> Source:
    """A checkpoint of that library: of flat or nested state dicts.

    Raises:
        ValueError: naming the file, for one that is missing or truncated, or that is in a form of which the library has
            many (compressed pieces, say); for metadata of other classes, and what `arranged` refuses.
    """
    path = folder / METADATA
    if not path.is_file():
        raise ValueError(f"{path} is missing: the save did not come to an end; use another checkpoint")
    try:
        metadata = read_dcp_metadata(path)
        keys: Mapping[str, Any] = metadata.planner_data if isinstance(metadata.planner_data, dict) else {}
        pieces: dict[str, list[tuple[MetadataIndex, Any]]] = {}
        for index, where in metadata.storage_data.items():
            pieces.setdefault(index.fqn, []).append((index, where))
        found: list[Leaf] = []
        for name, tensor in metadata.state_dict_metadata.items():
            keys_of = tuple(keys.get(name, (name,)))
            if isinstance(tensor, TensorStorageMetadata):
                found.append((keys_of, _entry(folder, name, tensor, pieces.get(name, []))))
            else:
                found += _object(folder, keys_of, pieces.get(name, []))
    except (pickle.UnpicklingError, EOFError, AttributeError, KeyError, TypeError, IndexError, ImportError) as error:
        raise ValueError(f"{path} cannot be read: {' '.join(str(error).split())[:200]}") from error
    sections, notes = arranged(found, weights_only=weights_only)
    if not sections["weights"]:
        raise ValueError(f"{folder} holds no weights")
    kind = "a checkpoint of torch.distributed.checkpoint"
    return Source(kind, sections, small_files(folder, None), tuple(notes))


def _entry(folder: Path, name: str, tensor: TensorStorageMetadata, pieces: list[tuple[MetadataIndex, Any]]) -> Entry:
    spec = TensorSpec(name, tensor.properties.dtype, tuple(tensor.size))
    sizes = {tuple(chunk.offsets): tuple(chunk.sizes) for chunk in tensor.chunks}
    places = []
    for index, where in pieces:
        offsets = tuple(index.offset) if index.offset is not None else (0,) * len(spec.shape)
        piece = _piece(folder, name, where)
        if not isinstance(piece, Entry) or (piece.spec.dtype, piece.spec.shape) != (spec.dtype, sizes.get(offsets)):
            raise ValueError(f"{folder / where.relative_path}: a piece of {name} is not what {METADATA} says of it")
        for place in piece.places:
            part = None if piece.spec.shape == spec.shape else Part(name, spec.shape, offsets)
            places.append(Place(place.file, place.offset, TensorSpec(name, spec.dtype, piece.spec.shape), part))
        if len(pieces) == 1 and piece.spec.shape == spec.shape:
            return piece  # also one that is not row-major
        if not piece.row_major:
            raise ValueError(f"{folder}: the pieces of {name} are not row-major; save contiguous tensors")
    try:
        check_cover(spec, [place.box for place in places])
    except ValueError as error:
        raise ValueError(f"{folder}: the pieces of {name} do not make up the tensor ({error})") from error
    return stored_entries(folder, {name: Stored(spec, tuple(places))})[name]


def _piece(folder: Path, name: str, where: Any) -> object:
    if getattr(where, "transform_descriptors", None):
        raise ValueError(
            f"{folder / where.relative_path}: {name} is stored as {where.transform_descriptors}; save it plain"
        )
    if not (folder / where.relative_path).is_file():
        raise ValueError(f"{folder / where.relative_path} is missing, {METADATA} names it; copy the folder again")
    return loaded(folder, where.relative_path, where.offset, where.length)


def _object(folder: Path, keys: tuple[Any, ...], pieces: list[tuple[MetadataIndex, Any]]) -> Iterator[Leaf]:
    """What is no tensor: numbers in the optimizer's state; others are only named."""
    value: object = None
    for _, where in pieces:
        with contextlib.suppress(ValueError):  # another class: nothing that we keep
            value = _piece(folder, str(keys[-1]), where) if where.length <= MAX_OBJECT else None
    yield from leaves(value if isinstance(value, (int, float, dict, list)) else str(value), keys)


def target(found: Source) -> Target:
    """A folder that `torch.distributed.checkpoint` loads, with the small files beside."""
    entries = {section: e for section, e in found.sections.items() if e}
    size = sum(entry.spec.nbytes + PIECE_OVERHEAD for section in entries.values() for entry in section.values())

    def write(draft: Path, chunk: int, advance: Callable[[int], object]) -> None:
        writer = dcp.FileSystemWriter(draft, single_file_per_rank=True, thread_count=1)
        try:
            with warnings.catch_warnings(action="ignore", category=UserWarning):  # that there is one process
                dcp.save({}, storage_writer=writer, planner=_Pieces(entries, chunk, advance), no_dist=True)
        except dcp.CheckpointException as error:
            cause = next(iter(error.failures.values()))[0]
            raise cause if isinstance(cause, (ValueError, OSError)) else error from error
        for name, content in found.small.items():
            folders.write_file(draft / name, content)

    return Target(((FILE, size), (METADATA, 0)), found.small, write)


class _Pieces(dcp.DefaultSavePlanner):
    """Gives the library's writer one piece after the other, each read when it is written.

    Pieces are the boxes in which the values come, so that a checkpoint's checksums are checked on the way.
    """

    def __init__(
        self, sections: Mapping[str, Mapping[str, Entry]], chunk: int, advance: Callable[[int], object]
    ) -> None:
        super().__init__()
        self._sections, self._chunk, self._advance = sections, chunk, advance
        self._left: dict[tuple[str, tuple[int, ...]], Callable[[], Tensor]] = {}
        self._written: Tensor | None = None

    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
        self.is_coordinator = is_coordinator

    def create_local_plan(self) -> SavePlan:
        items: list[WriteItem] = []
        places = nested(self._sections)
        self.mappings = {key: path for key, (path, _) in places.items()}
        for key, (path, section) in places.items():
            entry = self._sections[section][".".join(map(str, path[1:] if section == "weights" else path[2:]))]
            empty = not math.prod(entry.spec.shape)
            boxes = [full_box(entry.spec.shape)] if empty else self._prepared(key, entry)
            items += [_item(key, entry.spec, box) for box in boxes]
            if empty:
                self._left[key, boxes[0].offsets] = partial(torch.empty, entry.spec.shape, dtype=entry.spec.dtype)
        self.plan = SavePlan(items, planner_data=self.mappings)
        return self.plan

    def _prepared(self, key: str, entry: Entry) -> list[Box]:
        prepared: list[Box] = []
        for unit in entry.units(self._chunk):
            boxes = list(entry.boxes(unit, self._chunk))
            values = _Reader(entry, unit, self._chunk, len(boxes))
            self._left |= {(key, box.offsets): partial(values.take, box) for box in boxes}
            prepared += boxes
        return prepared

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        if self._written is not None:  # the writer keeps all tensors of a file: what is written gives its memory back
            self._written.untyped_storage().resize_(0)
        offset = write_item.index.offset
        data = self._left.pop((write_item.index.fqn, tuple(offset or ())))()
        storage = data.untyped_storage()
        if storage.size() != data.nbytes or not storage.resizable():
            data = data.clone()
        self._written = data
        self._advance(data.nbytes)
        return data


class _Reader:
    """The values of a unit, taken in the order in which they come."""

    def __init__(self, entry: Entry, unit: Unit, chunk: int, count: int) -> None:
        self._start, self._left = partial(entry.values, unit, chunk), count
        self._values: Values | None = None

    def take(self, box: Box) -> Tensor:
        self._values = self._values or self._start()
        found, data = next(self._values)
        if found != box:
            raise RuntimeError(f"torch.distributed.checkpoint asked for {box} before {found}")
        self._left -= 1
        if not self._left:
            next(self._values, None)  # its end checks the checksum
        return data


def _item(key: str, spec: TensorSpec, box: Box) -> WriteItem:
    offsets = torch.Size(box.offsets)
    chunk = ChunkStorageMetadata(offsets, torch.Size(box.sizes))
    data = TensorWriteData(chunk, TensorProperties(spec.dtype), torch.Size(spec.shape))
    return WriteItem(MetadataIndex(key, offsets), WriteItemType.SHARD, tensor_data=data)
