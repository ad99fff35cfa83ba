"""Bytes between a rank's memory and a file, in bounded chunks: no rank holds more than 64 MiB beyond its tensors."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import xxhash
from torch import Tensor

from composable.checkpoint.format import Place, TensorSpec
from composable.checkpoint.shards import Box, Piece, byte_runs, chunk_boxes, row_major_strides
from composable.checkpoint.storage import PAGE, STEP, File, Readable, huge_pages, read_all, write_all

THREADS = 4
COPIED = (32 << 20) // THREADS  # bytes of one thread's copy of what cannot be written or read in place
SHORT_RUN = 16 << 10  # bytes: shorter runs are read together with what lies between them ...
SHORT_REMOTE_RUN = 1 << 20  # ... from a store, where each read is a request ...
MAX_SPREAD = 16  # ... unless that multiplies the bytes read by more than this

_RAW = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def raw(tensor: Tensor) -> Tensor:
    """The same memory, strides and shape as integers of the same size: copies of it keep every bit."""
    return tensor.view(_RAW[tensor.element_size()])


def run_all(function: Callable[..., None], tasks: Iterable[tuple[Any, ...]]) -> None:
    """Call `function` with each argument tuple on a few threads; the first error stops the rest.

    System calls, hashes of large buffers and torch's copies run without the interpreter's lock.
    """
    with ThreadPoolExecutor(THREADS) as pool:
        futures = [pool.submit(function, *task) for task in tasks]
        try:
            for future in futures:
                future.result()
        except BaseException:
            for future in futures:
                future.cancel()
            raise


def write_box(file: File, place: Place, piece: Piece, box: Box) -> str:
    """Write one box of a tensor to its place in an open file; returns the xxh3_64 of its bytes."""
    digest, itemsize = xxhash.xxh3_64(), place.spec.dtype.itemsize
    for part, data in _memory(piece, box):
        digest.update(data)
        for at, start, size in byte_runs(part, piece.shape, itemsize):
            write_all(file, data[start : start + size], place.offset + at)
    return digest.hexdigest()


def stream_box(write: Callable[[memoryview], None], piece: Piece, box: Box) -> str:
    """Hand a box's row-major bytes to `write`, in order; returns their xxh3_64."""
    digest = xxhash.xxh3_64()
    for _, data in _memory(piece, box):
        digest.update(data)
        write(data)
    return digest.hexdigest()


def hash_memory(piece: Piece, box: Box) -> str:
    """The xxh3_64 of a box's row-major bytes as this rank holds them."""
    digest = xxhash.xxh3_64()
    for _, data in _memory(piece, box):
        digest.update(data)
    return digest.hexdigest()


def _memory(piece: Piece, box: Box) -> Iterator[tuple[Box, memoryview]]:
    """The row-major bytes of a box, part by part: one part in place where memory has them so, else bounded copies."""
    if _in_place(piece, box):
        yield box, _bytes(raw(piece.local)[box.slices(piece.box.offsets)])
        return
    itemsize = piece.local.element_size()
    room = scratch(COPIED)
    for part in chunk_boxes(box, itemsize, COPIED):
        values = piece.local[part.slices(piece.box.offsets)].resolve_conj().resolve_neg()
        copy = room[: part.numel * itemsize]
        copy.view(_RAW[itemsize]).view(part.sizes).copy_(raw(values))
        yield part, _bytes(copy)


def _lazy(tensor: Tensor) -> bool:
    """Whether the memory is not the values: a conjugate or a negative that torch has not carried out."""
    return tensor.is_conj() or tensor.is_neg()


def _in_place(piece: Piece, box: Box) -> bool:
    local = piece.local
    return local.device.type == "cpu" and not _lazy(local) and local[box.slices(piece.box.offsets)].is_contiguous()


def scratch(size: int) -> Tensor:
    """So many bytes [size] uint8, given back to the system at their end: the allocator would keep much of them."""
    return torch.frombuffer(huge_pages(size), dtype=torch.uint8)


