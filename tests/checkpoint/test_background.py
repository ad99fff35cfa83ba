import errno
import os
import re
import resource
import subprocess
import sys
import threading
import time
import warnings
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from composable.checkpoint import Box, Piece, is_complete, latest, load, save
from composable.checkpoint.background import BackgroundSaver
from composable.checkpoint.host_memory import BLOCK, HostMemory, place
from tests.checkpoint.test_ranks import content, error_of, load_strided, strided_net
from tests.checkpoint.test_save_load import bits, many_kinds, zeros

GIB = 1 << 30


class Disk:
    """Writes that wait until the disk is let go."""

    def __init__(self, monkeypatch):
        self.go, self.reached, real = threading.Event(), threading.Event(), os.pwrite

        def pwrite(*args):
            self.reached.set()
            assert self.go.wait(60)
            return real(*args)

        monkeypatch.setattr(os, "pwrite", pwrite)


def full(*args):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def until_failed(saver):
    deadline = time.monotonic() + 60
    while not saver.failed:
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.mark.parametrize("writer", ["shared", "per_rank"])
def test_every_kind_of_tensor_is_saved_as_in_the_foreground_byte_for_byte(tmp_path, writer):
    weights, state = many_kinds(), {"float32.step": torch.tensor(3.0)}
    save(tmp_path / "front", weights, state, {"x.json": "{}"}, writer=writer)
    with BackgroundSaver() as saver:
        for again in range(2):  # the second into the memory of the first
            saver.save(tmp_path / f"back{again}", weights, state, {"x.json": "{}"}, writer=writer)
    for again in range(2):
        assert content(tmp_path / f"back{again}") == content(tmp_path / "front")
        load(tmp_path / f"back{again}", loaded := zeros(weights))
        assert {n: bits(t) for n, t in loaded.items()} == {n: bits(t) for n, t in weights.items()}


def test_an_optimizer_step_right_after_a_save_does_not_change_what_is_saved(tmp_path, monkeypatch):
    torch.manual_seed(0)
    parameter = torch.nn.Parameter(torch.randn(40, 30))
    optimizer = torch.optim.AdamW([parameter], lr=0.1)
    disk = Disk(monkeypatch)

    def step():
        parameter.grad = torch.randn(40, 30)
        optimizer.step()

    def tensors():
        state = optimizer.state[parameter]
        return {"w": parameter.detach(), "t": parameter.detach().t()}, {f"w.{key}": state[key] for key in state}

    step()
    before = [{name: bits(tensor.clone()) for name, tensor in section.items()} for section in tensors()]
    with BackgroundSaver() as saver:
        saver.save(tmp_path / "c", *tensors(), {})
        assert disk.reached.wait(60)  # nothing is written, and the loop goes on
        for _ in range(3):
            step()
        assert not is_complete(tmp_path / "c")
        assert saver.take_saved() == []
        disk.go.set()
        saver.wait()
        assert [saved.folder for saved in saver.take_saved()] == [tmp_path / "c"]
        assert saver.take_saved() == []
    after = [{name: bits(tensor) for name, tensor in section.items()} for section in tensors()]
    loaded = tuple(zeros(section) for section in tensors())
    load(tmp_path / "c", *loaded)
    assert [{name: bits(tensor) for name, tensor in section.items()} for section in loaded] == before
    assert all(a[name] != b[name] for a, b in zip(before, after, strict=True) for name in a)


def test_the_next_save_waits_for_the_last_and_uses_its_memory(tmp_path, monkeypatch):
    disk, weights = Disk(monkeypatch), {"w": torch.ones(1000)}
    events = []
    with BackgroundSaver() as saver:
        saver.save(tmp_path / "1", weights, {}, {}, then=lambda: events.append("first is complete"))
        kept = saver.memory.nbytes
        weights["w"].fill_(2)
        threading.Timer(0.2, disk.go.set).start()
        saver.save(tmp_path / "2", weights, {}, {}, then=lambda: events.append("second is complete"))
        events.append("second is copied")
        assert is_complete(tmp_path / "1")
        assert saver.memory.nbytes == kept >= 4000
    assert events[0] == "first is complete"
    assert sorted(events[1:]) == ["second is complete", "second is copied"]
    for number in (1, 2):
        load(tmp_path / str(number), loaded := {"w": torch.zeros(1000)})
        assert torch.equal(loaded["w"], torch.full((1000,), float(number)))


