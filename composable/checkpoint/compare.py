"""Values of stored tensors in numbers: statistics of one, and how two checkpoints differ, chunk by chunk."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from composable.checkpoint.format import NAMES, Stored
from composable.checkpoint.listing import Listing
from composable.checkpoint.region import read_region
from composable.checkpoint.remote import Folder
from composable.checkpoint.shards import chunk_boxes, full_box
from composable.checkpoint.transfer import raw, run_all

FIRST = 8  # values that statistics show
BYTES_EACH = 64  # most bytes that a value of one or two tensors takes in a chunk, copies and masks included


@dataclass(frozen=True)
class Statistics:
    """What a tensor's values are like. Of NaN and infinite values only the numbers count.

    `minimum maximum mean std norm` are of the finite values, in float64, `std` over all of them (no correction), NaN
    where there are none; `first` are the first values as they stand. A complex number counts as two values.
    """

    values: int
    minimum: float
    maximum: float
    mean: float
    std: float
    norm: float
    zeros: int
    nan: int
    infinite: int
    first: tuple[float | int | bool | complex, ...]


@dataclass(frozen=True)
class _Sums:
    """Of some finite values: their number, mean, sum of squared distances from it, norm, and range."""

    count: int = 0
    mean: float = math.nan
    squares: float = 0.0
    norm: float = 0.0
    minimum: float = math.inf
    maximum: float = -math.inf

    def __add__(self, other: _Sums) -> _Sums:
        """Of both together (Chan, Golub, LeVeque 1979: no difference of large sums)."""
        if not self.count or not other.count:
            return self if self.count else other
        count, apart = self.count + other.count, other.mean - self.mean
        return _Sums(
            count,
            self.mean + apart * other.count / count,
            self.squares + other.squares + apart * apart * self.count * other.count / count,
            math.hypot(self.norm, other.norm),
            min(self.minimum, other.minimum),
            max(self.maximum, other.maximum),
        )


def as_float64(values: Tensor, name: str) -> Tensor:
    """The values as float64, of a complex tensor both parts; ValueError for values packed in pairs."""
    if values.dtype == torch.float4_e2m1fn_x2:
        raise ValueError(f"{name} is of 4-bit values, two in a byte, with which nothing is computed")
    return (torch.view_as_real(values.resolve_conj()) if values.is_complex() else values).to(torch.float64)


def statistics(
    folder: Folder, tensor: Stored, chunk: int, advance: Callable[[int], object] = lambda size: None
) -> Statistics:
    """Read a tensor once and say what its values are like. Holds `chunk` bytes; `advance` is told of bytes read.

    Raises ValueError for 4-bit values.
    """
    spec = tensor.spec
    sums, zeros, nan, infinite = _Sums(), 0, 0, 0
    first: list[float | int | bool | complex] = []
    for box in chunk_boxes(full_box(spec.shape), BYTES_EACH, chunk):
        values = read_region(folder, tensor, box)
        numbers = as_float64(values, spec.name).view(-1)
        if len(first) < FIRST:
            first += values.reshape(-1)[: FIRST - len(first)].tolist()
        zeros += int((numbers == 0).sum())
        nan += int(numbers.isnan().sum())
        infinite += int(numbers.isinf().sum())
        sums += _sums(numbers[numbers.isfinite()])
        advance(box.numel * spec.dtype.itemsize)
    there = sums.count > 0
    return Statistics(
        sums.count + nan + infinite,
        sums.minimum if there else math.nan,
        sums.maximum if there else math.nan,
        sums.mean,
        math.sqrt(sums.squares / sums.count) if there else math.nan,
        sums.norm if there else math.nan,
        zeros,
        nan,
        infinite,
        tuple(first),
    )


def _sums(finite: Tensor) -> _Sums:
    if not len(finite):
        return _Sums()
    mean = finite.mean()
    return _Sums(
        len(finite),
        float(mean),
        float((finite - mean).square_().sum()),
        float(torch.linalg.vector_norm(finite)),
        float(finite.min()),
        float(finite.max()),
    )


@dataclass(frozen=True)
class Difference:
    """One tensor of two checkpoints: `what` makes it differ, empty if it is the same to the bit.

    `absolute` is the largest |a - b|, `relative` that over the largest finite |b| (absolute where that is 0); infinite
    where one of them alone is NaN or infinite; None where there are no values of both to compare.
    """

    section: str
    name: str
    what: str = ""
    absolute: float | None = None
    relative: float | None = None


@dataclass(frozen=True)
class _Apart:
    bits: bool = False
    absolute: float = 0.0
    largest: float = 0.0


def differences(
    a: tuple[Folder, Listing],
    b: tuple[Folder, Listing],
    chunk: int,
    advance: Callable[[int], object] = lambda size: None,
) -> Iterator[Difference]:
    """Compare two checkpoints tensor by tensor, whatever their files; those of `a` first, in its order.

    Each of the threads holds `chunk` bytes. `advance` is told of bytes of `a` that have been compared.
    """
    for section, here in a[1].tensors.items():
        there = b[1].tensors.get(section, {})
        for name, tensor in here.items():
            if name not in there:
                yield Difference(section, name, f"only in {a[0]}")
            elif tensor.spec.shape != there[name].spec.shape:
                yield Difference(section, name, f"{list(tensor.spec.shape)} and {list(there[name].spec.shape)}")
            else:
                yield _difference(section, (a[0], tensor), (b[0], there[name]), chunk)
            advance(tensor.spec.nbytes)
        for name in there:
            if name not in here:
                yield Difference(section, name, f"only in {b[0]}")


def _difference(section: str, a: tuple[Folder, Stored], b: tuple[Folder, Stored], chunk: int) -> Difference:
    name, types = a[1].spec.name, [NAMES[tensor.spec.dtype] for _, tensor in (a, b)]
    cast = types[0] != types[1]
    found: list[_Apart] = []
    boxes = list(chunk_boxes(full_box(a[1].spec.shape), BYTES_EACH, chunk))
    run_all(lambda box: found.append(_apart(name, read_region(*a, box), read_region(*b, box))), [(x,) for x in boxes])
    what = f"{types[0]} and {types[1]}" if cast else "other values"
    if not cast and not any(part.bits for part in found):
        return Difference(section, name)
    absolute = max((part.absolute for part in found), default=0.0)
    largest = max((part.largest for part in found), default=0.0)
    if absolute == 0:
        what = f"{what}, equal values" if cast else "equal values in other bits (sign of zero, kind of NaN)"
    return Difference(section, name, what, absolute, absolute / largest if largest else absolute)


def _apart(name: str, a: Tensor, b: Tensor) -> _Apart:
    """How far apart two chunks of one box are."""
    if a.dtype == b.dtype and torch.equal(raw(a), raw(b)):
        return _Apart(False, 0.0, float(_finite(as_float64(b, name)).abs().max())) if _numbers(b) else _Apart()
    if not (_numbers(a) and _numbers(b)):
        return _Apart(True, math.inf, 0.0)
    x, y = (as_float64(values, name) for values in (a, b))
    same = (x == y) | (x.isnan() & y.isnan())
    apart = (x - y).abs_().masked_fill_(same, 0.0).nan_to_num_(nan=math.inf, posinf=math.inf)
    return _Apart(True, float(apart.max()), float(_finite(y).abs().max()))


def _numbers(values: Tensor) -> bool:
    return values.dtype != torch.float4_e2m1fn_x2


def _finite(values: Tensor) -> Tensor:
    return values.masked_fill(~values.isfinite(), 0.0)
