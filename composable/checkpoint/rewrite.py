"""The same tensors in other files: ranges read, checked against their checksums, and written, chunk by chunk.

Every byte is read once and written as often as files hold it. The new folder is a draft until it is complete.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import xxhash
from torch import Tensor

from composable.checkpoint import folder as folders
from composable.checkpoint.draft import drafted
from composable.checkpoint.for_ranks import LAYOUT
from composable.checkpoint.format import FilePlan, Part, Place, Stored, TensorSpec, plan_rank_files
from composable.checkpoint.listing import Listing, list_folder
from composable.checkpoint.owners import check_cover
from composable.checkpoint.plan import SectionPlan, Table, Writer, merge_specs, plan_sections
from composable.checkpoint.region import read_region, room_for
from composable.checkpoint.remote import Folder, RemotePath
from composable.checkpoint.save import finish
from composable.checkpoint.shards import Box, Piece, chunk_boxes, full_box
from composable.checkpoint.storage import naming, opened, write_all
from composable.checkpoint.transfer import raw, run_all, write_box

MAX_SMALL = 64 << 20  # bytes: what is larger beside the tensors of a plain folder is no configuration or tokenizer
OTHER_WEIGHTS = (
    ".safetensors",
    ".bin",
    ".pt",
    ".pth",
    ".ckpt",
    ".distcp",
    ".gguf",
    ".h5",
    ".msgpack",
    ".onnx",
    ".index.json",
)
STATE = "train_state.json"


@dataclass(frozen=True)
class Unit:
    """A box of a tensor that is read as one; the xxh3_64 that its bytes must have, empty if nothing says."""

    name: str
    box: Box
    digest: str = ""


@dataclass(frozen=True)
class Output:
    """The files of one section (`weights`, `optimizer`) that are to be written, in a sub-folder."""

    section: str
    folder: str
    files: tuple[FilePlan, ...]


@dataclass(frozen=True)
class Rewrite:
    """What is to be written from which folder: `outputs`, and small files by name.

    `sections` is the plan of a checkpoint, which gets a manifest; without it the folder has only what is said here.
    """

    source: Folder
    listing: Listing
    outputs: tuple[Output, ...]
    small: Mapping[str, bytes]
    sections: tuple[SectionPlan, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes that will be written."""
        tensors = sum(file.size for output in self.outputs for file in output.files)
        return tensors + sum(map(len, self.small.values()))

    @property
    def nbytes_read(self) -> int:
        """Bytes of tensors that will be read."""
        return sum(t.spec.nbytes for output in self.outputs for t in self.listing.tensors[output.section].values())

    @property
    def names(self) -> list[tuple[str, int]]:
        """(relative name, bytes) of every file that holds tensors."""
        return [(os.path.join(o.folder, file.name), file.size) for o in self.outputs for file in o.files]


def plan_checkpoint(
    source: Folder, max_file_size: int, writer: Writer = "shared", ranks: int = 1, *, weights_only: bool = False
) -> Rewrite:
    """A checkpoint of the same content, in files of at most `max_file_size` bytes, written as if by `ranks` ranks.

    `weights_only` leaves out the state of the optimizer and how far the run was. Raises what `list_folder` raises.
    """
    listing = list_folder(source, ["weights"] if weights_only else ["weights", "optimizer"])
    table: Table = {
        section: {name: (t.spec.dtype, t.spec.shape, full_box(t.spec.shape)) for name, t in tensors.items()}
        for section, tensors in listing.tensors.items()
    }
    sections = tuple(plan_sections([table] * ranks, max_file_size, writer))
    outputs = tuple(Output(section.name, section.folder, section.files) for section in sections)
    small = small_files(source, listing.manifest)
    if weights_only:
        small.pop(STATE, None)
    return Rewrite(source, listing, outputs, small, sections)


