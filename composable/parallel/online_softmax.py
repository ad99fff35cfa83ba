"""Attention computed piece by piece: partial results are merged, and gradients split, by their log-sum-exp.

Milakov & Gimelshein 2018 (arXiv:1805.02867); the backward pass of a piece is that of FlashAttention (Dao et al. 2022,
arXiv:2205.14135, appendix B.2), which takes the output and the log-sum-exp of the whole row. Nothing is approximated.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from composable._torch import attention_backward, attention_forward


@dataclass(frozen=True)
class Piece:
    """Some queries and some keys that one kernel call joins."""

    rows: slice
    """of the queries this rank holds"""
    columns: slice
    """of the keys at hand"""
    causal: bool
    """square, on the diagonal: row i sees columns up to i; else every row sees every column"""


@dataclass(frozen=True)
class Window:
    """Tokens that each query sees, itself the last of them, where the places of queries and keys in the row are known.

    Places are given as the runs that follow each other in memory.
    """

    size: int
    rows: tuple[range, ...]
    """of the queries this rank holds"""
    columns: tuple[range, ...]
    """of the keys at hand"""
    device: torch.device

    def hides(self, piece: Piece) -> bool:
        """Whether no query of the piece sees a key of it."""
        return _at(self.rows, piece.rows.start) - _at(self.columns, piece.columns.stop - 1) >= self.size

    def mask(self, piece: Piece) -> Tensor | None:
        """bool [1, 1, rows, columns], causal order too; None where the window is wider than the piece."""
        if _at(self.rows, piece.rows.stop - 1) - _at(self.columns, piece.columns.start) < self.size:
            return None
        rows, columns = (
            torch.cat([torch.arange(run.start, run.stop, device=self.device) for run in runs])[part]
            for runs, part in ((self.rows, piece.rows), (self.columns, piece.columns))
        )
        before = rows[:, None] - columns  # how far back a key is
        return ((before >= 0) & (before < self.size))[None, None]


def _at(runs: tuple[range, ...], index: int) -> int:
    for run in runs:
        if index < len(run):
            return run[index]
        index -= len(run)
    raise IndexError(index)


@dataclass(frozen=True)
class Partial:
    """Attention over the pieces seen so far; `add` changes it in place."""

    out: Tensor
    """[B, H, S, hd] in float32 or wider"""
    lse: Tensor
    """[B, H, S]: log of the sum of exponentials; -inf where nothing was seen"""

    @classmethod
    def empty(cls, q: Tensor, sinks: Tensor | None = None) -> "Partial":
        """For queries q [B, H, S, hd]; every row has seen its head's sink [H], which has no value, if there are any."""
        wide = torch.promote_types(q.dtype, torch.float32)
        lse = q.new_full(q.shape[:-1], -torch.inf, dtype=wide)
        return cls(torch.zeros_like(q, dtype=wide), lse if sinks is None else lse.copy_(sinks[:, None]))

    def add(self, q: Tensor, k: Tensor, v: Tensor, piece: Piece, mask: Tensor | None) -> None:
        """Merge a piece; the first that a row meets must hold a key it may see, as the diagonal does.

        Args:
            q: [B, H, S, hd]; k, v: [B, H_kv, T, hd]. Whole: the piece says which of them.
            mask: as `piece_mask` gives it.
        """
        rows, columns = piece.rows, piece.columns
        causal = piece.causal and mask is None
        out, lse = attention_forward(q[:, :, rows], k[:, :, columns], v[:, :, columns], mask, causal)
        before = self.lse[:, :, rows]
        after = torch.logaddexp(before, lse)
        kept, new = (before - after).exp()[..., None], (lse - after).exp()[..., None]
        self.out[:, :, rows] = self.out[:, :, rows] * kept + out * new
        self.lse[:, :, rows] = after


@dataclass(frozen=True)
class Finished:
    """What the backward pass of every piece is given."""

    q: Tensor
    """[B, H, S, hd]"""
    out: Tensor
    """[B, H, S, hd] over all pieces"""
    lse: Tensor
    """[B, H, S] over all pieces"""
    grad: Tensor
    """[B, H, S, hd] of `out`"""

    def gradients(
        self, k: Tensor, v: Tensor, piece: Piece, mask: Tensor | None, to: tuple[Tensor, Tensor, Tensor]
    ) -> None:
        """Add a piece's gradients of q, k and v to the tensors `to`, in place and in their dtype."""
        rows, columns = piece.rows, piece.columns
        found = attention_backward(
            self.grad[:, :, rows],
            self.q[:, :, rows],
            k[:, :, columns],
            v[:, :, columns],
            mask,
            piece.causal and mask is None,
            self.out[:, :, rows],
            self.lse[:, :, rows],
        )
        for total, part, where in zip(to, found, (rows, columns, columns), strict=True):
            total[:, :, where] += part


def piece_mask(
    piece: Piece, queries: Tensor | None, keys: Tensor | None, window: Window | None = None
) -> Tensor | None:
    """Which keys of a piece may be seen, from the document of every query [B, S] and of every key [B, T].

    Returns:
        bool [B or 1, 1, rows, columns]; None where the piece says all: without documents and within the window.
    """
    near = None if window is None else window.mask(piece)
    if queries is None or keys is None:
        return near
    same = queries[:, None, piece.rows, None] == keys[:, None, None, piece.columns]
    same = same.tril_() if piece.causal else same
    return same if near is None else same & near
