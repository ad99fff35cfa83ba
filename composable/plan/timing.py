"""How long a step takes: computation by roofline, what is waited for between ranks, and the bubble of a pipeline.

Each matrix product takes the longer of its FLOPs at what the device achieves and its bytes at the memory's bandwidth;
other operators take their bytes. Exchanges that computation waits for add up; those that run beside it cost what is
left over. A model of the ranks' means: no jitter, no contention between exchanges, no time of the host.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from composable.data.loader import accumulation
from composable.models.count import flops_per_token
from composable.parallel.compose import split
from composable.parallel.config import recompute_every
from composable.parallel.split import Stage
from composable.plan.bubble import Event, Simulation, StageCost, simulate
from composable.plan.devices import Cluster, Device
from composable.plan.layers import Sizes
from composable.plan.links import seconds, span
from composable.plan.memory import ITEM, Planned
from composable.plan.products import Work, block_work, head_work
from composable.plan.shards import stage_units
from composable.plan.stage import stage_tape
from composable.plan.traffic import Flow, traffic

KERNELS = 0.7
"""share of what a tuned matrix product achieves on an accelerator that those of a model do, among other kernels and at
the clocks of a loaded device: assumed. torchtitan's report (tests/plan/test_anchors.py), at 500 of 700 W, means 0.5"""
ATTENTION = 0.6
"""share of what matrix products achieve that a fused attention kernel reaches: assumed, FlashAttention-2 reports 0.5 to
0.73 of an A100's peak (arXiv:2307.08691)"""
ATTENTION_BACKWARD = 2.5
"""FLOPs of a fused attention's backward pass over its forward pass: five products to two"""
FUSED = 0.5
"""share of the bytes of operators between products that is left where they are compiled: assumed"""
BACKWARD = 2 / 3
"""of the computation of a micro-batch"""
REDUCE = "reduce gradients"
UPDATE_BYTES = {"adamw": 7, "sgd": 5}
"""numbers that an optimizer's update reads and writes for each one that it updates"""


@dataclass(frozen=True)
class StepTime:
    """One step. Seconds; of the slowest rank of a pipeline."""

    compute: float
    """products and other operators, recomputation included"""
    waited: Mapping[str, float]
    """purpose of an exchange -> what computation waits for it; of parameters and gradients what nothing hides"""
    hidden: float
    """exchanges of parameters and gradients that run beside computation"""
    bubble: float
    """waiting for other stages"""
    update: float
    """of the optimizer"""
    tokens: int
    """of the step, over all ranks"""
    events: tuple[Event, ...]
    """of one pass of a pipeline, by rank, in time"""
    ideal: float
    """the FLOPs of the model (`count.flops_per_token`) at the devices' peak"""

    @property
    def total(self) -> float:
        """Of the step."""
        return self.compute + sum(self.waited.values()) + self.bubble + self.update

    @property
    def tokens_per_second(self) -> float:
        """Over all ranks."""
        return self.tokens / self.total

    @property
    def mfu(self) -> float:
        """Model FLOP/s utilisation."""
        return self.ideal / self.total


@dataclass(frozen=True)
class _Stage:
    """Of one micro-batch: seconds."""

    forward: float
    backward_input: float
    backward_weight: float

    @property
    def all(self) -> float:
        return self.forward + self.backward_input + self.backward_weight


