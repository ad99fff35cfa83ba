"""Initial weights as a pure function of (seed, name, element): the same in every layout and on every device.

Twelve 16-bit uniforms are drawn for an element from a counter-based hash and summed (Irwin-Hall): a normal variate up
to an excess kurtosis of -0.1 and cut at 6 standard deviations. Sums of integers are exact, where the logarithms and
cosines of other methods differ in the last bit between devices, and between the middle and the end of a vector loop.
"""

import hashlib
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

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
        if name.endswith(".bias"):
            return Init()
        if name.endswith("norm.weight"):
            return Init(mean=1.0)
        if name.endswith(("o_proj.weight", "down_proj.weight")):
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


def _mix(x: Tensor) -> Tensor:
    """The finaliser of SplitMix64 (Steele et al. 2014), on int64 that wraps around."""
    for shift, factor in ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15)):
        x = (x ^ _shift_right(x, shift)) * factor
    return x ^ _shift_right(x, 31)


def _shift_right(x: Tensor, bits: int) -> Tensor:
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _variates(index: Tensor, key: int) -> Tensor:
    """Twelve uniforms on 0..65535 an index, summed and centred: int64, in units of 2**-17 standard deviations."""
    total = torch.full_like(index, -12 * 65535)
    for draw in range(3):
        bits = _mix((index * 3 + draw) * -0x61C8864680B583EB + key)
        for shift in (0, 16, 32, 48):
            total += 2 * ((bits >> shift) & 0xFFFF)
    return total


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
