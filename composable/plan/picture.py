"""A layout as a picture: the memory of each rank of the pipeline in its parts, and the timeline of a pass."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from composable.plan.search import Candidate

COLOURS = {"F": "#4c78a8", "B": "#f58518", "I": "#f2a65a", "W": "#54a24b"}
MEANING = {"F": "forward", "B": "backward", "I": "backward, inputs", "W": "backward, weights"}


def draw(one: Candidate, path: Path) -> None:
    """Write a picture of a layout to `path`, of the format that its ending says.

    Raises:
        ValueError: matplotlib is not there.
    """
    try:
        import matplotlib.figure
    except ImportError as error:
        raise ValueError("a picture needs matplotlib: pip install 'composable[plot]'") from error
    events = one.time.events
    figure: Any = matplotlib.figure.Figure(figsize=(11, 8 if events else 4.5), layout="constrained")
    axes = figure.subplots(2 if events else 1, squeeze=False)[:, 0]
    figure.suptitle(f"{one.recipe.name}: {one.layout}", fontsize=9)
    _memory(axes[0], one)
    if events:
        _timeline(axes[1], one, events)
    figure.savefig(path, dpi=120)


def _memory(axes: Any, one: Candidate) -> None:
    ranks = [rank.rank for rank in one.memory]
    parts = sorted({part for rank in one.memory for part in rank.parts})
    base = [0.0] * len(ranks)
    for part in [*parts, "allocator's slack"]:
        sizes = [(rank.slack if part == "allocator's slack" else rank.parts.get(part, 0)) / 1e9 for rank in one.memory]
        axes.bar(ranks, sizes, bottom=base, label=part)
        base = [low + size for low, size in zip(base, sizes, strict=True)]
    axes.set_xlabel("rank of the pipeline")
    axes.set_ylabel("GB")
    axes.set_xticks(ranks)
    axes.legend(fontsize=7, ncols=2, loc="center left", bbox_to_anchor=(1.0, 0.5))


def _timeline(axes: Any, one: Candidate, events: Any) -> None:
    for kind, colour in COLOURS.items():
        mine = [event for event in events if event.kind == kind]
        if mine:
            axes.barh(
                [event.rank for event in mine],
                [event.end - event.start for event in mine],
                left=[event.start for event in mine],
                height=0.8,
                color=colour,
                edgecolor="white",
                linewidth=0.2,
                label=MEANING[kind],
            )
    axes.invert_yaxis()
    axes.set_yticks(range(one.recipe.mesh.pp))
    axes.set_xlabel("seconds of one pass, exchanges within stages included")
    axes.set_ylabel("rank of the pipeline")
    axes.legend(fontsize=7, ncols=4, loc="lower right", bbox_to_anchor=(1.0, 1.0))
