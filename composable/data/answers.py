"""Which tokens of a data set have a loss: ranges of places, held as the rising vector of their borders.

Borders [2A] are start, stop, start, stop...: a place counts if an odd number of borders lies at or before it. A vector
of places would be as long as the data; this one is as long as there are answers in it.
"""

import numpy as np


def ranges_of(counted: np.ndarray) -> np.ndarray:
    """Borders (int64) of the ranges where `counted` [n] bool is true."""
    padded = np.concatenate([[False], counted, [False]])
    return np.flatnonzero(padded[1:] != padded[:-1])


def inside(ranges: np.ndarray, start: int, stop: int) -> np.ndarray:
    """[stop - start] bool: which of the places start..stop - 1 count."""
    if stop <= start:
        return np.zeros(0, bool)
    first, last = _between(ranges, start, stop)
    passed = np.cumsum(np.bincount(ranges[first:last] - start, minlength=stop - start))
    return (first + passed) % 2 == 1


def cut(ranges: np.ndarray, start: int, stop: int) -> np.ndarray:
    """Borders of the ranges within start..stop, counted from `start`."""
    if stop <= start:
        return np.zeros(0, np.int64)
    first, last = _between(ranges, start, stop)
    inner = np.asarray(ranges[first:last], np.int64) - start
    return np.concatenate([[0] * (first % 2), inner, [stop - start] * (last % 2)]).astype(np.int64)


def total(ranges: np.ndarray) -> int:
    """How many places count."""
    return int((ranges[1::2] - ranges[::2]).sum())


def _between(ranges: np.ndarray, start: int, stop: int) -> tuple[int, int]:
    """Which borders lie after `start` and before `stop`."""
    return int(np.searchsorted(ranges, start, side="right")), int(np.searchsorted(ranges, stop, side="left"))
