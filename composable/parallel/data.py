"""Data parallelism: ddp, zero1, zero2 and zero3 are one mechanism, FSDP2, told what to keep and when to exchange.

Every reduction is a SUM: the loss is divided by the step's valid tokens before the backward pass.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from composable._torch import take_empty_gradients
from composable.mesh import Mesh, MeshViews
from composable.moe.experts import Experts
from composable.optim.local import local
from composable.parallel.config import DataKind, Parallel
from composable.parallel.expert import shard_dimension


def shard_data(
    model: nn.Module,
    blocks: Sequence[nn.Module],
    mesh: Mesh,
    views: MeshViews,
    parallel: Parallel,
    experts: Sequence[Experts] = (),
) -> None:
    """Spread parameters over data and context ranks, in place; a model of one such rank without a cast stays as it is.

    Args:
        model: on the meta device or not; its parameters become DTensors.
        blocks: its blocks in order; `parallel.unit` of them are gathered together.
        experts: in its blocks. Those whose ranks are not those of the blocks are units of their own.
    """
    cast = parallel.precision != "none" or parallel.offload
    if mesh.tp == mesh.ep == 1:
        experts = ()
    apart = bool(experts) and (mesh.dp_replicate * mesh.efsdp > 1 or cast)
    # Where experts are sharded the rest is too, over however few ranks: pipelines exchange all of a stage or nothing.
    if not (mesh.data_ranks * mesh.cp > 1 or cast or apart):
        return
    accelerated = views.parameters.device_type != "cpu"
    policy = MixedPrecisionPolicy()
    if parallel.precision != "none":
        # Inputs are not cast: cosines and sines in bfloat16 are wrong by as much as they are large at far positions.
        policy = MixedPrecisionPolicy(
            getattr(torch, parallel.precision), getattr(torch, parallel.reduce), cast_forward_inputs=False
        )
    options: dict[str, Any] = {
        "mp_policy": policy,
        "offload_policy": CPUOffloadPolicy(pin_memory=accelerated) if parallel.offload else OffloadPolicy(),
        "reshard_after_forward": None if parallel.data == "zero3" else False,
    }
    if apart:
        over = _mesh_of(views.expert, "efsdp", parallel)
        for module in experts:
            place = partial(shard_dimension, ranks=over["efsdp"].size())
            fully_shard(module, mesh=over, shard_placement_fn=place, **options)
    else:  # each rank has its own, and nothing is exchanged
        options["ignored_params"] = {parameter for module in experts for parameter in module.parameters()}
    options["mesh"] = _mesh_of(views.parameters, "fsdp", parallel)
    if not all(local(parameter).numel() for parameter in model.parameters()):
        take_empty_gradients()
    if parallel.unit:
        for start in range(0, len(blocks), parallel.unit):
            fully_shard(list(blocks[start : start + parallel.unit]), **options)
    fully_shard(model, **options)
    for unit in _sharded(model):
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)


def _mesh_of(view: DeviceMesh, name: str, parallel: Parallel) -> DeviceMesh:
    """The ranks that share parameters, and those that have copies of them."""
    return view["dp_replicate", name] if view["dp_replicate"].size() > 1 or parallel.data == "ddp" else view[name]


def _sharded(model: nn.Module) -> list[FSDPModule]:
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def begin_micro_batch(model: nn.Module, kind: DataKind, *, last: bool) -> None:
    """Before the forward pass of a micro-batch: say what is exchanged after its backward pass.

    Args:
        last: it is the last of the step, after which every gradient is complete and sharded like its parameter.
    """
    if not isinstance(model, FSDPModule):
        return
    model.set_is_last_backward(last)
    if kind in ("ddp", "zero1"):
        model.set_requires_gradient_sync(last)
    else:
        model.set_requires_all_reduce(last)
    model.set_reshard_after_backward(last or kind == "zero3")


def reshard(model: nn.Module) -> None:
    """Free gathered parameters, which a forward pass without a backward pass leaves: stale once weights change."""
    for module in _sharded(model):
        module.reshard()
