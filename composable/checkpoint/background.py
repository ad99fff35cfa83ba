"""Saving while training goes on: the loop waits for a copy of its tensors, a thread writes the copy."""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from types import TracebackType

import torch.distributed as dist
from torch import Tensor

from composable.checkpoint.host_memory import HostMemory
from composable.checkpoint.plan import PartKey, SectionPlan, Table, Writer, owned_parts, plan_sections, table_of
from composable.checkpoint.remote import Folder
from composable.checkpoint.save import commit, described
from composable.checkpoint.shards import Piece
from composable.checkpoint.together import rank_of, together


@dataclass(frozen=True)
class Saved:
    """A checkpoint that is complete."""

    folder: Folder | str
    seconds: float
    """from the end of the copy to the end of what came after the commit"""


class BackgroundSaver:
    """Saves checkpoints from a thread; a context, at whose end the last of them is waited for.

    Every method but `failed` and `take_saved` is collective over all ranks, and so is building one: it makes a process
    group of its own (gloo), on which the threads meet without meeting a collective of the training. Without a process
    group it is for one process.

    A copy of what this rank writes stays in host memory from the first save on (see `HostMemory`). One save is under
    way at a time. The thread is a daemon: a process that leaves without closing the saver does not wait for it, and
    then the folder has no manifest.
    """

    def __init__(self) -> None:
        self._group = dist.new_group(backend="gloo") if dist.is_initialized() else None
        self.memory = HostMemory()
        self._planned: tuple[Table, tuple[int, Writer], list[SectionPlan]] | None = None
        self._doing = ""
        self._done: Future[None] | None = None
        self._saved: list[Saved] = []

    def __enter__(self) -> BackgroundSaver:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.wait()
        except Exception as failure:
            if error is None:
                raise
            warnings.warn(f"{failure} (while the run ended by another error)", RuntimeWarning, stacklevel=2)
        finally:
            self.memory = HostMemory()
            if self._group is not None and dist.is_initialized():
                dist.destroy_process_group(self._group)
            self._group = None

    @property
    def failed(self) -> bool:
        """Whether a save has failed on this rank since the last `wait` or `save`, which raise it; does not wait."""
        return self._done is not None and self._done.done() and self._done.exception() is not None

    def take_saved(self) -> list[Saved]:
        """The checkpoints that became complete since the last call; does not wait."""
        saved = self._saved[:]
        del self._saved[: len(saved)]
        return saved

    def prepare(
        self,
        weights: Mapping[str, Tensor | Piece],
        optimizer: Mapping[str, Tensor | Piece],
        *,
        writer: Writer = "shared",
        max_file_size: int = 5 * 10**9,
    ) -> None:
        """Allocate the memory for saves of these tensors in the background, so that the first does not wait for it.

        What this says of tensors is raised at once, a lack of memory as the failure of a save is.
        """
        sections, pieces = self._plan(weights, optimizer, {}, (max_file_size, writer))
        parts = owned_parts(sections, pieces, rank_of(self._group))

        def allocate() -> None:
            together(self._group, lambda: self.memory.prepare(parts))

        self._start("no host memory for saving in the background", allocate)

    def save(
        self,
        folder: Folder | str,
        weights: Mapping[str, Tensor | Piece],
        optimizer: Mapping[str, Tensor | Piece],
        files: Mapping[str, str | bytes],
        *,
        writer: Writer = "shared",
        max_file_size: int = 5 * 10**9,
        overwrite: bool = False,
        then: Callable[[], object] | None = None,
    ) -> None:
        """Copy what `checkpoint.save` would save, and write it in the background; waits for the last save first.

        When it returns, the tensors may be written to. What `save` says of arguments, results and errors holds here.
        What can be said before anything is written is raised at once; later errors by the next `save`, by `wait` or at
        the end, on every rank.

        Args:
            then: what rank 0 does once the checkpoint is complete, such as to delete older ones; in the thread, and an
                error of it is one of the save.

        Raises:
            OSError, ValueError, RuntimeError: also of the last save, if that failed.
        """
        files = dict(files)
        sections, pieces = self._plan(weights, optimizer, files, (max_file_size, writer))
        parts: dict[PartKey, Piece] = {}

        def copy() -> None:
            parts.update(self.memory.copy(owned_parts(sections, pieces, rank_of(self._group))))

        together(self._group, copy)

        def write() -> None:
            began = time.perf_counter()
            commit(folder, sections, parts, files, overwrite=overwrite, group=self._group)
            together(self._group, lambda: then() if then and rank_of(self._group) == 0 else None)
            self._saved.append(Saved(folder, time.perf_counter() - began))

        self._start(f"{folder} was not saved in the background", write)

    def _plan(
        self,
        weights: Mapping[str, Tensor | Piece],
        optimizer: Mapping[str, Tensor | Piece],
        files: Mapping[str, str | bytes],
        options: tuple[int, Writer],
    ) -> tuple[list[SectionPlan], dict[str, dict[str, Piece]]]:
        """The plan, and what this rank holds, once nothing is being written.

        The last plan is kept, and made anew only where a rank has something else than then: tables of all ranks are
        long.
        """
        pieces: dict[str, dict[str, Piece]] = {}
        last = self._planned

        def describe() -> bool:
            self.wait()
            pieces.update(described(weights, optimizer, files))
            return last is not None and last[:2] == (table_of(pieces), options)

        same = all(together(self._group, describe))
        if last is None or not same:
            table = table_of(pieces)
            last = (table, options, plan_sections(together(self._group, lambda: table), *options))
            self._planned = last
        return last[2], pieces

    def wait(self) -> None:
        """Wait until nothing is being written.

        Raises:
            OSError, ValueError, RuntimeError: it failed; on every rank, and once.
        """
        if self._done is None:
            return
        error = self._done.exception()
        self._done = None
        if error is not None:
            kind = next((kind for kind in (OSError, ValueError) if isinstance(error, kind)), RuntimeError)
            raise kind(f"{self._doing}: {error}") from error

    def stop_if_failed(self, failed: Sequence[bool | float]) -> None:
        """What every rank calls after they exchanged `failed`: raises on all of them if a save failed on any.

        Args:
            failed: of every rank, in order.
        """
        if any(failed):
            self.wait()
            ranks = ", ".join(str(rank) for rank, flag in enumerate(failed) if flag)
            raise RuntimeError(f"saving in the background failed on rank {ranks}; its output says why")

    def _start(self, doing: str, act: Callable[[], None]) -> None:
        """Call `act` in a thread; `doing` is what an error of it says first."""
        done: Future[None] = Future()

        def run() -> None:
            try:
                act()
            except BaseException as error:
                done.set_exception(error)
            else:
                done.set_result(None)

        self._doing, self._done = doing, done
        threading.Thread(target=run, name="saving", daemon=True).start()
