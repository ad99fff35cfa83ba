"""The bytes of live tensors on a real run: what the memory model is measured against.

A dispatch mode sees every tensor that an operator gives, forward, backward and within collectives, and follows its
storage until that is freed or changes its size. Counted are the bytes of all distinct storages that are alive together;
not counted is what no operator gives: scratch memory within one kernel, gloo's own buffers, Python.
"""

import contextlib
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

import composable.moe.experts
from composable._torch import DispatchMode
from composable.data.loader import accumulation
from composable.moe.layer import MoE
from composable.optim.local import local
from composable.optim.optimizers import build_optimizer
from composable.recipe import Recipe
from composable.step import train_step
from composable.train import build_model
from composable.verify import micro_batch


class LiveBytes(DispatchMode):
    """Counts while it is entered; `peak` is the most at once since `restart`."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: dict[int, int] = {}
        """id of a storage -> its bytes"""
        self.watched: dict[int, weakref.ref] = {}
        self.now = self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Iterable[type], args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # its own operators on local tensors come here one by one
        out = func(*args, **(kwargs or {}))
        for each in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(each, Tensor) and each.device.type != "meta":
                self.see(each.untyped_storage())
        return out

    def see(self, storage: torch.UntypedStorage) -> None:
        key = id(storage)
        if key in self.sizes:
            return
        self.sizes[key] = storage.nbytes()
        self.watched[key] = weakref.ref(storage, lambda _, key=key: self.forget(key))
        self.add(storage.nbytes())

    def add(self, size: int) -> None:
        self.now += size
        self.peak = max(self.peak, self.now)

    def forget(self, key: int) -> None:
        self.now -= self.sizes.pop(key)
        del self.watched[key]

    def resized(self, storage: torch.UntypedStorage) -> None:
        key = id(storage)
        if key in self.sizes:
            before, self.sizes[key] = self.sizes[key], storage.nbytes()
            self.add(storage.nbytes() - before)

    def restart(self) -> None:
        self.peak = self.now

    def __enter__(self) -> "LiveBytes":
        self.resize = resize = torch.UntypedStorage.resize_

        def resized(storage: torch.UntypedStorage, size: int) -> Any:
            out = resize(storage, size)
            self.resized(storage)
            return out

        torch.UntypedStorage.resize_ = resized  # type: ignore[method-assign]
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        torch.UntypedStorage.resize_ = self.resize  # type: ignore[method-assign]
        super().__exit__(*error)


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
    with LiveBytes() as live, watched_loads() as loads:
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
