"""Which layouts of a recipe are legal on a cluster, which of them fit, and which is the fastest.

Layouts are looked at by what they would take at least, the most promising first, until no other can be among the best:
so those that are given are the best of all that are tried, while most are never worked out.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from composable.data.loader import accumulation
from composable.mesh import Mesh
from composable.plan.devices import Cluster
from composable.plan.layout import Layout
from composable.plan.memory import Planned, RankMemory, least_states, memory, worst
from composable.plan.timing import StepTime, least_compute, step_time

LONG = 16384
"""tokens of a row from which context parallelism is tried"""
SHORTEST = 2048
"""tokens of a row that a context rank has at least"""


@dataclass(frozen=True)
class Space:
    """What is tried; degrees follow from the numbers of devices, heads, layers and experts."""

    micro_batch: tuple[int, ...] = (1, 2, 4, 8)
    data: tuple[str, ...] = ("ddp", "zero1", "zero2", "zero3")
    recompute: tuple[str, ...] = ("none", "selective", "full")
    """from the one that computes least to the one that keeps least: the first that fits is taken"""
    schedule: tuple[str, ...] = ("1F1B", "Interleaved1F1B")
    offload: bool = False


@dataclass(frozen=True)
class Candidate:
    """A layout that was worked out."""

    layout: Layout
    recipe: Planned
    """resolved"""
    memory: tuple[RankMemory, ...]
    """of each rank of the pipeline"""
    time: StepTime

    @property
    def worst(self) -> RankMemory:
        """Of the rank that needs the most."""
        return worst(self.memory)


@dataclass(frozen=True)
class Plan:
    """What a search found."""

    best: tuple[Candidate, ...]
    """that fit, the fastest first"""
    tried: int
    """legal layouts, micro-batches, data kinds and schedules that there are"""
    worked_out: int
    """of these, those that were looked at: the others take longer whatever they wait for"""
    too_large: int
    """of these, those that do not fit whatever is recomputed"""
    refused: Mapping[str, int] = field(default_factory=dict)
    """why layouts are not legal: the beginning of the rule's message -> how many"""


def work_out(layout: Layout, recipe: Planned, world: int, cluster: Cluster, load: float = 1.0) -> Candidate:
    """Memory and time of one layout. Raises ValueError, with the rule, for one that is not legal."""
    resolved, _ = layout.put_into(recipe).resolve(world)
    held = memory(resolved, accelerator=cluster.device.name != "cpu", load=load)
    layout = dataclasses.replace(layout, mesh=resolved.mesh)
    return Candidate(layout, resolved, held, step_time(resolved, cluster, load=load))


def search(
    recipe: Planned,
    world: int,
    cluster: Cluster,
    *,
    space: Space | None = None,
    top: int = 5,
    load: float = 1.0,
    advance: Callable[[int, int], object] = lambda done, total: None,
) -> Plan:
    """The fastest layouts of a recipe on `world` devices that fit.

    Args:
        load: rows that the experts of the fullest rank get, over an even share.
        advance: is told how many of how many were looked at.
    """
    space = space or Space()
    refused: Counter[str] = Counter()
    open_: list[tuple[float, Layout]] = []
    seconds: dict[tuple[int, ...], float] = {}
    for layout in layouts(recipe, world, cluster, space):
        try:
            resolved, _ = layout.put_into(recipe).resolve(world)
        except ValueError as error:
            refused[_rule(error)] += 1
            continue
        layout = dataclasses.replace(layout, mesh=resolved.mesh)
        mesh = resolved.mesh
        key = (mesh.tp, mesh.cp, mesh.ep, mesh.etp, layout.micro_batch)
        if key not in seconds:
            seconds[key] = least_compute(resolved, cluster, load)
        open_.append((_least(resolved, seconds[key]), layout))
    open_.sort(key=lambda each: (each[0], str(each[1])))
    found: list[Candidate] = []
    worked_out = too_large = 0
    for number, (least, layout) in enumerate(open_):
        beat = found[top - 1].time.total if len(found) >= top else math.inf
        if least > 1.01 * beat:
            break
        advance(number, len(open_))
        fits = _first_that_fits(layout, recipe, world, cluster, space, load, beat)
        worked_out += 1
        if fits is None:
            too_large += 1
        else:
            found = sorted([*found, fits], key=_better)[: max(top, 1)]
    advance(len(open_), len(open_))
    return Plan(tuple(found), len(open_), worked_out, too_large, dict(refused))


def _better(candidate: Candidate) -> tuple[float, int]:
    """Faster; of times that are the same to three digits, with less memory."""
    return float(f"{candidate.time.total:.2e}"), candidate.worst.total


