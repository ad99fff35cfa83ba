"""A linear layer that takes the faster of the two float32 matrix products that a CPU build of torch carries."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from composable._torch import onednn_linear


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [..., I] @ weight [O, I]^T + bias [O].

    On a CPU, `F.linear` in float32 goes to MKL, which leaves a processor that is not Intel's at half its speed or less;
    oneDNN, in the same build, picks its kernels by what the processor can do. Other dtypes, devices and tensor
    subclasses take `F.linear`.
    """
    plain = type(x) is Tensor and type(weight) in (Tensor, nn.Parameter)
    if (
        plain
        and x.device.type == "cpu"
        and x.dtype == weight.dtype == torch.float32
        and weight.numel() > 0  # a rank may have no rows of a vocabulary, and oneDNN knows no empty products
        and torch.backends.mkldnn.is_available()
    ):
        return onednn_linear(x, weight, bias)
    return F.linear(x, weight, bias)


class Linear(nn.Linear):
    """`nn.Linear` by `linear`."""

    def forward(self, x: Tensor) -> Tensor:
        """x [..., I] -> [..., O]."""
        return linear(x, self.weight, self.bias)
