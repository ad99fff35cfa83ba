"""The loss as a sum, which is all that a micro-batch contributes to the mean over the step's valid tokens."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from composable.linear import linear

IGNORE = -100
"""a label that has no loss"""

Loss = Callable[[Tensor, Tensor], Tensor]
"""(logits [..., V], labels [...]) -> sum over valid labels []"""


def cross_entropy_sum(logits: Tensor, labels: Tensor) -> Tensor:
    """Sum over valid labels of -log softmax, in float32 or wider.

    Args:
        logits: [B, S, V].
        labels: [B, S]; IGNORE has no loss, so that none valid gives 0.
    """
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32)).flatten(0, -2)
    return F.cross_entropy(wide, labels.flatten(), ignore_index=IGNORE, reduction="sum")


def chunked_loss(loss: Loss, hidden: Tensor, weight: Tensor, labels: Tensor, chunk: int) -> Tensor:
    """`loss(linear(hidden, weight), labels)`, `chunk` tokens at a time, so that all logits never exist at once.

    Gradients are computed along with the loss (Hsu et al. 2024, arXiv:2410.10989): no product is made twice, and what
    waits for the backward pass are two tensors of the sizes of `hidden` and `weight`.

    Args:
        hidden: [B, S, D].
        weight: [V, D], of the head, or this rank's rows of it if `loss` joins them.
        labels: [B, S].
        chunk: tokens at a time, 1 or more.

    Returns:
        [].
    """
    hidden, labels = hidden.flatten(0, -2), labels.flatten()
    if torch.is_grad_enabled():
        return _ChunkedLoss.apply(loss, chunk, hidden, weight, labels)
    pairs = zip(hidden.split(chunk), labels.split(chunk), strict=True)
    return torch.stack([loss(linear(part, weight), wanted) for part, wanted in pairs]).sum()


def _value_and_gradient(loss: Loss, logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    with torch.enable_grad():
        value = loss(logits.requires_grad_(), labels)
    return value.detach(), torch.autograd.grad(value, logits)[0]


def _add(total: Tensor | None, product: Tensor) -> Tensor:
    """Sum of many chunks' products: wider than these, if they are of half precision."""
    wide = product.to(torch.promote_types(product.dtype, torch.float32))
    return wide if total is None else total.add_(wide)


class _ChunkedLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, loss: Loss, chunk: int, hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        for_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[2] else None
        for_weight = None
        values = []
        for start in range(0, len(hidden), chunk):
            part = slice(start, start + chunk)
            value, g = _value_and_gradient(loss, linear(hidden[part], weight), labels[part])
            values.append(value)
            if for_hidden is not None:
                for_hidden[part] = linear(g, weight.t())
            if ctx.needs_input_grad[3]:
                for_weight = _add(for_weight, linear(g.t(), hidden[part].t()))
            del g  # before the next chunk's logits
        ctx.save_for_backward(for_hidden, for_weight)
        ctx.dtypes = hidden.dtype, weight.dtype
        return torch.stack(values).sum()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[None, None, Tensor | None, Tensor | None, None]:
        # In the loss's precision: 1 / tokens in half precision would scale every gradient by its rounding.
        for_hidden, for_weight = (
            x if x is None else (x.to(g.dtype) * g).to(dtype)
            for x, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        )
        return None, None, for_hidden, for_weight, None
