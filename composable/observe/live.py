"""The bytes of live tensors over time, by part: what a rank holds, and what it holds at its peak.

Counted are the storages of tensors that operators give, each once and at its size, from the operator that made it until
nobody holds it; not what a kernel takes while it runs, nor what an allocator adds. So it is exact and the same on every
machine, and works on fake tensors, which have sizes and no memory.
"""

from __future__ import annotations

import functools
import weakref
from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from composable._torch import DispatchMode, asks_device, device_of, in_backward, infers_shapes
from composable.observe.traffic import tensors_in

PARTS = ("parameters", "gradients", "optimizer", "buffers", "gathered", "communication", "activations")
"""`gathered`: parameters that data parallelism brings together for computation; `communication`: what it packs for its
collectives; `activations`: all the rest, inputs and what a step computes in between included"""


class _Block:
    """One storage."""

    __slots__ = ("backward", "part", "size")

    def __init__(self, size: int, part: str, backward: bool) -> None:
        self.size, self.part, self.backward = size, part, backward


class LiveMemory(DispatchMode):
    """Follows the storages that are made under it, in this thread; for one use as a context."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0
        """bytes"""
        self.peak = 0
        """bytes, since `restart`"""
        self._clock = 0
        self._peak_at = 0
        self._live: dict[int, tuple[Any, _Block, int, int]] = {}
        """id of a storage -> (weak reference to it, its block, bytes, since when)"""
        self._spans: list[tuple[_Block, int, int, int]] = []
        """(block, bytes, from, until)"""
        self._resize = torch.UntypedStorage.resize_

    def __enter__(self) -> LiveMemory:
        """Resizes are no operators: FSDP's of gathered parameters are seen by standing in for the method."""

        @functools.wraps(self._resize)
        def resize(storage: torch.UntypedStorage, size: int) -> Any:
            out = self._resize(storage, size)
            if id(storage) in self._live:
                self._resized(storage, size)
            return out

        torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign,assignment]
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]
        super().__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator, and take what it gives into the books."""
        if asks_device(func):
            return device_of(args[0])
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        out = func(*args, **(kwargs or {}))
        if infers_shapes():
            return out
        if func.namespace == "fsdp":
            for value in (*args, *(kwargs or {}).values()):
                self._claim(tensors_in(value), "communication", only_unnamed=True)
        for tensor in tensors_in(out):
            self._note(tensor, "activations")
        return out

    def claim(self, tensors: Iterable[Tensor], part: str) -> None:
        """Say of which part tensors are, from when they were made; DTensors by their local ones."""
        with torch.no_grad():
            self._claim((t.to_local() if isinstance(t, DTensor) else t for t in tensors), part)

    def ignore(self, tensor: Tensor) -> None:
        """Leave out the storage of a tensor that stands for another."""
        storage = tensor.untyped_storage()
        known = self._live.pop(id(storage), None)
        if known is not None:
            self.now -= known[2]
        self._live[id(storage)] = (weakref.ref(storage, self._gone(id(storage))), _Block(0, "", False), 0, self._clock)

    def restart(self) -> None:
        """Forget the peak so far."""
        self._spans.clear()
        self.peak, self._peak_at = self.now, self._clock

    def forward_begins(self) -> None:
        """A forward pass begins: what a backward pass has left behind are gradients."""
        for _, block, _, _ in self._live.values():
            if block.backward and block.part == "activations":
                block.part = "gradients"

    def at_peak(self) -> dict[str, int]:
        """Part -> bytes at the peak."""
        return self._at(self._peak_at)

    def at_rest(self) -> dict[str, int]:
        """Part -> bytes now."""
        return self._at(self._clock)

    def _at(self, time: int) -> dict[str, int]:
        totals: Counter[str] = Counter()
        for block, size, start, stop in self._spans:
            if start <= time < stop:
                totals[block.part] += size
        for _, block, size, start in self._live.values():
            if start <= time:
                totals[block.part] += size
        return {part: totals[part] for part in PARTS}

    def _claim(self, tensors: Iterable[Tensor], part: str, only_unnamed: bool = False) -> None:
        for tensor in tensors:
            if device_of(tensor).type == "meta":
                continue
            block = self._note(tensor, part)
            if not only_unnamed or block.part == "activations":
                block.part = part

    def _note(self, tensor: Tensor, part: str) -> _Block:
        storage = tensor.untyped_storage()
        known = self._live.get(id(storage))
        if known is not None:
            size = storage.nbytes()
            if size != known[2] and known[1].part:  # by `resize_` of a tensor
                self._resized(storage, size)
            return known[1]
        if device_of(tensor).type == "meta":
            return _Block(0, part, False)
        block = _Block(storage.nbytes(), part, in_backward())
        self._born(storage, block, block.size)
        return block

    def _born(self, storage: torch.UntypedStorage, block: _Block, size: int) -> None:
        key = id(storage)
        self._clock += 1
        self._live[key] = (weakref.ref(storage, self._gone(key)), block, size, self._clock)
        self.now += size
        if self.now > self.peak:
            self.peak, self._peak_at = self.now, self._clock

    def _gone(self, key: int) -> Any:
        return lambda reference: self._died(key)

    def _died(self, key: int) -> _Block:
        _, block, size, start = self._live.pop(key)
        self._clock += 1
        self.now -= size
        if size:
            self._spans.append((block, size, start, self._clock))
        return block

    def _resized(self, storage: torch.UntypedStorage, size: int) -> None:
        block = self._died(id(storage))
        if block.part:
            block.part = "gathered"
        self._born(storage, block, size if block.part else 0)
