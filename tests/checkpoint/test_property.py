"""Any tensors, sharded in any way, written by either writer and read back under any other sharding: to the bit."""

import itertools
import math
import os
import tempfile
from unittest import mock

import fsspec
import numpy as np
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.distributed.tensor import Replicate, Shard

from composable._torch import strided_shard
from composable.checkpoint import load, owners
from composable.checkpoint.format import DTYPES
from composable.checkpoint.remote import as_folder
from composable.checkpoint.shards import Piece, byte_runs, placed_box
from composable.checkpoint.transfer import raw
from tests.checkpoint.simulate import save_as_ranks


@st.composite
def meshes(draw):
    return tuple(draw(st.lists(st.integers(1, 3), min_size=1, max_size=3)))


@st.composite
def placements(draw, shape, mesh):
    """One for each mesh dimension: replicated, sharded on any dimension, or two shards of one in the strided order."""
    chosen = [draw(st.sampled_from([Replicate()] + [Shard(d) for d in range(len(shape))])) for _ in mesh]
    if shape and len(mesh) > 1 and draw(st.booleans()):
        dim = draw(st.integers(0, len(shape) - 1))
        chosen[-2:] = [strided_shard(dim, split_factor=mesh[-1]), Shard(dim)]
    return tuple(chosen)


@st.composite
def tensors(draw):
    """Random bits of any dtype; the mesh and placements under which they are saved, and those of loading."""
    dtype = DTYPES[draw(st.sampled_from(sorted(DTYPES)))]
    shape = tuple(draw(st.lists(st.integers(0, 7), max_size=3)))
    if dtype == torch.float4_e2m1fn_x2 and not shape:
        shape = (3,)
    values = np.random.default_rng(draw(st.integers(0, 2**32))).bytes(math.prod(shape) * dtype.itemsize)
    if dtype == torch.bool:
        values = bytes(value % 2 for value in values)
    flat = torch.frombuffer(bytearray(values), dtype=dtype) if values else torch.empty(0, dtype=dtype)
    two = [(mesh, draw(placements(shape, mesh))) for mesh in (draw(meshes()), draw(meshes()))]
    return flat.view(shape), *two


def split(named, index):
    """For each rank of the largest mesh: name -> piece, under the index-th of each tensor's two layouts."""
    held = [{} for _ in range(max(math.prod(entry[index][0]) for entry in named.values()))]
    for name, entry in named.items():
        whole, (mesh, placed) = entry[0], entry[index]
        for rank, coordinate in enumerate(itertools.product(*map(range, mesh))):
            box = placed_box(tuple(whole.shape), placed, mesh, coordinate)
            held[rank][name] = Piece(whole[box.slices()], tuple(whole.shape), box)
    return held


def other(piece):
    """The same part of a tensor with none of its bits."""
    local = torch.empty_like(piece.local, memory_format=torch.contiguous_format)
    raw(local).copy_(~raw(piece.local) & 1 if local.dtype == torch.bool else ~raw(piece.local))
    return Piece(local, piece.shape, piece.box)


def bits(tensor):
    return raw(tensor).numpy().tobytes()


def check_written_once(sections, ranks):
    """Every byte of every file once, by a rank that holds it and may write there."""
    for section in sections:
        counts = {file.name: np.zeros(file.size, dtype=int) for file in section.files}
        for file in section.files:
            counts[file.name][: len(file.header)] += 1
            for place in file.places:
                for rank, box in section.owners[place.name]:
                    if not place.box.contains(box) or (place.part and box != place.box):
                        continue
                    assert file.writer in (None, rank)
                    assert ranks[rank][section.name][place.name].box.contains(box)
                    for at, _, size in byte_runs(box.within(place.box), place.spec.shape, place.spec.dtype.itemsize):
                        counts[file.name][place.offset + at : place.offset + at + size] += 1
        assert all((count == 1).all() for count in counts.values())


@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.lists(tensors(), min_size=1, max_size=3),
    st.integers(1, 64),
    st.sampled_from([1, 60, 10**9]),
    st.sampled_from(["shared", "per_rank", "memory"]),
)
def test_what_is_written_once_under_one_mesh_is_read_to_the_bit_under_another(found, small, max_file_size, kind):
    named = {f"t{i}": entry for i, entry in enumerate(found)}
    before = [{"weights": pieces, "optimizer": {f"{n}.m": p for n, p in pieces.items()}} for pieces in split(named, 1)]
    with tempfile.TemporaryDirectory() as folder, mock.patch.object(os, "fsync"):
        target = "memory://property" if kind == "memory" else folder
        with mock.patch.object(owners, "SMALL", small):
            writer = "shared" if kind == "shared" else "per_rank"
            sections = save_as_ranks(target, before, writer, max_file_size)
        check_written_once(sections, before)
        for pieces in split(named, 2):
            weights = {name: other(piece) for name, piece in pieces.items()}
            moments = {f"{name}.m": other(piece) for name, piece in pieces.items()}
            load(as_folder(target), weights, moments, allow_extra=["*"])
            for name, piece in pieces.items():
                assert bits(weights[name].local) == bits(moments[f"{name}.m"].local) == bits(piece.local)
        if kind == "memory":
            fsspec.filesystem("memory").rm("/property", recursive=True)
