"""Rotary position embedding (Su et al. 2021, arXiv:2104.09864), computed from positions: there is no table to keep.

Nothing is a buffer, so no cast of the model can round the frequencies, and none is left uninitialised.
"""

import math

import torch
from torch import Tensor

from composable.models.config import RopeConfig


def inverse_frequencies(config: RopeConfig, head_dim: int, device: torch.device | None = None) -> tuple[Tensor, float]:
    """Angle per position of each pair, and the scale of the tables.

    Returns:
        float64 tensor [head_dim / 2], in radians per token; and the attention factor (1 but for yarn).
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float64, device=device) / head_dim
    plain = config.theta**-exponents
    if config.scaling == "none":
        return plain, 1.0
    if config.scaling == "linear":
        return plain / config.factor, 1.0
    if config.scaling == "llama3":
        return _llama3(plain, config), 1.0
    return _yarn(plain, config, head_dim)


def _llama3(plain: Tensor, config: RopeConfig) -> Tensor:
    """Llama 3.1: long wavelengths are stretched, short ones kept, those between blended."""
    turns = config.original_length * plain / (2 * math.pi)
    keep = ((turns - config.low_frequency) / (config.high_frequency - config.low_frequency)).clamp(0, 1)
    return keep * plain + (1 - keep) * plain / config.factor


def _yarn(plain: Tensor, config: RopeConfig, head_dim: int) -> tuple[Tensor, float]:
    """YaRN (Peng et al. 2023, arXiv:2309.00071, section 3.2 and 3.4)."""

    def dimension(turns: float) -> float:
        return head_dim * math.log(config.original_length / (turns * 2 * math.pi)) / (2 * math.log(config.theta))

    low, high = dimension(config.beta_fast), dimension(config.beta_slow)
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    pairs = torch.arange(head_dim // 2, dtype=torch.float64, device=plain.device)
    stretch = ((pairs - low) / max(high - low, 1e-3)).clamp(0, 1)
    scale = config.attention_factor
    if scale is None:
        given = (config.mscale, config.mscale_all_dim)
        own, all_dim = given if given[0] and given[1] else (1.0, 0.0)
        scale = magnitude(config.factor, own) / magnitude(config.factor, all_dim)
    return stretch * plain / config.factor + (1 - stretch) * plain, scale


def magnitude(factor: float, weight: float | None) -> float:
    """By what yarn multiplies queries and keys for contexts `factor` times as long; `weight` 1 is the paper's."""
    return 0.1 * (weight or 0.0) * math.log(factor) + 1.0 if factor > 1 else 1.0


def tables(config: RopeConfig, head_dim: int, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosine and sine of every position and pair.

    Args:
        positions: integers [S] or [B, S].
        dtype: of the activations; tables are float32, or float64 for float64.

    Returns:
        two tensors [S, 1, head_dim / 2] or [B, S, 1, head_dim / 2], to be broadcast over heads.
    """
    inverse, scale = inverse_frequencies(config, head_dim, positions.device)
    angles = positions.to(torch.float64)[..., None, None] * inverse
    wide = torch.promote_types(dtype, torch.float32)
    return (angles.cos() * scale).to(wide), (angles.sin() * scale).to(wide)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the pairs (i, i + head_dim / 2) of x [B, S, H, head_dim], in the tables' precision; same dtype back."""
    half = cos.size(-1)  # a plain number to torch.compile, where the width of x may be a symbol that inductor fails on
    first, second = x.narrow(-1, 0, half), x.narrow(-1, half, half)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


def in_halves(x: Tensor) -> Tensor:
    """The pairs (2i, 2i + 1) of x [..., head_dim] where `rotate` looks for them: (i, i + head_dim / 2)."""
    return x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
