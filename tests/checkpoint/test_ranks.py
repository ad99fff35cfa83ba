import errno
import os

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from composable.checkpoint import Box, Piece, latest, load, local_box, save
from tests.checkpoint.test_save_load import bits, many_kinds, zeros

# Uneven (5 over 2 or 4), empty (1 and 3 over 4) and even shards of every dimension.
SHAPES = {"a": (5, 8), "b": (1, 3), "c": (8, 4, 3), "d": (16,), "e": (), "f": (3, 700, 2)}
TILES = {(4,): [(Shard(0),), (Shard(1),), (Replicate(),)], (2,): [(Shard(0),), (Replicate(),)]}
TILES[2, 2] = [(Shard(0), Shard(1)), (Shard(1), Shard(0)), (Replicate(), Shard(0)), (Shard(0), Shard(0))]


def values() -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(1)
    tensors = {name: torch.randn(shape, generator=g, dtype=torch.float64) for name, shape in SHAPES.items()}
    return tensors | {
        "i": torch.arange(14, dtype=torch.int32).view(7, 2),
        "w": torch.randn(12, 4, generator=g).bfloat16(),
    }


def placed(tensors, mesh, choice):
    """Each tensor distributed in turn by the placements of its mesh shape, where its dimensions allow them."""
    out = {}
    options = TILES[tuple(mesh.shape)]
    for i, (name, tensor) in enumerate(tensors.items()):
        placements = options[(i + choice) % len(options)]
        if any(p.is_shard() and p.dim >= tensor.ndim for p in placements):
            out[name] = tensor
        else:
            out[name] = distribute_tensor(tensor, mesh, placements)
    return out


def save_placed(folder, mesh_shape, choice):
    mesh = init_device_mesh("cpu", mesh_shape)
    tensors = placed(values(), mesh, choice)
    save(
        folder, tensors, {f"{name}.m": tensor for name, tensor in tensors.items()}, {"x.json": "{}"}, max_file_size=1000
    )


def load_placed(folder, mesh_shape, choice):
    mesh = init_device_mesh("cpu", mesh_shape)
    tensors = placed({name: torch.zeros_like(tensor) for name, tensor in values().items()}, mesh, choice)
    state = {f"{name}.m": tensor.clone() for name, tensor in tensors.items()}
    load(folder, tensors, state)
    whole = lambda t: t.full_tensor() if isinstance(t, DTensor) else t  # noqa: E731
    return all(
        torch.equal(whole(tensors[name]), value) and torch.equal(whole(state[f"{name}.m"]), value)
        for name, value in values().items()
    )


def content(folder):
    return {path.name: path.read_bytes() for path in folder.rglob("*.safetensors*")}


@pytest.mark.parametrize(("mesh", "choice"), [((2,), 0), ((4,), 0), ((4,), 1), ((2, 2), 0), ((2, 2), 3)])
def test_what_any_layout_saved_is_byte_for_byte_what_one_process_saves(ranks, tmp_path, mesh, choice):
    ranks(4 if mesh != (2,) else 2, save_placed, tmp_path / "many", mesh, choice)
    save(tmp_path / "one", values(), {f"{n}.m": t for n, t in values().items()}, {"x.json": "{}"}, max_file_size=1000)
    assert content(tmp_path / "many") == content(tmp_path / "one")
    load(tmp_path / "many", loaded := zeros(values()))
    assert {n: bits(t) for n, t in loaded.items()} == {n: bits(t) for n, t in values().items()}


def test_a_checkpoint_of_four_ranks_is_loaded_in_every_layout(ranks, tmp_path):
    ranks(4, save_placed, tmp_path / "c", (2, 2), 1)
    for mesh, choice in [((2,), 0), ((2,), 1), ((4,), 0), ((4,), 1), ((4,), 2), ((2, 2), 0), ((2, 2), 2), ((2, 2), 3)]:
        assert all(ranks(4 if mesh != (2,) else 2, load_placed, tmp_path / "c", mesh, choice))


def save_kinds(folder):
    save(folder, many_kinds(), {}, {})


def load_kinds(folder):
    load(folder, loaded := zeros(many_kinds()))
    return {name: bits(tensor) for name, tensor in loaded.items()}


def test_every_kind_of_tensor_saved_by_two_ranks_is_loaded_by_one_and_by_four(ranks, tmp_path):
    ranks(2, save_kinds, tmp_path / "c")
    expected = {name: bits(tensor) for name, tensor in many_kinds().items()}
    assert load_kinds(tmp_path / "c") == expected
    assert ranks(4, load_kinds, tmp_path / "c") == [expected] * 4


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(8, 12), nn.Linear(12, 8), nn.LayerNorm(8)

    def forward(self, x):
        return self.norm(self.down(self.up(x)))


