"""The numbers of a run, in two places with the same content: `metrics.jsonl` for programs, TensorBoard for people."""

from __future__ import annotations

import contextlib
import json
import os
import warnings
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


class MetricsWriter:
    """Writes lines of metrics on rank 0; on all other ranks every method does nothing.

    Args:
        folder: the run's; gets `metrics.jsonl` and `tensorboard/`.
        rank: this process's global rank.
        resume_step: the last optimizer step that is kept. What a killed run wrote beyond it is dropped, as those steps
            will be made again: each step is logged once. 0 begins anew.
    """

    def __init__(self, folder: Path, *, rank: int, resume_step: int = 0) -> None:
        self._lines: TextIO | None = None
        self._board: SummaryWriter | None = None
        if rank != 0:
            return
        # Imported here: it takes a second, and the other ranks never need it.
        from torch.utils.tensorboard import SummaryWriter

        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        _keep_until(folder / "metrics.jsonl", resume_step)
        self._lines = (folder / "metrics.jsonl").open("a", encoding="utf-8")
        board = folder / "tensorboard"
        again = any(board.glob("events.out.tfevents.*"))
        self._board = SummaryWriter(str(board), purge_step=resume_step + 1 if again else None)

    def write(self, values: Mapping[str, float | int]) -> None:
        """Add a line, and its numbers to TensorBoard; both are on disk (or with the system) when it returns.

        Floats are written in full: reading gives the same bits. NaN and infinities are written as Python's json reads
        them. TensorBoard's tags are `tag(key)`.

        Args:
            values: "step" (the optimizer step, an int) and numbers by name.

        Raises:
            ValueError: no "step".
            TypeError: a value that is not an int or a float (call `.item()` on a tensor).
        """
        if self._lines is None or self._board is None:
            return
        if not isinstance(values.get("step"), int):
            raise ValueError(f"metrics {sorted(values)} have no step; write the optimizer step as an int under 'step'")
        for key, value in values.items():
            if not isinstance(value, int | float):
                raise TypeError(f"metric {key!r} is a {type(value).__name__}; give an int or a float (tensor.item())")
        self._lines.write(json.dumps(dict(values)) + "\n")
        self._lines.flush()
        for key, value in values.items():
            if key != "step":
                self._board.add_scalar(tag(key), value, int(values["step"]))
        self._board.flush()

    def text(self, tag: str, text: str) -> None:
        """Show `text` (Markdown) in TensorBoard under `tag`."""
        if self._board is not None:
            self._board.add_text(tag, text)
            self._board.flush()

    def histogram(self, tag: str, counts: Tensor, step: int) -> None:
        """Show whole numbers 0, 1, ... by how often each came, as a histogram with a bar for each in TensorBoard.

        Args:
            counts: [N] of the number n at index n, such as the tokens of each expert; integers of 0 or more.
        """
        if self._board is None:
            return
        bars: list[int] = counts.tolist()
        there = [n for n, count in enumerate(bars) if count] or [0]
        self._board.add_histogram_raw(
            tag,
            # The bar of n reaches from n - 1/2 to n + 1/2. TensorBoard draws the first and last that are not empty up
            # to min and max.
            min=there[0] - 0.5,
            max=there[-1] + 0.5,
            num=sum(bars),
            sum=sum(n * count for n, count in enumerate(bars)),
            sum_squares=sum(n * n * count for n, count in enumerate(bars)),
            bucket_limits=[n + 0.5 for n in range(len(bars))],
            bucket_counts=bars,
            global_step=step,
        )
        self._board.flush()

    def image(self, tag: str, pixels: Tensor, step: int) -> None:
        """Show a picture in TensorBoard.

        Args:
            pixels: [3, H, W] uint8, red, green and blue.

        Raises:
            ValueError: another shape or dtype.
        """
        if self._board is None:
            return
        if pixels.dim() != 3 or len(pixels) != 3 or pixels.dtype != torch.uint8:
            raise ValueError(f"picture {tag!r} is {list(pixels.shape)} of {pixels.dtype}; give [3, H, W] of uint8")
        self._board.add_image(tag, pixels, step)
        self._board.flush()

    def hparams(self, values: Mapping[str, Any], metrics: Iterable[str]) -> None:
        """Enter the run in TensorBoard's table of hyperparameters.

        Args:
            values: nested mappings are joined with dots; what is not a number, text or truth value is written as text.
            metrics: TensorBoard tags of the scalars by which runs are compared.
        """
        if self._board is not None:
            from torch.utils.tensorboard.summary import hparams

            # Not SummaryWriter.add_hparams: it opens a second event file and writes each metric again as of step 0.
            assert self._board.file_writer is not None
            for summary in hparams(dict(_flat(values)), dict.fromkeys(metrics, 0.0)):
                self._board.file_writer.add_summary(summary)
            self._board.flush()

    def close(self) -> None:
        """Flush and close both files; later calls of any method do nothing."""
        if self._lines is not None:
            self._lines.close()
        if self._board is not None:
            self._board.close()
        self._lines = self._board = None


def tag(key: str) -> str:
    """TensorBoard's tag of a key of `metrics.jsonl`.

    "validation_x" -> "validation/x"; a key with a slash ("moe/entropy") stays; any other x -> "train/x".
    """
    if "/" in key:
        return key
    return key.replace("validation_", "validation/", 1) if key.startswith("validation_") else f"train/{key}"


def read_metrics(path: Path) -> Iterator[dict[str, float | int]]:
    """The lines of a `metrics.jsonl`; a torn last one (a kill leaves it) is passed over, any other with a warning."""
    lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    for number, line in enumerate(lines, 1):
        values: Any = None
        with contextlib.suppress(json.JSONDecodeError):
            values = json.loads(line)
        if isinstance(values, dict) and "step" in values:
            yield values
        elif number < len(lines):
            warnings.warn(f"{path}, line {number} is no line of metrics and is left out: {line[:80]!r}", stacklevel=2)


def _keep_until(path: Path, step: int) -> None:
    """Drop the lines beyond `step` and a torn end: the file is replaced in one go, or left alone if nothing changes."""
    if not path.exists():
        return
    kept = "".join(json.dumps(values) + "\n" for values in read_metrics(path) if values["step"] <= step)
    if kept.encode() == path.read_bytes():
        return
    draft = path.with_suffix(".jsonl.new")
    with draft.open("w", encoding="utf-8") as file:
        file.write(kept)
        file.flush()
        os.fsync(file.fileno())
    os.replace(draft, path)


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, int | float | str | bool]]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value if isinstance(value, int | float | str | bool) else str(value)
