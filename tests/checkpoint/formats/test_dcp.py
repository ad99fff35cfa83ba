"""Checkpoints of torch.distributed.checkpoint, whoever wrote them and in whatever pieces."""

import pickle

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from composable.checkpoint.formats import dcp as dcp_format
from composable.checkpoint.formats import hugging_face
from composable.checkpoint.formats.source import write
from tests.checkpoint.test_save_load import bits
from tests.tools.test_reshard import tensors

PLACEMENTS = {"rows": [Shard(0)], "columns": [Shard(1)], "same": [Replicate()]}


def wholes():
    torch.manual_seed(0)
    return {name: torch.randn(5, 6) for name in PLACEMENTS} | {"scalar": torch.tensor(2.5), "none": torch.empty(0, 3)}


def save_sharded(folder):
    mesh = init_device_mesh("cpu", (2,))
    state = {
        name: distribute_tensor(tensor, mesh, PLACEMENTS[name]) if name in PLACEMENTS else tensor
        for name, tensor in wholes().items()
    }
    moments = {name: {"exp_avg": tensor} for name, tensor in state.items()}
    dcp.save({"model": state, "optimizer": {"state": moments, "lr": 0.5}, "step": 3}, checkpoint_id=folder)


def load_sharded(folder):
    mesh = init_device_mesh("cpu", (2,))
    state = {
        name: distribute_tensor(torch.zeros_like(tensor), mesh, PLACEMENTS[name]) if name in PLACEMENTS else tensor * 0
        for name, tensor in wholes().items()
    }
    dcp.load({"model": state}, checkpoint_id=folder)
    return {name: bits(t.full_tensor() if name in PLACEMENTS else t) for name, t in state.items()}


@pytest.mark.parametrize("chunk", [8, 1 << 20])
def test_what_many_ranks_saved_becomes_whole_and_is_loaded_by_many_again(ranks, tmp_path, chunk):
    ranks(2, save_sharded, tmp_path / "a")
    found = dcp_format.source(tmp_path / "a")
    assert found.notes == ("left out: step, optimizer.lr",)
    write(hugging_face.target(found, 10**9), tmp_path / "b", chunk)
    expected = {name: bits(tensor) for name, tensor in wholes().items()}
    assert tensors(tmp_path / "b") == expected
    state = tensors(tmp_path / "b", "optimizer")
    assert {name: state[f"{name}.exp_avg"] for name in expected} == expected
    write(dcp_format.target(found), tmp_path / "c", chunk)
    assert ranks(2, load_sharded, tmp_path / "c") == [expected, expected]


def test_one_that_is_not_row_major_comes_out_as_its_values(tmp_path):
    dcp.save({"w": torch.arange(6.0).view(2, 3).t()}, checkpoint_id=tmp_path / "a", no_dist=True)
    write(hugging_face.target(dcp_format.source(tmp_path / "a"), 10**9), tmp_path / "b", 1 << 20)
    assert tensors(tmp_path / "b") == {"w": bits(torch.arange(6.0).view(2, 3).t())}


class Touch:
    """What a hostile pickle does."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


def test_metadata_runs_no_strangers_code(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / ".metadata").write_bytes(pickle.dumps(Touch(tmp_path / "touched")))
    with pytest.raises(ValueError, match="it asks for"):
        dcp_format.source(tmp_path / "a")
    assert not (tmp_path / "touched").exists()


def test_a_piece_that_is_missing_is_named(tmp_path):
    dcp.save({"w": torch.ones(4)}, checkpoint_id=tmp_path / "a", no_dist=True)
    (tmp_path / "a" / "__0_0.distcp").unlink()
    with pytest.raises(ValueError, match=r"__0_0\.distcp is missing"):
        dcp_format.source(tmp_path / "a")
