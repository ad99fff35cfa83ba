"""Which tokens of a row a context rank holds: causal work is balanced by one early and one late chunk for each.

A row of S tokens is cut into 2 * cp chunks; rank r holds chunks r and 2 * cp - 1 - r, one after the other (Zhu 2024,
"zigzag" of ring-flash-attention; Llama 3, Dubey et al. 2024, arXiv:2407.21783, section 3.3.2).
"""

import torch
from torch import Tensor

from composable.data.loader import MicroBatch


def shard_sequence(batch: MicroBatch, rank: int, cp: int) -> MicroBatch:
    """The part of a micro-batch that context rank `rank` of `cp` computes: [B, S] -> [B, S / cp].

    Positions are made explicit (0, 1, 2... where there were none), so that the model need not know the order of its
    tokens; `samples` stay.

    Raises:
        ValueError: S is not a multiple of 2 * cp, or there is no such rank.
    """
    check_length(batch.tokens.size(1), cp)
    if not 0 <= rank < cp:
        raise ValueError(f"rank {rank}: the context ranks of a group of {cp} are 0 to {cp - 1}")
    positions = batch.positions
    if positions is None:
        positions = torch.arange(batch.tokens.size(1), device=batch.tokens.device).expand_as(batch.tokens)

    def mine(x: Tensor) -> Tensor:
        chunks = x.chunk(2 * cp, dim=1)
        return torch.cat((chunks[rank], chunks[2 * cp - 1 - rank]), dim=1)

    return batch._replace(
        tokens=mine(batch.tokens),
        labels=mine(batch.labels),
        positions=mine(positions),
        documents=None if batch.documents is None else mine(batch.documents),
        indices=None if batch.indices is None else mine(batch.indices),
    )


def check_length(seq_len: int, cp: int) -> None:
    """Raise ValueError unless `seq_len` tokens can be cut into 2 * cp equal chunks."""
    if seq_len % (2 * cp):
        below = seq_len // (2 * cp) * 2 * cp
        near = [length for length in (below, below + 2 * cp) if length]
        raise ValueError(
            f"data.seq_len={seq_len} with mesh.cp={cp}: a row is cut into an early and a late chunk for each context "
            f"rank, so its length is a multiple of 2*cp = {2 * cp}; the nearest is {' or '.join(map(str, near))}"
        )


def places(rank: int, cp: int, length: int) -> tuple[range, range]:
    """Where in the row the `length` tokens of a rank are: its early chunk and its late one."""
    half = length // 2
    early, late = rank * half, (2 * cp - 1 - rank) * half
    return range(early, early + half), range(late, late + half)


def to_row(shards: Tensor, dim: int) -> Tensor:
    """Every rank's tokens [cp, ..., S / cp, ...] -> [..., S, ...] in the row's order; `dim`, that of S, is negative."""
    heads, tails = shards.chunk(2, dim)
    return torch.cat((*heads.unbind(), *reversed(tails.unbind())), dim)


def from_row(row: Tensor, cp: int, dim: int) -> Tensor:
    """The inverse of `to_row`: [..., S, ...] -> [cp, ..., S / cp, ...]."""
    chunks = row.chunk(2 * cp, dim)
    return torch.stack([torch.cat((chunks[rank], chunks[-1 - rank]), dim) for rank in range(cp)])
