"""The bytes of safetensors files: headers, the place of every tensor, and the index that Hugging Face readers expect.

Format: https://huggingface.co/docs/safetensors (eight bytes of header length, a JSON header, the tensors row-major and
without gaps). Only values are computed here; nothing is read or written but by `read_header`.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

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
class Place:
    """Where a tensor lies: file name and byte offset of its first element, counted from the start of the file."""

    file: str
    offset: int
    spec: TensorSpec


@dataclass(frozen=True)
class FilePlan:
    """One file to be written: its name, its header (with the length before it), its size, and the tensors' places."""

    name: str
    header: bytes
    size: int
    places: tuple[Place, ...]


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
    names = [f"{prefix}-{i:05d}-of-{len(groups):05d}.safetensors" for i in range(1, len(groups) + 1)]
    return [
        _plan_file(n, g) for n, g in zip(names if len(groups) > 1 else [f"{prefix}.safetensors"], groups, strict=True)
    ]


def _plan_file(name: str, specs: Sequence[TensorSpec]) -> FilePlan:
    ordered = sorted(specs, key=lambda spec: -spec.dtype.itemsize)
    header = encode_header(ordered)
    places, offset = [], len(header)
    for spec in ordered:
        places.append(Place(name, offset, spec))
        offset += spec.nbytes
    return FilePlan(name, header, offset, tuple(places))


def encode_header(specs: Sequence[TensorSpec]) -> bytes:
    """Length and JSON header of a file that holds `specs` in this order, padded with spaces to 8 bytes."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for spec in specs:
        shape = list(spec.shape)
        if spec.dtype == torch.float4_e2m1fn_x2:
            shape[-1] *= 2  # torch counts pairs, the format counts values
        entries[spec.name] = {
            "dtype": NAMES[spec.dtype],
            "shape": shape,
            "data_offsets": [offset, offset + spec.nbytes],
        }
        offset += spec.nbytes
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > MAX_HEADER:
        raise ValueError(f"a header of {len(text)} bytes for {len(specs)} tensors; choose a smaller max_file_size")
    return len(text).to_bytes(8, "little") + text


def read_header(path: Path, name: str) -> dict[str, Place]:
    """The places of all tensors of one safetensors file, under `name` as its file name.

    Raises ValueError that names the file if it is truncated, or its header is not one of safetensors.
    """
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(size - 8, MAX_HEADER):
            raise ValueError(f"{path}: {size} bytes do not hold the header that a safetensors file starts with")
        try:
            return decode_header(file.read(length), name, size)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path}: {error}") from error


def decode_header(text: bytes, file: str, file_size: int) -> dict[str, Place]:
    """The places that a JSON header (without the length before it) gives in a file of `file_size` bytes."""
    places, end = {}, 0
    for name, entry in json.loads(text, object_pairs_hook=_no_duplicates).items():
        if name == "__metadata__":
            continue
        if entry["dtype"] not in DTYPES:
            raise ValueError(f"tensor {name} has the dtype {entry['dtype']}, which torch does not have")
        dtype, shape = DTYPES[entry["dtype"]], list(entry["shape"])
        if dtype == torch.float4_e2m1fn_x2:
            shape[-1] //= 2
        spec = TensorSpec(name, dtype, tuple(shape))
        start, stop = entry["data_offsets"]
        if start < 0 or stop - start != spec.nbytes:
            raise ValueError(f"tensor {name} of shape {spec.shape}, {dtype} cannot lie at bytes {start} to {stop}")
        places[name] = Place(file, 8 + len(text) + start, spec)
        end = max(end, stop)
    if file_size != 8 + len(text) + end:
        raise ValueError(
            f"the file has {file_size} bytes and its header asks for {8 + len(text) + end}; it was truncated or is not "
            "whole: copy it again or use another checkpoint"
        )
    return places


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
