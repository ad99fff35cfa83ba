"""Copies of a rank's tensors in host memory that is kept from one save to the next."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

from composable.checkpoint.plan import PartKey, Parts
from composable.checkpoint.shards import Piece, chunk_boxes, full_box
from composable.checkpoint.transfer import THREADS, raw, run_all

BLOCK = 1 << 30  # bytes of one allocation
ALIGN = 64  # bytes
CHUNK = 64 << 20  # bytes of one copy


class HostMemory:
    """Memory for copies of what a rank writes: pinned if any of it lies on an accelerator, pages of the system if not.

    It is allocated when it is first asked for (the slow part: pages are made, or pinned), again where other sizes are
    asked for, and used anew by every later copy. It holds what this rank writes once: not the shares that other ranks
    write of what they hold too, and memory that has several names once.
    """

    def __init__(self) -> None:
        self._layout: tuple[list[int], bool] = ([], False)  # bytes of every copy, pinned
        self._places: list[tuple[int, int]] = []  # (block, offset in it) of every copy
        self.blocks: list[Tensor] = []

    @property
    def nbytes(self) -> int:
        """Bytes that are kept for copies."""
        return sum(block.nbytes for block in self.blocks)

    def copy(self, parts: Parts) -> dict[PartKey, Piece]:
        """Each part as a piece of its own whose memory nobody else writes to until the next call.

        The values are those that the current streams of the parts' devices have computed; they are waited for.
        """
        sources = _sources(parts)
        distinct = {_identity(source): source for source in sources.values()}
        self._allocate(list(distinct.values()))
        targets = {
            identity: self.blocks[block][offset : offset + source.nbytes].view(source.dtype).view(source.shape)
            for (identity, source), (block, offset) in zip(distinct.items(), self._places, strict=True)
        }
        _copy([(targets[identity], source) for identity, source in distinct.items()])
        return {key: Piece(targets[_identity(sources[key])], parts[key].shape, key[2]) for key in parts}

    def prepare(self, parts: Parts) -> None:
        """Allocate the memory for copies of these parts, and have its pages made; nothing is read of the parts."""
        self._allocate(list({_identity(source): source for source in _sources(parts).values()}.values()))
        for block in self.blocks:
            if not block.is_pinned():
                block.zero_()

    def _allocate(self, sources: Sequence[Tensor]) -> None:
        layout = [max(1, -(-source.nbytes // ALIGN)) * ALIGN for source in sources], any(not s.is_cpu for s in sources)
        if layout == self._layout:
            return
        self.blocks, self._layout = [], ([], False)  # the old memory goes before the new comes
        self._places, sizes = place(layout[0])
        self.blocks = [torch.empty(size, dtype=torch.uint8, pin_memory=layout[1]) for size in sizes]
        self._layout = layout


def place(sizes: Sequence[int]) -> tuple[list[tuple[int, int]], list[int]]:
    """(block, offset in it) of every copy of `sizes` bytes, and the sizes of the blocks.

    Blocks are powers of two, as torch rounds pinned allocations up to one, and get smaller towards the end: little
    remains unused.
    """
    places: list[tuple[int, int]] = []
    blocks: list[int] = []
    used, left = 0, sum(sizes)
    for size in sizes:
        if not blocks or used + size > blocks[-1]:
            blocks.append(max(min(BLOCK, 1 << left.bit_length() - 1), 1 << (size - 1).bit_length()))
            used = 0
        places.append((len(blocks) - 1, used))
        used += size
        left -= size
    return places, blocks


def _sources(parts: Parts) -> dict[PartKey, Tensor]:
    return {key: piece.local.detach()[key[2].slices(piece.box.offsets)] for key, piece in parts.items()}


def _identity(tensor: Tensor) -> Hashable:
    """Equal for tensors that are the same memory seen the same way."""
    lazy = (tensor.is_conj(), tensor.is_neg())
    return tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), lazy


def _copy(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Copy sources into targets; they are there at the end. Strided ones go through contiguous memory of one chunk."""

    def copy(target: Tensor, source: Tensor) -> None:
        raw(target).copy_(raw(source.resolve_conj().resolve_neg()), non_blocking=True)

    def copy_all(chunks: Sequence[tuple[Tensor, Tensor]]) -> None:
        for target, source in chunks:
            copy(target, source)

    chunks = [
        (target[box.slices()], source[box.slices()])
        for target, source in pairs
        for box in chunk_boxes(full_box(source.shape), source.element_size(), CHUNK)
    ]
    copy_all([(target, source) for target, source in chunks if not source.is_cpu])
    here = [(target, source) for target, source in chunks if source.is_cpu]
    run_all(copy_all, [(here[first::THREADS],) for first in range(THREADS)])
    for device in {source.device for _, source in pairs if not source.is_cpu}:
        torch.accelerator.current_stream(device).synchronize()
