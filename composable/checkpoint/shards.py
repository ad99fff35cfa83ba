"""Which part of a global tensor a rank holds, and where the bytes of a part lie within the tensor's bytes."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, TypeGuard

import torch
from torch import Tensor

from composable._torch import strided_split_factor

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor, Placement


@dataclass(frozen=True)
class Box:
    """A rectangular part of a tensor: its first index and its size along every dimension (`()`, `()` for a scalar)."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Number of elements; 1 for a scalar, 0 if any size is 0."""
        return math.prod(self.sizes)

    def contains(self, other: Box) -> bool:
        """Whether every element of `other` lies in this box (an empty box lies in every box)."""
        return other.numel == 0 or all(
            a <= b and b + n <= a + m
            for a, m, b, n in zip(self.offsets, self.sizes, other.offsets, other.sizes, strict=True)
        )

    def overlap(self, other: Box) -> Box:
        """What lies in both boxes: a box of no elements if nothing does."""
        offsets = tuple(map(max, self.offsets, other.offsets))
        ends = (
            min(a + m, b + n) for a, m, b, n in zip(self.offsets, self.sizes, other.offsets, other.sizes, strict=True)
        )
        return Box(offsets, tuple(max(0, end - o) for end, o in zip(ends, offsets, strict=True)))

    def within(self, outer: Box) -> Box:
        """The same part with its first index counted from that of `outer`."""
        return Box(tuple(o - b for o, b in zip(self.offsets, outer.offsets, strict=True)), self.sizes)

    def slices(self, origin: Sequence[int] | None = None) -> tuple[slice, ...]:
        """The index that selects this box from a tensor whose first element has global index `origin` (default 0)."""
        origin = origin or (0,) * len(self.offsets)
        return tuple(slice(o - b, o - b + n) for o, n, b in zip(self.offsets, self.sizes, origin, strict=True))

    def narrow(self, dim: int, start: int, size: int) -> Box:
        """The sub-box of `size` indices from `start` (counted from the box's own first index) along `dim`."""
        offsets, sizes = list(self.offsets), list(self.sizes)
        offsets[dim] += start
        sizes[dim] = size
        return Box(tuple(offsets), tuple(sizes))


@dataclass(frozen=True)
class Piece:
    """One rank's part of a global tensor where no DTensor says so (an expert's rows inside a stacked tensor, say).

    `local` has the shape `box.sizes` and any strides; `shape` is the global shape. Raises ValueError if they disagree.
    """

    local: Tensor
    shape: tuple[int, ...]
    box: Box

    def __post_init__(self) -> None:
        if tuple(self.local.shape) != self.box.sizes or not Box((0,) * len(self.shape), self.shape).contains(self.box):
            raise ValueError(
                f"a piece of local shape {tuple(self.local.shape)} cannot be {self.box} of a tensor of shape "
                f"{self.shape}; give the local tensor the box's sizes, and a box inside the tensor"
            )


def pieces_of(tensors: Mapping[str, Tensor | Piece]) -> dict[str, Piece]:
    """Each tensor's local part, its global shape and its box; ValueError names the tensor that has no box."""
    pieces = {}
    for name, tensor in tensors.items():
        if isinstance(tensor, Piece):
            pieces[name] = tensor
            continue
        try:
            box = local_box(tensor)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error
        with torch.no_grad():
            local = (tensor.to_local() if _is_dtensor(tensor) else tensor).detach()
        if local.device.type == "meta":
            raise ValueError(f"{name}: the tensor is on the meta device and has no values; materialise it first")
        if not box.numel:
            local = local.reshape(box.sizes)  # torch does not fix the shape of an empty shard
        pieces[name] = Piece(local, tuple(tensor.shape), box)
    return pieces


