"""Grouped-query attention (Ainslie et al. 2023, arXiv:2305.13245), behind one callable for the inner product."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from composable.linear import Linear
from composable.models.config import DecoderConfig
from composable.models.rotary import rotate


@dataclass(frozen=True)
class Method:
    """How queries meet keys and values: two functions, chosen when the model is built."""

    mask: Callable[[Tensor | None], Any]
    """documents [B, S] or None -> what `attend` needs to know of them; once for all layers"""
    attend: Callable[[Tensor, Tensor, Tensor, Any], Tensor]
    """(q [B, H, S, hd], k [B, H_kv, S, hd], v [B, H_kv, S, hd], mask) -> [B, H, S, hd]"""


def document_mask(documents: Tensor | None) -> Tensor | None:
    """Causal within a document, nothing across: documents [B, S] -> bool [B, 1, S, S]; None for one document."""
    if documents is None:
        return None
    same = documents[:, None, :, None] == documents[:, None, None, :]
    return same.tril_()


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """Softmax attention by `scaled_dot_product_attention`; True in the mask means: may attend; None: causal."""
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=q.size(1) != k.size(1)
    )


LOCAL = Method(document_mask, attend)
"""attention over a sequence that one rank holds whole"""


class Attention(nn.Module):
    """Self-attention of one block; heads are counted from the weights, so a shard of them works alike."""

    def __init__(self, config: DecoderConfig, method: Method = LOCAL) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.attend = method.attend
        queries, keys = config.heads * config.head_dim, config.kv_heads * config.head_dim
        self.q_proj = Linear(config.dim, queries, bias=config.qkv_bias)
        self.k_proj = Linear(config.dim, keys, bias=config.qkv_bias)
        self.v_proj = Linear(config.dim, keys, bias=config.qkv_bias)
        self.o_proj = Linear(queries, config.dim, bias=config.output_bias)
        self.q_norm = nn.RMSNorm(config.head_dim, eps=config.norm_eps) if config.qk_norm else nn.Identity()
        self.k_norm = nn.RMSNorm(config.head_dim, eps=config.norm_eps) if config.qk_norm else nn.Identity()

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Any) -> Tensor:
        """x [B, S, D] -> [B, S, D]; cos and sin as `rotary.tables` gives them."""
        heads = (*x.shape[:-1], -1, self.head_dim)
        q = rotate(self.q_norm(self.q_proj(x).view(heads)), cos, sin)
        k = rotate(self.k_norm(self.k_proj(x).view(heads)), cos, sin)
        v = self.v_proj(x).view(heads)
        out = self.attend(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), mask)
        return self.o_proj(out.transpose(1, 2).flatten(2))
