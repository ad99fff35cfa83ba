"""How a model takes part in composition: what `compose` must know of it, as functions over its parts."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from composable.models.attention import Method
from composable.models.config import DecoderConfig
from composable.models.decoder import Decoder
from composable.models.init import InitRule, decoder_init
from composable.moe.config import MoEConfig
from composable.moe.layer import ALONE, MoE, Runtime
from composable.parallel.replicated import replicated
from composable.parallel.split import Costs, Stage, costs
from composable.parallel.tensor import tensor_parallel


@dataclass(frozen=True)
class Architecture:
    """A model that can be cut, spread and initialised.

    A part is called as `part(x, labels=, positions=, documents=)`, and one with experts with `indices=, scale=, step=,
    loads=` too: x are tokens [B, S] in the first stage and hidden states after it; the last stage gives the summed loss
    [], the others hidden states.
    """

    build: Callable[[Stage, Method, Runtime], nn.Module]
    """the part of a stage, with attention by the given method and experts where they run; called on the meta device"""
    blocks: Callable[[nn.Module], Sequence[nn.Module]]
    """the blocks of a part in order: units of recomputation, compilation and sharding"""
    tensor: Callable[[nn.Module, DeviceMesh], None]
    """spreads a part over a tensor mesh, in place"""
    costs: Callable[[int], Costs]
    """sequence length -> what the parts cost, by which they are dealt to stages"""
    init: InitRule
    """parameter name -> how it starts"""
    width: int
    """D of the hidden states [B, S, D] between parts"""
    moe: MoEConfig | None = None
    """of the layers that have experts"""
    experts: Callable[[nn.Module], Mapping[int, MoE]] = lambda part: {}
    """of a part: its layers with experts, by global index"""
    sequence_cut: bool = True
    """hidden states between parts are cut along the sequence over the tensor ranks, [B, S / tp, D]; if not, each rank
    has all of them"""
    partial_over_tensor: Callable[[nn.Module], Sequence[nn.Parameter]] = replicated
    """of a part on a tensor mesh: the parameters whose gradients are of the rank's own tokens or heads, to be summed
    over the tensor ranks; those of the others are complete"""


def decoder_architecture(config: DecoderConfig, dtype: torch.dtype, loss_chunk: int = 0) -> Architecture:
    """Our decoder.

    Args:
        dtype: of its parameters.
        loss_chunk: tokens of which logits exist at once; 0: all.
    """

    def build(stage: Stage, method: Method, runtime: Runtime = ALONE) -> nn.Module:
        part = Decoder(config, layers=stage.layers, first=stage.first, last=stage.last, method=method, runtime=runtime)
        for parameter in part.parameters():  # `part.to(dtype)` would round buffers too
            parameter.data = parameter.data.to(dtype)
        part.loss_chunk = loss_chunk
        return part

    def blocks(part: nn.Module) -> Sequence[nn.Module]:
        assert isinstance(part, Decoder)
        return part.blocks

    def tensor(part: nn.Module, mesh: DeviceMesh) -> None:
        assert isinstance(part, Decoder)
        tensor_parallel(part, mesh)

    def experts(part: nn.Module) -> Mapping[int, MoE]:
        return {module.layer: module for module in part.modules() if isinstance(module, MoE)}

    return Architecture(
        build,
        blocks,
        tensor,
        lambda seq_len: costs(config, seq_len),
        decoder_init(config),
        config.dim,
        config.moe,
        experts,
    )