def test_memory_that_is_prepared_is_the_memory_that_saves_use(tmp_path):
    weights = {"w": torch.ones(1000), "t": torch.ones(3, 5).t()}
    with BackgroundSaver() as saver:
        saver.prepare(weights, {"w.m": torch.ones(7)})
        saver.wait()
        kept = [block.data_ptr() for block in saver.memory.blocks]
        assert saver.memory.nbytes >= 4067
        assert saver.take_saved() == []
        saver.save(tmp_path / "c", weights, {"w.m": torch.ones(7)}, {})
        assert [block.data_ptr() for block in saver.memory.blocks] == kept
    load(tmp_path / "c", loaded := zeros(weights), {"w.m": torch.zeros(7)})
    assert all(torch.equal(loaded[name], weights[name]) for name in weights)


def test_a_lack_of_host_memory_is_an_error_of_the_save(tmp_path):
    huge = Piece(torch.ones(1).expand(1 << 46), (1 << 46,), Box((0,), (1 << 46,)))  # 256 TiB to copy
    with BackgroundSaver() as saver:
        saver.prepare({"w": huge}, {}, writer="per_rank")
        until_failed(saver)
        with pytest.raises(RuntimeError, match=r"no host memory for saving in the background: .*allocate"):
            saver.wait()
        saver.save(tmp_path / "c", {"w": torch.ones(3)}, {}, {})
    assert is_complete(tmp_path / "c")


def test_what_can_be_seen_before_writing_is_raised_at_once(tmp_path):
    with BackgroundSaver() as saver:
        with pytest.raises(ValueError, match=r"w\.odd.*complex128"):
            saver.save(tmp_path / "c", {"w.odd": torch.zeros(2, dtype=torch.complex128)}, {}, {})
        with pytest.raises(ValueError, match="extra file"):
            saver.save(tmp_path / "c", {"w": torch.zeros(2)}, {}, {"manifest.json": ""})
        assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("how", ["next", "wait", "end", "loop"])
def test_a_disk_that_fills_up_is_raised_with_its_reason_once_and_the_checkpoint_before_is_whole(tmp_path, how):
    weights = {"w": torch.ones(1000)}
    first, second = tmp_path / "step-00000001", tmp_path / "step-00000002"
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    words = r"step-00000002 was not saved in the background: .*model\.safetensors.*too large"
    with BackgroundSaver() as saver:
        saver.save(first, weights, {}, {})
        saver.wait()
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, limit[1]))
        try:
            saver.save(second, weights, {}, {}, then=lambda: pytest.fail("it is not complete"))
            until_failed(saver)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        ways = {
            "next": lambda: saver.save(second, weights, {}, {}),
            "wait": saver.wait,
            "loop": lambda: saver.stop_if_failed([saver.failed]),
            "end": lambda: saver.__exit__(None, None, None),
        }
        with pytest.raises(OSError, match=words):
            ways[how]()
        assert not saver.failed
        assert latest(tmp_path) == first
        assert list(second.rglob("*.safetensors")) == []
        load(first, {"w": torch.zeros(1000)})
        if how != "end":
            saver.save(second, weights, {}, {})
            saver.wait()
            assert latest(tmp_path) == second


def broken_run(folder):
    with BackgroundSaver() as saver:
        saver.save(folder, {"w": torch.ones(1000)}, {}, {})
        raise ZeroDivisionError


def test_a_run_that_ends_by_another_error_finishes_the_save_and_a_failure_of_it_is_not_lost(tmp_path, monkeypatch):
    with pytest.raises(ZeroDivisionError):
        broken_run(tmp_path / "1")
    assert is_complete(tmp_path / "1")
    monkeypatch.setattr(os, "pwrite", full)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        with pytest.raises(ZeroDivisionError):
            broken_run(tmp_path / "2")
    assert re.search("2 was not saved in the background: .*No space left", str(seen[0].message))
    assert not is_complete(tmp_path / "2")


