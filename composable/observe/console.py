"""The progress of a run for the person who watches it: a bar on a terminal, plain lines in a log file."""

from __future__ import annotations

import sys
import time

from tqdm import tqdm

SECONDS_PER_LINE = 5.0


class Progress:
    """One line of progress, with loss, tokens per second and the time left, on stderr.

    On a terminal it is a bar that moves. Elsewhere it is a plain line at most every `SECONDS_PER_LINE` seconds, and one
    for the last step: no carriage returns in log files.

    Args:
        total: optimizer steps of the whole run.
        initial: steps made before this start.
        enabled: whether this process shows anything (rank 0 does).
        note: what stands before the numbers, such as the run's name.
    """

    def __init__(self, total: int, initial: int = 0, *, enabled: bool, note: str = "") -> None:
        self._total, self._initial, self._enabled, self._note = total, initial, enabled, note
        self._start = time.monotonic()
        self._shown = self._start - SECONDS_PER_LINE  # the first update is shown
        self._bar: tqdm | None = None
        if enabled and sys.stderr.isatty():
            self._bar = tqdm(total=total, initial=initial, desc=note or None, unit="step", file=sys.stderr)

    def update(self, step: int, *, loss: float, tokens_per_second: float) -> None:
        """Show that optimizer step `step` is done, with its loss and the tokens per second of the whole job."""
        if not self._enabled:
            return
        if self._bar is not None:
            self._bar.set_postfix_str(f"loss {loss:.4f}, {_short(tokens_per_second)} tokens/s", refresh=False)
            self._bar.update(step - self._bar.n)
            return
        now = time.monotonic()
        if step < self._total and now - self._shown < SECONDS_PER_LINE:
            return
        self._shown = now
        made = step - self._initial
        left = f"{_clock((now - self._start) / made * (self._total - step))} left" if made > 0 else "time left unknown"
        head = f"{self._note}: " if self._note else ""
        rate = _short(tokens_per_second)
        print(f"{head}step {step}/{self._total}, loss {loss:.4f}, {rate} tokens/s, {left}", file=sys.stderr, flush=True)

    def say(self, text: str) -> None:
        """Print `text` on stdout, above the bar if there is one."""
        if self._enabled and self._bar is not None:
            tqdm.write(text, file=sys.stdout)
            sys.stdout.flush()
        elif self._enabled:
            print(text, flush=True)

    def close(self) -> None:
        """Leave the bar as it stands."""
        if self._bar is not None:
            self._bar.close()


def _short(number: float) -> str:
    """Three digits or so: 950, 12.3k, 4.56M."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(number) >= size:
            return f"{number / size:.3g}{letter}"
    return f"{number:.3g}"


def _clock(seconds: float) -> str:
    """H:MM:SS."""
    minutes, second = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{second:02}"
