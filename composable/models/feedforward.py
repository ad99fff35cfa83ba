"""SwiGLU (Shazeer 2020, arXiv:2002.05202)."""

import torch.nn.functional as F
from torch import Tensor, nn

from composable.linear import Linear
from composable.models.config import DecoderConfig


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x)), of hidden width `ffn` (the configuration's if None)."""

    def __init__(self, config: DecoderConfig, ffn: int | None = None) -> None:
        super().__init__()
        ffn = config.ffn if ffn is None else ffn
        self.gate_proj = Linear(config.dim, ffn, bias=config.mlp_bias)
        self.up_proj = Linear(config.dim, ffn, bias=config.mlp_bias)
        self.down_proj = Linear(ffn, config.dim, bias=config.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., D] -> [..., D]."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
