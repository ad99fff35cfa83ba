"""The bytes of safetensors files: headers, the place of every tensor, and the index that Hugging Face readers expect.

Format: https://huggingface.co/docs/safetensors (eight bytes of header length, a JSON header, the tensors row-major and
without gaps). Only values are computed here; nothing is read or written but by `read_header`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from composable.checkpoint.remote import Folder, RemotePath
from composable.checkpoint.shards import Box, full_box

DTYPES: Mapping[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "U16": torch.uint16,
    "I16": torch.int16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F4": torch.float4_e2m1fn_x2,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "C64": torch.complex64,
}
NAMES: Mapping[torch.dtype, str] = {dtype: name for name, dtype in DTYPES.items()}
PARTS = "composable.parts"  # key of the header's metadata: which entries are parts of tensors, and of which
FIRST_READ = 1 << 16  # bytes of the first read of a remote file: most headers in one request
MAX_HEADER = 100_000_000  # the limit of the safetensors library: what exceeds it, no reader opens


@dataclass(frozen=True)
class TensorSpec:
    """Name, dtype and global shape of one tensor of a checkpoint."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Size of the whole tensor in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Part:
    """Which part of a tensor an entry of a file is: the tensor's name and shape, and the part's first index."""

    name: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]


@dataclass(frozen=True)
class Place:
    """Where an entry lies: file name and byte offset of its first element, counted from the start of the file.

    `spec` is the entry's as it stands in the file; `part` says what it is a part of, if it is no whole tensor.
    """

    file: str
    offset: int
    spec: TensorSpec
    part: Part | None = None

    @property
    def name(self) -> str:
        """The tensor's name."""
        return self.part.name if self.part else self.spec.name

    @property
    def box(self) -> Box:
        """The part of the tensor that lies here."""
        return Box(self.part.offsets, self.spec.shape) if self.part else full_box(self.spec.shape)


@dataclass(frozen=True)
class Stored:
    """A tensor of a checkpoint: what it is, and the places of its parts, each element in one of them."""

    spec: TensorSpec
    places: tuple[Place, ...]


@dataclass(frozen=True)
class FilePlan:
    """One file to be written: its name, its header (with the length before it), its size, and its entries' places.

    `writer` is the rank that writes all of it; None: each rank writes what it holds.
    """

    name: str
    header: bytes
    size: int
    places: tuple[Place, ...]
    writer: int | None = None


def check_specs(specs: Iterable[TensorSpec]) -> None:
    """Refuse what the format cannot hold, with the tensor's name (ValueError)."""
    for spec in specs:
        if spec.dtype not in NAMES:
            raise ValueError(
                f"{spec.name}: safetensors has no dtype {spec.dtype}; save it as one of {', '.join(DTYPES)}"
                + (" (a complex number as torch.view_as_real)" if spec.dtype.is_complex else "")
            )
        if spec.dtype == torch.float4_e2m1fn_x2 and not spec.shape:
            raise ValueError(f"{spec.name}: {spec.dtype} packs two values along the last dimension, a scalar has none")
        if spec.name == "__metadata__":
            raise ValueError("__metadata__ is not a tensor's name in safetensors; rename the tensor")


def plan_files(specs: Sequence[TensorSpec], max_file_size: int, prefix: str) -> list[FilePlan]:
    """The files that hold `specs`, and the place of every tensor: a function of names, dtypes, shapes and order alone.

    A file takes tensors in the given order while their data fits into `max_file_size` bytes (a larger tensor has a file
    of its own). Within a file tensors of larger items come first, as safetensors' own writer has them, so that each
    lies aligned to its item. One file is called `prefix.safetensors`, several `prefix-00001-of-0000n.safetensors`.
    """
    groups = _groups(specs, max_file_size)
    names = _file_names(prefix, len(groups))
    return [_plan_file(name, group, {}, None) for name, group in zip(names, groups, strict=True)]


def plan_rank_files(
    entries: Sequence[Sequence[TensorSpec]], parts: Mapping[str, Part], max_file_size: int, prefix: str
) -> list[FilePlan]:
    """The files that the ranks write on their own: rank r's hold `entries[r]`, none if it has none.

    As `plan_files` for each rank, the files of all ranks numbered together. `parts` says which entries are parts.
    """
    groups = [(rank, group) for rank, specs in enumerate(entries) if specs for group in _groups(specs, max_file_size)]
    if not groups:
        return plan_files((), max_file_size, prefix)
    names = _file_names(prefix, len(groups))
    return [_plan_file(name, group, parts, rank) for name, (rank, group) in zip(names, groups, strict=True)]


def _groups(specs: Sequence[TensorSpec], max_file_size: int) -> list[list[TensorSpec]]:
    if max_file_size <= 0:
        raise ValueError(f"max_file_size is {max_file_size}; give a positive number of bytes")
    check_specs(specs)
    groups: list[list[TensorSpec]] = [[]]
    used = 0
    for spec in specs:
        if groups[-1] and used + spec.nbytes > max_file_size:
            groups.append([])
            used = 0
        groups[-1].append(spec)
        used += spec.nbytes
    return groups


