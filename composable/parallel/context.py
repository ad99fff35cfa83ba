"""Context parallelism: ranks share a sequence, and its attention by one of three methods.

| method | in a layer, forward (backward about twice) | suits |
|---|---|---|
| `all_gather` | one all-gather of keys and values | few key/value heads, short groups |
| `ring` | cp - 1 sends of a rank's keys and values, beside compute | long sequences, many ranks |
| `ulysses` | two all-to-alls, of (q, k, v) and of the output | many heads; any attention kernel |

`shard_sequence` gives a rank its tokens; the rest of the model works token by token and need not know.
"""

from typing import Any, get_args

import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

from composable.models.attention import Method
from composable.parallel.config import ContextKind
from composable.parallel.gathered import all_gather
from composable.parallel.head_tail import check_length, shard_sequence
from composable.parallel.ring import ring
from composable.parallel.ulysses import ulysses

__all__ = ["ContextKind", "check_context", "context_method", "shard_sequence"]


def check_context(seq_len: int, cp: int, tp: int, heads: int, kv_heads: int, method: ContextKind) -> None:
    """Refuse sizes that a sequence cannot be shared with.

    Args:
        seq_len: tokens of a row.
        cp, tp: degrees of the mesh.
        heads, kv_heads: of the whole model.

    Raises:
        ValueError: naming the rule and the nearest right value.
    """
    if method not in get_args(ContextKind):
        raise ValueError(f"parallel.context={method!r}: write one of {', '.join(get_args(ContextKind))}")
    check_length(seq_len, cp)
    if heads % kv_heads:
        raise ValueError(
            f"model.kv_heads={kv_heads}: each serves as many of the {heads} query heads, so it divides them"
        )
    local = heads // tp
    if method == "ulysses" and (heads % tp or local % cp):
        legal = [n for n in range(1, heads // tp + 1) if heads % (tp * n) == 0]
        near = f"the nearest cp is {min(legal, key=lambda n: abs(n - cp))}" if legal else f"tp must divide {heads} too"
        raise ValueError(
            f"mesh.cp={cp} with parallel.context=ulysses: the {heads} query heads over tp={tp} are shared by the "
            f"context ranks, so tp*cp must divide them; {near}, or choose parallel.context=ring or all_gather"
        )


def context_method(kind: ContextKind, group: ProcessGroup) -> Method:
    """How queries of this rank meet keys of all ranks: what a Decoder is built with in place of `LOCAL`.

    Causal order is that of the row, whatever the positions; `group` is the only one used. `mask` takes this rank's
    documents [B, S / cp] and `attend` its heads [B, H, S / cp, hd]; both are collective over `group`, and every rank
    must have documents, or none.

    Raises:
        ValueError: an unknown kind.
    """
    if kind == "all_gather":
        return _of_one_width(all_gather(group))
    if kind == "ring":
        return _of_one_width(ring(group))
    if kind == "ulysses":
        return _of_one_width(ulysses(group))
    raise ValueError(f"parallel.context={kind!r}: write one of {', '.join(get_args(ContextKind))}")


def _of_one_width(method: Method) -> Method:
    """For values narrower than queries and keys, as latent attention has them: they travel with zeros behind them."""

    def attend(q: Tensor, k: Tensor, v: Tensor, mask: Any, **form: Any) -> Tensor:
        short = q.size(-1) - v.size(-1)
        if short == 0:
            return method.attend(q, k, v, mask, **form)
        return method.attend(q, k, F.pad(v, (0, short)), mask, **form)[..., : v.size(-1)]

    return Method(method.mask, attend, method.narrow)