def _first_that_fits(
    layout: Layout, recipe: Planned, world: int, cluster: Cluster, space: Space, load: float, beat: float
) -> Candidate | None:
    """With the least recomputation that fits; of what takes longer than `beat` seconds by the memory of the first rank
    of the pipeline alone."""
    most = dataclasses.replace(layout, recompute=space.recompute[-1])
    if _that_fits(most, recipe, world, cluster, load) is None:
        return None
    for recompute in space.recompute:
        each = dataclasses.replace(layout, recompute=recompute)
        found = _that_fits(each, recipe, world, cluster, load)
        if found is None:
            continue
        if layout.mesh.pp == 1 or found.time.total > 1.01 * beat:
            return found
        whole = work_out(each, recipe, world, cluster, load)
        if whole.worst.total <= cluster.device.usable:
            return whole
    return None


def _that_fits(layout: Layout, recipe: Planned, world: int, cluster: Cluster, load: float) -> Candidate | None:
    try:
        resolved, _ = layout.put_into(recipe).resolve(world)
    except ValueError:
        return None
    limit = cluster.device.usable
    if least_states(resolved) > limit:
        return None
    held = memory(resolved, accelerator=cluster.device.name != "cpu", load=load, ranks=(0,))
    if worst(held).total > limit:
        return None
    return Candidate(layout, resolved, held, step_time(resolved, cluster, load=load, ranks=(0,)))


def _least(recipe: Planned, micro_batch: float) -> float:
    """Seconds that a step takes at least: computation evenly shared, and the bubble of equal stages."""
    mesh = recipe.mesh
    count = accumulation(recipe.data, mesh.data_ranks)
    seconds = count * micro_batch / mesh.pp
    if mesh.pp == 1:
        return seconds
    bubble = recipe.pipeline.bubble(mesh.pp, recipe.pipeline.micro_batches or count)
    return seconds / (1 - bubble)


def _rule(error: ValueError) -> str:
    """The part of a message that names what is wrong, without its numbers."""
    words = str(error).split(":")[0].split("=")[0]
    return words.split(" ")[0] if "." in words.split(" ")[0] else " ".join(str(error).split()[:6])


def layouts(recipe: Planned, world: int, cluster: Cluster, space: Space) -> Iterator[Layout]:
    """Everything that is tried, legal or not, without recomputation."""
    for mesh in meshes(recipe, world, cluster):
        whole = mesh.dp_shard == 1  # nothing to shard over
        kinds = [kind for kind in space.data if (kind == "ddp") == whole] or list(space.data[-1:])
        schedules = space.schedule if mesh.pp > 1 else ("1F1B",)
        for micro_batch, data, schedule in itertools.product(space.micro_batch, kinds, schedules):
            for virtual in _virtual(recipe, mesh, schedule):
                yield Layout(mesh, micro_batch, data, space.recompute[0], space.offload, schedule, virtual)


def _virtual(recipe: Planned, mesh: Mesh, schedule: str) -> tuple[int, ...]:
    if schedule in ("GPipe", "1F1B", "ZBVZeroBubble", "DualPipeV"):
        return (2,)
    return tuple(n for n in (2, 4) if n * mesh.pp <= recipe.model.layers) or (2,)


def meshes(recipe: Planned, world: int, cluster: Cluster) -> Iterator[Mesh]:
    """Degrees whose product is the world: tensor and expert groups that share nodes evenly, whole heads and layers."""
    model, moe = recipe.model, recipe.model.moe
    long = recipe.data.seq_len >= LONG or recipe.data.global_batch < world
    for tp in divisors(min(cluster.per_node, world)):
        if model.heads % tp or world % tp:
            continue
        for cp in divisors(world // tp):
            if cp > 1 and (not long or recipe.data.seq_len // cp < SHORTEST):
                continue
            for pp in divisors(world // (tp * cp)):
                if pp > model.layers:
                    continue
                data_ranks = world // (tp * cp * pp)
                for replicate in _replicas(data_ranks, tp * cp, cluster.per_node):
                    shard = data_ranks // replicate
                    for ep, etp in _experts(moe.experts if moe else 0, shard * cp * tp, tp):
                        yield Mesh(replicate, shard, cp, tp, pp, ep, etp)


def _replicas(data_ranks: int, inner: int, per_node: int) -> list[int]:
    """Replicas of sharded parameters: none; one for each node; one for each rank."""
    nodes = data_ranks * inner // per_node
    found = {1, data_ranks}
    if nodes > 1 and data_ranks % nodes == 0:
        found.add(nodes)
    return sorted(found)


def _experts(experts: int, ranks: int, tp: int) -> list[tuple[int, int]]:
    if not experts:
        return [(1, 1)]
    found = [(ep, 1) for ep in divisors(math.gcd(experts, ranks))]
    if tp > 1:
        found += [(ep, tp) for ep in divisors(math.gcd(experts, ranks // tp))]
    return found


def divisors(number: int) -> list[int]:
    """All of them, ascending."""
    return [each for each in range(1, number + 1) if number % each == 0]
