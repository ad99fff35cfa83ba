"""`torch.save` files: read where their bytes lie, and written as torch lays them out, tensor by tensor.

Such a file is a zip archive of a pickle and of one uncompressed record for each storage. The pickle is read by
`torch.load` with `weights_only` and onto the meta device, which gives shapes and places and reads no tensor.

We write a folder: `model.pt` with {name: tensor}, `optimizer.pt` with {"state": {weight: {state: tensor}}} if there is
such a state, and beside them config.json, tokenizer and `train_state.json` (step, place in the data, seed) as they are.
Nothing is lost but a checkpoint's checksums, which are made anew when it is read back.
"""

from __future__ import annotations

import dataclasses
import io
import os
import pickle
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import lru_cache, partial
from pathlib import Path
from typing import BinaryIO, cast

import torch
from torch import Tensor

from composable._torch import fake_tensor_mode, offset_in_file
from composable.checkpoint import folder as folders
from composable.checkpoint.format import FilePlan, Place, Stored, TensorSpec
from composable.checkpoint.formats.source import Entry, Source, Target, computed_entry, stored_entries
from composable.checkpoint.formats.state_dict import arranged, leaves
from composable.checkpoint.rewrite import Unit, fill_files, small_files
from composable.checkpoint.shards import Box, byte_runs
from composable.checkpoint.storage import naming
from composable.checkpoint.transfer import raw

NAMES: Mapping[str, str] = {"weights": "model.pt", "optimizer": "optimizer.pt"}
OVERHEAD = 512  # bytes that a tensor takes in the archive beside its own: headers, alignment, its lines of the pickle
RECORD = b"PK\x03\x04"  # of zip: what the file starts with
DEEP = 8
DEEPEST = 100  # of dictionaries: a pickle may hold one that holds itself


def source(path: Path, *, weights_only: bool = False) -> Source:
    """A file of a state dict, or a folder with `model.pt` and `optimizer.pt` as we write it.

    Raises:
        ValueError: naming the file, for one that torch.save did not write, that is truncated, or that needs more than
            `weights_only` allows; for what `arranged` refuses.
    """
    file = path / NAMES["weights"] if path.is_dir() else path
    found = list(leaves(loaded(file.parent, file.name)))
    small: Mapping[str, bytes] = {}
    if path.is_dir():
        small = small_files(path, None)
        if (path / NAMES["optimizer"]).is_file() and not weights_only:
            found = [(("model", *keys), value) for keys, value in found]
            found += leaves(loaded(path, NAMES["optimizer"]), ("optimizer",))
    sections, notes = arranged(found, weights_only=weights_only)
    if not sections["weights"]:
        raise ValueError(f"{file} holds no weights; give a file of a state dict")
    return Source("a state dict of torch.save", sections, small, tuple(notes))


def loaded(folder: Path, name: str, start: int = 0, length: int | None = None) -> object:
    """What was saved, an `Entry` in the place of every tensor; of the `length` bytes of a file from `start` on.

    Raises:
        ValueError: naming the file.
    """
    path = folder / name
    with naming(path), open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        end = size if length is None else start + length
        file.seek(start)
        if end > size or file.read(4) != RECORD:
            what = "is truncated" if end > size else "is no file of torch.save (of torch 1.6 or newer)"
            raise ValueError(f"{path} {what}")
        try:
            content = torch.load(io.BufferedReader(_Slice(file, start, end)), map_location="meta", weights_only=True)
        except (RuntimeError, pickle.UnpicklingError, EOFError, KeyError, AttributeError, TypeError) as error:
            first = " ".join(str(error).split())
            unsafe = "Unsupported" in first or "Weights only load failed" in first
            raise ValueError(
                f"{path} needs more than torch.load(weights_only=True) allows, which may run a stranger's code: "
                "load it where it was made, and save tensors alone"
                if unsafe
                else f"{path} cannot be read, it was truncated or changed: {first[:200]}"
            ) from error
    return _entries(content, folder, name, start, end)