def _is_dtensor(tensor: Tensor) -> TypeGuard[DTensor]:
    """Nothing is one where DTensor was not imported, which takes a tool that handles files half a second."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def full_box(shape: Sequence[int]) -> Box:
    """The box that is the whole tensor."""
    return Box((0,) * len(shape), tuple(shape))


def local_box(tensor: Tensor) -> Box:
    """Which box of the global tensor this rank's local tensor holds.

    A plain tensor holds itself whole (replicated on every rank). For a DTensor: `Replicate` and `Shard` of any
    dimension, uneven and empty shards, and FSDP2's strided shard over tensor parallelism. Raises ValueError for a
    placement whose local tensor is not a box of the global values (`Partial`), and on a rank outside the tensor's mesh.
    """
    if not _is_dtensor(tensor):
        return full_box(tensor.shape)
    mesh, placements = tensor.device_mesh, tensor.placements
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise ValueError(f"this rank is not in the tensor's mesh {mesh}; leave the tensor out on this rank")
    box = placed_box(tuple(tensor.shape), placements, tuple(mesh.shape), tuple(coordinate))
    local = tuple(tensor.to_local().shape)
    if box.sizes != local and not (box.numel == 0 and math.prod(local) == 0):
        raise ValueError(
            f"a DTensor of shape {tuple(tensor.shape)} with placements {placements} on a mesh of shape "
            f"{tuple(mesh.shape)} should hold {box.sizes} here but holds {local}; shard it in equal parts, or "
            "redistribute it first"
        )
    return box


def placed_box(
    shape: tuple[int, ...],
    placements: Sequence[Placement],
    mesh_shape: tuple[int, ...],
    coordinate: tuple[int, ...],
) -> Box:
    """The box that `placements` give to the rank at `coordinate` of a mesh (no process group needed).

    Chunks are `torch.chunk`'s: of ceil(n / ranks) elements, the last ones short or empty. Shards of one dimension are
    taken in the order of the mesh, but a strided shard after the shards to its right that make up its split factor.
    """
    offsets, sizes = [0] * len(shape), list(shape)
    for mesh_dim, tensor_dim in _shard_order(placements, mesh_shape, len(shape)):
        start, size = chunk(sizes[tensor_dim], mesh_shape[mesh_dim], coordinate[mesh_dim])
        offsets[tensor_dim] += start
        sizes[tensor_dim] = size
    return Box(tuple(offsets), tuple(sizes))


def chunk(length: int, parts: int, index: int) -> tuple[int, int]:
    """Start and size of part `index` when `length` is cut as `torch.chunk` does: ceil-sized parts, late ones short."""
    step = -(-length // parts)
    start = min(step * index, length)
    return start, min(step, length - start)


def _shard_order(placements: Sequence[Placement], mesh_shape: tuple[int, ...], ndim: int) -> list[tuple[int, int]]:
    """(mesh dim, tensor dim) of every shard in the order in which the shards were taken."""
    order: list[tuple[int, int]] = []
    for mesh_dim in reversed(range(len(placements))):
        placement = placements[mesh_dim]
        factor = strided_split_factor(placement)
        if factor is None and not placement.is_shard():
            if placement.is_replicate():
                continue
            raise ValueError(
                f"placement {placement} has no place in a checkpoint: its local values are not a part of the tensor; "
                "redistribute it to Replicate or Shard first"
            )
        dim: int = placement.dim % ndim  # type: ignore[attr-defined]
        position, product = 0, 1
        while factor is not None and product < factor and position < len(order):
            if order[position][1] == dim:
                product *= mesh_shape[order[position][0]]
            position += 1
        if factor is not None and product != factor:
            raise ValueError(
                f"placements {tuple(placements)} on a mesh of shape {mesh_shape}: the split factor {factor} of "
                f"{placement} is not the product of mesh dimensions to its right that shard dimension {dim}"
            )
        order.insert(position, (mesh_dim, dim))
    return order


def chunk_boxes(box: Box, itemsize: int, limit: int) -> Iterator[Box]:
    """Cut a box into sub-boxes of at most `limit` bytes (at least one element), in row-major order of the elements."""
    dim, inner = 0, box.numel * itemsize
    if not inner:
        return
    if inner <= limit or not box.sizes:
        yield box
        return
    while dim < len(box.sizes) - 1 and inner // box.sizes[dim] > limit:
        inner //= box.sizes[dim]
        dim += 1
    rows = max(1, limit // (inner // box.sizes[dim]))
    for outer in product(*map(range, box.sizes[:dim])):
        row = box
        for d, i in enumerate(outer):
            row = row.narrow(d, i, 1)
        for start in range(0, box.sizes[dim], rows):
            yield row.narrow(dim, start, min(rows, box.sizes[dim] - start))


def byte_runs(box: Box, shape: Sequence[int], itemsize: int) -> Iterator[tuple[int, int, int]]:
    """Contiguous runs of a box: (byte offset in the whole tensor, byte offset in the box's own row-major bytes, bytes).

    Neighbouring rows that touch are one run: a box that is full in all dimensions but the first is a single run.
    """
    if box.numel == 0:
        return
    strides = row_major_strides(shape)
    dim = len(shape)
    while dim > 0 and box.sizes[dim - 1] == shape[dim - 1]:
        dim -= 1
    # Dimensions from `dim` on are full; dimension dim-1 is cut, and its indices follow each other in memory.
    outer = max(dim - 1, 0)
    size = math.prod(box.sizes[outer:]) * itemsize
    base = sum(o * s for o, s in zip(box.offsets, strides, strict=True)) * itemsize
    for number, index in enumerate(product(*map(range, box.sizes[:outer]))):
        yield base + sum(i * s for i, s in zip(index, strides, strict=False)) * itemsize, number * size, size


def row_major_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides in elements of a contiguous tensor of this shape."""
    strides = [1] * len(shape)
    for dim in reversed(range(len(shape) - 1)):
        strides[dim] = strides[dim + 1] * shape[dim + 1]
    return tuple(strides)
