"""Why a layout: the way that leads to it, what stands against its neighbours, what would help where nothing fits."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

from composable.checkpoint.budget import size_text
from composable.mesh import Mesh
from composable.plan.devices import Cluster
from composable.plan.layout import Layout
from composable.plan.memory import Planned, RankMemory, memory, worst
from composable.plan.search import LONG, Candidate, Plan, Space, search, work_out

MOST_DEVICES = 1 << 16


@dataclass(frozen=True)
class Neighbour:
    """A layout that differs from another in one thing, and what came of it."""

    change: str
    verdict: str


def way(recipe: Planned, world: int, cluster: Cluster, load: float = 1.0) -> list[str]:
    """The questions that lead to a kind of layout, in their order, with this recipe's answers."""
    said: list[str] = []
    limit = size_text(cluster.device.usable)
    least = dataclasses.replace(Layout.of(recipe), micro_batch=1, recompute="full", offload=False)
    alone = _held(dataclasses.replace(least, mesh=Mesh(dp_shard=1), data="ddp"), recipe, 1, cluster, load, batch=1)
    if isinstance(alone, RankMemory) and alone.total <= cluster.device.usable:
        said.append(
            f"one device holds all: {_states(alone)}, {size_text(alone.total)} with a micro-batch of 1, of {limit}: "
            "data parallelism is enough"
        )
    else:
        took = f"{size_text(alone.total)} with a micro-batch of 1" if isinstance(alone, RankMemory) else alone
        states = f"{_states(alone)}; " if isinstance(alone, RankMemory) else ""
        said.append(f"one device does not hold it: {states}{took}, of {limit}: shard it")
        said += _sharded(least, recipe, world, cluster, load)
    if (moe := recipe.model.moe) is not None:
        said.append(
            f"{moe.experts} experts, of which a token goes to {moe.top_k}: ep shares them, so each rank multiplies "
            "more rows of fewer experts; within a node as far as that goes"
        )
    if recipe.data.seq_len >= LONG:
        said.append(f"rows of {recipe.data.seq_len:,} tokens: cp cuts them where one row takes too much")
    if recipe.data.global_batch < world:
        said.append(
            f"a global batch of {recipe.data.global_batch} rows is less than {world} devices: more than "
            f"{world // recipe.data.global_batch} must share a row, by tp, cp and pp"
        )
    return said


