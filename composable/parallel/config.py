"""How a model is spread over a mesh: values and their checks."""

from dataclasses import dataclass
from typing import Literal

from composable.mesh import Mesh
from composable.parallel.split import V_SCHEDULES, parse_split

DataKind = Literal["ddp", "zero1", "zero2", "zero3"]
ContextKind = Literal["all_gather", "ring", "ulysses"]

SPLIT_BACKWARD = frozenset({"InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"})
"""schedules that compute the gradients of activations first and those of weights later"""


@dataclass(frozen=True)
class Parallel:
    """What the data ranks keep and exchange, and what is recomputed, compiled and cast."""

    data: DataKind = "zero3"
    """ddp: parameters whole everywhere, gradients summed once a step; zero1: the same through the step, optimizer state
    sharded; zero2: gradients reduce-scattered after each micro-batch; zero3: parameters sharded too"""
    unit: int = 1
    """blocks that are gathered together; 0: the whole model at once"""
    offload: bool = False
    """parameters, gradients and optimizer state live in host memory, and the optimizer runs there"""
    precision: Literal["none", "bfloat16"] = "none"
    """dtype that parameters are cast to for computation; the master weights keep the recipe's dtype"""
    reduce: Literal["float32", "bfloat16"] = "float32"
    """dtype of gradients in reductions, with precision bfloat16"""
    recompute: str = "none"
    """activations thrown away and computed again in the backward pass: none, full (every block), every:N (every N-th
    block), selective (all but matrix products and attention)"""
    compile: bool = False
    """torch.compile of every block and of the loss"""
    context: ContextKind = "all_gather"
    """how the ranks of mesh.cp share attention: keys and values gathered, sent around a ring, or heads exchanged"""
    loss_chunk: int = 0
    """tokens of a rank whose logits exist at once: head and loss are computed in chunks of so many; 0: all at once"""

    def __post_init__(self) -> None:
        recompute_every(self.recompute)
        if self.unit < 0:
            raise ValueError(f"parallel.unit={self.unit}: a number of blocks, or 0 for the whole model")
        if self.loss_chunk < 0:
            raise ValueError(f"parallel.loss_chunk={self.loss_chunk}: a number of tokens, or 0 for all at once")
        if self.reduce == "bfloat16" and self.precision == "none":
            raise ValueError(
                "parallel.reduce=bfloat16 without mixed precision would round gradients that were computed wider; "
                "write parallel.precision=bfloat16 with it"
            )

    @property
    def whole_blocks(self) -> bool:
        """Whether blocks are recomputed or compiled, so that their backward pass is one piece."""
        return self.recompute != "none" or self.compile

    def check(self, mesh: Mesh, blocks: int) -> None:
        """Refuse what does not go together; `mesh` must be resolved.

        Raises:
            ValueError: naming the rule and the nearest right value.
        """
        if self.unit > blocks:
            raise ValueError(f"parallel.unit={self.unit}: the model has {blocks} blocks; write 0 for the whole model")
        every = recompute_every(self.recompute)
        if every > blocks:
            raise ValueError(
                f"parallel.recompute={self.recompute}: the model has {blocks} blocks, so no block would be "
                f"recomputed; write every:{blocks} or less"
            )


def recompute_every(recompute: str) -> int:
    """Every how many blocks one is recomputed; 0 for none.

    Raises:
        ValueError: a text that is none of the four forms.
    """
    if recompute == "none":
        return 0
    if recompute in ("full", "selective"):
        return 1
    kind, _, number = recompute.partition(":")
    if kind == "every" and number.isdecimal() and int(number) > 0:
        return int(number)
    raise ValueError(f"parallel.recompute={recompute!r}: write none, full, every:N with N of 1 or more, or selective")


