"""Pipeline parallelism: micro-batches through the stages that ranks hold, by `torch.distributed.pipelining`.

Its schedules take a batch that they cut themselves, learn shapes by running the model, divide gradients by the number
of micro-batches and reduce them after every pass. Here they get one chunk a micro-batch, static shapes, no division,
and reduce when the data parallelism says so.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class

from composable.data.loader import MicroBatch
from composable.parallel.config import SPLIT_BACKWARD, DataKind, Pipeline
from composable.parallel.data import reshard
from composable.parallel.split import owners

Train = Callable[[Sequence[MicroBatch], Tensor], Tensor]
Evaluate = Callable[[MicroBatch], Tensor]


@dataclass(frozen=True)
class Border:
    """What passes through a pipeline: one micro-batch, of static shape."""

    tokens: tuple[int, int]
    """(B, S) of a micro-batch, local to this rank"""
    hidden: tuple[int, ...]
    """of the tensor that one stage hands to the next, local to this rank: (B, S, D), S cut by sequence parallelism"""
    dtype: torch.dtype
    """of that tensor: that of computation"""


def pipelined(
    parts: Sequence[nn.Module],
    stage_indices: Sequence[int],
    num_stages: int,
    pipeline: Pipeline,
    border: Border,
    *,
    micro_batches: int,
    device: torch.device,
    group: dist.ProcessGroup,
    data: DataKind,
    whole_blocks: bool = False,
) -> tuple[Train, Evaluate]:
    """How micro-batches pass through the stages of a pipeline, of which this rank holds `parts`.

    Every rank of the pipeline is given the same micro-batches. Losses are known where the last stage is, and are 0 on
    the other ranks: the sum over the pipeline's ranks is the loss.

    Args:
        parts: this rank's stages, sharded and with their weights. `part(x, **micro_batch.told)` gives the hidden
            states, and the last one the summed loss [].
        stage_indices: which stages they are, ascending; as `split.owners` has it.
        num_stages: of the whole pipeline.
        micro_batches: of one pass; `train` takes a multiple of it, in as many passes.
        group: the ranks of the pipeline, in order.
        data: when gradients are reduced: at the end of the step (ddp, zero1) or of each pass (zero2, zero3).
        whole_blocks: blocks are recomputed or compiled: schedules that split the backward pass then compute all
            gradients in its first half. Split, a block would be recomputed once for each of its weights.

    Returns:
        train: (M micro-batches, divisor []) -> summed loss of each [M] float64 or zeros; leaves the gradients of
            their sum / divisor. ValueError, before anything is sent, if M or the shape of a micro-batch is wrong.
        evaluate: micro-batch -> its summed loss [] float64 or 0, without gradients.
    """
    keep_gathered(parts, pipeline.schedule)
    split = whole_blocks and pipeline.schedule in SPLIT_BACKWARD
    stages = [
        _Stage(part, index, num_stages, device, group, border, split)
        for part, index in zip(parts, stage_indices, strict=True)
    ]
    sums: list[Tensor] = []

    def loss_fn(loss: Tensor, divisor: Tensor) -> Tensor:  # [], [1]
        sums.append(loss.detach())
        return loss / divisor[0]

    build: Any = get_schedule_class(pipeline.schedule)
    mine = stages[0] if issubclass(build, PipelineScheduleSingle) else stages
    schedule = build(mine, micro_batches, loss_fn=loss_fn, scale_grads=False)
    rank_of = owners(pipeline.schedule, dist.get_world_size(group), num_stages)
    passes = _Passes(stages, schedule, sums, rank_of, border, micro_batches, device, data)
    return passes.train, passes.evaluate


@dataclass(frozen=True)
class _Passes:
    """Micro-batches through the stages of a rank."""

    stages: Sequence["_Stage"]
    schedule: Any
    sums: list[Tensor]
    """what the schedule's loss function saw in this step"""
    rank_of: Sequence[int]
    border: Border
    micro_batches: int
    device: torch.device
    data: DataKind

    def train(self, batches: Sequence[MicroBatch], divisor: Tensor) -> Tensor:
        _check(batches, self.micro_batches, self.border)
        self.sums.clear()
        divisors = divisor.to(self.device).expand(self.micro_batches)
        for start in range(0, len(batches), self.micro_batches):
            last = start + self.micro_batches == len(batches)
            for stage in self.stages:
                stage.reduces = last or self.data in ("zero2", "zero3")
            chosen = [batch.to(self.device) for batch in batches[start : start + self.micro_batches]]
            tokens, others = _joined(chosen)
            inputs = (tokens,) if self.stages[0].is_first else ()
            with self._named():
                self.schedule.step(*inputs, target=divisors, return_outputs=False, **others)
        if not self.sums:
            return torch.zeros(len(batches), dtype=torch.float64, device=self.device)
        return torch.stack(self.sums).double()

    @torch.no_grad()
    def evaluate(self, batch: MicroBatch) -> Tensor:
        _check([batch], 1, self.border)
        tokens, others = _joined([batch.to(self.device)])
        with self._named():
            return _forward(self.stages, self.rank_of, self.border, tokens, others)

    @contextlib.contextmanager
    def _named(self) -> Iterator[None]:
        """An error says in which stage it was."""
        try:
            yield
        except Exception as error:
            indices = " and ".join(str(stage.stage_index) for stage in self.stages)
            where = f"pipeline stage {indices} of {len(self.rank_of)} on rank {dist.get_rank()}"
            raise RuntimeError(f"{where}: {_cause(error)}") from error