def strided_net(seed):
    """FSDP2 over tensor parallelism on a 2 x 2 mesh: column-wise weights get a strided shard."""
    torch.manual_seed(seed)
    net, mesh = Net(), init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    whole = {name: value.detach().clone() for name, value in net.named_parameters()}
    parallelize_module(net, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    fully_shard(net, mesh=mesh["dp"])
    return net, whole


def save_strided(folder):
    net, whole = strided_net(0)
    for name, parameter in net.named_parameters():
        assert torch.equal(parameter.to_local(), whole[name][local_box(parameter).slices()])
    save(folder, dict(net.named_parameters()), {}, {})
    return [str(parameter.placements[0]) for parameter in net.parameters()]


def load_strided(folder):
    net, _ = strided_net(1)
    load(folder, dict(net.named_parameters()))
    _, whole = strided_net(0)
    return all(
        torch.equal(parameter.to_local(), whole[name][local_box(parameter).slices()])
        for name, parameter in net.named_parameters()
    )


def test_fsdp_over_tensor_parallelism_saves_and_loads_its_strided_shards(ranks, tmp_path):
    placements = ranks(4, save_strided, tmp_path / "c")[0]
    assert any("_S" in placement for placement in placements)
    torch.manual_seed(0)
    net = Net()
    load(tmp_path / "c", loaded := {name: torch.zeros_like(p) for name, p in net.named_parameters()})
    assert all(torch.equal(loaded[name], p) for name, p in net.named_parameters())
    assert all(ranks(4, load_strided, tmp_path / "c"))
    save(tmp_path / "one", dict(net.named_parameters()), {}, {})
    assert all(ranks(4, load_strided, tmp_path / "one"))


def stages(folder, save_it):
    """Two stages with a tied weight on both, and a stacked tensor of which each rank gives its part as a piece."""
    rank = dist.get_rank()
    tensors = {f"layers.{2 * i + rank}.w": torch.full((3,), float(2 * i + rank)) for i in range(6)}
    tensors["embedding"] = torch.arange(6.0)
    tensors["experts"] = Piece(torch.full((2, 2), float(rank)), (4, 2), Box((2 * rank, 0), (2, 2)))
    if save_it:
        save(folder, tensors, {}, {})
        return True
    loaded = {
        n: Piece(torch.zeros(2, 2), t.shape, t.box) if isinstance(t, Piece) else t * 0 for n, t in tensors.items()
    }
    load(folder, loaded)
    local = lambda t: t.local if isinstance(t, Piece) else t  # noqa: E731
    return all(torch.equal(local(loaded[name]), local(tensors[name])) for name in tensors)


def test_ranks_with_other_names_save_one_checkpoint_with_tied_weights_once(ranks, tmp_path):
    ranks(2, stages, tmp_path / "c", True)
    whole = {f"layers.{i}.w": torch.full((3,), float(i)) for i in range(12)}
    whole |= {"embedding": torch.arange(6.0), "experts": torch.tensor([0.0, 0, 1, 1]).view(4, 1).expand(4, 2)}
    save(tmp_path / "one", whole, {}, {})
    assert content(tmp_path / "c") == content(tmp_path / "one")
    assert all(ranks(2, stages, tmp_path / "c", False))


def error_of(function, *args):
    try:
        function(*args)
    except Exception as error:
        return type(error).__name__, str(error)
    return None


def failing_save(folder, rank, call):
    real = getattr(os, call)
    if dist.get_rank() == rank:

        def full(*args):
            raise OSError(errno.ENOSPC, "No space left on device")

        setattr(os, call, full)
    try:
        return error_of(
            save, folder, {"w": distribute_tensor(torch.ones(8), init_device_mesh("cpu", (2,)), [Shard(0)])}, {}, {}
        )
    finally:
        setattr(os, call, real)


@pytest.mark.parametrize(
    ("rank", "call"), [(0, "ftruncate"), (0, "pwrite"), (1, "pwrite"), (1, "fsync"), (0, "replace")]
)
def test_a_full_disk_under_one_rank_raises_on_all_with_its_message(ranks, tmp_path, rank, call):
    save(tmp_path / "step-00000001", {"w": torch.ones(8)}, {}, {})
    errors = ranks(2, failing_save, tmp_path / "step-00000002", rank, call)
    assert errors[0] == errors[1]
    assert errors[0][0] == "OSError"
    assert f"rank {rank}: " in errors[0][1]
    assert "No space left on device" in errors[0][1]
    assert latest(tmp_path) == tmp_path / "step-00000001"
    assert content(tmp_path / "step-00000002") == {}
    load(tmp_path / "step-00000001", {"w": torch.zeros(8)})


def differing(folder, kind):
    rank, mesh = dist.get_rank(), init_device_mesh("cpu", (2,))
    given = {
        "shape": torch.ones(2 + rank),
        "dtype": torch.ones(2, dtype=torch.float64 if rank else torch.float32),
        "odd": torch.ones(2, dtype=torch.complex128),
        "partial": DTensor.from_local(torch.ones(2), mesh, [Partial()]),
        "hole": Piece(torch.ones(1), (3,), Box((rank,), (1,))),
    }[kind]
    return error_of(save, folder, {"layers.0.w": given}, {}, {})


@pytest.mark.parametrize("kind", ["shape", "dtype", "odd", "partial", "hole"])
def test_what_cannot_be_saved_is_refused_by_name_on_all_ranks_before_anything_is_written(ranks, tmp_path, kind):
    errors = ranks(2, differing, tmp_path / "c", kind)
    assert errors[0] == errors[1]
    assert errors[0][0] == "ValueError"
    assert "layers.0.w" in errors[0][1]
    assert not (tmp_path / "c").exists()


def load_error(folder, names, bad_rank=None):
    tensors = {name: torch.zeros(8) for name in names}
    if bad_rank == dist.get_rank():
        tensors["w"] = torch.zeros(4)
    return error_of(load, folder, tensors)


@pytest.mark.parametrize("harm", ["truncate", "delete", "flip", "missing", "incomplete", "shape"])
def test_what_cannot_be_loaded_is_refused_by_name_on_all_ranks(ranks, tmp_path, harm):
    folder = tmp_path / "c"
    save(folder, {"v": torch.arange(8.0), "w": torch.arange(8.0)}, {}, {}, max_file_size=32)
    path = folder / "model-00002-of-00002.safetensors"
    content, names, expected = path.read_bytes(), ["v", "w"], path.name
    if harm == "truncate":
        path.write_bytes(content[:-1])
    elif harm == "delete":
        path.unlink()
    elif harm == "flip":
        path.write_bytes(content[:-1] + b"\x01")
    elif harm == "missing":
        names, expected = ["v", "w", "u"], "(u)"
    elif harm == "incomplete":
        (folder / "manifest.json").rename(folder / "manifest.json.partial")
        expected = "incomplete"
    else:
        expected = "w has shape (8,)"
    errors = ranks(2, load_error, folder, names, 1 if harm == "shape" else None)
    assert errors[0] == errors[1]
    assert errors[0][0] == "ValueError"
    assert expected in errors[0][1]


def counted_load(folder, mesh_shape, placement):
    """Bytes that this rank read from the tensor file; checksums that it took as it read, in memory, in the file."""
    import sys

    module, hashes = sys.modules["composable.checkpoint.load"], ("read_and_hash", "hash_memory", "hash_file")
    preadv, real, counts = (
        os.preadv,
        {name: getattr(module, name) for name in hashes},
        dict.fromkeys(("read", *hashes), 0),
    )

    def counting(handle, buffers, offset):
        counts["read"] += sum(len(buffer) for buffer in buffers)
        return preadv(handle, buffers, offset)

    os.preadv = counting
    for name, function in real.items():

        def wrapper(*args, name=name, function=function):
            counts[name] += 1
            return function(*args)

        setattr(module, name, wrapper)
    try:
        load(folder, {"w": distribute_tensor(torch.zeros(64, 64), init_device_mesh("cpu", mesh_shape), [placement])})
    finally:
        os.preadv = preadv
        for name, function in real.items():
            setattr(module, name, function)
    return counts


def save_sharded(folder):
    save(folder, {"w": distribute_tensor(torch.randn(64, 64), init_device_mesh("cpu", (4,)), [Shard(0)])}, {}, {})


def test_a_rank_reads_what_it_needs_and_each_box_is_checked_once(ranks, tmp_path):
    ranks(4, save_sharded, tmp_path / "c")
    part = 64 * 64 * 4 // 4
    same = ranks(4, counted_load, tmp_path / "c", (4,), Shard(0))
    assert [tuple(each.values()) for each in same] == [(part, 1, 0, 0)] * 4
    fewer = ranks(2, counted_load, tmp_path / "c", (2,), Shard(0))
    assert [tuple(each.values()) for each in fewer] == [(2 * part, 0, 2, 0)] * 2
    whole = ranks(2, counted_load, tmp_path / "c", (2,), Replicate())
    assert [tuple(each.values()) for each in whole] == [(4 * part, 0, 2, 0)] * 2
    across = ranks(2, counted_load, tmp_path / "c", (2,), Shard(1))
    assert [tuple(each.values())[1:] for each in across] == [(0, 0, 2)] * 2
