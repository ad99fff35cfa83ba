"""Sizes as people write them, and what a bound on a process's memory leaves for copies of tensors."""

from __future__ import annotations

import os
import re
import resource

from composable.checkpoint.transfer import THREADS

MAX_CHUNK = 8 << 20  # bytes: larger chunks are slower, as they leave the cache of a core between reading and writing
MIN_CHUNK = 1 << 20
BUFFERS = 16 << 20  # bytes that one thread's reads and writes take beside its chunk
GROWTH = 64 << 20  # bytes by which the program itself still grows: kernels that torch loads when they are first used

_UNITS = {"": 1, "b": 1} | {
    f"{letter}{suffix}": base**power
    for power, letter in enumerate("kmgt", 1)
    for suffix, base in (("b", 1000), ("ib", 1024))
}


def parse_size(text: str) -> int:
    """Bytes of a size such as `5GB` (powers of 1000), `512MiB` (powers of 1024) or `4096`; ValueError for another."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]*)", text.strip().lower(), re.ASCII)
    if not match or match[2] not in _UNITS or not (size := int(float(match[1]) * _UNITS[match[2]])):
        raise ValueError(f"{text!r} is no size; write a positive number and a unit, as 5GB or 512MiB")
    return size


def size_text(size: float) -> str:
    """A size for people, in powers of 1000: `1.24 GB`."""
    for unit in ("B", "kB", "MB", "GB"):
        if size < 999.5:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:,.3g} TB"


def chunk_bytes(memory: int) -> int:
    """Bytes that each of the threads of `transfer.run_all` may hold so that the process never takes more than `memory`.

    What the process takes already (Python and torch) counts. Raises ValueError where less than 1 MiB is left.
    """
    fixed = _resident() + GROWTH
    left = (memory - fixed) // THREADS - BUFFERS
    if left < MIN_CHUNK:
        least = -(-(fixed + THREADS * (BUFFERS + MIN_CHUNK)) // 10**7) * 10
        raise ValueError(
            f"memory of {size_text(memory)} does not suffice: the program itself takes {size_text(fixed)}; "
            f"write --memory {least}MB or more"
        )
    return min(left, MAX_CHUNK)


def _resident() -> int:
    """Bytes of memory that this process takes now."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:  # a system without it: the largest so far, in KiB, but on macOS in bytes
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if os.uname().sysname == "Darwin" else 1024)