def _sharded(least: Layout, recipe: Planned, world: int, cluster: Cluster, load: float) -> Iterator[str]:
    limit = cluster.device.usable
    inside = min(cluster.per_node, world)
    for what, mesh in (
        (f"sharded over all {world} devices (zero3)", Mesh(dp_shard=world)),
        (f"with tensor parallelism over {inside} devices of a node too", Mesh(dp_shard=world // inside, tp=inside)),
    ):
        held = _held(dataclasses.replace(least, mesh=mesh, data="zero3"), recipe, world, cluster, load, batch=world)
        if isinstance(held, str):
            yield f"{what}: {held}"
            continue
        largest = max(held.parts, key=lambda part: held.parts[part])
        fits = held.total <= limit
        yield (
            f"{what} it takes {size_text(held.total)} with a micro-batch of 1, most of it {largest} "
            f"({size_text(held.parts[largest])}): {'fits' if fits else 'does not fit'}"
        )
        if fits:
            return
    yield "the layers of one stage are fewer: a pipeline"


def _held(layout: Layout, recipe: Planned, world: int, cluster: Cluster, load: float, batch: int) -> RankMemory | str:
    """Of a layout with a global batch that it divides; or why it is not legal."""
    recipe = dataclasses.replace(recipe, data=dataclasses.replace(recipe.data, global_batch=batch))
    try:
        resolved, _ = layout.put_into(recipe).resolve(world)
        return worst(memory(resolved, accelerator=cluster.device.name != "cpu", load=load))
    except ValueError as error:
        return str(error)


def _states(held: RankMemory) -> str:
    sizes = (held.parameters, held.gradients, held.optimizer)
    return f"weights, gradients and optimizer state take {size_text(sum(sizes))}"


def neighbours(best: Candidate, recipe: Planned, world: int, cluster: Cluster, load: float = 1.0) -> list[Neighbour]:
    """What stands against the layouts next to the best one: a rule, memory, or time."""
    found = []
    for change, layout in _next_to(best.layout, recipe, cluster):
        try:
            other = work_out(layout, recipe, world, cluster, load)
        except ValueError as error:
            found.append(Neighbour(change, f"not legal: {error}"))
            continue
        over = other.worst.total - cluster.device.usable
        slower = other.time.total / best.time.total - 1
        if over > 0:
            largest = max(other.worst.parts, key=lambda part: other.worst.parts[part])
            found.append(
                Neighbour(change, f"does not fit: {size_text(other.worst.total)}, most of it {largest}")
            )  # fmt: skip
        else:
            found.append(Neighbour(change, f"{abs(slower):.1%} {'slower' if slower > 0 else 'faster'}: {_cost(other)}"))
    return found


def _cost(candidate: Candidate) -> str:
    """What a step of it mostly waits for."""
    time = candidate.time
    waits = {**time.waited, "bubble": time.bubble}
    most = max(waits, key=lambda each: waits[each], default="")
    if not most or waits[most] < 0.02 * time.total:
        return f"computes for {time.compute / time.total:.0%} of the step"
    return f"{most} {waits[most] / time.total:.0%} of the step"


def _next_to(layout: Layout, recipe: Planned, cluster: Cluster) -> Iterator[tuple[str, Layout]]:
    """Half and twice each degree that is in use or could be, paid for by dp_shard; the other choices one by one."""
    mesh = layout.mesh
    for name in ("tp", "pp", "cp", "ep"):
        degree = getattr(mesh, name)
        if name == "ep" and recipe.model.moe is None:
            continue
        if name == "cp" and degree == 1 and recipe.data.seq_len < LONG:
            continue
        for other in sorted({max(degree // 2, 1), degree * 2} - {degree}):
            if name == "tp" and other > cluster.per_node:
                continue
            changed = dataclasses.replace(mesh, **{name: other}, dp_shard=-1, dp_replicate=1)
            if name == "tp" and mesh.etp > 1:
                changed = dataclasses.replace(changed, etp=other)
            kind = "zero1" if layout.data == "ddp" else layout.data
            yield f"{name} {other}", dataclasses.replace(layout, mesh=changed, data=kind)
    for micro_batch in sorted({max(layout.micro_batch // 2, 1), layout.micro_batch * 2} - {layout.micro_batch}):
        yield f"micro-batch {micro_batch}", dataclasses.replace(layout, micro_batch=micro_batch)
    for recompute in ("none", "selective", "full"):
        if recompute != layout.recompute:
            yield f"recompute {recompute}", dataclasses.replace(layout, recompute=recompute)
    if mesh.dp_shard > 1:
        for data in ("zero1", "zero2", "zero3"):
            if data != layout.data:
                yield data, dataclasses.replace(layout, data=data)


def remedies(recipe: Planned, world: int, cluster: Cluster, space: Space, load: float = 1.0) -> list[str]:
    """What to change where no layout fits: offload, or more devices, the fewest that do by doubling."""
    said = []
    if not space.offload:
        with_host = search(recipe, world, cluster, space=dataclasses.replace(space, offload=True), top=1, load=load)
        if with_host.best:
            said.append(f"with --offload it fits: {_in_short(with_host)}")
    devices = world * 2
    while devices <= MOST_DEVICES:
        batch = recipe.data.global_batch
        larger = dataclasses.replace(
            recipe, data=dataclasses.replace(recipe.data, global_batch=batch if batch % devices == 0 else devices)
        )
        more = search(larger, devices, cluster, space=space, top=1, load=load)
        if more.best:
            said.append(f"on {devices} devices it fits: {_in_short(more)}")
            break
        devices *= 2
    if not said:
        said.append(
            f"nothing that is tried fits, up to {MOST_DEVICES:,} devices: make micro-batch, rows or model smaller"
        )
    return said


def _in_short(plan: Plan) -> str:
    best = plan.best[0]
    return f"{best.layout} ({size_text(best.worst.total)} a device)"
