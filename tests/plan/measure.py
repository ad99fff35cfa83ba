"""What a real run holds, and how its experts are loaded: what the memory model is measured against."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import composable.moe.experts
from composable.data.loader import accumulation
from composable.moe.layer import MoE
from composable.observe.live import LiveMemory
from composable.optim.local import local
from composable.optim.optimizers import build_optimizer
from composable.recipe import Recipe
from composable.step import train_step
from composable.train import build_model
from composable.verify import micro_batch


@contextlib.contextmanager
def watched_loads() -> Iterator[dict[int, list[float]]]:
    """Layer -> rows that each of its dispatches brought to this rank's experts, over an even share."""
    loads: dict[int, list[float]] = {}
    layers: list[int] = []
    forward, dispatch = MoE.forward, composable.moe.experts.dispatch

    def noted(module: MoE, *args: Any, **kwargs: Any) -> Tensor:
        layers.append(module.layer)
        return forward(module, *args, **kwargs)

    def watched(x: Tensor, routing: Any, *rest: Any) -> Any:
        rows, counts, record = dispatch(x, routing, *rest)
        loads.setdefault(layers[-1], []).append(sum(counts) / routing.ids.numel())
        return rows, counts, record

    MoE.forward, composable.moe.experts.dispatch = noted, watched  # type: ignore[assignment]
    try:
        yield loads
    finally:
        MoE.forward, composable.moe.experts.dispatch = forward, dispatch  # type: ignore[method-assign]


def measure(recipe: Recipe, steps: int = 2) -> dict[str, Any]:
    """Of this rank on the default process group: bytes at most in the steps after the first, bytes of parameters,
    gradients and optimizer state, and the mean load of the experts in each layer.

    Args:
        recipe: its mesh is resolved here.
    """
    recipe, _ = recipe.resolve(dist.get_world_size())
    data, mesh = recipe.data, recipe.mesh
    count, mine = accumulation(data, mesh.data_ranks), mesh.data_rank(dist.get_rank())
    found: dict[str, Any] = {}
    with LiveMemory() as live, watched_loads() as loads:
        model = build_model(recipe, torch.device("cpu"))
        optimizer = build_optimizer(model.parts, recipe.optimizer, only=model.named)
        update = optimizer.step

        def noted() -> None:
            grads = [p.grad for p in model.parameters if p.grad is not None]
            found["gradients"] = sum(local(g).numel() * g.element_size() for g in grads)
            update()

        optimizer.step = noted  # type: ignore[method-assign,assignment]
        for step in range(1, steps + 1):
            chosen = range(mine, mesh.data_ranks * count, mesh.data_ranks)
            batches = [micro_batch(step, m, data, recipe.model.vocab_size) for m in chosen]
            if step > 1:
                live.restart()
                loads.clear()
            train_step(model, optimizer, batches, step=step, lr=1e-3, max_norm=recipe.optimizer.max_norm)
        found |= {"peak": live.peak, "load": {layer: sum(seen) / len(seen) for layer, seen in loads.items()}}
        found["parameters"] = sum(local(p).numel() * p.element_size() for p in model.parameters)
        state = [x for each in optimizer.state.values() for x in each.values() if isinstance(x, Tensor)]
        found["optimizer"] = sum(local(x).numel() * x.element_size() for x in state)
    return found
