import itertools
import math
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.tensor import Partial, Replicate, Shard

from composable._torch import strided_shard
from composable.checkpoint import owners
from composable.checkpoint.format import TensorSpec
from composable.checkpoint.owners import check_cover, plan_owners
from composable.checkpoint.shards import Box, Piece, byte_runs, chunk, chunk_boxes, full_box, local_box, placed_box


@pytest.mark.parametrize(("length", "parts"), [(10, 4), (4, 4), (3, 4), (0, 2), (7, 1), (5, 3)])
def test_chunks_are_those_of_torch(length, parts):
    pieces = list(torch.arange(length).chunk(parts)) if length else []
    pieces += [torch.empty(0)] * (parts - len(pieces))
    assert [chunk(length, parts, i)[1] for i in range(parts)] == [len(piece) for piece in pieces]
    assert all(piece[0] == chunk(length, parts, i)[0] for i, piece in enumerate(pieces) if len(piece))


def test_a_plain_tensor_is_its_own_box():
    assert local_box(torch.ones(2, 3)) == Box((0, 0), (2, 3))
    assert local_box(torch.tensor(1.0)) == Box((), ())


def test_a_strided_shard_is_taken_after_the_shards_to_its_right():
    # FSDP over 2 after tensor parallelism over 4: rank (f, t) holds half f of quarter t.
    placements = (strided_shard(0, split_factor=4), Shard(0))
    for f, t in itertools.product(range(2), range(4)):
        assert placed_box((16, 3), placements, (2, 4), (f, t)) == Box((4 * t + 2 * f, 0), (2, 3))
    # In the order of the mesh without it.
    assert placed_box((16, 3), (Shard(0), Shard(0)), (2, 4), (1, 2)) == Box((12, 0), (2, 3))


def test_a_split_factor_that_no_mesh_dimension_explains_is_refused():
    with pytest.raises(ValueError, match="split factor 3"):
        placed_box((12,), (strided_shard(0, split_factor=3), Shard(0)), (2, 2), (0, 0))


def test_partial_has_no_place_in_a_checkpoint():
    with pytest.raises(ValueError, match="redistribute"):
        placed_box((4,), (Partial(),), (2,), (0,))


def test_a_piece_must_fit_its_box():
    with pytest.raises(ValueError, match="box"):
        Piece(torch.ones(2, 2), (4, 2), Box((3, 0), (2, 2)))
    with pytest.raises(ValueError, match="box"):
        Piece(torch.ones(2, 2), (4, 2), Box((0, 0), (1, 2)))


def test_a_box_full_in_inner_dimensions_is_one_run():
    assert list(byte_runs(Box((2, 0, 0), (3, 4, 5)), (9, 4, 5), 4)) == [(160, 0, 240)]
    assert list(byte_runs(Box((0, 1), (2, 2)), (2, 4), 1)) == [(1, 0, 2), (5, 2, 2)]
    assert list(byte_runs(Box((), ()), (), 8)) == [(0, 0, 8)]
    assert list(byte_runs(Box((0, 0), (0, 4)), (0, 4), 8)) == []


@st.composite
def boxes(draw):
    shape = tuple(draw(st.lists(st.integers(1, 6), max_size=4)))
    offsets = tuple(draw(st.integers(0, n - 1)) for n in shape)
    return shape, Box(offsets, tuple(draw(st.integers(0, n - o)) for n, o in zip(shape, offsets, strict=True)))


@settings(deadline=None, max_examples=100)
@given(boxes(), st.integers(1, 40), st.sampled_from([1, 2, 8]))
def test_chunks_and_runs_of_a_box_give_its_bytes_in_order(shape_and_box, limit, itemsize):
    shape, box = shape_and_box
    whole = torch.arange(math.prod(shape) * itemsize, dtype=torch.int64).view(*shape, itemsize)
    expected = whole[(*box.slices(), slice(None))].reshape(-1)
    flat, got = whole.view(-1), []
    for part in chunk_boxes(box, itemsize, limit):
        assert 0 < part.numel * itemsize <= max(limit, itemsize)
        position = 0
        for at, start, size in byte_runs(part, shape, itemsize):
            assert start == position
            got.append(flat[at : at + size])
            position += size
    assert torch.equal(torch.cat(got) if got else torch.empty(0, dtype=torch.int64), expected)


