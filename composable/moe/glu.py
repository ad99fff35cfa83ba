"""What an expert computes between its matrices: SwiGLU, or the clamped one of gpt-oss; and the biases of both."""

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

ALPHA = 1.702
"""slope of the sigmoid in the clamped form, with which gate * sigmoid(ALPHA * gate) is close to GELU"""


@dataclass(frozen=True)
class Form:
    """What experts have beside three matrices."""

    gate_bias: Tensor | None = None
    """[E, F]; the biases come together, or not at all"""
    up_bias: Tensor | None = None
    """[E, F]"""
    down_bias: Tensor | None = None
    """[E, D]"""
    limit: float = 0.0
    """as `glu` takes it"""

    @property
    def biases(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Those of gate, up and down."""
        return self.gate_bias, self.up_bias, self.down_bias


PLAIN = Form()
"""SwiGLU without biases"""


def glu(gate: Tensor, up: Tensor, limit: float = 0.0) -> Tensor:
    """gate, up [..., F] -> [..., F]: silu(gate) * up; with a limit gpt-oss's (arXiv:2508.10925), clamped and shifted.

    That is gate' * sigmoid(1.702 gate') * (up' + 1), gate' at most `limit`, up' within -limit and limit.
    """
    activated, factor = factors(gate, up, limit)
    return activated * factor


def factors(gate: Tensor, up: Tensor, limit: float = 0.0) -> tuple[Tensor, Tensor]:
    """The two whose product is `glu`: the activated gate, which is new memory, and what multiplies it."""
    if not limit:
        return F.silu(gate), up
    gate = gate.clamp(max=limit)
    return (gate * ALPHA).sigmoid() * gate, up.clamp(-limit, limit) + 1
