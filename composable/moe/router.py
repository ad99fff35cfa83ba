"""Which experts a token goes to, and with which weights."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from composable.moe.config import MoEConfig
from composable.moe.noise import Draw, gaussian, gumbel, uniform


@dataclass(frozen=True)
class Routing:
    """Where the tokens of one rank go."""

    ids: Tensor
    """[T, K] int64: expert of each choice, best first; -1: the choice was dropped"""
    weights: Tensor
    """[T, K] float32 or wider; 0 where dropped"""
    counts: Tensor
    """[E] int64: choices of each expert"""


Router = Callable[[Tensor, MoEConfig, Tensor | None], Routing]
"""(logits [T, E], config, bias [E] or None) -> where the tokens go"""


def route(logits: Tensor, config: MoEConfig, bias: Tensor | None = None) -> Routing:
    """Choose `top_k` experts for each token, ties by the lower expert index, and weigh them.

    Args:
        logits: [T, E], of any float dtype; computed with in float32 or wider.
        bias: [E] or None: added to the scores for choosing only.

    Raises:
        ValueError: logits of another number of experts.
    """
    if logits.ndim != 2 or logits.size(1) != config.experts:
        raise ValueError(f"logits of shape {list(logits.shape)}: they are [tokens, moe.experts={config.experts}]")
    scores = score(logits, config)
    ids = choose(scores, config, bias)
    return Routing(ids, weigh(scores, ids, config), count(ids, config.experts))


def score(logits: Tensor, config: MoEConfig) -> Tensor:
    """logits [T, E] -> scores [T, E] in float32 or wider; those of `topk_softmax` are the logits."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if config.score == "softmax":
        return _softmax(wide)
    return wide.sigmoid() if config.score == "sigmoid" else wide


def _softmax(x: Tensor) -> Tensor:
    """x [..., E], over the experts. A CPU is four times as fast along 2,048 tokens as along 8 experts."""
    return x.transpose(-1, 0).softmax(0).transpose(-1, 0) if x.device.type == "cpu" else x.softmax(-1)


def choose(scores: Tensor, config: MoEConfig, bias: Tensor | None = None) -> Tensor:
    """scores [T, E] -> ids [T, K], the best first; without gradient."""
    scores = preference(scores, config, bias)
    # torch.topk breaks ties as it likes; a stable sort keeps the order of the experts.
    return scores.sort(dim=-1, descending=True, stable=True).indices[:, : config.top_k]


def preference(scores: Tensor, config: MoEConfig, bias: Tensor | None = None) -> Tensor:
    """[T, E] by which a token orders the experts: scores with the bias, -inf outside its best groups."""
    scores = scores.detach()
    if config.exploration.expert_dropout and config.score != "topk_softmax":
        # A hidden expert has score 0 (its logit is -inf): no bias may lift it above visible ones.
        scores = scores.masked_fill(scores == 0, -torch.inf)
    if bias is not None:
        scores = scores + bias.to(scores)
    if config.groups_kept == config.groups:
        return scores
    grouped = scores.unflatten(-1, (config.groups, -1))  # [T, G, E / G]
    best = grouped.sort(dim=-1, descending=True).values[..., : 2 if config.group_score == "top2_sum" else 1].sum(-1)
    kept = best.sort(dim=-1, descending=True, stable=True).indices[:, : config.groups_kept]
    outside = torch.ones_like(best, dtype=torch.bool).scatter(1, kept, False)
    return grouped.masked_fill(outside[..., None], -torch.inf).flatten(1)


def weigh(scores: Tensor, ids: Tensor, config: MoEConfig) -> Tensor:
    """Weights [T, K] of the choices ids [T, K]: normalised over those that are not dropped, which have weight 0."""
    dropped = ids < 0
    values = scores.gather(1, ids.clamp(min=0))
    if config.score == "topk_softmax":
        weights = values.masked_fill(dropped, -torch.inf).softmax(-1).masked_fill(dropped, 0.0)
    else:
        weights = values.masked_fill(dropped, 0.0)
    if config.normalise:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return weights * config.scale if config.scale != 1 else weights


def count(ids: Tensor, experts: int, mask: Tensor | None = None) -> Tensor:
    """ids [T, K] -> choices of each expert [E] int64, of tokens that `mask` [T] has, dropped ones left out."""
    counted = ids >= 0 if mask is None else (ids >= 0) & mask[:, None]
    out = torch.zeros(experts, dtype=torch.int64, device=ids.device)
    return out.scatter_add_(0, ids.clamp(min=0).flatten(), counted.to(torch.int64).flatten())


def probabilities(logits: Tensor, config: MoEConfig) -> Tensor:
    """logits [T, E] -> scores of each token divided by their sum: what balance losses weigh frequencies with."""
    if config.score != "sigmoid":
        return _softmax(logits.to(torch.promote_types(logits.dtype, torch.float32)))
    scores = score(logits, config)
    return scores / (scores.sum(-1, keepdim=True) + 1e-20)


def jittered(x: Tensor, config: MoEConfig, draw: Draw | None) -> Tensor:
    """The router's input x [T, D], multiplied by uniform numbers near 1 if there is a draw (Switch, appendix C)."""
    width = config.exploration.jitter
    if draw is None or not width:
        return x
    factors = uniform(draw, "jitter", x.size(1), torch.promote_types(x.dtype, torch.float32))
    return x * (1 + width * (2 * factors - 1))


def explore(logits: Tensor, config: MoEConfig, draw: Draw | None) -> Tensor:
    """Temperature, noise (Shazeer et al. 2017, arXiv:1701.06538) and hidden experts on logits [T, E].

    Args:
        logits: float32 or wider.
        draw: None outside of training: only the last temperature is applied.
    """
    rule = config.exploration
    if draw is None:
        return logits if rule.temperature_end == 1 else logits / rule.temperature_end
    if rule.temperature != 1 or rule.temperature_end != 1:
        step = torch.as_tensor(draw.step, device=logits.device).to(logits.dtype)
        done = (step / rule.temperature_steps).clamp(max=1) if rule.temperature_steps else torch.ones_like(step)
        logits = logits / (rule.temperature + (rule.temperature_end - rule.temperature) * done)
    if rule.noise != "none":
        variates = gaussian if rule.noise == "gaussian" else gumbel
        logits = logits + rule.noise_scale * variates(draw, "noise", logits.size(1), logits.dtype)
    if rule.expert_dropout:
        luck = uniform(draw, "dropout", logits.size(1), logits.dtype)
        least = luck.topk(config.top_k, dim=-1).values[:, -1:]  # a token keeps as many experts as it needs
        logits = logits.masked_fill((luck < rule.expert_dropout) & (luck < least), -torch.inf)
    return logits
