"""A trace of chosen steps, for chrome://tracing or https://ui.perfetto.dev."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, schedule


@contextmanager
def trace(folder: Path, first: int, count: int, rank: int, *, start: int = 1) -> Iterator[Callable[[], None]]:
    """Trace optimizer steps `first` to `first + count - 1` on this rank.

    Gives a function to be called at the end of each step. The trace is written to
    `folder/profile/rank{rank}-steps{first}-{last}.json` as soon as its last step is over, or at the end of the run if
    that comes first. With `count` 0, or if the run begins after `first`, nothing is traced and nothing written.

    Args:
        folder: the run's.
        first: the first traced step, counted as the run counts, from 1.
        count: how many steps.
        rank: this process's global rank.
        start: the first step that this process makes (more than 1 in a resumed run).

    Raises:
        ValueError: `first` below 1 or `count` below 0.
    """
    if first < 1 or count < 0:
        raise ValueError(
            f"profile of {count} steps from step {first}: steps are counted from 1; write first >= 1, count >= 0"
        )
    if count == 0 or first < start:
        yield lambda: None
        return
    wait = first - start
    # One step of warm-up, if there is one before: the profiler's own start-up would be in the first traced step.
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Profiler won't be using warmup")  # there is no step before to warm up in
        plan = schedule(wait=max(0, wait - 1), warmup=min(1, wait), active=count, repeat=1)
    path = Path(folder) / "profile" / f"rank{rank}-steps{first}-{first + count - 1}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)
    with profile(
        activities=activities, schedule=plan, on_trace_ready=lambda p: p.export_chrome_trace(str(path)), acc_events=True
    ) as profiler:
        yield profiler.step
