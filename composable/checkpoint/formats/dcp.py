"""Folders of `torch.distributed.checkpoint`: read where their bytes lie; its own writer lays out what we
write, and the values are written into their places.

Weights are at `model.<name>`, the state of the optimizer at `optimizer.state.<weight>.<state>`: what
`dcp.load({"model": {name: tensor}, "optimizer": {"state": {weight: {state: tensor}}}}, checkpoint_id=folder)` fills.
config.json, tokenizer and `train_state.json` (step, place in the data, seed) lie beside them as they are, where that
library takes no notice of them. Nothing is lost but a checkpoint's checksums, which are made anew when it is read back.

The library's metadata is a pickle, and is read with its own few classes alone.
"""

from __future__ import annotations

import contextlib
import pickle
import warnings
from collections.abc import Callable, Iterator, Mapping
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
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from composable._torch import dcp_place, fake_tensor_mode, read_dcp_metadata
from composable.checkpoint import folder as folders
from composable.checkpoint.format import Part, Place, Stored, TensorSpec
from composable.checkpoint.formats.recognise import DCP_METADATA, DCP_SUFFIX
from composable.checkpoint.formats.source import Entry, Source, Target, stored_entries
from composable.checkpoint.formats.state_dict import Leaf, arranged, leaves, nested
from composable.checkpoint.formats.torch_file import fill_archives, loaded
from composable.checkpoint.owners import check_cover
from composable.checkpoint.rewrite import small_files
from composable.checkpoint.shards import full_box

FILE = f"__0_0{DCP_SUFFIX}"
PIECE_OVERHEAD = 1900  # bytes that a piece takes in a file beside its own, and in the metadata
MAX_OBJECT = 1 << 20  # bytes: a larger object is no number of an optimizer


def source(folder: Path, *, weights_only: bool = False) -> Source:
    """A checkpoint of that library: of flat or nested state dicts.

    Raises:
        ValueError: naming the file, for one that is missing or truncated, or that is in a form of which the library has
            many (compressed pieces, say); for metadata of other classes, and what `arranged` refuses.
    """
    path = folder / DCP_METADATA
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
            raise ValueError(f"{folder / where.relative_path}: a piece of {name} is not what {DCP_METADATA} says of it")
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
        raise ValueError(f"{folder / where.relative_path} is missing, {DCP_METADATA} names it; copy the folder again")
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
        with (
            torch.serialization.skip_data(materialize_fake_tensors=True),
            warnings.catch_warnings(action="ignore", category=UserWarning),  # that there is one process
        ):
            try:
                dcp.save({}, storage_writer=_Layout(draft), planner=_Planner(entries), no_dist=True)
            except dcp.CheckpointException as error:
                cause = next(iter(error.failures.values()))[0]
                raise cause if isinstance(cause, (ValueError, OSError)) else error from error
        pieces = read_dcp_metadata(draft / DCP_METADATA).storage_data
        for section, laid in source(draft).sections.items():
            places = {name: place for name, entry in laid.items() for place in entry.places}
            spans = [(where.offset, where.length) for where in pieces.values()]
            if laid:
                fill_archives(draft / FILE, spans, places, entries[section], chunk, advance)
        for name, content in found.small.items():
            folders.write_file(draft / name, content)

    return Target(((FILE, size), (DCP_METADATA, 0)), found.small, write)


class _Layout(dcp.FileSystemWriter):
    """Lays out one file without values, as its base does with them: that gives torch.save a stream without `seek`."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> torch.futures.Future[list[WriteResult]]:
        results: list[WriteResult] = []
        with open(Path(self.path) / FILE, "wb") as file:
            for item in plan.items:
                offset = file.tell()
                torch.save(planner.resolve_data(item), file)
                length = file.tell() - offset
                results.append(WriteResult(item.index, length, dcp_place(FILE, offset, length)))
        future: torch.futures.Future[list[WriteResult]] = torch.futures.Future()
        future.set_result(results)
        return future


class _Planner(dcp.DefaultSavePlanner):
    """Gives the writer all tensors, without values."""

    def __init__(self, sections: Mapping[str, Mapping[str, Entry]]) -> None:
        super().__init__()
        self._sections = sections

    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
        self.is_coordinator = is_coordinator

    def create_local_plan(self) -> SavePlan:
        self._specs: dict[str, TensorSpec] = {}
        places = nested(self._sections)
        self.mappings = {key: path for key, (path, _) in places.items()}
        for key, (path, section) in places.items():
            name = ".".join(map(str, path[1:] if section == "weights" else path[2:]))
            self._specs[key] = self._sections[section][name].spec
        self.plan = SavePlan([_item(key, spec) for key, spec in self._specs.items()], planner_data=self.mappings)
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        spec = self._specs[write_item.index.fqn]
        with fake_tensor_mode():
            return torch.empty(spec.shape, dtype=spec.dtype)


def _item(key: str, spec: TensorSpec) -> WriteItem:
    whole = full_box(spec.shape)
    offsets, sizes = torch.Size(whole.offsets), torch.Size(whole.sizes)
    data = TensorWriteData(ChunkStorageMetadata(offsets, sizes), TensorProperties(spec.dtype), sizes)
    return WriteItem(MetadataIndex(key, offsets), WriteItemType.SHARD, tensor_data=data)
