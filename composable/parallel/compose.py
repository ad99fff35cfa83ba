"""The one place that knows in which order the parts of parallelism are applied to a model."""

from collections.abc import Sequence

import torch
from torch import nn

from composable.mesh import Mesh
from composable.models.init import InitRule, materialise
from composable.parallel.config import Parallel
from composable.parallel.data import shard_data
from composable.parallel.recompute import recompute


def compose(
    model: nn.Module,
    mesh: Mesh,
    parallel: Parallel,
    *,
    blocks: Sequence[nn.Module],
    init: InitRule,
    seed: int,
    device: torch.device,
) -> nn.Module:
    """Recompute, compile, shard over data ranks; then give every rank its part of the initial weights.

    Args:
        model: built on the meta device; changed in place and returned.
        mesh: resolved; its world is the default process group.
        blocks: the model's blocks in order.
        init: how each parameter starts.
        device: of this rank.

    Raises:
        ValueError: a combination that does not work, with the reason, on every rank.
    """
    parallel.check(mesh, len(blocks))
    recompute(blocks, parallel.recompute)
    if parallel.compile:
        compile_blocks(model, blocks)
    shard_data(model, blocks, mesh, mesh.views(device.type), parallel)
    materialise(model, torch.device("cpu") if parallel.offload else device, init, seed)
    return model


def compile_blocks(model: nn.Module, blocks: Sequence[nn.Module]) -> None:
    """Compile every block's forward, and the loss of a model that has one as `model.loss`, in place: names stay."""
    for block in blocks:
        block.forward = torch.compile(block.forward)
    loss = getattr(model, "loss", None)
    if callable(loss):
        model.loss = torch.compile(loss)  # type: ignore[assignment]
