"""What layers with experts need around a training step: which token is which, shares of the step, counts, the bias."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from composable.data.loader import MicroBatch
from composable.mesh import Mesh
from composable.moe.balance import update_bias
from composable.moe.layer import Runtime
from composable.moe.log import RoutingLog, Totals


@dataclass(frozen=True)
class ExpertStep:
    """Of all layers with experts of a model, on one rank."""

    mesh: Mesh
    runtime: Runtime
    log: RoutingLog
    biases: Mapping[int, Tensor]
    """layer -> its score-correction bias [E], of the layers on this rank that have one"""

    def told(self, batches: Sequence[MicroBatch], step: int | None = None) -> list[MicroBatch]:
        """Micro-batches that know each token's index in the step and, in training, their share of the step's tokens.

        Collective where there are balance losses: one all-reduce, of the number of tokens.

        Args:
            batches: of this data rank, whole rows.
            step: of the optimizer; None: this is evaluation.
        """
        rank = self.mesh.data_rank(dist.get_rank())
        rows = [int((batch.samples >= 0).sum()) for batch in batches]
        balances = step is not None and bool(self.log.config.balance.losses)
        total = self._everywhere(sum(rows)) if balances else 0.0
        out = []
        for number, (batch, real) in enumerate(zip(batches, rows, strict=True)):
            b, s = batch.tokens.shape
            row = torch.arange(b) + (number * self.mesh.data_ranks + rank) * b
            indices = torch.where(batch.samples[:, None] >= 0, row[:, None] * s + torch.arange(s), -1)
            batch = batch._replace(indices=indices)
            if step is not None:
                batch = batch._replace(step=torch.full((b,), step))
            if balances:
                batch = batch._replace(scale=torch.full((b,), real / max(total, 1.0), dtype=torch.float64))
            out.append(batch)
        return out

    def with_loads(
        self, evaluate: Callable[[MicroBatch], Tensor], batches: Sequence[MicroBatch]
    ) -> Sequence[MicroBatch]:
        """Micro-batches that know the choices of the whole step, where balance of global scope wants them.

        A forward pass without gradients counts them; the log keeps its time. With one micro-batch a rank, layers add up
        their counts themselves.
        """
        if not self.log.config.balance.counts_step or self.runtime.step_group is not None:
            return batches
        start = time.perf_counter()

        def run() -> None:
            for batch in batches:
                evaluate(batch._replace(scale=None))

        loads = self.log.counted(run)[None].cpu()
        self.log.count_seconds += time.perf_counter() - start
        return [batch._replace(loads=loads) for batch in batches]

    def update(self) -> None:
        """Move the biases after an optimizer step; collective, one reduction, if there is a rate."""
        if self.log.config.balance.bias_rate:
            counts = self.log.counts()
            for layer, bias in self.biases.items():
                update_bias(bias, counts[layer - self.log.layers.start], self.log.config.balance.bias_rate)

    def totals(self) -> Totals:
        """What experts did since this was last asked for; collective."""
        return self.log.totals(dict(self.biases))

    def _everywhere(self, rows: int) -> float:
        """Rows of this data rank -> of all."""
        total = torch.tensor(float(rows), device=self.log.device)
        dist.all_reduce(total)
        return total.item() / self.mesh.copies_of_batch
