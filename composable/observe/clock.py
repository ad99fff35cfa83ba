"""How long a step takes, what part of it waits for data, and the tokens per second that makes."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True)
class StepTimes:
    """Averages over the steps since the last report."""

    step_seconds: float
    """Seconds per optimizer step."""

    tokens_per_second: float
    """Tokens of the counted steps by their seconds."""

    data_wait: float
    """The share of the time, in [0, 1], spent waiting for data."""

    save_seconds: float | None
    """Seconds, outside of any step, for which saving held the loop; None if nothing was saved."""


class _Step(NamedTuple):
    seconds: float
    waited: float
    tokens: int
    first: bool  # of the process


class StepClock:
    """Times optimizer steps by explicit marks: `start`, `data_ready`, `stop`, and a `report` every so many steps.

    What lies between `stop` and the next `start` (validation, checkpoints, logging) is in no step. The first step of
    the process (start-up, compilation) does not count in a report that has other steps; a report of it alone gives it
    as it was. An accelerator works on after the host: read the loss before `stop` to have the step's true end, or
    report over several steps, whose sum is then right up to the last.

    Args:
        now: gives the time in seconds.
    """

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now
        self._started: float | None = None
        self._waited = 0.0
        self._first = True
        self._window: list[_Step] = []
        self._saving: float | None = None

    def start(self) -> None:
        """A step begins: data is asked for."""
        self._started = self._now()
        self._waited = 0.0

    def data_ready(self) -> None:
        """The step's data is there: the time since `start` was waiting."""
        self._waited = self._now() - self._begun()

    def stop(self, tokens: int) -> float:
        """The step is over; it took in `tokens` over the whole job (all ranks). Gives its seconds.

        Raises:
            RuntimeError: `start` was not called.
        """
        seconds = self._now() - self._begun()
        self._window.append(_Step(seconds, self._waited, tokens, self._first))
        self._first = False
        self._started = None
        return seconds

    def saved(self, seconds: float) -> None:
        """Saving held the loop for so long."""
        self._saving = (self._saving or 0.0) + seconds

    def report(self) -> StepTimes:
        """Averages over the steps since the last report, which this one ends.

        Raises:
            RuntimeError: there was no step.
        """
        if not self._window:
            raise RuntimeError("no step since the last report; call report after start and stop")
        counted = [step for step in self._window if not step.first] or self._window
        self._window, saving, self._saving = [], self._saving, None
        seconds = max(sum(step.seconds for step in counted), 1e-12)  # a clock may be too coarse for one step
        return StepTimes(
            step_seconds=seconds / len(counted),
            tokens_per_second=sum(step.tokens for step in counted) / seconds,
            data_wait=sum(step.waited for step in counted) / seconds,
            save_seconds=saving,
        )

    def _begun(self) -> float:
        if self._started is None:
            raise RuntimeError("no step has begun; call start() first")
        return self._started
