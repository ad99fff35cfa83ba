"""The loss as a sum, which is all that a micro-batch contributes to the mean over the step's valid tokens."""

import torch
import torch.nn.functional as F
from torch import Tensor

IGNORE = -100
"""a label that has no loss"""


def cross_entropy_sum(logits: Tensor, labels: Tensor) -> Tensor:
    """Sum over valid labels of -log softmax, in float32 or wider.

    Args:
        logits: [B, S, V].
        labels: [B, S]; IGNORE has no loss, so that none valid gives 0.
    """
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32)).flatten(0, -2)
    return F.cross_entropy(wide, labels.flatten(), ignore_index=IGNORE, reduction="sum")