class _Slice(io.RawIOBase):
    """A part of an open file as a file."""

    def __init__(self, file: BinaryIO, start: int, end: int) -> None:
        self._file, self._start, self._size, self._at = file, start, end - start, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._size}[whence]
        self._at = max(0, base + offset)
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: object) -> int:
        view = memoryview(cast(bytearray, buffer)).cast("B")
        self._file.seek(self._start + self._at)
        data = self._file.read(max(0, min(len(view), self._size - self._at)))
        view[: len(data)] = data
        self._at += len(data)
        return len(data)


def _entries(values: object, folder: Path, name: str, start: int, end: int, depth: int = 0) -> object:
    if depth > DEEPEST:
        raise ValueError(f"{folder / name} holds dictionaries in dictionaries without an end; save a state dict")
    if isinstance(values, Mapping):
        return {key: _entries(value, folder, name, start, end, depth + 1) for key, value in values.items()}
    if isinstance(values, (list, tuple)) and depth < DEEP:
        return [_entries(value, folder, name, start, end, depth + 1) for value in values]
    return _entry(values, folder, name, start, end) if isinstance(values, Tensor) else values


def _entry(tensor: Tensor, folder: Path, name: str, start: int, end: int) -> Entry:
    """A tensor on the meta device as what lies in the file; it is given its name later."""
    if type(tensor) not in (Tensor, torch.nn.Parameter) or tensor.layout != torch.strided:
        raise ValueError(
            f"{folder / name} holds a {type(tensor).__name__} of layout {tensor.layout}; save plain tensors, as "
            "full_tensor() and to_dense() give them"
        )
    spec = TensorSpec("", tensor.dtype, tuple(tensor.shape))
    if not tensor.numel():
        return stored_entries(folder, {"": Stored(spec, ())})[""]
    begin = start + offset_in_file(tensor) + int(tensor.storage_offset()) * spec.dtype.itemsize
    span = 1 + sum((n - 1) * stride for n, stride in zip(spec.shape, tensor.stride(), strict=True))
    if tensor.is_conj() or tensor.is_neg() or begin + span * spec.dtype.itemsize > end:
        raise ValueError(
            f"{folder / name}: a tensor of shape {spec.shape} does not lie in the file as it is; copy it again"
        )
    place = Place(name, begin, spec)
    if tensor.is_contiguous():
        return stored_entries(folder, {"": Stored(spec, (place,))})[""]
    return computed_entry(spec, partial(_strided, folder / name, place, tensor.stride()), [place])


