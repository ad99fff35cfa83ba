"""Any box of a stored tensor, from whichever files hold it, without the rest."""

from __future__ import annotations

import torch
from torch import Tensor

from composable.checkpoint.format import Stored
from composable.checkpoint.remote import Folder
from composable.checkpoint.shards import Box, Piece
from composable.checkpoint.storage import naming, opened_files
from composable.checkpoint.transfer import read_box, scratch

LARGE = 1 << 20  # bytes: smaller pieces of memory come from the allocator, which would keep much of larger ones


def room_for(size: int) -> Tensor:
    """So many bytes [size] uint8."""
    return torch.empty(size, dtype=torch.uint8) if size < LARGE else scratch(size)


def read_region(folder: Folder, tensor: Stored, box: Box, room: Tensor | None = None) -> Tensor:
    """The values of `box` of a tensor of `folder`, contiguous, of the shape `box.sizes`; OSError names a file.

    They lie in `room`, uint8 and at least as large; None: in memory of their own.
    Takes the memory of the values and at most 16 MiB more. Files are open while they are read only: a checkpoint of
    any number of files needs no more descriptors than one.
    """
    dtype, size = tensor.spec.dtype, box.numel * tensor.spec.dtype.itemsize
    values = (room_for(size) if room is None else room[:size]).view(dtype).view(box.sizes)
    shared = [(place, common) for place in tensor.places if (common := place.box.overlap(box)).numel]
    with opened_files(folder, {place.file for place, _ in shared}) as opens:
        for place, common in shared:
            inner = common.within(place.box)
            with naming(folder / place.file):
                piece = Piece(values[common.slices(box.offsets)], place.spec.shape, inner)
                read_box(opens[place.file], place, piece, inner)
    return values