def test_an_error_of_what_comes_after_the_commit_is_one_of_the_save(tmp_path):
    def then():
        raise PermissionError("cannot delete")

    with BackgroundSaver() as saver:
        saver.save(tmp_path / "c", {"w": torch.ones(2)}, {}, {}, then=then)
        with pytest.raises(OSError, match="cannot delete"):
            saver.wait()
    assert is_complete(tmp_path / "c")


def test_a_process_that_leaves_does_not_wait_for_a_thread_that_hangs(tmp_path):
    script = (
        "import os, threading, torch\n"
        "from composable.checkpoint.background import BackgroundSaver\n"
        "reached = threading.Event()\n"
        "os.pwrite = lambda *args: (reached.set(), threading.Event().wait())\n"
        f"BackgroundSaver().save({str(tmp_path / 'c')!r}, dict(w=torch.ones(2)), {{}}, {{}})\n"
        "reached.wait()\n"
        "print('the end')\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stdout) == (0, "the end\n"), done.stderr
    assert not is_complete(tmp_path / "c")


def test_blocks_hold_every_copy_apart_and_little_is_unused():
    for sizes in ([64], [GIB * 3 + 64, 64, 64], [50 << 20] * 100, [64] * 9 + [96 << 20] * 7, [640 << 20] * 5):
        places, blocks = place(sizes)
        taken = sorted((block, at, at + size) for (block, at), size in zip(places, sizes, strict=True))
        assert all(end <= blocks[block] for block, _, end in taken)
        assert all(a[0] < b[0] or a[2] <= b[1] for a, b in pairwise(taken))
        assert all(block & (block - 1) == 0 for block in blocks)
    assert place([50 << 20] * 100)[1][:4] == [BLOCK] * 4
    assert sum(place([50 << 20] * 100)[1]) < 1.06 * (5000 << 20)
    assert place([]) == ([], [])


def test_memory_under_several_names_is_copied_once_and_every_part_keeps_its_own_values():
    whole, step = torch.arange(600_000.0).view(600, 1000), torch.tensor(5.0)
    parts = {
        ("weights", name, Box((0, 0), (600, 1000))): Piece(whole, (600, 1000), Box((0, 0), (600, 1000)))
        for name in "ab"
    }
    parts |= {("optimizer", f"{i}.step", Box((), ())): Piece(step, (), Box((), ())) for i in range(1000)}
    memory = HostMemory()
    copies = memory.copy(parts)
    assert memory.nbytes < 2 * whole.nbytes
    whole.zero_()
    step.zero_()
    assert all(copy.local.sum() == 599_999 * 300_000 for key, copy in copies.items() if key[0] == "weights")
    assert all(copy.local == 5 for key, copy in copies.items() if key[0] == "optimizer")


def test_a_rank_copies_what_it_writes_and_not_all_that_it_holds():
    whole = torch.arange(4000.0).view(4, 1000)
    box = Box((1, 10), (2, 500))
    memory = HostMemory()
    (copy,) = memory.copy({("weights", "w", box): Piece(whole, (4, 1000), Box((0, 0), (4, 1000)))}).values()
    assert (copy.box, copy.shape, memory.nbytes) == (box, (4, 1000), 4096)
    assert torch.equal(copy.local, whole[1:3, 10:510])


def mixed():
    """A layout in which ranks share tensors, split them along either dimension, and hold what others do not."""
    mesh, g = init_device_mesh("cpu", (2,)), torch.Generator().manual_seed(3)
    whole = torch.randn(1 << 10, 1 << 9, generator=g)  # 2 MiB: what is replicated is shared out
    tensors = {f"r{i}": distribute_tensor(whole + i, mesh, [Replicate()]) for i in range(4)}
    tensors |= {"rows": distribute_tensor(whole[:5, :8], mesh, [Shard(0)])}
    tensors |= {"columns": distribute_tensor(whole[:5, :9], mesh, [Shard(1)])}
    tensors |= {"none": distribute_tensor(whole[:0], mesh, [Shard(0)]), "step": torch.tensor(4.0)}
    return tensors | {f"of_rank_{dist.get_rank()}": torch.ones(3)}


def save_both(folder, writer):
    tensors = mixed()
    save(folder / "front", tensors, {"r0.m": tensors["r0"]}, {}, writer=writer)
    with BackgroundSaver() as saver:
        for again in range(2):
            saver.save(folder / f"back{again}", tensors, {"r0.m": tensors["r0"]}, {}, writer=writer)
            for _ in range(20):  # what training says meanwhile is not mixed up with what the threads say
                number = torch.tensor(float(dist.get_rank()))
                dist.all_reduce(number)
                assert number == 1
        saver.wait()
        tensors |= {"one_more": torch.ones(2)}  # another plan, on all ranks
        saver.save(folder / "more", tensors, {}, {}, writer=writer)
        return saver.memory.nbytes


@pytest.mark.parametrize("writer", ["shared", "per_rank"])
def test_ranks_save_in_the_background_what_they_save_in_the_foreground(ranks, tmp_path, writer):
    kept = ranks(2, save_both, tmp_path, writer)
    for again in range(2):
        assert content(tmp_path / f"back{again}") == content(tmp_path / "front")
    load(tmp_path / "more", loaded := {"one_more": torch.zeros(2)}, allow_extra=["*"])
    assert loaded["one_more"].tolist() == [1, 1]
    held = 5 * (2 << 20)
    assert all(memory < 0.7 * held for memory in kept)  # half of what is replicated, not all of it


def save_strided(folder):
    net, _ = strided_net(0)
    with BackgroundSaver() as saver:
        saver.save(folder, dict(net.named_parameters()), {}, {})
        for parameter in net.parameters():
            parameter.data.zero_()


def test_strided_shards_are_copied_as_parts_of_the_whole(ranks, tmp_path):
    ranks(4, save_strided, tmp_path / "c")
    assert all(ranks(4, load_strided, tmp_path / "c"))


def failing(folder, rank, where):
    """A disk that is full under one rank: what each rank's loop sees, by the flags that ranks exchange in a step."""
    mesh = init_device_mesh("cpu", (2,))
    weights = {"w": distribute_tensor(torch.ones(8), mesh, [Shard(0)])}
    real, errors = os.pwrite, []
    with BackgroundSaver() as saver:
        saver.save(folder / "step-00000001", weights, {}, {})
        saver.wait()
        if dist.get_rank() == rank:
            os.pwrite = full
        try:
            saver.save(folder / "step-00000002", weights, {}, {})
            if where == "loop":
                while not errors:
                    flags = [None, None]
                    dist.all_gather_object(flags, saver.failed)
                    if error := error_of(saver.stop_if_failed, flags):
                        errors.append(error)
            else:
                errors.append(error_of(saver.save, folder / "step-00000003", weights, {}, {}))
        finally:
            os.pwrite = real
    return errors


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("where", ["loop", "next"])
def test_a_disk_full_under_one_rank_stops_all_with_its_reason_and_no_checkpoint_is_left(ranks, tmp_path, rank, where):
    errors = ranks(2, failing, tmp_path, rank, where)
    assert errors[0] == errors[1]
    ((kind, text),) = errors[0]
    assert kind == "OSError"
    assert f"step-00000002 was not saved in the background: rank {rank}: " in text
    assert "No space left on device" in text
    assert latest(tmp_path) == tmp_path / "step-00000001"
    assert content(tmp_path / "step-00000002") == {}
    load(tmp_path / "step-00000001", {"w": torch.zeros(8)})


def one_cannot_copy(folder):
    weights = {"w": torch.ones(8)}
    if dist.get_rank() == 1:
        weights["v"] = torch.ones(8, device="meta")
    with BackgroundSaver() as saver:
        return error_of(saver.save, folder, weights, {}, {})


def test_a_rank_that_cannot_copy_stops_all_before_anything_is_written(ranks, tmp_path):
    errors = ranks(2, one_cannot_copy, tmp_path / "c")
    assert errors[0] == errors[1]
    assert errors[0][0] == "ValueError"
    assert "rank 1: v: the tensor is on the meta device" in errors[0][1]
    assert not (tmp_path / "c").exists()
