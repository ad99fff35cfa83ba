"""Random numbers as a pure function of (seed, step, layer, the token's index in the step): the same in every layout.

A counter-based hash in wrapping int64 arithmetic, so that recomputation, pipelines and shards of a sequence draw the
same numbers, and the step may be a tensor: a compiled router does not change with it.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from composable.bits import ODD, mix, sum_of_uniforms

Stream = Literal["jitter", "noise", "dropout"]

_STREAMS: dict[Stream, int] = {"jitter": 1, "noise": 2, "dropout": 3}


@dataclass(frozen=True)
class Draw:
    """Which numbers are drawn for which tokens."""

    seed: int
    step: int | Tensor
    """of the optimizer; a tensor is [] int64"""
    layer: int
    tokens: Tensor
    """[T] int64: each token's index among all of the step (sample, then position)"""


def uniform(draw: Draw, stream: Stream, columns: int, dtype: torch.dtype) -> Tensor:
    """[T, columns] uniform on (0, 1): odd multiples of 2**-24, exact in float32 and wider."""
    bits = _bits(draw, stream, columns, 1)[..., 0]
    return ((bits & 0x7FFFFF) * 2 + 1).to(dtype) * 2.0**-24


def gaussian(draw: Draw, stream: Stream, columns: int, dtype: torch.dtype) -> Tensor:
    """[T, columns] standard normal up to an excess kurtosis of -0.1."""
    return sum_of_uniforms(_bits(draw, stream, columns, 3)).to(dtype) * 2.0**-17


def gumbel(draw: Draw, stream: Stream, columns: int, dtype: torch.dtype) -> Tensor:
    """[T, columns] standard Gumbel variates: -log(-log(uniform))."""
    return -(-uniform(draw, stream, columns, dtype).log()).log()


def _bits(draw: Draw, stream: Stream, columns: int, words: int) -> Tensor:
    """[T, columns, words] 64 random bits each, as int64."""
    step = torch.as_tensor(draw.step, dtype=torch.int64, device=draw.tokens.device)
    key = torch.full_like(step, draw.seed)
    for part in (step, draw.layer, _STREAMS[stream]):  # one after the other: no two sums of them meet
        key = mix(key * ODD + part)
    counter = torch.arange(columns * words, device=draw.tokens.device).view(columns, words)
    return mix((draw.tokens[:, None, None] * (columns * words) + counter) * ODD + key)
