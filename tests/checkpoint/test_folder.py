import os
import signal
import time

import pytest
import torch

from composable.checkpoint import is_complete, latest, load, prune, save, step_folder
from composable.checkpoint.folder import locked


def write(root, step):
    save(
        step_folder(root, step),
        {"w": torch.full((6,), float(step))},
        {"w.m": torch.zeros(6)},
        {"train_state.json": "{}"},
    )


def value(folder):
    loaded = {"w": torch.zeros(6)}
    load(folder, loaded)
    return loaded["w"][0].item()


def names(root):
    return sorted(path.name for path in root.glob("step-*"))


def die_at(call, act):
    """Run `act` in a child, killed at its call-th system call that changes the disk; whether it came to the end."""
    child = os.fork()
    if child == 0:
        count = 0

        def counted(function):
            def wrapper(*args, **kwargs):
                nonlocal count
                count += 1
                if count == call:
                    os.kill(os.getpid(), signal.SIGKILL)
                return function(*args, **kwargs)

            return wrapper

        for name in ("pwrite", "fsync", "replace", "ftruncate", "unlink", "rmdir", "mkdir"):
            setattr(os, name, counted(getattr(os, name)))
        try:
            act()
            os._exit(0)
        finally:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0
    return not os.WIFSIGNALED(status)


def test_a_kill_at_any_moment_leaves_a_checkpoint_complete_or_absent(tmp_path):
    for call in range(1, 100):
        root = tmp_path / str(call)
        write(root, 1)
        ended = die_at(call, lambda root=root: write(root, 2))
        newest = latest(root)
        assert value(newest) == (2 if is_complete(step_folder(root, 2)) else 1)
        assert value(step_folder(root, 1)) == 1
        if newest == step_folder(root, 1):
            if step_folder(root, 2).exists() and any(step_folder(root, 2).iterdir()):
                with pytest.raises(ValueError, match="incomplete"):
                    value(step_folder(root, 2))
            write(root, 2)  # the same command again
            assert value(latest(root)) == 2
        if ended:
            break
    assert ended
    assert call > 15


def test_a_kill_while_pruning_never_leaves_a_half_deleted_checkpoint_that_looks_complete(tmp_path):
    for call in range(1, 100):
        root = tmp_path / str(call)
        for step in (1, 2, 3):
            write(root, step)
        ended = die_at(call, lambda root=root: prune(root, 1))
        for folder in root.glob("step-*"):
            if is_complete(folder):
                assert value(folder) == int(folder.name[5:])
        assert latest(root) == step_folder(root, 3)
        prune(root, 1)
        assert names(root) == ["step-00000003"]
        if ended:
            break
    assert ended
    assert call > 5


def test_latest_is_the_newest_complete_step_whatever_the_file_says(tmp_path):
    assert latest(tmp_path) is None
    assert latest(tmp_path / "none") is None
    for step in (9, 10):
        write(tmp_path, step)
    assert (tmp_path / "latest").read_text() == "step-00000010\n"
    (tmp_path / "step-00000011").mkdir()
    (tmp_path / "step-00000011" / "model.safetensors").write_bytes(b"partial")
    (tmp_path / "step-backup").mkdir()
    (tmp_path / "latest").write_text("step-00000011\n")
    assert latest(tmp_path) == tmp_path / "step-00000010"
    (tmp_path / "step-00000010" / "manifest.json").unlink()
    assert latest(tmp_path) == tmp_path / "step-00000009"


def test_an_export_leaves_no_pointer_beside_it(tmp_path):
    save(tmp_path / "my-model", {"w": torch.ones(2)}, {}, {})
    assert [path.name for path in tmp_path.iterdir()] == ["my-model"]


def test_prune_keeps_the_newest_complete_ones_and_what_is_being_written(tmp_path):
    for step in (1, 2, 3, 4):
        write(tmp_path, step)
    for step in (0, 5):
        (tmp_path / f"step-{step:08d}").mkdir()
    (tmp_path / "step-00000003" / "manifest.json").unlink()
    assert prune(tmp_path, 0) == [tmp_path / "step-00000003", tmp_path / "step-00000000"]
    assert names(tmp_path) == ["step-00000001", "step-00000002", "step-00000004", "step-00000005"]
    assert prune(tmp_path, 2) == [tmp_path / "step-00000001"]
    assert names(tmp_path) == ["step-00000002", "step-00000004", "step-00000005"]


def test_prune_never_deletes_the_only_complete_checkpoint(tmp_path):
    write(tmp_path, 1)
    for step in (2, 3):
        write(tmp_path, step)
        (tmp_path / f"step-{step:08d}" / "manifest.json").unlink()
    assert prune(tmp_path, 1) == []
    assert value(latest(tmp_path)) == 1
    (tmp_path / "step-00000001" / "manifest.json").unlink()
    assert prune(tmp_path, 1) == []
    with pytest.raises(ValueError, match="keep"):
        prune(tmp_path, -1)


def test_two_jobs_cannot_write_one_folder(tmp_path):
    step_folder(tmp_path, 1).mkdir()
    with locked(step_folder(tmp_path, 1)), pytest.raises(BlockingIOError, match="another process"):
        write(tmp_path, 1)
    write(tmp_path, 1)
    assert value(latest(tmp_path)) == 1


def test_a_killed_job_frees_the_folder(tmp_path):
    folder = step_folder(tmp_path, 1)
    folder.mkdir()
    child = os.fork()
    if child == 0:
        with locked(folder):
            (folder / "held").touch()
            time.sleep(60)
        os._exit(1)
    while not (folder / "held").exists():
        time.sleep(0.01)
    with pytest.raises(BlockingIOError):
        write(tmp_path, 1)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    write(tmp_path, 1)