def plan_for_ranks(source: Folder, listing: Listing, held: Mapping[str, Mapping[str, Box]]) -> Rewrite:
    """Files with the weights that each rank holds: prefix of its file -> name -> box.

    The plan's `small` files lack the `layout.json` that the caller makes of `names`. Raises ValueError, with the
    tensor's name, for one of which no rank holds a part.
    """
    tensors = listing.tensors["weights"]
    files: list[FilePlan] = []
    for prefix, boxes in held.items():
        own = {name: (tensors[name].spec.dtype, box.sizes, full_box(box.sizes)) for name, box in boxes.items()}
        parts = {
            name: Part(name, tensors[name].spec.shape, box.offsets)
            for name, box in boxes.items()
            if box != full_box(tensors[name].spec.shape)
        }
        files += plan_rank_files([merge_specs([{"weights": own}], "weights")], parts, 1 << 62, prefix)
    for name, tensor in tensors.items():
        check_cover(tensor.spec, list({boxes[name] for boxes in held.values() if name in boxes}))
    small = small_files(source, listing.manifest)
    small.pop(STATE, None)
    return Rewrite(source, listing, (Output("weights", "", tuple(files)),), small)


def small_files(source: Folder, manifest: folders.Manifest | None) -> dict[str, bytes]:
    """The files beside the tensors: those of the manifest, or of a plain folder what is no weights of any format.

    Raises ValueError, naming the file, for one whose checksum does not match.
    """
    if manifest:
        names = [name for name, (_, digest) in manifest.files.items() if digest and not name.endswith(".index.json")]
    else:
        names = sorted(
            path.name
            for path in source.iterdir()
            if path.is_file()
            and not path.name.startswith(".")
            and not path.name.endswith(OTHER_WEIGHTS)
            and path.name not in (LAYOUT, folders.MANIFEST)
        )
    content: dict[str, bytes] = {}
    for name in names:
        path = source / name
        if not manifest and (path.size() if isinstance(path, RemotePath) else path.stat().st_size) > MAX_SMALL:
            continue
        data = path.read_bytes()
        if manifest and xxhash.xxh3_64_hexdigest(data) != manifest.files[name][1]:
            raise ValueError(f"{path} was changed since it was saved: its checksum does not match")
        content[name] = data
    return content


def rewrite(plan: Rewrite, target: Path, chunk: int, advance: Callable[[int], object] = lambda size: None) -> None:
    """Carry out a plan; `target` is there when it is complete, and as it was after an error.

    Args:
        chunk: bytes that each of the threads of `transfer.run_all` holds.
        advance: is told of bytes that have been read and written.

    Raises:
        ValueError: naming file and tensor, for bytes of the source that are not those that were saved.
        OSError: a disk without room, or one that fails.
    """
    with drafted(target, plan.nbytes) as draft:
        checksums: list[tuple[str, str, Box, str]] = []
        for output in plan.outputs:
            tensors = plan.listing.tensors[output.section]
            given = plan.listing.manifest.checksums.get(output.section, {}) if plan.listing.manifest else {}
            units = [unit for name in tensors for unit in units_of(plan.source, tensors[name], given.get(name), chunk)]

            def values(unit: Unit, tensors: Mapping[str, Stored] = tensors) -> Iterator[tuple[Box, Tensor]]:
                return checked(plan.source, tensors[unit.name], unit, chunk)

            written = write_units(draft / output.folder, output.files, units, values, advance)
            checksums += [(output.section, *entry) for entry in written]
        if plan.sections:
            finish(draft, plan.sections, plan.small, [checksums])
        else:
            for name, content in plan.small.items():
                folders.write_file(draft / name, content)


