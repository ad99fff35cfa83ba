"""Grouped-query attention (Ainslie et al. 2023, arXiv:2305.13245), behind one callable for the inner product.

A token may see a window of those before it only (Beltagy et al. 2020, arXiv:2004.05150), and a learnt sink of each head
may take its share of the softmax (gpt-oss, arXiv:2508.10925).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from composable._torch import attention_backward, attention_forward
from composable.linear import Linear
from composable.models.config import DecoderConfig
from composable.models.rotary import rotate


class Attend(Protocol):
    """Causal softmax attention."""

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Any, *, window: int = 0, sinks: Tensor | None = None
    ) -> Tensor:
        """q [B, H, S, hd], k [B, H_kv, S, hd], v [B, H_kv, S, hd] -> [B, H, S, hd].

        Args:
            mask: as `Method.mask` gives it, or `Method.narrow` for this window.
            window: tokens that each sees, itself the last of them; 0: all before it.
            sinks: [H], a logit that joins each row's softmax and has no value.
        """


def as_it_is(mask: Any, window: int, positions: Tensor) -> Any:
    """The mask of a method whose `attend` makes what it needs of a window."""
    return mask


@dataclass(frozen=True)
class Method:
    """How queries meet keys and values: functions, chosen when the model is built."""

    mask: Callable[[Tensor | None], Any]
    """documents [B, S] or None -> what `attend` needs to know of them; once for all layers"""
    attend: Attend
    narrow: Callable[[Any, int, Tensor], Any] = as_it_is
    """(what `mask` gave, window, positions [S] or [B, S]) -> the same for layers with that window, once for them"""


class Banded(NamedTuple):
    """A mask that has its window in it."""

    mask: Tensor
    """bool [B or 1, 1, S, S]"""


def document_mask(documents: Tensor | None) -> Tensor | None:
    """Causal within a document, nothing across: documents [B, S] -> bool [B, 1, S, S]; None for one document."""
    if documents is None:
        return None
    same = documents[:, None, :, None] == documents[:, None, None, :]
    return same.tril_()


def window_mask(mask: Tensor | None, window: int, length: int, device: torch.device) -> Tensor | Banded | None:
    """Join a mask bool [B, 1, S, S], or None for causal, with a window of rows of S = `length` tokens.

    What no window of that many tokens narrows is given back as it is.
    """
    if not 0 < window < length:
        return mask
    band = torch.ones(length, length, dtype=torch.bool, device=device).tril_().triu_(1 - window)[None, None]
    return Banded(band if mask is None else mask & band)


def narrow(mask: Tensor | None, window: int, positions: Tensor) -> Tensor | Banded | None:
    """`window_mask` for the tokens of `positions`."""
    return window_mask(mask, window, positions.size(-1), positions.device)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | Banded | None,
    *,
    window: int = 0,
    sinks: Tensor | None = None,
) -> Tensor:
    """Softmax attention by `scaled_dot_product_attention`; True in the mask means: may attend; None: causal."""
    found = mask if isinstance(mask, Banded) else window_mask(mask, window, q.size(2), q.device)
    seen = found.mask if isinstance(found, Banded) else found
    if sinks is not None:
        return _attend_with_sinks(q, k, v, seen, sinks)
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=seen, is_causal=seen is None, enable_gqa=q.size(1) != k.size(1)
    )


@torch.compiler.disable  # kernels with a log-sum-exp
def _attend_with_sinks(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, sinks: Tensor) -> Tensor:
    return _Sinks.apply(q, k, v, mask, sinks)


class _Sinks(torch.autograd.Function):
    """A sink makes the sum of a row's exponentials larger, and adds nothing else: its value is 0."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, sinks: Tensor) -> Tensor:
        out, lse = attention_forward(q, k, v, mask, mask is None)
        total = torch.logaddexp(lse, sinks.to(lse.dtype)[:, None])
        out = (out * (lse - total).exp()[..., None]).to(q.dtype)
        ctx.save_for_backward(q, k, v, mask, sinks, out, total)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, mask, sinks, out, total = ctx.saved_tensors
        grad = grad.contiguous()
        for_q, for_k, for_v = attention_backward(grad, q, k, v, mask, mask is None, out, total)
        return for_q, for_k, for_v, None, sink_gradient(sinks, grad, out, total)


def sink_gradient(sinks: Tensor, grad: Tensor, out: Tensor, lse: Tensor) -> Tensor:
    """Gradient [H] of sinks [H]: their weight in each row takes from its output in proportion.

    Args:
        grad: [B, H, S, hd] of `out`, which has the sinks' share taken from it.
        lse: [B, H, S], sinks included.
    """
    weights = (sinks.to(lse.dtype)[:, None] - lse).exp()
    along = (grad.to(lse.dtype) * out.to(lse.dtype)).sum(-1)
    return -(weights * along).sum((0, 2)).to(sinks.dtype)


LOCAL = Method(document_mask, attend, narrow)
"""attention over a sequence that one rank holds whole"""


class Attention(nn.Module):
    """Self-attention of one block; heads are counted from the weights, so a shard of them works alike."""

    def __init__(self, config: DecoderConfig, method: Method = LOCAL, layer: int = 0) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.attend = method.attend
        self.window = config.window_of(layer)
        self.wide = config.qk_norm_wide
        queries, keys = config.heads * config.head_dim, config.kv_heads * config.head_dim
        self.q_proj = Linear(config.dim, queries, bias=config.qkv_bias)
        self.k_proj = Linear(config.dim, keys, bias=config.qkv_bias)
        self.v_proj = Linear(config.dim, keys, bias=config.qkv_bias)
        self.o_proj = Linear(queries, config.dim, bias=config.output_bias)
        widths = (queries, keys) if self.wide else (config.head_dim, config.head_dim)
        self.q_norm, self.k_norm = (
            nn.RMSNorm(width, eps=config.norm_eps) if config.qk_norm else nn.Identity() for width in widths
        )
        self.sinks = nn.Parameter(torch.zeros(config.heads)) if config.sinks else None

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Any) -> Tensor:
        """x [B, S, D] -> [B, S, D]; cos and sin as `rotary.tables` gives them."""
        heads = (*x.shape[:-1], -1, self.head_dim)
        q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x).view(heads)
        if self.wide:
            q, k = self.q_norm(q).view(heads), self.k_norm(k).view(heads)
        else:
            q, k = self.q_norm(q.view(heads)), self.k_norm(k.view(heads))
        q, k = (part.transpose(1, 2) for part in (rotate(q, cos, sin), rotate(k, cos, sin)))
        out = self.attend(q, k, v.transpose(1, 2), mask, window=self.window, sinks=self.sink_logits())
        return self.o_proj(out.transpose(1, 2).flatten(2))

    def sink_logits(self) -> Tensor | None:
        """Of this rank's heads [H]; None: there are no sinks."""
        return self.sinks