class _Stage(PipelineStage):
    """A stage with static shapes, whose gradients are reduced in the passes that say so."""

    def __init__(
        self,
        part: nn.Module,
        index: int,
        count: int,
        device: torch.device,
        group: dist.ProcessGroup,
        border: Border,
        whole_backward: bool,
    ) -> None:
        first, last = index == 0, index == count - 1
        tokens = torch.empty(border.tokens, dtype=torch.int64, device="meta")
        hidden = torch.empty(border.hidden, dtype=border.dtype, device="meta", requires_grad=True)
        loss = torch.empty((), dtype=border.dtype, device="meta", requires_grad=True)
        super().__init__(
            part,
            index,
            count,
            device,
            input_args=tokens if first else hidden,
            output_args=loss if last else hidden,
            group=group,
            # Given a builder, torch runs the whole backward pass where the gradients of inputs are due, and what was
            # built where those of weights are: nothing.
            dw_builder=(lambda: lambda: None) if whole_backward else None,
        )
        self.reduces = True

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        """At the end of a pass; between passes, gradients stay whole and grow."""
        if self.reduces:
            super().perform_reduce_grad(grad_scale_factor)


def keep_gathered(parts: Sequence[nn.Module], schedule: str) -> None:
    """Keep parameters gathered between forward and backward under schedules that split the backward pass.

    They look for the weights of a stage in its autograd graph; FSDP's resharding puts others in their place, and the
    gradients would be wrong without an error.
    """
    for part in parts:
        if schedule in SPLIT_BACKWARD and isinstance(part, FSDPModule):
            part.set_reshard_after_forward(False)


def _check(batches: Sequence[MicroBatch], micro_batches: int, border: Border) -> None:
    if not batches or len(batches) % micro_batches:
        low = len(batches) // micro_batches * micro_batches
        near = f"{low} or {low + micro_batches}" if low else str(micro_batches)
        raise ValueError(
            f"a step of {len(batches)} micro-batches does not divide into pipeline passes of {micro_batches} "
            f"(pipeline.micro_batches); give {near}"
        )
    for index, batch in enumerate(batches):
        if tuple(batch.tokens.shape) != border.tokens:
            raise ValueError(
                f"micro-batch {index} has tokens of shape {tuple(batch.tokens.shape)}, and the pipeline was built for "
                f"{border.tokens}, rows by tokens, which cannot change; fill it up with rows of ignored labels"
            )


def _joined(batches: Sequence[MicroBatch]) -> tuple[Tensor, dict[str, Tensor]]:
    """Tokens [M * B, S], and what every stage is told of them: torch cuts the first dimension into M."""
    shape = batches[0].tokens.shape
    told = [batch.told for batch in batches]
    for each in told:
        if "positions" in each:
            each["positions"] = each["positions"].expand(shape)
    others = {name: torch.cat([each[name] for each in told]) for name in told[0]}
    return torch.cat([batch.tokens for batch in batches]), others


def _forward(
    stages: Sequence[_Stage], rank_of: Sequence[int], border: Border, tokens: Tensor, others: dict[str, Tensor]
) -> Tensor:
    """One micro-batch from stage to stage; its loss [] float64 where the last stage is, else 0.

    Not through the schedule: that would take as many micro-batches as training, and build its buffers anew at each
    change between the two.
    """
    x, group = tokens, stages[0].group
    for stage in stages:
        index = stage.stage_index
        if index and rank_of[index - 1] != rank_of[index]:
            x = torch.empty(border.hidden, dtype=border.dtype, device=tokens.device)
            dist.recv(x, group=group, group_src=rank_of[index - 1])
        x = stage.submod(x, **others)
        reshard(stage.submod)
        if not stage.is_last and rank_of[index + 1] != rank_of[index]:
            dist.send(x.contiguous(), group=group, group_dst=rank_of[index + 1])
    return x.double() if stages[-1].is_last else torch.zeros((), dtype=torch.float64, device=tokens.device)


def _cause(error: BaseException) -> str:
    """What went wrong first: torch wraps the error of a stage in its own."""
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {error}"
