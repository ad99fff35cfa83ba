"""Context parallelism: attention over a shared sequence is that of one process, whatever the method."""

import itertools

import pytest
import torch
import torch.distributed as dist

from composable.data.loader import MicroBatch
from composable.models import attention
from composable.models.config import DecoderConfig
from composable.models.decoder import Decoder
from composable.models.init import decoder_init, materialise
from composable.models.loss import IGNORE
from composable.parallel.context import check_context, context_method, shard_sequence
from composable.parallel.gathered import pieces
from composable.parallel.head_tail import from_row, to_row
from composable.parallel.recompute import recompute
from composable.parallel.ring import meeting
from composable.verify import error

KINDS = ["all_gather", "ring", "ulysses"]
LENGTH, HEAD_DIM = 16, 6
DOCUMENTS = [[1, 4, 1, 7, 3], [6, 5, 1, 4]]  # lengths: of one token; across every border of chunks, the middle too
MODEL = DecoderConfig(
    vocab_size=37, dim=16, layers=2, heads=4, kv_heads=2, head_dim=4, ffn=24, qk_norm=True, init_std=0.2
)


def documents_of(row: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Lengths -> document and position of every token; ids fall along the row, as nothing says they rise."""
    ids = torch.cat([torch.full((n,), len(row) - i) for i, n in enumerate(row)])
    return ids, torch.cat([torch.arange(n) for n in row])


def packed() -> torch.Tensor:
    return torch.stack([documents_of(row)[0] for row in DOCUMENTS])


def mine(row: torch.Tensor, dim: int) -> torch.Tensor:
    return from_row(row, dist.get_world_size(), dim)[dist.get_rank()]


def heads_of(heads: int, kv_heads: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """q, k, v of a row, and the gradient of its output."""
    generator = torch.Generator().manual_seed(heads * 10 + kv_heads)
    shapes = [(2, n, LENGTH, HEAD_DIM) for n in (heads, kv_heads, kv_heads, heads)]
    return tuple(torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes)


def attended(method: attention.Method, tensors, documents) -> list[torch.Tensor]:
    """Output, and gradients of q, k and v."""
    *leaves, grad = tensors
    # As the decoder gives them: [B, S, H, hd] in memory.
    leaves = [x.transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for x in leaves]
    out = method.attend(*leaves, method.mask(documents))
    out.backward(grad)
    return [out.detach(), *(leaf.grad for leaf in leaves)]


def share(kind, shapes, documents, dtype=torch.float64):
    method = context_method(kind, dist.group.WORLD)
    tensors = [[mine(x, -2) for x in heads_of(*shape, dtype)] for shape in shapes]
    own = None if documents is None else mine(documents, -1)
    return [attended(method, each, own) for each in tensors]


def whole(shapes, documents, dtype=torch.float64):
    return [attended(attention.LOCAL, heads_of(*shape, dtype), documents) for shape in shapes]


def joined(results, shape: int, which: int) -> torch.Tensor:
    return to_row(torch.stack([rank[shape][which] for rank in results]), -2)


SHAPES = [(4, 4), (4, 2), (8, 1)]


@pytest.mark.parametrize("documents", [False, True], ids=["one document", "documents"])
@pytest.mark.parametrize("cp", [1, 2, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_outputs_and_gradients_are_those_of_the_whole_row(kind, cp, documents, ranks):
    ids = packed() if documents else None
    results, expected = ranks(cp, share, kind, SHAPES, ids), whole(SHAPES, ids)
    for shape, which in itertools.product(range(len(SHAPES)), range(4)):
        found = error(joined(results, shape, which), expected[shape][which])
        assert found <= 1e-9, f"{SHAPES[shape]}, {('out', 'q', 'k', 'v')[which]}: {found}"


@pytest.mark.parametrize("documents", [False, True], ids=["one document", "documents"])
@pytest.mark.parametrize("kind", KINDS)
def test_bfloat16_stays_bfloat16_and_near(kind, documents, ranks):
    ids = packed() if documents else None
    results, expected = ranks(2, share, kind, SHAPES, ids, torch.bfloat16), whole(SHAPES, ids)
    for shape, which in itertools.product(range(len(SHAPES)), range(4)):
        found = joined(results, shape, which)
        assert found.dtype == torch.bfloat16
        assert error(found.double(), expected[shape][which]) < 0.03


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_call_gives_the_same_bits(kind, ranks):
    first, second = (ranks(4, share, kind, SHAPES, packed(), torch.float32) for _ in range(2))
    for a, b in zip(first, second, strict=True):
        assert all(
            torch.equal(x, y) for left, right in zip(a, b, strict=True) for x, y in zip(left, right, strict=True)
        )


def share_in_pairs(kind):
    """Two groups of 2, of ranks that are not neighbours, each with a row of its own."""
    groups = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])]
    place, row = divmod(dist.get_rank(), 2)
    method = context_method(kind, groups[row])
    tensors = [from_row(x[row : row + 1], 2, -2)[place] for x in heads_of(4, 2, torch.float64)]
    return [attended(method, tensors, from_row(packed()[row : row + 1], 2, -1)[place])]


@pytest.mark.parametrize("kind", KINDS)
def test_only_the_given_group_is_used(kind, ranks):
    results, (expected,) = ranks(4, share_in_pairs, kind), whole([(4, 2)], packed())
    for row, which in itertools.product(range(2), range(4)):
        assert error(joined(results[row::2], 0, which), expected[which][row : row + 1]) <= 1e-9


def batches(documents: bool) -> list[MicroBatch]:
    """Two micro-batches with ragged labels."""
    made = []
    for index in range(2):
        generator = torch.Generator().manual_seed(index)
        tokens = torch.randint(0, MODEL.vocab_size, (2, LENGTH), generator=generator)
        labels = tokens.roll(-1, 1)
        labels[torch.rand(labels.shape, generator=generator) < 0.3 * index] = IGNORE
        rows = [documents_of(row[:: 1 - 2 * index]) for row in DOCUMENTS]
        ids, positions = (torch.stack(part) for part in zip(*rows, strict=True))
        packing = (positions, ids) if documents else (None, None)
        made.append(MicroBatch(tokens, labels, *packing, torch.arange(2)))
    return made


def trained(kind, documents, kept) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Summed losses of two micro-batches and their gradients, summed over ranks; kind None: whole rows."""
    method = attention.LOCAL if kind is None else context_method(kind, dist.group.WORLD)
    with torch.device("meta"):
        model = Decoder(MODEL, method=method).to(torch.float64)
    materialise(model, torch.device("cpu"), decoder_init(MODEL), seed=0)
    recompute(model.blocks, kept)
    losses = []
    for whole_batch in batches(documents):
        batch = whole_batch if kind is None else shard_sequence(whole_batch, dist.get_rank(), dist.get_world_size())
        loss = model(batch.tokens, batch.labels, batch.positions, batch.documents)
        loss.backward()
        losses.append(loss.detach())
    total = torch.stack(losses)
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    if kind is not None:
        for tensor in (total, *gradients.values()):
            dist.all_reduce(tensor)
    return total, gradients


@pytest.mark.parametrize("documents", [False, True], ids=["one document", "documents"])
@pytest.mark.parametrize("cp", [2, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_a_decoder_trains_as_on_one_process(kind, cp, documents, ranks):
    losses, expected = trained(None, documents, "none")
    for found, gradients in ranks(cp, trained, kind, documents, "none"):
        assert error(found, losses) <= 1e-9
        assert {name: error(gradients[name], expected[name]) <= 1e-9 for name in expected} == dict.fromkeys(
            expected, True
        )


@pytest.mark.parametrize("kept", ["full", "selective"])
@pytest.mark.parametrize("kind", KINDS)
def test_recomputation_repeats_the_exchange(kind, kept, ranks):
    losses, expected = trained(None, True, "none")
    for found, gradients in ranks(2, trained, kind, True, kept):
        assert error(found, losses) <= 1e-9
        assert max(error(gradients[name], expected[name]) for name in expected) <= 1e-9


def test_a_rank_holds_an_early_and_a_late_chunk():
    tokens = torch.arange(8).repeat(2, 1) + torch.tensor([[0], [100]])
    batch = MicroBatch(tokens, tokens + 1, None, None, torch.tensor([5, -1]))
    first, second = (shard_sequence(batch, rank, 2) for rank in range(2))
    assert first.tokens.tolist() == [[0, 1, 6, 7], [100, 101, 106, 107]]
    assert second.tokens.tolist() == [[2, 3, 4, 5], [102, 103, 104, 105]]
    assert torch.equal(first.labels, first.tokens + 1)
    assert first.positions.tolist() == [[0, 1, 6, 7]] * 2
    assert first.documents is None
    assert first.samples.tolist() == [5, -1]


def test_positions_and_documents_go_with_their_tokens():
    ids, positions = documents_of([3, 5])
    row = torch.arange(8)[None]
    part = shard_sequence(MicroBatch(row, row, positions[None], ids[None], torch.zeros(1)), 0, 2)
    assert part.positions.tolist() == [[0, 1, 3, 4]]
    assert part.documents.tolist() == [[2, 2, 1, 1]]
    assert all(x is None or x.is_contiguous() for x in part)


@pytest.mark.parametrize("cp", [1, 2, 3, 4])
def test_the_row_comes_back_in_its_order(cp):
    row = torch.arange(24.0).view(1, 24, 1)
    shards = from_row(row, cp, -2)
    batch = MicroBatch(row[..., 0], row[..., 0], None, None, torch.zeros(1))
    for rank in range(cp):
        assert torch.equal(shards[rank, ..., 0], shard_sequence(batch, rank, cp).tokens)
    assert torch.equal(to_row(shards, -2), row)


def seen(found, rank, owner, cp) -> torch.Tensor:
    """How often each pair of the row's tokens [S, S] is computed; columns of one owner, or of the row (None)."""
    index, count = torch.arange(24), torch.zeros(24, 24)
    rows = from_row(index, cp, -1)[rank]
    columns = index if owner is None else from_row(index, cp, -1)[owner]
    for piece in found:
        r, c = rows[piece.rows], columns[piece.columns]
        part = torch.ones(len(r), len(c))
        count[r[:, None], c] += part.tril() if piece.causal else part
    return count


@pytest.mark.parametrize("cp", [1, 2, 3, 4])
def test_every_causal_pair_is_computed_once_and_no_other(cp):
    ringed = sum(seen([meeting(r, o, 24 // cp)], r, o, cp) for r in range(cp) for o in range(cp))
    gathered = sum(seen(pieces(r, cp, 24 // cp), r, None, cp) for r in range(cp))
    causal = torch.ones(24, 24).tril()
    assert torch.equal(ringed, causal)
    assert torch.equal(gathered, causal)


def test_ranks_have_equal_work_at_every_step_of_the_ring():
    work = {seen([meeting(r, o, 6)], r, o, 4).sum().item() for r in range(4) for o in range(4) if r != o}
    assert work == {6 * 6 / 2}
    assert len({seen(pieces(r, 4, 6), r, None, 4).sum().item() for r in range(4)}) == 1


def test_lengths_that_cannot_be_cut_are_refused():
    with pytest.raises(ValueError, match=r"data\.seq_len=10 with mesh\.cp=2.*multiple of 2\*cp = 4; .* 8 or 12"):
        check_context(10, 2, 1, 4, 2, "ring")
    row = torch.zeros(1, 3)
    with pytest.raises(ValueError, match="the nearest is 4"):
        shard_sequence(MicroBatch(row, row, None, None, row[0]), 0, 2)
    row = torch.zeros(1, 4)
    with pytest.raises(ValueError, match="0 to 1"):
        shard_sequence(MicroBatch(row, row, None, None, row[0]), 2, 2)


def test_ulysses_wants_heads_for_every_rank():
    check_context(64, 4, 2, 8, 2, "ulysses")
    check_context(64, 4, 4, 8, 2, "ring")
    with pytest.raises(ValueError, match=r"8 query heads over tp=4.*the nearest cp is 2.*ring or all_gather"):
        check_context(64, 4, 4, 8, 2, "ulysses")


def test_an_unknown_method_and_heads_that_do_not_group_are_refused():
    with pytest.raises(ValueError, match=r"parallel\.context='both': write one of all_gather, ring, ulysses"):
        check_context(64, 2, 1, 8, 2, "both")
    with pytest.raises(ValueError, match="kv_heads=3"):
        check_context(64, 2, 1, 8, 3, "ring")
