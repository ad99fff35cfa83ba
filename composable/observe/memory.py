"""How much memory a process has used at most, and what holds it now."""

from __future__ import annotations

import gc
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import nn

from composable._torch import dump_cuda_memory, record_cuda_memory

GIB = 2**30


def peak_memory_gib(device: torch.device) -> float:
    """The most memory that this process has held, in GiB.

    On an accelerator: what torch's allocator gave out at most since start or `reset_peak_memory_stats`. On a CPU: the
    peak resident set of the process since it started, with the interpreter and all libraries.
    """
    if device.type != "cpu":
        return torch.accelerator.max_memory_allocated(device) / GIB
    import resource  # not on Windows

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / GIB if sys.platform == "darwin" else peak * 1024 / GIB  # bytes on macOS, KiB elsewhere


def record_memory(device: torch.device, entries: int = 100_000) -> None:
    """Keep stack traces of the last `entries` allocations for `memory_snapshot`, 0 to stop; nothing on a CPU."""
    if device.type == "cuda":
        record_cuda_memory(entries)


def memory_snapshot(path: Path, device: torch.device) -> None:
    """Write what holds memory now to `path`.

    On CUDA: the allocator's state, to be dropped on https://pytorch.org/memory_viz. Elsewhere a JSON table of the live
    tensors that Python can reach (`tensor_table`): what only a C++ graph holds (saved activations) is not in it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    if device.type == "cuda":
        dump_cuda_memory(str(path))
    else:
        path.write_text(json.dumps(tensor_table(), indent=1) + "\n", encoding="utf-8")


def tensor_table() -> dict[str, Any]:
    """The live tensors by shape, dtype and device: {"bytes": of all distinct storages, "tensors": [largest first]}.

    Each entry has `shape`, `dtype`, `device`, `count` and `bytes` (elements x element size x count; views of one
    storage are each counted there, and once in the total). A DTensor shows as its local tensor.
    """
    # By type(), as isinstance() would wake lazy proxies; exactly these two, as wrappers have no storage of their own.
    tensors = [x for x in gc.get_objects() if type(x) is torch.Tensor or type(x) is nn.Parameter]
    tensors = [x for x in tensors if x.layout == torch.strided and _storage(x) is not None]
    counts = Counter(
        (tuple(x.shape), str(x.dtype).removeprefix("torch."), str(x.device), x.element_size()) for x in tensors
    )
    storages = dict(storage for x in tensors if (storage := _storage(x)))
    rows = [
        {"shape": shape, "dtype": dtype, "device": device, "count": n, "bytes": n * torch.Size(shape).numel() * size}
        for (shape, dtype, device, size), n in counts.items()
    ]
    return {"bytes": sum(storages.values()), "tensors": sorted(rows, key=lambda row: -row["bytes"])}


def _storage(tensor: torch.Tensor) -> tuple[tuple[str, int], int] | None:
    """((device, address), bytes) of a tensor's memory; None where a tracer of torch.compile left a tensor without."""
    try:
        return (str(tensor.device), tensor.untyped_storage().data_ptr()), tensor.untyped_storage().nbytes()
    except RuntimeError:
        return None
