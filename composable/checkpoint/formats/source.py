"""What every format is read as and written from: tensors by section and name, whose values come box by box."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from composable.checkpoint.draft import drafted
from composable.checkpoint.folder import Checksums
from composable.checkpoint.format import Place, Stored, TensorSpec, check_specs
from composable.checkpoint.remote import Folder
from composable.checkpoint.rewrite import Unit, checked, units_of
from composable.checkpoint.shards import Box, chunk_boxes, full_box

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
Values = Iterator[tuple[Box, Tensor]]


@dataclass(frozen=True)
class Entry:
    """A tensor of a source, and how its values are had.

    `units` cuts it into what is read as one, for chunks of so many bytes; `values` gives those of a unit, in boxes of
    which none takes more than so many bytes, and `boxes` tells these before. `places` are where its bytes lie, if they
    lie in files; `row_major` says whether they do in the order of the elements.
    """

    spec: TensorSpec
    units: Callable[[int], Iterator[Unit]]
    boxes: Callable[[Unit, int], Iterator[Box]]
    values: Callable[[Unit, int], Values]
    places: tuple[Place, ...] = ()
    row_major: bool = True


@dataclass(frozen=True)
class Source:
    """What was found: `kind` says in words which format; section (`weights`, `optimizer`) -> name -> tensor.

    `small` are configuration, tokenizer and what else lies beside; `notes` say what of the source is left out.
    """

    kind: str
    sections: Mapping[str, Mapping[str, Entry]]
    small: Mapping[str, bytes] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(entry.spec.nbytes for entries in self.sections.values() for entry in entries.values())

    @property
    def config(self) -> dict[str, Any]:
        """The content of config.json, empty if there is none; ValueError if it is no JSON object."""
        try:
            return {**json.loads(self.small.get("config.json", b"{}"))}
        except (ValueError, TypeError, RecursionError) as error:
            raise ValueError(f"config.json is no JSON object: {error}") from error

    def with_config(self, config: Mapping[str, Any]) -> Source:
        """The same with this config.json."""
        text = (json.dumps(config, indent=2) + "\n").encode()
        return dataclasses.replace(self, small={**self.small, "config.json": text})

    @property
    def files(self) -> list[str]:
        """The files that hold tensors."""
        entries = (entry for section in self.sections.values() for entry in section.values())
        return sorted({place.file for entry in entries for place in entry.places})


@dataclass(frozen=True)
class Target:
    """What would be written: (relative name, bytes) of the files of tensors, and small files by name.

    `write(folder, chunk, advance)` writes all of it into a new folder, holding about `chunk` bytes on each of the
    threads of `transfer.run_all`; `advance` is told of bytes of tensors that were written.
    """

    names: tuple[tuple[str, int], ...]
    small: Mapping[str, bytes]
    write: Callable[[Path, int, Callable[[int], object]], None]

    @property
    def nbytes(self) -> int:
        """Bytes that will be written."""
        return sum(size for _, size in self.names) + sum(map(len, self.small.values()))


def write(
    target: Target,
    path: Path,
    chunk: int,
    advance: Callable[[int], object] = lambda size: None,
    check: Callable[[], object] = lambda: None,
) -> None:
    """Carry out a plan; `path` is there when it is complete, and as it was after an error.

    `check` runs beside the writing: what it raises ends that, and is raised.

    Raises:
        ValueError: naming file and tensor, for bytes of the source that are not those that were saved.
        OSError: a disk without room, or one that fails.
    """
    with drafted(path, target.nbytes) as draft, ThreadPoolExecutor(1) as pool:
        verdict = pool.submit(check)

        def checking(size: int) -> None:
            if verdict.done():
                verdict.result()
            advance(size)

        target.write(draft, chunk, checking)
        verdict.result()


def stored_entries(
    folder: Folder, tensors: Mapping[str, Stored], checksums: Checksums | None = None
) -> dict[str, Entry]:
    """Tensors whose bytes lie row-major in files of a folder; the boxes that have checksums are checked."""

    def entry(stored: Stored) -> Entry:
        given = None if checksums is None else checksums.get(stored.spec.name)
        return Entry(
            stored.spec,
            lambda chunk: units_of(folder, stored, given, chunk),
            lambda unit, chunk: chunk_boxes(unit.box, stored.spec.dtype.itemsize, chunk),
            lambda unit, chunk: checked(folder, stored, unit, chunk),
            stored.places,
        )

    return {name: entry(stored) for name, stored in tensors.items()}


def computed_entry(
    spec: TensorSpec, read: Callable[[Box], Tensor], places: Iterable[Place] = (), share: int = 1
) -> Entry:
    """A tensor of which `read` gives any box, while it holds no more than `share` times the box's bytes."""

    def units(chunk: int) -> Iterator[Unit]:
        boxes = chunk_boxes(full_box(spec.shape), spec.dtype.itemsize, max(1, chunk // share))
        return (Unit(spec.name, box) for box in boxes)

    def values(unit: Unit, chunk: int) -> Values:
        yield unit.box, read(unit.box)

    return Entry(spec, units, lambda unit, chunk: iter([unit.box]), values, tuple(places), row_major=False)


def number_entry(name: str, value: float) -> Entry:
    """A number as the scalar float32 that our optimizers keep it as."""
    return computed_entry(TensorSpec(name, torch.float32, ()), lambda box: torch.tensor(float(value)))


def narrowed(source: Source, dtype: torch.dtype) -> Source:
    """The same with floating-point weights in another dtype, and config.json saying so; the optimizer's state stays.

    Raises:
        ValueError: weights of eight bits or fewer, which other tensors scale.
    """
    weights = {name: _cast(entry, dtype) for name, entry in source.sections["weights"].items()}
    source = dataclasses.replace(source, sections={**source.sections, "weights": weights})
    if not (config := source.config):
        return source
    key = "dtype" if "dtype" in config else "torch_dtype"
    return source.with_config(config | {key: str(dtype).removeprefix("torch.")})


def _cast(entry: Entry, dtype: torch.dtype) -> Entry:
    spec = entry.spec
    if spec.dtype == dtype or not spec.dtype.is_floating_point:
        return entry
    if spec.dtype not in FLOATS:
        raise ValueError(
            f"{spec.name} is {spec.dtype}, which other tensors scale: a cast would lose that; dequantise it"
        )

    def share(chunk: int) -> int:  # of the values as they are: both are held at once
        return max(1, chunk * spec.dtype.itemsize // (spec.dtype.itemsize + dtype.itemsize))

    def values(unit: Unit, chunk: int) -> Values:
        for box, data in entry.values(unit, share(chunk)):
            yield box, data.to(dtype)
            del data

    return dataclasses.replace(
        entry,
        spec=dataclasses.replace(spec, dtype=dtype),
        units=lambda chunk: entry.units(share(chunk)),
        boxes=lambda unit, chunk: entry.boxes(unit, share(chunk)),
        values=values,
    )


def without(source: Source, drop: Callable[[str], bool], why: str) -> Source:
    """The same without the weights (and what the optimizer has for them) whose names `drop` is true for."""
    sections = {
        section: {name: entry for name, entry in entries.items() if not drop(name)}
        for section, entries in source.sections.items()
    }
    count = sum(len(source.sections[section]) - len(entries) for section, entries in sections.items())
    notes = (*source.notes, f"left out: {count:,} tensors {why}") if count else source.notes
    return dataclasses.replace(source, sections=sections, notes=notes)


def check_dtypes(source: Source) -> None:
    """Refuse what safetensors cannot hold, with the tensor's name (ValueError)."""
    for entries in source.sections.values():
        check_specs(entry.spec for entry in entries.values())
