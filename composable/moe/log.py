"""What the experts of all layers were given, summed over steps and ranks: for the correction bias, and for people."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from composable.moe.config import MoEConfig
from composable.moe.layer import Routed


@dataclass(frozen=True)
class Totals:
    """Sums over some steps and all ranks, on the device; L layers with experts, E experts."""

    layers: range
    """their global indices"""
    chosen: Tensor
    """[L, E] int64 choices before any drop"""
    executed: Tensor
    """[L, E] int64 choices that were executed"""
    losses: dict[str, Tensor]
    """[L] float64 by name: mean over the steps, before coefficients"""
    bias: Tensor
    """[L, E] float64 correction biases, zeros where there are none"""
    count_seconds: float
    """a step's time in the extra forward pass that counts for balance of global scope"""


class RoutingLog:
    """Takes each layer's `Routed`, and gives sums over ranks; one for a model.

    Args:
        layers: those with experts, of the whole model.
        owned: whether this rank counts what a pipeline stage's ranks all have (one of them does).
        parts_of_loss: ranks that record the same loss of a micro-batch: each counts its share.
    """

    def __init__(
        self, layers: range, config: MoEConfig, device: torch.device, *, owned: bool, parts_of_loss: int
    ) -> None:
        self.layers, self.config, self.device = layers, config, device
        self.owned, self.parts = owned, parts_of_loss
        self.names = tuple(config.balance.losses)
        width = 2 * config.experts + len(self.names)
        self._here = torch.zeros(len(layers), width, dtype=torch.float64, device=device)  # counts are exact to 2**53
        self._total = torch.zeros_like(self._here)
        self._steps = 0
        self.count_seconds = 0.0

    def add(self, routed: Routed) -> None:
        """A layer's part of one micro-batch."""
        row = self._here[routed.layer - self.layers.start]
        experts = self.config.experts
        row[:experts] += routed.chosen
        row[experts : 2 * experts] += routed.executed
        for place, name in enumerate(self.names, 2 * experts):
            if name in routed.losses:
                row[place] += routed.losses[name] / self.parts

    def next_step(self) -> None:
        """Another optimizer step begins."""
        self._steps += 1

    def counts(self) -> Tensor:
        """[L, E] int64 choices on all ranks, before any drop, since they were last asked for; collective."""
        new = self._summed()
        self._total += new
        return new[:, : self.config.experts].round().to(torch.int64)

    def counted(self, run: Callable[[], None]) -> Tensor:
        """[L, E] int64: what is executed on all ranks while `run` runs, and nothing else remembers it; collective."""
        before, self._here = self._here, torch.zeros_like(self._here)
        run()
        found = self._summed()[:, self.config.experts : 2 * self.config.experts]
        self._here = before
        return found.round().to(torch.int64)

    def totals(self, biases: dict[int, Tensor]) -> Totals:
        """Sums since they were last asked for; collective, one reduction.

        Args:
            biases: layer -> [E], of this rank's layers.
        """
        e, steps = self.config.experts, max(self._steps, 1)
        bias = torch.zeros(len(self.layers), e, dtype=torch.float64, device=self._here.device)
        for layer, value in biases.items():
            if self.owned:
                bias[layer - self.layers.start] = value
        new, bias = self._summed(bias).split([self._here.size(1), e], dim=1)
        total = self._total + new
        chosen, executed, losses = total.split([e, e, len(self.names)], dim=1)
        named = dict(zip(self.names, (losses / steps).unbind(1), strict=True))
        seconds = self.count_seconds / steps
        self._total.zero_()
        self._steps, self.count_seconds = 0, 0.0
        return Totals(
            self.layers, chosen.round().to(torch.int64), executed.round().to(torch.int64), named, bias, seconds
        )

    def _summed(self, *more: Tensor) -> Tensor:
        flat = torch.cat([self._here, *more], dim=1)
        dist.all_reduce(flat)
        self._here = torch.zeros_like(self._here)
        return flat
