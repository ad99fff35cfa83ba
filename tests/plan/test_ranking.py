"""The planner's first choice against real runs of all legal layouts of 8 ranks, in which sleeps stand for the devices.

Each rank makes real steps with tiny tensors, and sleeps for every matrix product and every collective as long as a
stated device and its links would take: `CLUSTER`. So two cores can stand for eight devices. Transfers between stages
of a pipeline are real ones, and take next to nothing.
"""

import math
import statistics
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.flop_counter import flop_registry

from composable._torch import DispatchMode
from composable.data.loader import DataConfig, accumulation
from composable.mesh import Mesh
from composable.models.config import DecoderConfig
from composable.observe.traffic import collective_call
from composable.optim.optimizers import build_optimizer
from composable.plan.devices import Cluster, cluster
from composable.plan.links import Span, seconds
from composable.plan.search import Space, layouts, search, work_out
from composable.plan.timing import ATTENTION, ATTENTION_BACKWARD
from composable.plan.traffic import Flow
from composable.recipe import Recipe
from composable.step import train_step
from composable.train import build_model
from composable.verify import micro_batch

MODEL = DecoderConfig(vocab_size=64, dim=64, layers=4, heads=4, kv_heads=4, head_dim=16, ffn=192)
RECIPE = Recipe(
    "sleeps", MODEL, dtype="float64", mesh=Mesh(), data=DataConfig(seq_len=32, global_batch=16, micro_batch=1)
)
FLOPS = 6 * 4 * (4 * 64 * 64 + 3 * 64 * 192) * 16 * 32  # of a step, nearly
SECONDS = 4.0
"""that a step takes on eight devices that never wait: so long that what two cores really do counts little"""
CLUSTER = cluster(
    "cpu",
    (
        f"float64={FLOPS / 8 / SECONDS:.0f}",
        "memory_bandwidth=1000TB",  # other operators take nothing
        "inside=10000000",
        "across=10000000",
        "inside_latency=4000us",
        "across_latency=4000us",
        "per_node=8",
    ),
)
SPACE = Space(micro_batch=(1,), data=("ddp", "zero3"), recompute=("none",))


class Sleeping(DispatchMode):
    """Sleeps as long as a device of CLUSTER computes and exchanges."""

    def __init__(self, nodes: Cluster) -> None:
        super().__init__()
        self.nodes = nodes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, torch.distributed.tensor.DTensor) for kind in types):
            return NotImplemented
        call = collective_call(func, args)
        if call is not None and call.kind not in ("send", "receive", "barrier"):
            ranks = dist.get_world_size(call.group)
            time.sleep(seconds(Flow("", call.kind, "", ranks, 1, call.bytes, False), Span(1, ranks), self.nodes))
        out = func(*args, **(kwargs or {}))
        count = flop_registry.get(func._overloadpacket)
        if count is not None:
            time.sleep(self._products(func, count(*args, **(kwargs or {}), out_val=out)))
        return out

    def _products(self, func: Any, flops: int) -> float:
        rate = self.nodes.device.float64
        if "attention" not in func.name():
            return flops / rate
        # torch counts all scores, a kernel computes those below the diagonal; its backward as many products as planned
        share = (RECIPE.data.seq_len + 1) / (2 * RECIPE.data.seq_len)
        share *= ATTENTION_BACKWARD / 2.5 if "backward" in func.name() else 1
        return flops * share / rate / ATTENTION


def measured(recipe: Recipe) -> float:
    """Seconds of this rank's step, the second one."""
    model = build_model(recipe, torch.device("cpu"))
    optimizer = build_optimizer(model.parts, recipe.optimizer, only=model.named)
    data, mesh = recipe.data, recipe.mesh
    count, mine = accumulation(data, mesh.data_ranks), mesh.data_rank(dist.get_rank())
    for step in (1, 2):
        chosen = range(mine, mesh.data_ranks * count, mesh.data_ranks)
        batches = [micro_batch(step, m, data, MODEL.vocab_size) for m in chosen]
        if step == 1:
            train_step(model, optimizer, batches, step=step, lr=1e-3, max_norm=1.0)
            continue
        dist.barrier()
        began = time.monotonic()
        with Sleeping(CLUSTER):
            train_step(model, optimizer, batches, step=step, lr=1e-3, max_norm=1.0)
    return time.monotonic() - began


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_first_choice_is_within_a_tenth_of_the_best_of_all_legal_layouts(ranks):
    plan = search(RECIPE, 8, CLUSTER, space=SPACE, top=3)
    found = {}
    for layout in layouts(RECIPE, 8, CLUSTER, SPACE):
        try:
            one = work_out(layout, RECIPE, 8, CLUSTER)
        except ValueError:
            continue
        found[one.layout] = (max(ranks(8, measured, one.recipe)), one.time.total)
    assert len(found) >= 12
    best = min(took for took, _ in found.values())
    told = sorted((took, predicted, str(layout)) for layout, (took, predicted) in found.items())
    assert found[plan.best[0].layout][0] < 1.1 * best, told
    off = [abs(math.log(took / predicted)) for took, predicted in found.values()]
    assert statistics.median(off) < 0.1, told
