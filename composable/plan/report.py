"""A plan as text."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Iterable, Sequence
from typing import Any

from composable.checkpoint.budget import size_text
from composable.models.count import count_parameters
from composable.plan.advice import Neighbour
from composable.plan.devices import Cluster
from composable.plan.layout import Layout
from composable.plan.memory import Planned
from composable.plan.search import Candidate, Plan
from composable.plan.traffic import Flow, traffic


def headline(recipe: Planned, world: int, cluster: Cluster) -> str:
    """What is planned, and for what."""
    count = count_parameters(recipe.model)
    active = f" ({count.active:,} a token)" if count.active != count.total else ""
    data = recipe.data
    return (
        f"{recipe.name}: {count.total:,} parameters{active}, steps of {data.global_batch:,} rows of {data.seq_len:,} "
        f"tokens\n{world} x {cluster.device.name}, {cluster.per_node} a node: {size_text(cluster.device.usable)} each "
        "for tensors and their allocator"
    )


def counted(plan: Plan) -> list[str]:
    """How much was looked at."""
    refused = sum(plan.refused.values())
    said = [f"{plan.tried:,} legal layouts ({refused:,} break a rule); {plan.worked_out:,} looked at"]
    if plan.too_large:
        said[0] += f", of which {plan.too_large:,} do not fit"
    most = sorted(plan.refused.items(), key=lambda each: -each[1])[:4]
    return [*said, *(f"  {number:,} refused by {rule}" for rule, number in most)]


def table(found: Sequence[Candidate]) -> list[str]:
    """One line for each layout."""
    lines = [f"{'':>2} {'memory':>9} {'bubble':>7} {'waits':>7} {'tokens/s':>11} {'MFU':>6}  layout"]
    for number, each in enumerate(found, 1):
        time = each.time
        lines.append(
            f"{number:>2} {size_text(each.worst.total):>9} {time.bubble / time.total:>7.1%} "
            f"{sum(time.waited.values()) / time.total:>7.1%} {time.tokens_per_second:>11,.0f} {time.mfu:>6.1%}  "
            f"{each.layout}"
        )
    return lines


def said_options(layout: Layout, recipe: Planned) -> str:
    """The options to paste."""
    return shlex.join(layout.options(recipe)) or "none, the recipe has this layout"


def explained(one: Candidate, recipe: Planned, cluster: Cluster) -> list[str]:
    """Everything of one layout; `recipe` as it is without it."""
    held, time = one.worst, one.time
    fits = held.total <= cluster.device.usable
    lines = [
        str(one.layout),
        f"memory of pipeline rank {held.rank}, which needs the most: {size_text(held.total)}, "
        f"{'fits' if fits else 'DOES NOT FIT'}",
    ]
    parts = [*held.parts.items(), ("allocator's slack", held.slack)]
    lines += [f"  {part:<24}{size_text(size):>10}" for part, size in parts if size]
    if held.host:
        lines.append(f"  {'in host memory':<24}{size_text(held.host):>10}")
    lines += ["exchanges of rank 0 in a step"]
    lines += [
        f"  {flow.purpose:<24}{size_text(flow.bytes):>10}  {flow.kind} over {flow.group} ({flow.ranks} ranks), "
        f"{flow.count:,} calls{', beside computation' if flow.hides else ''}"
        for flow in _flows(one, cluster)
    ]
    lines += [f"a step takes {time.total:.3g} s: {time.tokens_per_second:,.0f} tokens/s, MFU {time.mfu:.1%}"]
    seconds = {"computation": time.compute, **{f"waits: {p}": t for p, t in time.waited.items()}}
    seconds |= {"bubble": time.bubble, "optimizer": time.update}
    lines += [f"  {name:<24}{each:>9.3g} s  {each / time.total:>6.1%}" for name, each in seconds.items() if each]
    if time.hidden:
        lines.append(f"  {'hidden behind it':<24}{time.hidden:>9.3g} s")
    return [*lines, f"options: {said_options(one.layout, recipe)}"]


def _flows(one: Candidate, cluster: Cluster) -> tuple[Flow, ...]:
    return traffic(one.recipe, accelerator=cluster.device.name != "cpu", ranks_per_node=cluster.per_node)


def listed(title: str, lines: Iterable[str]) -> list[str]:
    """A titled list."""
    return [title, *(f"  {line}" for line in lines)]


def beside(found: Sequence[Neighbour]) -> list[str]:
    """What stands against the neighbours."""
    width = max((len(each.change) for each in found), default=0)
    return listed("instead of the first", [f"{each.change:<{width}}  {each.verdict}" for each in found])


def as_values(one: Candidate, recipe: Planned, cluster: Cluster) -> dict[str, Any]:
    """All of a layout, as JSON has it; `recipe` as it is without it."""
    return {
        "layout": dataclasses.asdict(one.layout),
        "options": one.layout.options(recipe),
        "memory": [{**dataclasses.asdict(rank), "peak": rank.peak, "total": rank.total} for rank in one.memory],
        "traffic": [dataclasses.asdict(flow) for flow in _flows(one, cluster)],
        "time": {
            **dataclasses.asdict(dataclasses.replace(one.time, events=())),
            "total": one.time.total,
            "tokens_per_second": one.time.tokens_per_second,
            "mfu": one.time.mfu,
        },
    }
