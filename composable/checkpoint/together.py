"""Ranks that succeed or fail together, with a process group or without one."""

from __future__ import annotations

import builtins
from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

T = TypeVar("T")


def rank_of(group: dist.ProcessGroup | None) -> int:
    """This rank's number in the group; 0 without a process group."""
    return dist.get_rank(group) if dist.is_initialized() else 0


def world_of(group: dist.ProcessGroup | None) -> int:
    """Number of ranks in the group; 1 without a process group."""
    return dist.get_world_size(group) if dist.is_initialized() else 1


def together(group: dist.ProcessGroup | None, act: Callable[[], T]) -> list[T]:
    """Call `act` on every rank and return the results of all ranks in order: a barrier that carries values and errors.

    If `act` raises on any rank, every rank raises: the type of the first error (RuntimeError if it is not a built-in
    one), with the message of each failing rank. The results must be picklable.
    """
    value: Any = None
    caught: Exception | None = None
    try:
        value = act()
    except Exception as error:
        caught = error
    failure = (type(caught).__name__, str(caught)) if caught else None
    gathered: list[Any] = [(value, failure)]
    if dist.is_initialized():
        gathered = [None] * world_of(group)
        dist.all_gather_object(gathered, (value, failure), group=group)
    failures = {rank: entry[1] for rank, entry in enumerate(gathered) if entry[1]}
    if failures:
        raise _error(failures, len(gathered)) from caught
    return [entry[0] for entry in gathered]


def _error(failures: dict[int, tuple[str, str]], world: int) -> Exception:
    name = next(iter(failures.values()))[0]
    kind = getattr(builtins, name, RuntimeError)
    if not (isinstance(kind, type) and issubclass(kind, Exception)) or issubclass(kind, UnicodeError | ExceptionGroup):
        kind = RuntimeError
    label = "" if kind is not RuntimeError or name == "RuntimeError" else f"{name}: "
    texts = list(dict.fromkeys(text for _, text in failures.values()))
    if len(texts) == 1 and len(failures) == world:
        return kind(label + texts[0])  # the same on all ranks: a rank's number would say nothing
    return kind("; ".join(f"rank {rank}: {label}{text}" for rank, (_, text) in list(failures.items())[:8]))
