"""The learning rate as a pure function of the optimizer step: nothing to save, to advance, or to go stale."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

Kind = Literal["constant", "linear", "cosine", "wsd"]
ScaleRule = Literal["none", "linear", "sqrt"]


@dataclass(frozen=True)
class ScheduleConfig:
    """The shape of the learning rate over a run: a linear warm-up to the peak, then one of four ways to go on."""

    kind: Kind = "cosine"
    """After the warm-up: `constant` stays at the peak; `linear` and `cosine` (Loshchilov and Hutter 2016, arXiv
    1608.03983, without restarts) fall from the peak to `min_ratio` at the last step; `wsd` (warm-up, stable, decay: Hu
    et al. 2024, arXiv 2404.06395) stays at the peak and falls linearly to `min_ratio` over the last `decay` of the
    steps."""

    warmup: int = 0
    """Optimizer steps of the linear warm-up: step s has s / warmup of the peak, step `warmup` has exactly the peak. 0
    is the same as 1: the first step has the peak."""

    min_ratio: float = 0.1
    """What remains at the last step, as a share of the peak. With 0 the fall aims at the step after the last, so that
    no step has a learning rate of 0."""

    decay: float = 0.1
    """`wsd` only: the share of all steps, in (0, 1], over which the rate falls (at least one step)."""


def check(config: ScheduleConfig, steps: int) -> list[str]:
    """Warnings about a schedule over a run of `steps` optimizer steps; empty when there is nothing to say.

    Raises:
        ValueError: a value that no run could mean (negative warm-up, shares outside their range, no step at all).
    """
    if config.kind not in get_args(Kind):
        raise ValueError(f"schedule.kind is {config.kind!r}; write one of {', '.join(get_args(Kind))}")
    if steps < 1:
        raise ValueError(f"steps is {steps}: a schedule needs at least one optimizer step; write steps >= 1")
    if config.warmup < 0:
        raise ValueError(f"schedule.warmup is {config.warmup}: it counts steps; write 0 for no warm-up")
    if not 0 <= config.min_ratio <= 1:
        raise ValueError(f"schedule.min_ratio is {config.min_ratio}: a share of the peak; write a number in [0, 1]")
    if not 0 < config.decay <= 1:
        raise ValueError(
            f"schedule.decay is {config.decay}: a share of the steps; write a number in (0, 1], or kind 'constant' for "
            "no decay"
        )
    if config.warmup > steps:
        return [
            f"schedule.warmup is {config.warmup} but the run has {steps} steps: the learning rate ends at "
            f"{steps}/{config.warmup} of its peak"
        ]
    return []


def learning_rate(config: ScheduleConfig, step: int, steps: int, peak: float) -> float:
    """The learning rate of optimizer step `step` (the first is 1) of `steps`; past the end it stays as it ended.

    It depends on nothing else: not on accumulation, micro-batches, ranks, or steps skipped. Always 0 < rate <= `peak`,
    after the warm-up rate >= `min_ratio * peak`, and the last warm-up step has exactly `peak`.

    Raises:
        ValueError: `step` or `steps` below 1.
    """
    if step < 1 or steps < 1:
        raise ValueError(f"step {step} of {steps}: steps are counted from 1; write step >= 1 and steps >= 1")
    step = min(step, steps)
    warmup = max(config.warmup, 1)
    if step < warmup:
        return peak * step / warmup
    left = 1.0 - _decayed(config, step, steps, warmup)
    if config.kind == "cosine":
        left = math.sin(0.5 * math.pi * left) ** 2  # (1 - cos(pi left)) / 2, without its cancellation near 0
    return peak * min(1.0, config.min_ratio + (1.0 - config.min_ratio) * left)


def _decayed(config: ScheduleConfig, step: int, steps: int, warmup: int) -> float:
    """How much of the fall lies behind `step`, in [0, 1]: 0 where it starts, 1 at the last step."""
    if config.kind == "constant":
        return 0.0
    start = warmup
    if config.kind == "wsd":
        start = max(warmup, steps - max(1, round(config.decay * steps)))
    end = steps if config.min_ratio > 0 else steps + 1
    return max(0, step - start) / max(1, end - start)


def scale_learning_rate(lr: float, global_batch: int, reference_batch: int | None, rule: ScaleRule) -> float:
    """The rate for `global_batch`, from one tuned at `reference_batch` (same unit: samples or tokens).

    `none` gives `lr` back; `linear` multiplies by the ratio of batches (Goyal et al. 2017, arXiv 1706.02677: SGD);
    `sqrt` by its square root (Malladi et al. 2022, arXiv 2205.10287: Adam).

    Raises:
        ValueError: a rule without a reference batch, or an unknown rule.
    """
    if rule == "none":
        return lr
    if rule not in get_args(ScaleRule):
        raise ValueError(f"optimizer.scale is {rule!r}; write one of {', '.join(get_args(ScaleRule))}")
    if not reference_batch or reference_batch < 0 or global_batch < 1:
        raise ValueError(
            f"optimizer.scale={rule} compares batches, given global_batch={global_batch} and "
            f"reference_batch={reference_batch}; write the batch at which lr was tuned as optimizer.reference_batch"
        )
    ratio = global_batch / reference_batch
    return lr * (ratio if rule == "linear" else math.sqrt(ratio))
