"""Attention by pieces is attention, and every kernel that may compute a piece agrees with torch's own attention."""

import pytest
import torch
import torch.nn.functional as F

import composable._torch
from composable._torch import attention_backward, attention_forward
from composable.parallel.online_softmax import Finished, Partial, Piece, piece_mask
from composable.verify import error

MASKS = {
    "all": (None, False),
    "causal": (None, True),
    "mask": ((torch.arange(7)[:, None] + torch.arange(7)) % 3 > 0, False),
}


def inputs(kv_heads: int = 2, device: str = "cpu", dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    """q, k, v, and the gradient of the output; heads are strided as a decoder's are."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, 7, heads, 8) for heads in (4, kv_heads, kv_heads, 4)]
    made = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    return [x.to(device, dtype).transpose(1, 2) for x in made]


def reference(q, k, v, grad, mask, causal):
    """Output and gradients by the public function."""
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    out = F.scaled_dot_product_attention(*leaves, attn_mask=mask, is_causal=causal, enable_gqa=True)
    out.backward(grad)
    return [out.detach(), *(leaf.grad for leaf in leaves)]


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("case", MASKS)
@pytest.mark.parametrize("kernel", ["cpu", "plain"])
def test_a_kernel_has_the_numbers_of_torchs_attention(kernel, case, kv_heads, monkeypatch):
    monkeypatch.setattr(composable._torch, "_attention_kernel", lambda *_: kernel)
    q, k, v, grad = inputs(kv_heads)
    mask, causal = MASKS[case]
    mask = None if mask is None else mask.expand(2, 1, 7, 7)
    out, lse = attention_forward(q, k, v, mask, causal)
    found = [out, *attention_backward(grad, q, k, v, mask, causal, out, lse)]
    assert [error(a, b) < 1e-12 for a, b in zip(found, reference(q, k, v, grad, mask, causal), strict=True)] == [
        True
    ] * 4


@pytest.mark.parametrize("kernel", ["cpu", "plain"])
def test_a_row_that_sees_nothing_weighs_nothing(kernel, monkeypatch):
    monkeypatch.setattr(composable._torch, "_attention_kernel", lambda *_: kernel)
    q, k, v, grad = inputs()
    mask = torch.ones(2, 1, 7, 7, dtype=torch.bool)
    mask[1, :, 3] = False
    out, lse = attention_forward(q, k, v, mask, False)
    assert (lse[1, :, 3] == -torch.inf).all()
    assert (out[1, :, 3] == 0).all()
    assert lse.isfinite().sum() == lse.numel() - 4
    for_q, *_ = attention_backward(grad, q, k, v, mask, False, out, lse.clamp(min=0.0))
    assert (for_q[1, :, 3] == 0).all()
    assert for_q.isfinite().all()


@pytest.mark.parametrize("kernel", ["flash", "efficient", "plain"])
@pytest.mark.parametrize("masked", [False, True])
def test_accelerator_kernels_are_called_by_their_signatures(kernel, masked, monkeypatch):
    if kernel == "flash" and masked:
        kernel = "efficient"  # flash takes no mask
    monkeypatch.setattr(composable._torch, "_attention_kernel", lambda *_: kernel)
    q, k, v, grad = inputs(device="meta", dtype=torch.bfloat16)
    mask = torch.ones(2, 1, 7, 7, dtype=torch.bool, device="meta") if masked else None
    out, lse = attention_forward(q, k, v, mask, not masked)
    assert (out.shape, out.dtype, lse.shape, lse.dtype) == (q.shape, q.dtype, (2, 4, 7), torch.float32)
    found = attention_backward(grad, q, k, v, mask, not masked, out, lse)
    assert [(x.shape, x.dtype) for x in found] == [(x.shape, x.dtype) for x in (q, k, v)]


@pytest.mark.parametrize("documents", [False, True])
def test_pieces_in_any_order_after_the_diagonal_make_the_whole(documents):
    q, k, v, grad = inputs()
    ids = torch.tensor([[0, 0, 1, 2, 2, 2, 0], [5, 5, 5, 5, 5, 5, 5]]) if documents else None
    first, second = slice(0, 3), slice(3, 7)
    pieces = [Piece(second, second, True), Piece(first, first, True), Piece(second, first, False)]
    masks = [piece_mask(piece, ids, ids) for piece in pieces]
    partial = Partial.empty(q)
    for piece, mask in zip(pieces, masks, strict=True):
        partial.add(q, k, v, piece, mask)
    found = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    for piece, mask in zip(pieces, masks, strict=True):
        Finished(q, partial.out, partial.lse, grad).gradients(k, v, piece, mask, found)
    whole = None if ids is None else (ids[:, None, :, None] == ids[:, None, None]).tril()
    expected = reference(q, k, v, grad, whole, whole is None)
    for a, b in zip((partial.out, *found), expected, strict=True):
        assert error(a, b) < 1e-12


def test_partial_results_in_half_precision_are_kept_in_float32():
    partial = Partial.empty(torch.zeros(1, 2, 4, 8, dtype=torch.bfloat16))
    assert (partial.out.dtype, partial.lse.dtype) == (torch.float32, torch.float32)
