"""A checkpoint, though written past the page cache, is in it soon after: also when the program ends at once."""

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from composable.checkpoint import page_cache, save
from composable.checkpoint.background import BackgroundSaver
from composable.checkpoint.page_cache import file_system
from composable.checkpoint.storage import PAGE, opened

TENSORS = {"large": torch.arange(6 << 20, dtype=torch.float32).view(6, -1), "small": torch.ones(5)}
PROGRAM = f"""
import os, sys, time
import torch
from composable.checkpoint import page_cache, save
preadv = os.preadv
def slow(*args):
    time.sleep(float(sys.argv[2]))
    return preadv(*args)
os.preadv = slow
page_cache.AT_EXIT, page_cache.STEP = 0.5, 1 << 20
save(sys.argv[1], {{"large": torch.ones({24 << 20}, dtype=torch.uint8)}}, {{}}, {{}}, writer="per_rank")
"""


def cached(folder: Path) -> list[bool]:
    """Of each page of the tensor files, whether memory has it."""
    found = []
    for path in sorted(folder.glob("*.safetensors")):
        with opened(path, os.O_RDONLY) as file:
            for offset in range(0, path.stat().st_size, PAGE):
                try:
                    found.append(os.preadv(file.handle, [bytearray(1)], offset, os.RWF_NOWAIT) == 1)
                except BlockingIOError:
                    found.append(False)
    return found


def read_back() -> None:
    """Wait for what reads in the background."""
    for thread in threading.enumerate():
        if thread.name == "reading back":
            thread.join()


@pytest.mark.parametrize("writer", ["shared", "per_rank"])
def test_a_checkpoint_is_in_memory_soon_after_it_was_saved(tmp_path, writer):
    save(tmp_path / "step", TENSORS, {"moment": TENSORS["large"]}, {}, writer=writer)
    read_back()
    assert all(cached(tmp_path / "step"))
    assert all(cached(tmp_path / "step" / "optimizer"))


def test_its_memory_was_touched_once_for_those_that_read_next(tmp_path):
    def read_by_this_process() -> int:
        return int(Path("/proc/self/io").read_text().split()[1])

    save(tmp_path / "step", TENSORS, {}, {})
    read_back()
    before, [file] = read_by_this_process(), (tmp_path / "step").glob("*.safetensors")
    size = file.stat().st_size
    assert sum(page_cache._read([(file, 5, size // 2), (file, size // 2, size + 9)])) >= size - 5
    assert read_by_this_process() - before >= size - 5


def test_it_is_also_where_the_program_ends_with_the_save(tmp_path):
    subprocess.run([sys.executable, "-c", PROGRAM, tmp_path / "step", "0"], check=True)
    assert all(cached(tmp_path / "step"))


def test_and_after_a_save_in_the_background(tmp_path):
    with BackgroundSaver() as saver:
        saver.save(tmp_path / "step", TENSORS, {}, {})
    threads = [thread for thread in threading.enumerate() if thread.name == "reading back"]
    assert not any(thread.daemon for thread in threads)  # or they would end with the program
    read_back()
    assert all(cached(tmp_path / "step"))


def test_a_program_that_is_done_does_not_wait_long_for_a_slow_disk(tmp_path):
    start = time.monotonic()
    subprocess.run([sys.executable, "-c", PROGRAM, tmp_path / "step", "2.5"], check=True)  # 24 reads
    assert time.monotonic() - start < 30


def test_the_cores_are_for_the_programs_own_work_first(tmp_path, monkeypatch):
    def priority() -> int:
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    own, found = priority(), []
    monkeypatch.setattr(page_cache, "_read", lambda spans: found.append(priority()) or ())
    save(tmp_path / "step", TENSORS, {}, {})
    read_back()
    assert found == [19]
    assert priority() == own < 19


def test_what_takes_much_of_the_memory_is_left_on_the_disk(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(page_cache, "_read", lambda spans: asked.append(spans) or ())
    for number, available in enumerate((90 << 20, 100 << 20)):  # of which 24 are saved
        monkeypatch.setattr(page_cache, "_available", lambda available=available: available)
        save(tmp_path / f"step-{number}", TENSORS, {}, {})
        read_back()
        assert len(asked) == number


def test_nothing_depends_on_what_is_read_back(tmp_path, monkeypatch):
    def start(thread):
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", start)
        page_cache.read_back(tmp_path, [], 0)
    missing, start = tmp_path / "deleted", time.monotonic()
    assert not list(page_cache._read([(missing, 0, 1 << 40), (missing, 5, 9)]))
    assert time.monotonic() - start < 5


def test_the_next_checkpoint_ends_the_reading_of_the_last(tmp_path, monkeypatch):
    started, may_go_on, reads = threading.Event(), threading.Event(), []

    def reading(spans):
        started.set()
        assert may_go_on.wait(60)
        for span in spans:
            reads.append(span)
            yield 0

    monkeypatch.setattr(page_cache, "_read", reading)
    tensors = {str(name): TENSORS["large"] for name in range(3)}
    for number in range(2):
        started.clear()
        save(tmp_path / f"step-{number}", tensors, {}, {})
        assert started.wait(60)
    may_go_on.set()
    read_back()
    folders = [path.parent.name for path, _, _ in reads]
    assert folders.count("step-1") == 3
    assert folders.count("step-0") == 1  # where it stopped


def test_a_disk_of_this_machine_is_told_from_a_share():
    mounts = b"""\
overlay / overlay rw,relatime 0 0
proc /proc proc rw 0 0
server:/home /home nfs4 rw 0 0
/dev/sda1 /home/my\\040disk ext4 rw 0 0
/dev/sdb1 /scratch xfs rw 0 0
lustre@tcp:/fs /scratch lustre rw 0 0
""" + "server:/ü /mnt/ü nfs4 rw 0 0\n".encode()
    places = {
        "/work": "overlay",
        "/home/a": "nfs4",
        "/homes": "overlay",
        "/home/my disk/a": "ext4",
        "/scratch": "lustre",
    }
    assert {path: file_system(Path(path), mounts) for path in places} == places
    assert file_system(Path("/mnt/ü/run"), mounts) == "nfs4"
    assert file_system(Path("/work"), b"") == ""