def _file_names(prefix: str, count: int) -> list[str]:
    if count == 1:
        return [f"{prefix}.safetensors"]
    return [f"{prefix}-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]


def _plan_file(name: str, specs: Sequence[TensorSpec], parts: Mapping[str, Part], writer: int | None) -> FilePlan:
    ordered = sorted(specs, key=lambda spec: -spec.dtype.itemsize)
    header = encode_header(ordered, parts)
    places, offset = [], len(header)
    for spec in ordered:
        places.append(Place(name, offset, spec, parts.get(spec.name)))
        offset += spec.nbytes
    return FilePlan(name, header, offset, tuple(places), writer)


def encode_header(specs: Sequence[TensorSpec], parts: Mapping[str, Part] | None = None) -> bytes:
    """Length and JSON header of a file that holds `specs` in this order, padded with spaces to 8 bytes.

    `parts`: entries that are no whole tensors; the header's metadata says what they are parts of.
    """
    here = {spec.name: _part_values(spec, parts[spec.name]) for spec in specs if parts and spec.name in parts}
    entries: dict[str, object] = {"__metadata__": {"format": "pt"} | ({PARTS: _json(here)} if here else {})}
    offset = 0
    for spec in specs:
        entries[spec.name] = {
            "dtype": NAMES[spec.dtype],
            "shape": _in_values(spec.dtype, spec.shape),
            "data_offsets": [offset, offset + spec.nbytes],
        }
        offset += spec.nbytes
    text = _json(entries).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > MAX_HEADER:
        raise ValueError(f"a header of {len(text)} bytes for {len(specs)} tensors; choose a smaller max_file_size")
    return len(text).to_bytes(8, "little") + text


def _json(value: object) -> str:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)


def _in_values(dtype: torch.dtype, indices: Sequence[int]) -> list[int]:
    """A shape or index as the format has it: torch counts pairs of 4-bit values, the format counts values."""
    pairs = dtype == torch.float4_e2m1fn_x2
    return [*indices[:-1], indices[-1] * 2] if pairs else list(indices)


def _in_items(dtype: torch.dtype, indices: Sequence[int]) -> tuple[int, ...]:
    """A shape or index as torch has it."""
    pairs = dtype == torch.float4_e2m1fn_x2
    return (*indices[:-1], indices[-1] // 2) if pairs else tuple(indices)


def _part_values(spec: TensorSpec, part: Part) -> dict[str, object]:
    shape, offsets = (_in_values(spec.dtype, indices) for indices in (part.shape, part.offsets))
    return {"name": part.name, "shape": shape, "offsets": offsets}


def read_header(path: Folder, name: str) -> dict[str, Place]:
    """The places of all entries of one safetensors file, under `name` as its file name.

    Raises ValueError that names the file if it is truncated, or its header is not one of safetensors.
    """
    size, header = read_head(path)
    try:
        return decode_header(header[8:], name, size)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{path}: {error}") from error


def read_head(path: Folder) -> tuple[int, bytes]:
    """Size of a safetensors file, and its header with the length before it; ValueError if the file cannot hold it."""
    if isinstance(path, RemotePath):
        size, head = path.size(), path.read_bytes(0, FIRST_READ)
        length = int.from_bytes(head[:8], "little")
        if FIRST_READ < 8 + length <= min(size, MAX_HEADER):
            head += path.read_bytes(FIRST_READ, 8 + length)
        head = head[: 8 + length]
    else:
        with open(path, "rb") as file:
            size, head = path.stat().st_size, file.read(8)
            length = int.from_bytes(head, "little")
            head += file.read(min(length, MAX_HEADER, size))
    if size < 8 or length > min(size - 8, MAX_HEADER) or len(head) != 8 + length:
        raise ValueError(f"{path}: {size} bytes do not hold the header that a safetensors file starts with")
    return size, head


def decode_header(text: bytes, file: str, file_size: int) -> dict[str, Place]:
    """The places that a JSON header (without the length before it) gives in a file of `file_size` bytes."""
    places, end = {}, 0
    entries = json.loads(text, object_pairs_hook=_no_duplicates)
    parts = json.loads(entries.pop("__metadata__", {}).get(PARTS, "{}"))
    if unknown := sorted(parts.keys() - entries.keys()):
        raise ValueError(f"{PARTS} tells of {', '.join(unknown)}, which the file does not hold")
    for name, entry in entries.items():
        if entry["dtype"] not in DTYPES:
            raise ValueError(f"tensor {name} has the dtype {entry['dtype']}, which torch does not have")
        dtype = DTYPES[entry["dtype"]]
        spec = TensorSpec(name, dtype, _in_items(dtype, entry["shape"]))
        start, stop = entry["data_offsets"]
        if start < 0 or stop - start != spec.nbytes:
            raise ValueError(f"tensor {name} of shape {spec.shape}, {dtype} cannot lie at bytes {start} to {stop}")
        part = _part(spec, parts[name]) if name in parts else None
        places[name] = Place(file, 8 + len(text) + start, spec, part)
        end = max(end, stop)
    if file_size != 8 + len(text) + end:
        raise ValueError(
            f"the file has {file_size} bytes and its header asks for {8 + len(text) + end}; it was truncated or is not "
            "whole: copy it again or use another checkpoint"
        )
    return places


def _part(spec: TensorSpec, values: Mapping[str, object]) -> Part:
    shape, offsets = (_in_items(spec.dtype, values[key]) for key in ("shape", "offsets"))  # type: ignore[arg-type]
    if len(shape) != len(spec.shape) or not full_box(shape).contains(Box(offsets, spec.shape)):
        raise ValueError(f"{spec.name} of shape {spec.shape} cannot lie at {offsets} in a tensor of shape {shape}")
    return Part(str(values["name"]), shape, offsets)


def _no_duplicates(pairs: list[tuple[str, object]]) -> dict[str, object]:
    entries = dict(pairs)
    if len(entries) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"names that stand twice in the header: {sorted({n for n in names if names.count(n) > 1})}")
    return entries


def encode_index(files: Sequence[FilePlan]) -> str:
    """The text of a `.safetensors.index.json`: total size of all tensors in bytes, and the file of each name."""
    places = [place for file in files for place in file.places]
    return json.dumps(
        {
            "metadata": {"total_size": sum(place.spec.nbytes for place in places)},
            "weight_map": {place.spec.name: place.file for place in places},
        },
        indent=2,
    )