def _strided(path: Path, place: Place, strides: tuple[int, ...], box: Box) -> Tensor:
    """A box of a tensor that is not row-major, from pages of the file: the kernel's memory, not the program's."""
    size = path.stat().st_size
    spec, item = place.spec, place.spec.dtype.itemsize
    pages = torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8)[place.offset % item :]
    values = pages[: pages.numel() // item * item].view(spec.dtype)
    at = place.offset // item
    return values.as_strided(spec.shape, strides, at)[box.slices()].clone(memory_format=torch.contiguous_format)


def target(found: Source) -> Target:
    """A folder with `model.pt`, and `optimizer.pt` if there is a state of the optimizer."""
    sections = {section: entries for section, entries in found.sections.items() if entries}
    names = tuple(
        (NAMES[section], sum(entry.spec.nbytes + OVERHEAD for entry in entries.values()) + 4096)
        for section, entries in sections.items()
    )

    def write(draft: Path, chunk: int, advance: Callable[[int], object]) -> None:
        for section, entries in sections.items():
            _write_file(draft / NAMES[section], section, entries, chunk, advance)
        for name, content in found.small.items():
            folders.write_file(draft / name, content)

    return Target(names, found.small, write)


def _write_file(
    path: Path, section: str, entries: Mapping[str, Entry], chunk: int, advance: Callable[[int], object]
) -> None:
    """torch.save lays out the file without values, and these are written into their places in it."""
    with fake_tensor_mode():
        tensors = {name: torch.empty(entry.spec.shape, dtype=entry.spec.dtype) for name, entry in entries.items()}
    saved: dict[str, object] = dict(tensors)
    if section == "optimizer":
        states: dict[str, dict[str, Tensor]] = {}
        for name, tensor in tensors.items():
            weight, _, state = name.rpartition(".")
            states.setdefault(weight, {})[state] = tensor
        saved = {"state": states}
    with torch.serialization.skip_data(materialize_fake_tensors=True):
        torch.save(saved, path)
    laid = cast("list[tuple[tuple[str, ...], Entry]]", list(leaves(loaded(path.parent, path.name))))
    first = 1 if section == "optimizer" else 0
    places = {".".join(keys[first:]): place for keys, entry in laid for place in entry.places}
    fill_archives(path, [(0, path.stat().st_size)], places, entries, chunk, advance)


def fill_archives(
    path: Path,
    archives: Iterable[tuple[int, int]],
    places: Mapping[str, Place],
    entries: Mapping[str, Entry],
    chunk: int,
    advance: Callable[[int], object],
) -> None:
    """Write values into a file that torch laid out without them, and the checksums of its archives.

    Args:
        archives: (offset, bytes) of each in the file.
        places: where each of the tensors that have elements lies.
    """
    sums: dict[str, list[tuple[int, int, int]]] = {name: [] for name in places}

    def values(unit: Unit) -> Iterator[tuple[Box, Tensor]]:
        for box, data in entries[unit.name].values(unit, chunk):
            memory = raw(data).view(-1).view(torch.uint8).numpy().data
            for at, begin, size in byte_runs(box, entries[unit.name].spec.shape, data.itemsize):
                sums[unit.name].append((at, size, zlib.crc32(memory[begin : begin + size])))
            yield box, data
            del data, memory

    units = [unit for entry in entries.values() for unit in entry.units(chunk)]
    named = [
        dataclasses.replace(place, spec=dataclasses.replace(place.spec, name=name)) for name, place in places.items()
    ]
    fill_files(path.parent, [FilePlan(path.name, b"", path.stat().st_size, tuple(named))], units, values, advance)
    crcs = {places[name].offset: _joined(parts) for name, parts in sums.items()}
    with open(path, "r+b") as file:
        for start, length in archives:
            _write_checksums(file, start, length, crcs)
        file.flush()
        os.fsync(file.fileno())
    folders.sync_folder(path.parent)


def _write_checksums(file: BinaryIO, start: int, length: int, sums: Mapping[int, int]) -> None:
    """Put the CRC-32 of each record (by the offset of its data) where the archive keeps it: behind the record, and in
    the directory at the end."""
    with zipfile.ZipFile(io.BufferedReader(_Slice(file, start, start + length))) as archive:
        records, entry = archive.infolist(), start + archive.start_dir
    for record in records:
        file.seek(start + record.header_offset + 26)
        data = start + record.header_offset + 30 + sum(struct.unpack("<HH", file.read(4)))
        file.seek(entry + 28)
        lengths = struct.unpack("<HHH", file.read(6))
        if data in sums and record.file_size:
            crc = struct.pack("<I", sums[data])
            file.seek(entry + 16)
            file.write(crc)
            file.seek(data + record.file_size + 4)
            file.write(crc)
        entry += 46 + sum(lengths)


def _joined(parts: list[tuple[int, int, int]]) -> int:
    """The CRC-32 of bytes of which parts are known: (offset, size, CRC-32) of each."""
    crc = 0
    for _, size, other in sorted(parts):
        crc = _product(_power(8 * size), crc) ^ other
    return crc


@lru_cache(maxsize=1024)
def _power(bits: int) -> int:
    """x^bits modulo zip's polynomial; the highest bit is the coefficient of x^0."""
    result, square = 1 << 31, 1 << 30
    while bits:
        result = _product(result, square) if bits & 1 else result
        square, bits = _product(square, square), bits >> 1
    return result


def _product(a: int, b: int) -> int:
    result = 0
    for bit in range(31, -1, -1):
        if a >> bit & 1:
            result ^= b
        b = b >> 1 ^ (0xEDB88320 if b & 1 else 0)
    return result
