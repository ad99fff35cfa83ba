"""Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1).

Queries, and keys with values, are made from narrow latents, each behind a norm of its own. A head of queries and keys
has a part without positions and a part with them, which in keys is one for all heads. Weights lie as published.
"""

from typing import Any

import torch
from torch import Tensor, nn

from composable.linear import Linear
from composable.models.attention import LOCAL, Method
from composable.models.config import DecoderConfig, RopeConfig
from composable.models.rotary import in_halves, magnitude, rotate

NORM_EPS = 1e-6
"""of the latents' norms, in every published model and whatever the other norms have"""


class Sequence(nn.Module):
    """What follows sees all tokens: here they are; tensor parallelism gathers them from its ranks."""

    def forward(self, *parts: Tensor) -> tuple[Tensor, ...]:
        """Each [B, s, any width] -> [B, S, the same width]."""
        return parts


class LatentAttention(nn.Module):
    """Self-attention of one block; heads are counted from the weights, so a shard of them works alike.

    The latents are made of hidden states token by token, so a rank makes those of its own tokens; `sequence` stands
    between them and the heads.
    """

    def __init__(self, config: DecoderConfig, method: Method = LOCAL) -> None:
        super().__init__()
        latent = config.latent
        assert latent is not None
        self.latent = latent
        self.attend = method.attend
        self.scale = score_scale(config.rope)
        queries = config.heads * latent.head_dim
        if latent.q_rank:
            self.q_a_proj = Linear(config.dim, latent.q_rank, bias=config.qkv_bias)
            self.q_a_layernorm = nn.RMSNorm(latent.q_rank, eps=NORM_EPS)
            self.q_b_proj = Linear(latent.q_rank, queries, bias=False)
        else:
            self.q_proj = Linear(config.dim, queries, bias=False)
        self.kv_a_proj_with_mqa = Linear(config.dim, latent.kv_rank + latent.rope_dim, bias=config.qkv_bias)
        self.kv_a_layernorm = nn.RMSNorm(latent.kv_rank, eps=NORM_EPS)
        self.sequence = Sequence()
        self.kv_b_proj = Linear(latent.kv_rank, config.heads * (latent.nope_dim + latent.value_dim), bias=False)
        self.o_proj = Linear(config.heads * latent.value_dim, config.dim, bias=config.output_bias)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Any) -> Tensor:
        """x [B, S, D] -> [B, S, D]; cos and sin of `rope_dim`, as `rotary.tables` gives them."""
        for_q, for_kv, shared = self.sequence(*self.latents(x))
        q, k, v = self.heads(for_q, for_kv, shared, cos, sin)
        out = self.attend(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), mask)
        return self.o_proj(out.transpose(1, 2).flatten(2))

    def latents(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x [B, s, D] -> what queries are made from [B, s, q_rank or D], what keys and values are made from
        [B, s, kv_rank], and the keys' part with positions, not yet turned [B, s, rope_dim]."""
        for_q = self.q_a_layernorm(self.q_a_proj(x)) if self.latent.q_rank else x
        for_kv, shared = self.kv_a_proj_with_mqa(x).split((self.latent.kv_rank, self.latent.rope_dim), dim=-1)
        return for_q, self.kv_a_layernorm(for_kv), shared

    def heads(
        self, for_q: Tensor, for_kv: Tensor, shared: Tensor, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """`latents` -> q and k [B, S, H, nope_dim + rope_dim], v [B, S, H, value_dim]."""
        latent = self.latent
        made = self.q_b_proj(for_q) if latent.q_rank else self.q_proj(for_q)
        q, turned = made.unflatten(-1, (-1, latent.head_dim)).split((latent.nope_dim, latent.rope_dim), dim=-1)
        q = torch.cat((q, self._rotate(turned, cos, sin)), dim=-1)
        k, v = (
            self.kv_b_proj(for_kv)
            .unflatten(-1, (-1, latent.nope_dim + latent.value_dim))
            .split((latent.nope_dim, latent.value_dim), dim=-1)
        )
        turned = self._rotate(shared[..., None, :], cos, sin)
        k = torch.cat((k, turned.expand(-1, -1, k.size(2), -1)), dim=-1)
        return q if self.scale == 1 else q * self.scale, k, v

    def _rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return rotate(in_halves(x) if self.latent.interleaved else x, cos, sin)


def score_scale(rope: RopeConfig) -> float:
    """By what the scores of latent attention are multiplied beside 1 / sqrt(head_dim): 1 but for yarn."""
    return magnitude(rope.factor, rope.mscale_all_dim) ** 2 if rope.scaling == "yarn" else 1.0