@st.composite
def layouts(draw):
    shape = tuple(draw(st.lists(st.integers(0, 9), max_size=3)))
    mesh = tuple(draw(st.lists(st.integers(1, 3), min_size=1, max_size=3)))
    kinds = [Replicate()] + [Shard(d) for d in range(len(shape))]
    placements = [draw(st.sampled_from(kinds)) for _ in mesh]
    if shape and len(mesh) > 1 and draw(st.booleans()):  # the strided form of two shards of one dimension
        dim = draw(st.integers(0, len(shape) - 1))
        placements[-2:] = [strided_shard(dim, split_factor=mesh[-1]), Shard(dim)]
    return shape, mesh, tuple(placements)


DTYPES = st.sampled_from([torch.bool, torch.bfloat16, torch.float32, torch.complex64])


@settings(deadline=None, max_examples=150)
@given(st.lists(st.tuples(layouts(), DTYPES), min_size=1, max_size=3), st.integers(1, 64))
def test_every_byte_is_written_once_by_a_rank_that_holds_it(tensors, small):
    world = max(math.prod(mesh) for (_, mesh, _), _ in tensors)
    specs, held = [], [{} for _ in range(world)]
    for i, ((shape, mesh, placements), dtype) in enumerate(tensors):
        specs.append(TensorSpec(f"t{i}", dtype, shape))
        for rank, coordinate in enumerate(itertools.product(*map(range, mesh))):
            held[rank][f"t{i}"] = placed_box(shape, placements, mesh, coordinate)
    with mock.patch.object(owners, "SMALL", small):
        plan = plan_owners(specs, held)
    for spec in specs:
        counts = np.zeros(spec.nbytes, dtype=int)
        for rank, box in plan[spec.name]:
            assert held[rank][spec.name].contains(box)
            for at, _, size in byte_runs(box, spec.shape, spec.dtype.itemsize):
                counts[at : at + size] += 1
        assert (counts == 1).all()


def test_replicated_tensors_are_shared_out_evenly():
    specs = [TensorSpec("large", torch.float32, (4096, 1024))]  # 16 MiB
    specs += [TensorSpec(f"small{i}", torch.float32, (1024,)) for i in range(8)]
    written = [0] * 4
    for parts in plan_owners(specs, [{spec.name: full_box(spec.shape) for spec in specs}] * 4).values():
        for rank, box in parts:
            written[rank] += box.numel * 4
    assert written == [(16 << 20) // 4 + 2 * 4096] * 4


def test_a_rank_that_must_write_much_is_spared_the_shared_tensors():
    specs = [TensorSpec("own", torch.uint8, (3 << 20,)), TensorSpec("shared", torch.uint8, (1 << 20,))]
    both = {"shared": full_box((1 << 20,))}
    plan = plan_owners(specs, [{"own": full_box((3 << 20,)), **both}, both])
    assert {rank for rank, _ in plan["shared"]} == {1}


@pytest.mark.parametrize(
    ("parts", "word"),
    [
        ([Box((0, 0), (2, 4))], "held by no rank"),
        ([Box((0, 0), (3, 4)), Box((2, 0), (2, 4))], "exactly once"),
        ([Box((0, 0), (4, 4)), Box((0, 0), (4, 4))], "exactly once"),
        ([Box((0, 0), (5, 4))], "outside"),
        ([], "held by no rank"),
    ],
)
def test_a_plan_with_a_gap_or_an_overlap_is_refused_with_the_tensors_name(parts, word):
    with pytest.raises(ValueError, match=rf"layers\.1\.w.*{word}"):
        check_cover(TensorSpec("layers.1.w", torch.float32, (4, 4)), parts)