def write_units(
    base: Path,
    files: Sequence[FilePlan],
    units: Iterable[Unit],
    values: Callable[[Unit], Iterator[tuple[Box, Tensor]]],
    advance: Callable[[int], object],
) -> list[tuple[str, Box, str]]:
    """Create `files` in `base` and fill them with the values of all units; returns (name, box, xxh3_64) of what lies
    in each.

    `values` gives those of a unit, box by box; each goes to every entry of its tensor's name that has a part of it.
    """
    base.mkdir(exist_ok=True)
    for file in files:
        path = base / file.name
        with naming(path), opened(path, os.O_RDWR | os.O_CREAT | os.O_EXCL) as new:
            os.ftruncate(new.handle, file.size)
            write_all(new, memoryview(file.header), 0)
    return fill_files(base, files, units, values, advance)


def fill_files(
    base: Path,
    files: Sequence[FilePlan],
    units: Iterable[Unit],
    values: Callable[[Unit], Iterator[tuple[Box, Tensor]]],
    advance: Callable[[int], object],
) -> list[tuple[str, Box, str]]:
    """As `write_units`, into files that are there at their full size."""
    entries: dict[str, list[tuple[Path, Place]]] = {}
    for file in files:
        for place in file.places:
            entries.setdefault(place.name, []).append((base / file.name, place))
    written: list[tuple[str, Box, str]] = []

    def write(unit: Unit) -> None:
        for box, data in values(unit):
            for path, place in entries[unit.name]:
                if (common := box.overlap(place.box)).numel:
                    inner = common.within(place.box)
                    piece = Piece(data[common.slices(box.offsets)], place.spec.shape, inner)
                    with naming(path), opened(path, os.O_WRONLY) as file:
                        written.append((unit.name, common, write_box(file, place, piece, inner)))
                    del piece
            advance(data.nbytes)
            del data  # before the next is read

    def sync(path: Path) -> None:
        with naming(path), opened(path, os.O_WRONLY) as file:
            os.fsync(file.handle)

    run_all(write, [(unit,) for unit in units])
    run_all(sync, [(base / file.name,) for file in files])
    folders.sync_folder(base)
    return written


def units_of(source: Folder, tensor: Stored, checksums: Sequence[tuple[Box, str]] | None, chunk: int) -> Iterator[Unit]:
    """A tensor in the boxes that have checksums, or else in chunks of its places; ValueError where some have none."""
    name = tensor.spec.name
    if checksums is None:
        for place in tensor.places:
            for box in chunk_boxes(place.box, tensor.spec.dtype.itemsize, chunk):
                yield Unit(name, box)
        return
    try:
        check_cover(tensor.spec, [box for box, _ in checksums])
    except ValueError as error:
        raise ValueError(f"{source / folders.MANIFEST} has no checksums of all of {name}: {error}") from error
    for box, digest in checksums:
        yield Unit(name, box, digest)


def checked(source: Folder, tensor: Stored, unit: Unit, chunk: int) -> Iterator[tuple[Box, Tensor]]:
    """A unit's values in chunks, each in the memory of the one before; ValueError at their end if they are not those
    that were saved."""
    digest, itemsize = xxhash.xxh3_64(), tensor.spec.dtype.itemsize
    boxes = list(chunk_boxes(unit.box, itemsize, chunk))
    room = room_for(max((box.numel for box in boxes), default=0) * itemsize)
    for box in boxes:
        data = read_region(source, tensor, box, room)
        if unit.digest:
            digest.update(raw(data).view(-1).view(torch.uint8).numpy().data)
        yield box, data
        del data
    if unit.digest and digest.hexdigest() != unit.digest:
        files = ", ".join(sorted({p.file for p in tensor.places if p.box.overlap(unit.box).numel}))
        raise ValueError(
            f"{source} ({files}): the bytes of {unit.name} were changed since they were saved: their checksum does not "
            "match; use another checkpoint"
        )


def tensor_specs(listing: Listing) -> list[TensorSpec]:
    """The weights of a listing in the order in which files hold them."""
    table = {n: (t.spec.dtype, t.spec.shape, full_box(t.spec.shape)) for n, t in listing.tensors["weights"].items()}
    return merge_specs([{"weights": table}], "weights")
