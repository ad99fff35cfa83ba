"""The weighted mean of the weights of several checkpoints of one model (Wortsman et al. 2022, arXiv:2203.05482)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from composable.checkpoint import folder as folders
from composable.checkpoint.draft import drafted
from composable.checkpoint.format import FilePlan, encode_index, plan_files
from composable.checkpoint.listing import Listing, list_folder
from composable.checkpoint.region import read_region
from composable.checkpoint.remote import Folder
from composable.checkpoint.rewrite import STATE, Unit, small_files, tensor_specs, write_units
from composable.checkpoint.shards import Box, chunk_boxes, full_box
from composable.checkpoint.transfer import raw

BYTES_EACH = 48  # most bytes that a value takes in a chunk: sum, addend and result, as stored and in float64
AVERAGED = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
INDEX = "model.safetensors.index.json"
SHOWN = 5  # differences that an error tells


@dataclass(frozen=True)
class Mean:
    """Sources to be averaged as (folder, its tensors, its weight) each, and the files that will hold the mean."""

    sources: tuple[tuple[Folder, Listing, float], ...]
    files: tuple[FilePlan, ...]
    small: dict[str, bytes]

    @property
    def nbytes(self) -> int:
        """Bytes that will be written."""
        return sum(file.size for file in self.files) + sum(map(len, self.small.values()))


def plan_mean(sources: Sequence[Folder], weights: Sequence[float] | None, max_file_size: int) -> Mean:
    """The plan of a mean; `weights` (equal ones if None) count relative to their sum.

    Raises:
        ValueError: weights that are none, as many as there are not sources; sources of different models, with the names
            and shapes that differ; what `list_folder` raises.
    """
    if weights is None:
        weights = [1.0] * len(sources)
    if len(weights) != len(sources):
        raise ValueError(f"{len(weights)} weights for {len(sources)} checkpoints; give one for each")
    if not all(math.isfinite(weight) and weight >= 0 for weight in weights) or not 0 < sum(weights) < math.inf:
        raise ValueError(f"weights {list(weights)}: the weights of a mean are not negative, and one is above zero")
    listings = [list_folder(source, ["weights"]) for source in sources]
    for source, listing in zip(sources[1:], listings[1:], strict=True):
        _check_same(sources[0], listings[0], source, listing)
    files = tuple(plan_files(tensor_specs(listings[0]), max_file_size, "model"))
    small = small_files(sources[0], listings[0].manifest)
    small.pop(STATE, None)
    small[INDEX] = encode_index(files).encode()
    return Mean(tuple(zip(sources, listings, weights, strict=True)), files, small)


def _check_same(first: Folder, a: Listing, other: Folder, b: Listing) -> None:
    here, there = a.tensors["weights"], b.tensors["weights"]
    wrong = [f"{name} is only in {first}" for name in here if name not in there]
    wrong += [f"{name} is only in {other}" for name in there if name not in here]
    wrong += [
        f"{name} is {list(here[name].spec.shape)} in {first} and {list(there[name].spec.shape)} in {other}"
        for name in here
        if name in there and here[name].spec.shape != there[name].spec.shape
    ]
    if wrong:
        more = f"; and {len(wrong) - SHOWN} more" if len(wrong) > SHOWN else ""
        raise ValueError(f"they are different models: {'; '.join(wrong[:SHOWN])}{more}")


def write_mean(plan: Mean, target: Path, chunk: int, advance: Callable[[int], object] = lambda size: None) -> None:
    """Write the mean as a plain Hugging Face folder; `target` is there when complete, and as it was after an error.

    Sums are float64, and cast once to the dtype of the first source. What is not floating point (or of one byte: scaled
    by other tensors) has no mean and must be the same in all.

    Args:
        chunk: bytes that each of the threads of `transfer.run_all` holds.
        advance: is told of bytes of the mean that have been written.

    Raises:
        ValueError: a tensor without a mean that differs between the sources.
        OSError: a disk without room, or one that fails.
    """
    tensors = plan.sources[0][1].tensors["weights"]
    units = [
        Unit(name, box)
        for name, tensor in tensors.items()
        for box in chunk_boxes(full_box(tensor.spec.shape), BYTES_EACH, chunk)
    ]

    def values(unit: Unit) -> Iterator[tuple[Box, Tensor]]:
        averaged = tensors[unit.name].spec.dtype in AVERAGED
        yield unit.box, _mean(plan, unit) if averaged else _same(plan, unit)

    with drafted(target, plan.nbytes) as draft:
        write_units(draft, plan.files, units, values, advance)
        for name, content in plan.small.items():
            folders.write_file(draft / name, content)


def _mean(plan: Mean, unit: Unit) -> Tensor:
    total = torch.zeros(unit.box.sizes, dtype=torch.float64)
    for folder, listing, weight in plan.sources:
        stored = listing.tensors["weights"][unit.name]
        if stored.spec.dtype not in AVERAGED:
            raise ValueError(f"{unit.name} is {stored.spec.dtype} in {folder}, of which there is no mean")
        total += read_region(folder, stored, unit.box).double().mul_(weight)
    total /= sum(weight for _, _, weight in plan.sources)
    return total.to(plan.sources[0][1].tensors["weights"][unit.name].spec.dtype)


def _same(plan: Mean, unit: Unit) -> Tensor:
    (first, listing, _), *others = plan.sources
    values = read_region(first, listing.tensors["weights"][unit.name], unit.box)
    for folder, other, _ in others:
        stored = other.tensors["weights"][unit.name]
        if stored.spec.dtype != values.dtype or not torch.equal(
            raw(values), raw(read_region(folder, stored, unit.box))
        ):
            raise ValueError(
                f"{unit.name} is of {values.dtype}, which has no mean, and not the same in {first} and {folder}"
            )
    return values
