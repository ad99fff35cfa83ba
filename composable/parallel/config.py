"""How a model is spread over a mesh: values and their checks."""

from dataclasses import dataclass
from typing import Literal

from composable.mesh import Mesh

DataKind = Literal["ddp", "zero1", "zero2", "zero3"]


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

    def __post_init__(self) -> None:
        recompute_every(self.recompute)
        if self.unit < 0:
            raise ValueError(f"parallel.unit={self.unit}: a number of blocks, or 0 for the whole model")
        if self.reduce == "bfloat16" and self.precision == "none":
            raise ValueError(
                "parallel.reduce=bfloat16 without mixed precision would round gradients that were computed wider; "
                "write parallel.precision=bfloat16 with it"
            )

    def check(self, mesh: Mesh, blocks: int) -> None:
        """Refuse what does not go together; `mesh` must be resolved.

        Raises:
            ValueError: naming the rule and the nearest right value.
        """
        for name in ("cp", "tp", "pp", "ep"):
            if getattr(mesh, name) > 1:
                raise ValueError(
                    f"mesh.{name}={getattr(mesh, name)}: only the data dimensions dp_replicate and dp_shard are "
                    f"composed so far; write mesh.{name}=1"
                )
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