def step_time(
    recipe: Planned, cluster: Cluster, *, load: float | Mapping[int, float] = 1.0, ranks: Sequence[int] | None = None
) -> StepTime:
    """Of a step of a recipe on a cluster.

    Args:
        recipe: resolved.
        load: rows that the experts of the fullest rank get, over an even share; or of each layer that has experts.
        ranks: of the pipeline, those whose exchanges are looked at; all if None. The others are taken to exchange what
            the nearest of them does for each of its layers.

    Raises:
        ValueError: a device that has no peak for the dtype.
    """
    mesh = recipe.mesh
    stages, owners = split(recipe.architecture, mesh, recipe.pipeline, recipe.data.seq_len)
    count = accumulation(recipe.data, mesh.data_ranks)
    costs = [_compute(recipe, cluster, stage, load) for stage in stages]
    asked = range(mesh.pp) if ranks is None else sorted(set(ranks))
    accelerator = cluster.device.name != "cpu"
    flows = {
        rank: traffic(recipe, rank * mesh.stage_ranks, accelerator=accelerator, ranks_per_node=cluster.per_node)
        for rank in asked
    }
    waits: list[dict[str, float]] = []
    for number, stage in enumerate(stages):
        rank = min(asked, key=lambda each: abs(each - owners[number]))
        blocks = sum(len(s.layers) for s, owner in zip(stages, owners, strict=True) if owner == rank)
        share = len(stage.layers) / blocks / count if blocks else 0.0
        waited = _waited(recipe, cluster, flows[rank], rank)
        waits.append({purpose: share * time for purpose, time in waited.items()})
    data = {rank: _beside(recipe, cluster, flows[rank], rank) for rank in asked}
    tokens = recipe.data.global_batch * recipe.data.seq_len
    peak = cluster.device.peak(_dtype(recipe)) * mesh.world
    ideal = flops_per_token(recipe.model, recipe.data.seq_len) * tokens / peak
    found = []
    for rank in asked:
        mine = [number for number, owner in enumerate(owners) if owner == rank]
        compute = count * sum(costs[number].all for number in mine)
        waited = {purpose: count * time for purpose, time in _added(waits[number] for number in mine).items()}
        hidden, left = _left_over(recipe, data[rank], cluster.overlap * compute, count)
        update = _update(recipe, cluster, [stages[number] for number in mine])
        found.append((compute + sum(waited.values()), compute, _added((waited, left)), hidden, update))
    busy, compute, waited, hidden, update = max(found, key=lambda each: each[0])
    bubble, events = 0.0, tuple[Event, ...]()
    if mesh.pp > 1:
        one = _pipeline(recipe, cluster, costs, waits, count)
        whole, events = one.time * (count // (recipe.pipeline.micro_batches or count)), one.events
        bubble = max(whole - busy, 0.0)
    return StepTime(compute, {p: t for p, t in waited.items() if t}, hidden, bubble, update, tokens, events, ideal)


def _added(times: Iterable[Mapping[str, float]]) -> dict[str, float]:
    found: dict[str, float] = {}
    for each in times:
        for purpose, time in each.items():
            found[purpose] = found.get(purpose, 0.0) + time
    return found


def least_compute(recipe: Planned, cluster: Cluster, load: float | Mapping[int, float] = 1.0) -> float:
    """Seconds of one micro-batch through the whole model on one rank of its tensor, context and expert ranks, without
    recomputation: no pipeline over them is faster than an even share of it."""
    whole = Stage(True, range(recipe.model.layers), True)
    return _compute(recipe, cluster, whole, load, recompute="none").all


def _dtype(recipe: Planned) -> torch.dtype:
    name = recipe.dtype if recipe.parallel.precision == "none" else recipe.parallel.precision
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def _compute(
    recipe: Planned, cluster: Cluster, stage: Stage, load: float | Mapping[int, float], recompute: str = ""
) -> _Stage:
    """Of a stage, one micro-batch: what its own device does."""
    device, parallel, data = cluster.device, recipe.parallel, recipe.data
    recompute = recompute or parallel.recompute
    item = ITEM[recipe.dtype if parallel.precision == "none" else parallel.precision]
    sizes = Sizes(
        recipe.model,
        recipe.mesh,
        data.micro_batch,
        data.seq_len,
        item,
        data.document_mask,
        device.name != "cpu",
        parallel.context,
        load,
    )
    rate = device.peak(_dtype(recipe)) * device.achievable * (1.0 if device.name == "cpu" else KERNELS)
    every = recompute_every(recompute)
    units = stage_units(recipe.model, recipe.mesh, parallel, stage, keeps=False)
    tape, _ = stage_tape(sizes, parallel, stage, units)
    moved = sum(2 * each.size for each in tape.operators if not each.product) / device.memory_bandwidth
    moved *= FUSED if parallel.compile else 1.0
    again, work, products = 0.0, Work(), 0.0
    for index, layer in enumerate(stage.layers):
        block = block_work(sizes, layer)
        time = _products(block, rate, device, item)
        products, work = products + time, work + block
        if every and index % every == 0 and recompute != "selective":
            again += time + block.attention / rate / ATTENTION + moved / max(len(stage.layers), 1)
    if recompute == "selective":
        again = moved
    if stage.last:
        products += _products(head_work(sizes), rate, device, item)
    attention = work.attention / rate / ATTENTION
    forward = products + attention + moved
    return _Stage(forward, products + ATTENTION_BACKWARD * attention + 2 * moved + again, products)


def _products(work: Work, rate: float, device: Device, item: int) -> float:
    return sum(max(each.flops / rate, each.bytes(item) / device.memory_bandwidth) for each in work.products)


def _waited(recipe: Planned, cluster: Cluster, flows: Sequence[Flow], rank: int) -> dict[str, float]:
    """Purpose -> seconds of a step that computation stands still for; sends between stages are not among them."""
    found: dict[str, float] = {}
    first = rank * recipe.mesh.stage_ranks
    for flow in flows:
        if not flow.hides:
            time = seconds(flow, span(flow, recipe.mesh, first, cluster.per_node), cluster)
            found[flow.purpose] = found.get(flow.purpose, 0.0) + time
    return found


def _beside(recipe: Planned, cluster: Cluster, flows: Sequence[Flow], rank: int) -> dict[str, tuple[float, int]]:
    """Purpose -> (seconds of a step, calls) of exchanges of parameters and gradients."""
    found: dict[str, tuple[float, int]] = {}
    first = rank * recipe.mesh.stage_ranks
    for flow in flows:
        if flow.hides and flow.kind not in ("send", "receive"):
            time = seconds(flow, span(flow, recipe.mesh, first, cluster.per_node), cluster)
            before = found.get(flow.purpose, (0.0, 0))
            found[flow.purpose] = (before[0] + time, before[1] + flow.count)
    return found


def _left_over(
    recipe: Planned, data: Mapping[str, tuple[float, int]], compute: float, count: int
) -> tuple[float, dict[str, float]]:
    """(hidden, purpose -> what is left) of exchanges beside `compute` seconds of computation.

    All have one stream; the first gather and the last reduction have nothing beside them. Of ddp and zero1 gradients
    are reduced in the last backward pass, in a pipeline after it.
    """
    left: dict[str, float] = {}
    room = compute
    for purpose in sorted(data, reverse=True):  # reductions first: they have the narrower window
        time, calls = data[purpose]
        window = room
        if purpose == REDUCE:
            late = recipe.parallel.data in ("ddp", "zero1")
            window = 0.0 if recipe.mesh.pp > 1 else min(room, compute * BACKWARD / (count if late else 1))
        alone = time / calls if window else time
        hidden = min(time - alone, window)
        left[purpose] = time - hidden
        room -= hidden
    return sum(time for time, _ in data.values()) - sum(left.values()), left


def _update(recipe: Planned, cluster: Cluster, stages: Sequence[Stage]) -> float:
    elements = sum(stage_units(recipe.model, recipe.mesh, recipe.parallel, s, keeps=False).elements for s in stages)
    moved = elements * UPDATE_BYTES[recipe.optimizer.kind] * ITEM[recipe.dtype]
    if recipe.parallel.offload:  # gradients down, parameters up; the host's memory is taken to be as fast as the link
        return moved / cluster.host_link
    return moved / cluster.device.memory_bandwidth


def _pipeline(
    recipe: Planned,
    cluster: Cluster,
    costs: Sequence[_Stage],
    waits: Sequence[Mapping[str, float]],
    count: int,
) -> Simulation:
    """One pass."""
    mesh, pipeline = recipe.mesh, recipe.pipeline
    again = recompute_every(recipe.parallel.recompute)
    told = []
    for cost, wait in zip(costs, waits, strict=True):
        waited, parts = sum(wait.values()), 3 if again else 2
        told.append(
            StageCost(
                cost.forward + waited / parts,
                cost.backward_input + waited * (parts - 1) / parts,
                cost.backward_weight,
            )
        )
    item = ITEM[recipe.dtype if recipe.parallel.precision == "none" else recipe.parallel.precision]
    hidden = recipe.data.micro_batch * recipe.data.seq_len // (mesh.cp * mesh.tp) * recipe.model.dim * item
    near = 2 * mesh.stage_ranks <= cluster.per_node
    link = cluster.inside if near else cluster.across
    transfer = hidden / link + (cluster.inside_latency if near else cluster.across_latency)
    return simulate(
        pipeline,
        mesh.pp,
        pipeline.micro_batches or count,
        told,
        transfer=transfer,
        whole_blocks=recipe.parallel.whole_blocks,
    )
