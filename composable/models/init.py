"""Initial weights as a pure function of (seed, name, element): the same in every layout and on every device.

Variates are sums of uniforms from a counter-based hash (`bits.sum_of_uniforms`).
"""

import hashlib
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from composable.bits import ODD, mix, sum_of_uniforms
from composable.checkpoint.shards import Box, local_box
from composable.models.config import DecoderConfig


@dataclass(frozen=True)
class Init:
    """How one tensor starts: a constant plus std times a standard normal variate."""

    mean: float = 0.0
    std: float = 0.0


InitRule = Callable[[str], Init]
"""parameter name -> how it starts"""


def decoder_init(config: DecoderConfig) -> InitRule:
    """Norms one, biases zero, matrices normal; those that write into the residual stream smaller (GPT-2, 2.3)."""

    def rule(name: str) -> Init:
        if name.endswith((".bias", "_bias")):
            return Init()
        if name.endswith("norm.weight"):
            return Init(mean=1.0)
        if name.endswith(("o_proj.weight", "down_proj.weight", "experts.down_proj")):
            return Init(std=config.init_std / math.sqrt(2 * config.layers))
        return Init(std=config.init_std)

    return rule


def initialise(named: Iterable[tuple[str, Tensor]], rule: InitRule, seed: int) -> None:
    """Fill tensors, or the local parts of DTensors, in place; a rank computes only what it holds."""
    with torch.no_grad():
        for name, tensor in named:
            init = rule(name)
            local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
            if init.std == 0:
                local.fill_(init.mean)
            else:
                _fill_normal(local, tensor.shape, local_box(tensor), init, _key(seed, name))


def materialise(model: nn.Module, device: torch.device, rule: InitRule, seed: int) -> None:
    """Give a model whose parameters were built on the meta device its memory and its initial weights.

    Buffers that have values keep them.

    Raises:
        ValueError: the model has buffers on the meta device, of which no rule says how they start.
    """
    buffers = dict(model.named_buffers())
    empty = [name for name, buffer in buffers.items() if buffer.is_meta]
    if empty:
        raise ValueError(
            f"no rule initialises the buffers {empty}: build them on a real device (parallel/foreign.py does), compute "
            "them from positions, or make them parameters"
        )
    model.to_empty(device=device)
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            buffer.copy_(buffers[name])
    initialise(model.named_parameters(), rule, seed)


def _key(seed: int, name: str) -> int:
    digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def _variates(index: Tensor, key: int) -> Tensor:
    """A normal variate for each index: int64, in units of 2**-17 standard deviations."""
    return sum_of_uniforms(torch.stack([mix((index * 3 + draw) * ODD + key) for draw in range(3)], dim=-1))


def _fill_normal(local: Tensor, shape: torch.Size, box: Box, init: Init, key: int, chunk: int = 1 << 20) -> None:
    if local.numel() == 0:
        return
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    index = torch.zeros((), dtype=torch.int64, device=local.device)
    for dim in range(1, len(shape)):
        steps = torch.arange(box.offsets[dim], box.offsets[dim] + box.sizes[dim], device=local.device) * strides[dim]
        index = index[..., None] + steps  # flat index within one row of dimension 0
    wide = torch.promote_types(local.dtype, torch.float32)
    rows = local.size(0) if local.ndim else 1
    view = local if local.ndim else local[None]
    first, stride = (box.offsets[0], strides[0]) if local.ndim else (0, 1)
    step = max(1, chunk // max(1, index.numel()))
    for start in range(0, rows, step):
        stop = min(rows, start + step)
        row = torch.arange(first + start, first + stop, device=local.device) * stride
        flat = row.view(-1, *[1] * index.ndim) + index
        view[start:stop] = (_variates(flat, key).to(wide) * (init.std * 2.0**-17) + init.mean).to(local.dtype)
