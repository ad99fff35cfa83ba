"""Losses that keep experts equally loaded, their gradients beside the model's loss, and the update without a loss.

Everything is computed from the routing that was executed (after capacity), over the tokens of a micro-batch that are
not padding, whichever ranks hold them.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from composable.moe.config import MoEConfig
from composable.moe.router import probabilities


@dataclass(frozen=True)
class Statistics:
    """Sums over the tokens of a micro-batch, by sequence: what all losses are made of. Float32 or wider."""

    counts: Tensor
    """[B, E] choices of each expert; no gradient"""
    probabilities: Tensor
    """[B, E] sums of the tokens' probabilities"""
    tokens: Tensor
    """[B] tokens that are not padding; no gradient"""
    z: Tensor
    """[] sum of the squared log-sum-exp of the logits"""


def statistics(
    logits: Tensor,
    ids: Tensor,
    config: MoEConfig,
    *,
    mask: Tensor | None = None,
    group: dist.ProcessGroup | None = None,
) -> Statistics:
    """Sums over this rank's tokens, and over those of `group` (one all-reduce).

    Every rank of the group gets the same sums, and gives its own tokens the gradient of them, once.

    Args:
        logits: [B, S, E], as they were routed by.
        ids: [B, S, K], as executed; -1: dropped.
        mask: [B, S] bool, False: padding; or None.
        group: ranks that hold other tokens of the same B sequences; None: this one alone.
    """
    wide = torch.promote_types(logits.dtype, torch.float32)
    b, s, e = logits.shape
    real = torch.ones(b, s, dtype=wide, device=logits.device) if mask is None else mask.to(wide)
    by_token = probabilities(logits, config)
    counted = (real[..., None] * (ids >= 0)).flatten(1)
    # Whole numbers: their sum is exact in any order.
    counts = torch.zeros(b, e, dtype=wide, device=logits.device).scatter_add_(1, ids.clamp(min=0).flatten(1), counted)
    sums = torch.bmm(real[:, None], by_token)[:, 0]  # [B, E]; padding of any value is left out, but for NaN
    z = logits.to(wide).logsumexp(-1).square().mul(real).sum() if config.balance.z else real.new_zeros(())
    flat = torch.cat([counts.flatten(), sums.flatten(), real.sum(1), z[None]])
    if group is not None and dist.get_world_size(group) > 1:
        flat = _sum_ranks(flat, group)
    counts, sums, tokens, z = flat.split([b * e, b * e, b, 1])
    return Statistics(counts.detach().view(b, e), sums.view(b, e), tokens.detach(), z[0])


def losses(total: Statistics, config: MoEConfig, counts: Tensor | None = None) -> dict[str, Tensor]:
    """Each loss that is on, [] by name, before its coefficient; 0 for a micro-batch that is all padding.

    Args:
        counts: [E] choices of each expert among all tokens of the step, for `scope` global; the micro-batch's if None.
    """
    e, k = config.experts, config.top_k
    tokens, lengths = total.tokens.sum().clamp(min=1), total.tokens.clamp(min=1)
    mean = total.probabilities.sum(0) / tokens  # [E]
    load = total.counts.sum(0) if counts is None else counts.to(mean)
    load = load / load.sum().clamp(min=1)
    wanted = {
        "switch": lambda: e * (load * mean).sum(),
        "kl": lambda: _kl(load, mean, total.counts.sum() if counts is None else counts.sum()),
        "sequence": lambda: (total.counts * total.probabilities / lengths[:, None]).sum() * (e / k) / tokens,
        "z": lambda: total.z / tokens,
    }
    return {name: wanted[name]() for name in config.balance.losses}


def weighted(values: dict[str, Tensor], config: MoEConfig) -> Tensor:
    """[] the sum of the losses times their coefficients."""
    return torch.stack([config.balance.losses[name] * value for name, value in values.items()]).sum()


def _kl(load: Tensor, mean: Tensor, choices: Tensor) -> Tensor:
    """KL(load || uniform), of which the gradient goes where a choice can be moved: to the probabilities.

    The load itself has none. An expert without any is taken to have half a choice in the gradient, which would be
    infinite.
    """
    e = load.numel()
    value = torch.xlogy(load, load * e).sum()
    slope = (load.clamp(min=0.5 / choices.clamp(min=1).to(load)) * e).log() + 1
    return value + (slope * (mean - mean.detach())).sum()


def inject(x: Tensor, aux: Tensor, scale: Tensor) -> Tensor:
    """x as it is; in its backward pass, `aux` gets the gradient `scale`, as if aux * scale were part of the loss.

    Args:
        x: [...], something that the loss depends on.
        aux: [].
        scale: [] without gradient; it comes with the micro-batch: its share of the step's tokens that are not padding.
    """
    return _Inject.apply(x, aux, scale)


@torch.compiler.disable
def at_backward(x: Tensor, call: Callable[[], None]) -> Tensor:
    """x as it is; `call` runs in its backward pass: once, whether or not activations are recomputed.

    Without gradients it runs at once.
    """
    if torch.is_grad_enabled() and x.requires_grad:
        return _Call.apply(x, call)
    call()
    return x


@torch.no_grad()
def update_bias(bias: Tensor, counts: Tensor, rate: float) -> None:
    """Move the score-correction bias towards equal loads, in place: up by `rate` below the mean load, down above it.

    DeepSeek-V3, section 2.1.2 (Wang et al. 2024, arXiv:2408.15664, algorithm 1).

    Args:
        bias: [..., E].
        counts: [..., E] int64 choices of each expert in the whole step, before any drop.
    """
    below = counts.sum(-1, keepdim=True) - counts * counts.size(-1)  # the mean, times E: exact
    bias.add_(below.sign().to(bias), alpha=rate)


@torch.compiler.disable
def sum_counts(counts: Tensor, group: dist.ProcessGroup) -> Tensor:
    """counts of this rank -> their sum over a group, in a tensor of its own."""
    total = counts.clone()
    dist.all_reduce(total, group=group)
    return total


@torch.compiler.disable
def _sum_ranks(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    return _Sum.apply(x, group)


class _Sum(torch.autograd.Function):
    """Sum over ranks that all compute the same from it: the gradient is each rank's own, not summed again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        out = x.clone()
        dist.all_reduce(out, group=group)
        return out

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        return g, None


class _Inject(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, aux: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(scale)
        ctx.dtype = aux.dtype
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor, None]:
        return g, ctx.saved_tensors[0].to(ctx.dtype), None


class _Call(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, call: Callable[[], None]) -> Tensor:
        ctx.call = call
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        ctx.call()
        return g, None