def _bytes(tensor: Tensor) -> memoryview:
    return tensor.view(-1).view(torch.uint8).numpy().data


def read_box(file: Readable, place: Place, piece: Piece, box: Box, shared: bool = False) -> None:
    """Read one box of a tensor from its place in an open file into this rank's memory, with a cast if dtypes differ.

    `shared`: other ranks read the same bytes, so the page cache should keep them.
    """
    spec = place.spec
    same = spec.dtype == piece.local.dtype and not _lazy(piece.local)
    if same and _in_place(piece, box) and not _reads_between(file, spec, box):
        data = _bytes(raw(piece.local)[box.slices(piece.box.offsets)])
        for at, start, size in byte_runs(box, spec.shape, spec.dtype.itemsize):
            read_all(file, data[start : start + size], place.offset + at, cached=shared)
        return
    for part, values in _read(file, place, box, shared):
        target = piece.local[part.slices(piece.box.offsets)]
        if same:
            raw(target).copy_(values)  # as integers: every bit, whatever the dtype's own copy does
        else:
            target.copy_(values.view(spec.dtype))


def read_and_hash(file: Readable, place: Place, piece: Piece, box: Box, shared: bool = False) -> str:
    """As `read_box`, of the stored dtype; returns the xxh3_64 of the box's row-major bytes, taken while they are in the
    processor's cache."""
    digest = xxhash.xxh3_64()
    for part in chunk_boxes(box, place.spec.dtype.itemsize, STEP - PAGE):  # so that each is one aligned read
        read_box(file, place, piece, part, shared)
        for _, data in _memory(piece, part):
            digest.update(data)
    return digest.hexdigest()


def hash_file(file: Readable, place: Place, box: Box) -> str:
    """The xxh3_64 of a box's row-major bytes as the file holds them."""
    digest = xxhash.xxh3_64()
    for _, values in _read(file, place, box):
        digest.update(_bytes(values.contiguous()))
    return digest.hexdigest()


def _read(file: Readable, place: Place, box: Box, shared: bool = False) -> Iterator[tuple[Box, Tensor]]:
    """A box's values from the file as integers of the same size (of any strides), part by part in row-major order."""
    spec, itemsize = place.spec, place.spec.dtype.itemsize
    between = _reads_between(file, spec, box)
    spread = math.ceil(_spread(spec, box)) if between else 1
    strides = row_major_strides(spec.shape)
    room = scratch(COPIED // 2).view(_RAW[itemsize])
    for part in chunk_boxes(box, itemsize * spread, COPIED // 2):
        if between:
            span = 1 + sum((n - 1) * s for n, s in zip(part.sizes, strides, strict=True))
            buffer = room[:span]
            start = sum(o * s for o, s in zip(part.offsets, strides, strict=True)) * itemsize
            read_all(file, _bytes(buffer), place.offset + start, cached=True)  # the ranks beside this one do too
            yield part, buffer.as_strided(part.sizes, strides)
        else:
            buffer = room[: part.numel].view(part.sizes)
            data = _bytes(buffer)
            for at, begin, size in byte_runs(part, spec.shape, itemsize):
                read_all(file, data[begin : begin + size], place.offset + at, cached=shared)
            yield part, buffer


def _reads_between(file: Readable, spec: TensorSpec, box: Box) -> bool:
    """Whether a box's runs are so short that reading what lies between them costs less than many small reads."""
    runs = byte_runs(box, spec.shape, spec.dtype.itemsize)
    first, short = next(runs, None), SHORT_RUN if isinstance(file, File) else SHORT_REMOTE_RUN
    return (
        first is not None
        and first[2] < min(short, box.numel * spec.dtype.itemsize)
        and (_spread(spec, box) <= MAX_SPREAD)
    )


def _spread(spec: TensorSpec, box: Box) -> float:
    """Bytes from a box's first row to its last, over the box's own."""
    return math.prod(spec.shape[1:]) / math.prod(box.sizes[1:])
