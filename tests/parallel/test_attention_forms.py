"""Windows and sinks over a shared sequence are those of one process, whatever the method."""

import itertools

import pytest
import torch
import torch.distributed as dist

from composable.models import attention
from composable.parallel.context import context_method
from composable.parallel.gathered import pieces
from composable.parallel.head_tail import from_row, places
from composable.parallel.online_softmax import Window, piece_mask
from composable.parallel.ring import meeting
from composable.verify import error
from tests.parallel.test_context import KINDS, LENGTH, heads_of, joined, mine, packed

HEADS, KV_HEADS = 4, 2
# Window, sinks. A token that sees itself alone has gradients for its query only beside a sink.
FORMS = [(1, True), *itertools.product([0, 2, 3, 8, LENGTH], [False, True])]


def sinks_of(dtype: torch.dtype) -> torch.Tensor:
    return torch.linspace(-1, 2, HEADS, dtype=torch.float64).to(dtype)


def attended(method, tensors, documents, window, sinks, length):
    """Output, and gradients of q, k, v and the sinks."""
    *leaves, grad = tensors
    leaves = [x.clone().requires_grad_() for x in leaves]
    logits = sinks_of(grad.dtype).requires_grad_() if sinks else None
    mask = method.mask(documents)
    if window:
        mask = method.narrow(mask, window, torch.arange(length))
    out = method.attend(*leaves, mask, window=window, sinks=logits)
    out.backward(grad)
    return [out.detach(), *(leaf.grad for leaf in leaves), None if logits is None else logits.grad]


def share(kind, documents, dtype):
    method = context_method(kind, dist.group.WORLD)
    tensors = [mine(x, -2) for x in heads_of(HEADS, KV_HEADS, dtype)]
    own = None if documents is None else mine(documents, -1)
    return [attended(method, tensors, own, *form, LENGTH // dist.get_world_size()) for form in FORMS]


def whole(documents):
    return [attended(attention.LOCAL, heads_of(HEADS, KV_HEADS, torch.float64), documents, *f, LENGTH) for f in FORMS]


@pytest.mark.parametrize(("cp", "dtype"), [(1, "float64"), (2, "float64"), (4, "float64"), (2, "bfloat16")])
@pytest.mark.parametrize("documents", [False, True], ids=["one document", "documents"])
@pytest.mark.parametrize("kind", KINDS)
def test_outputs_and_gradients_are_those_of_the_whole_row(kind, documents, cp, dtype, ranks):
    ids, near = packed() if documents else None, 1e-9 if dtype == "float64" else 0.04
    results, expected = ranks(cp, share, kind, ids, getattr(torch, dtype)), whole(ids)
    for form, (window, sinks) in enumerate(FORMS):
        for which in range(4):
            found = error(joined(results, form, which).double(), expected[form][which])
            assert found < near, f"window {window}, sinks {sinks}, {('out', 'q', 'k', 'v')[which]}: {found}"
        if sinks:  # each rank has the part of its tokens or heads
            total = sum(rank[form][4].double() for rank in results)
            assert error(total, expected[form][4]) < near, f"window {window}, sinks"


def windowed(found, rank, owner, cp, window) -> torch.Tensor:
    """How often each pair of the row's tokens [S, S] is seen; columns of one owner, or of the row (None)."""
    index, count = torch.arange(24), torch.zeros(24, 24)
    rows, length = from_row(index, cp, -1)[rank], 24 // cp
    columns = index if owner is None else from_row(index, cp, -1)[owner]
    runs = (range(24),) if owner is None else places(owner, cp, length)
    near = Window(window, places(rank, cp, length), runs, torch.device("cpu"))
    for piece in found:
        if not near.hides(piece):
            part = torch.ones(len(rows[piece.rows]), len(columns[piece.columns]))
            mask = piece_mask(piece, None, None, near)
            seen = part if mask is None else mask[0, 0]
            r, c = rows[piece.rows], columns[piece.columns]
            count[r[:, None], c] += seen.float().tril() if piece.causal and mask is None else seen
    return count


@pytest.mark.parametrize("window", [1, 2, 3, 6, 11, 24])
@pytest.mark.parametrize("cp", [1, 2, 3, 4])
def test_every_pair_within_the_window_is_computed_once_and_no_other(cp, window):
    band = torch.ones(24, 24).tril().triu(1 - window)
    length = 24 // cp
    ringed = sum(windowed([meeting(r, o, length)], r, o, cp, window) for r in range(cp) for o in range(cp))
    gathered = sum(windowed(pieces(r, cp, length, window), r, None, cp, window) for r in range(cp))
    assert torch.equal(ringed, band)
    assert torch.equal(gathered, band)


def test_what_the_window_hides_is_not_computed():
    length, cp = 6, 4
    met = [
        (r, o)
        for r, o in itertools.product(range(cp), repeat=2)
        if not Window(1, places(r, cp, length), places(o, cp, length), torch.device("cpu")).hides(meeting(r, o, length))
    ]
    assert met == [(r, r) for r in range(cp)]
    assert all(piece.causal for r in range(cp) for piece in pieces(r, cp, length, 1))
    widths = [p.columns.stop - p.columns.start for r in range(cp) for p in pieces(r, cp, length, 3) if not p.causal]
    assert set(widths) == {2}