@dataclass(frozen=True)
class Pipeline:
    """In which order micro-batches pass through the stages of a pipeline, and how the model is cut into stages."""

    schedule: Literal[
        "GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"
    ] = "1F1B"
    """GPipe (arXiv:1811.06965), 1F1B and Interleaved1F1B (arXiv:2104.04473), LoopedBFS (arXiv:2211.05953),
    InterleavedZeroBubble and ZBVZeroBubble (arXiv:2401.10241), DualPipeV (arXiv:2412.19437)"""
    split: str = ""
    """stages by hand, such as "E t*3 | t*4 | t*3 H" (E embedding, t*N blocks, H head); empty: cut by cost"""
    micro_batches: int = 0
    """micro-batches of one pass through the pipeline; 0: all of a step, so that a step is one pass"""
    virtual: int = 2
    """stages a rank holds under Interleaved1F1B, LoopedBFS and InterleavedZeroBubble; GPipe and 1F1B have one, V
    schedules (ZBVZeroBubble, DualPipeV) two"""

    def __post_init__(self) -> None:
        if self.micro_batches < 0:
            raise ValueError(
                f"pipeline.micro_batches={self.micro_batches}: a number of micro-batches, or 0 for all of a step"
            )
        if self.virtual < 1:
            raise ValueError(f"pipeline.virtual={self.virtual}: a rank holds 1 stage or more; the usual number is 2")
        if self.schedule in V_SCHEDULES and self.virtual != 2:
            raise ValueError(
                f"pipeline.virtual={self.virtual}: under {self.schedule} each rank holds two stages, one on the way "
                "down and one on the way up; write 2, or leave it out"
            )
        if self.schedule in ("GPipe", "1F1B") and self.virtual > 2:
            raise ValueError(
                f"pipeline.virtual={self.virtual}: under {self.schedule} each rank holds one stage; leave it out, or "
                "choose Interleaved1F1B or LoopedBFS"
            )

    @property
    def stages_per_rank(self) -> int:
        """Stages that one rank holds."""
        return 1 if self.schedule in ("GPipe", "1F1B") else self.virtual

    def check(self, pp: int, micro_batches: int, layers: int, *, whole_blocks: bool = False) -> list[str]:
        """Refuse, before anything is built, what the schedule cannot do; gives warnings.

        Args:
            pp: ranks of the pipeline; 1: nothing is refused.
            micro_batches: of one pass, a number.
            layers: blocks of the model.
            whole_blocks: blocks are recomputed or compiled, so that their backward pass is not split.

        Raises:
            ValueError: naming the rule and the nearest legal number.
        """
        if pp == 1:
            return []
        stages = pp * self.stages_per_rank
        if self.split:
            parse_split(self.split, layers, stages)
        elif layers < stages:
            raise ValueError(
                f"mesh.pp={pp} with {self.stages_per_rank} stages a rank ({self.schedule}) makes {stages} stages of "
                f"{layers} blocks, and each needs at least one; write mesh.pp={max(1, layers // self.stages_per_rank)} "
                "or less"
            )
        self._check_micro_batches(pp, micro_batches)
        warnings = []
        if micro_batches < 4 * pp:
            warnings.append(
                f"{micro_batches} micro-batches a pass are fewer than 4 times the {pp} ranks of the pipeline: the "
                f"bubble costs up to {self.bubble(pp, micro_batches):.0%} of a step under {self.schedule}; with "
                f"{4 * pp} micro-batches it would be {self.bubble(pp, 4 * pp):.0%}"
            )
        if whole_blocks and self.schedule in SPLIT_BACKWARD:
            warnings.append(
                f"recomputed or compiled blocks have a backward pass in one piece, so {self.schedule} has no weight "
                "gradients left to fill the bubble with"
            )
        return warnings

    def bubble(self, pp: int, micro_batches: int) -> float:
        """Share of a step in which ranks wait: (P - 1) / (V * M + P - 1), an upper bound where backward is split."""
        return (pp - 1) / (self.stages_per_rank * micro_batches + pp - 1)

    def _check_micro_batches(self, pp: int, micro_batches: int) -> None:
        def legal(number: int) -> bool:
            if number < least:
                return False
            return not rounds or number % (number // pp) == 0

        least = 2 * pp if self.schedule == "DualPipeV" else pp
        rounds = self.schedule in ("Interleaved1F1B", "InterleavedZeroBubble")
        if legal(micro_batches):
            return
        below = next((number for number in range(micro_batches, 0, -1) if legal(number)), None)
        above = next(number for number in range(max(micro_batches, 1), micro_batches + 2 * pp + 1) if legal(number))
        rule = (
            f"{self.schedule} needs at least {least} micro-batches with mesh.pp={pp}"
            if micro_batches < least
            else f"{self.schedule} takes micro-batches in rounds of equal size, as many rounds as there are whole "
            f"multiples of mesh.pp={pp}"
        )
        near = above if below is None else f"{below} or {above}"
        raise ValueError(f"pipeline.micro_batches={micro_batches}: {rule}; the nearest legal number is {near}")
