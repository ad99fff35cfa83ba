"""Who writes what: every byte of every tensor once, and about the same number of bytes on every rank."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from composable.checkpoint.format import TensorSpec
from composable.checkpoint.shards import Box, chunk_boxes

SMALL = 1 << 20  # bytes: a replicated box is not cut into pieces below this
LARGE = 64 << 20  # bytes: the largest box that is written, and checked, as one

Owned = tuple[int, Box]  # (rank, the box that it writes)


def plan_owners(
    specs: Sequence[TensorSpec],
    held: Sequence[Mapping[str, Box]],
    load: Sequence[int] | None = None,
    *,
    whole: bool = False,
) -> dict[str, list[Owned]]:
    """Which rank writes which box of every tensor, the same on every rank that asks with the same values.

    `held[rank]` maps a tensor's name to the box that the rank holds; a name that it does not hold is absent. A box held
    by several ranks is written once: cut along its first dimensions into one piece per holder when it is large, whole
    by one holder when it is smaller than 1 MiB, always by the holder with the fewest bytes so far. `load` is the
    number of bytes that each rank writes already. Boxes are at most 64 MiB. `whole`: boxes are as large as they are
    held, and shared ones are cut only if they are larger than a rank's even share of all bytes, so that as many tensors
    as can be have one owner. Raises ValueError, with the tensor's name, unless the boxes cover each element of each
    tensor exactly once.
    """
    bytes_of = list(load or [0] * len(held))
    holders: dict[str, dict[Box, list[int]]] = {spec.name: {} for spec in specs}
    for rank, boxes in enumerate(held):
        for name, box in boxes.items():
            holders[name].setdefault(box, []).append(rank)
    plan: dict[str, list[Owned]] = {spec.name: [] for spec in specs}
    shared = []
    for spec in specs:
        for box, ranks in holders[spec.name].items():
            if len(ranks) > 1:
                shared.append((spec, box, ranks))
            elif box.numel:
                parts = [box] if whole else chunk_boxes(box, spec.dtype.itemsize, LARGE)
                plan[spec.name] += [(ranks[0], part) for part in parts]
                bytes_of[ranks[0]] += box.numel * spec.dtype.itemsize
    # What only one rank can write is counted first, then the large shared boxes; the small ones level what is left.
    uncut = sum(spec.nbytes for spec in specs) / len(held) if whole else 0
    for spec, box, ranks in sorted(shared, key=lambda entry: -entry[1].numel * entry[0].dtype.itemsize):
        itemsize = spec.dtype.itemsize
        cut = box.numel * itemsize > uncut
        for part in _parts(box, itemsize, len(ranks)) if cut else [box] if box.numel else []:
            owner = min(ranks, key=lambda rank: (bytes_of[rank], rank))
            bytes_of[owner] += part.numel * itemsize
            plan[spec.name].append((owner, part))
    for spec in specs:
        check_cover(spec, [box for _, box in plan[spec.name]])
    return plan


def _parts(box: Box, itemsize: int, holders: int) -> Iterable[Box]:
    """Cut a shared box for its holders: pieces of SMALL to LARGE bytes, one per holder if that fits."""
    return chunk_boxes(box, itemsize, min(max(-(-box.numel * itemsize // holders), SMALL), LARGE))


def check_cover(spec: TensorSpec, boxes: Sequence[Box]) -> None:
    """Raise ValueError, with the tensor's name, unless `boxes` hold each element of the tensor exactly once."""
    inside = all(
        len(box.offsets) == len(spec.shape)
        and all(o >= 0 and o + n <= m for o, n, m in zip(box.offsets, box.sizes, spec.shape, strict=True))
        for box in boxes
    )
    if not inside:
        raise ValueError(f"{spec.name}: a rank holds a part outside the tensor's shape {spec.shape}: {list(boxes)}")
    # Counted on the grid of all borders: a cell lies in a box wholly or not at all.
    borders = [
        sorted({0, n} | {box.offsets[d] for box in boxes} | {box.offsets[d] + box.sizes[d] for box in boxes})
        for d, n in enumerate(spec.shape)
    ]
    if math.prod(spec.shape) == 0:
        return
    number = [{border: i for i, border in enumerate(line)} for line in borders]
    counts = np.zeros([len(line) - 1 for line in borders], dtype=np.int32)
    for box in boxes:
        counts[
            tuple(
                slice(number[d][o], number[d][o + n])
                for d, (o, n) in enumerate(zip(box.offsets, box.sizes, strict=True))
            )
        ] += 1
    if not (counts == 1).all():
        lacking, twice = int((counts == 0).sum()), int((counts > 1).sum())
        raise ValueError(
            f"{spec.name}: the ranks' parts do not cover the tensor of shape {spec.shape} exactly once "
            f"({lacking} regions held by no rank, {twice} by several parts); the parts are {list(boxes)[:8]}"
            f"{' ...' if len(boxes) > 8 else ''}; give every rank the tensor with the placements it really has"
        )


def least_loaded(sizes: Sequence[int], ranks: int) -> list[int]:
    """A rank for each of `sizes`, always the one with the fewest bytes so far."""
    heap = [(0, rank) for rank in range(ranks)]
    chosen = []
    for size in sizes:
        used, rank = heapq.heappop(heap)
        chosen.append(rank)
        heapq.heappush(heap, (used + size, rank))
    return chosen
