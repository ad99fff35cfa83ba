import multiprocessing
import os
import signal
import subprocess
import sys
import time
import warnings
from itertools import islice

import numpy as np
import pytest
import torch

from composable.data.loader import DataConfig, MicroBatch, accumulation, build_loader, validation_loader
from composable.data.packing import IGNORE
from composable.data.token_writer import TokenWriter
from composable.data.tokens import Tokens, open_tokens

S = 4


def numbered(n):
    """n samples of length S; every token of sample i is i + 3, so a batch shows which samples it holds."""
    return Tokens(np.repeat(np.arange(3, n + 3, dtype=np.uint16), S), np.arange(n + 1) * S, 65536)


def config(global_batch, micro_batch=1, **more):
    return DataConfig(seq_len=S, global_batch=global_batch, micro_batch=micro_batch, holdout=0.0, **more)


def ids(loader, count=None):
    """The samples of each micro-batch, read from its tokens; -1 for padding."""
    batches = []
    for batch in islice(loader, count):
        found = torch.where(batch.tokens[:, 0] > 0, batch.tokens[:, 0] - 3, -1)
        assert torch.equal(found, batch.samples)
        batches.append(found.tolist())
    return batches


def flat(batches):
    return [sample for batch in batches for sample in batch]


def read(tokens, data, ranks=1, position=0, steps=None, seed=1234):
    """What all ranks read together, micro-batch by micro-batch in the order of the samples."""
    each = [
        ids(build_loader(tokens, data, seed=seed, data_rank=rank, data_ranks=ranks, position=position, steps=steps))
        for rank in range(ranks)
    ]
    assert len({len(batches) for batches in each}) == 1, "every rank does the same number of micro-batches"
    return [batch for together in zip(*each, strict=True) for batch in together]


def test_a_micro_batch_holds_the_same_samples_in_every_layout():
    expected = read(numbered(64), config(8, 2), steps=8)
    assert sorted(flat(expected)) == list(range(64))
    for ranks in (2, 4):
        assert read(numbered(64), config(8, 2), ranks, steps=8) == expected


def test_a_run_resumes_on_other_ranks_with_the_samples_that_are_left():
    expected = flat(read(numbered(64), config(8), steps=8))
    before = flat(read(numbered(64), config(8), 4, steps=3))
    for ranks in (1, 2, 8):
        for micro_batch in (1, 8 // ranks):
            after = flat(read(numbered(64), config(8, micro_batch), ranks, position=24, steps=5))
            assert before + after == expected


def test_a_run_resumes_with_another_global_batch_inside_of_an_epoch():
    expected = flat(read(numbered(10), config(2, epochs=3)))
    assert expected[:6] + flat(read(numbered(10), config(8, epochs=3), position=6))[:24] == expected


@pytest.mark.parametrize(("n", "ranks"), [(10, 1), (20, 2)])
def test_a_run_resumes_exactly_after_every_step(n, ranks):
    data = config(2 * ranks, epochs=3)
    straight = flat(read(numbered(n), data, ranks))
    assert [sorted(straight[n * epoch : n * epoch + n]) for epoch in range(3)] == [list(range(n))] * 3
    for step in range(16):
        position = step * 2 * ranks
        assert straight[:position] + flat(read(numbered(n), data, ranks, position=position)) == straight


def test_nothing_is_left_after_the_last_epoch():
    for position in (30, 31, 1000):
        assert read(numbered(10), config(2, epochs=3), position=position) == []


@pytest.mark.filterwarnings("ignore:This DataLoader will create 3 worker processes")
def test_workers_never_change_the_order():
    tokens = numbered(48)
    expected = [read(tokens, config(4, 2, epochs=3), 2), read(tokens, config(4, 2, epochs=3), 2, position=44)]
    for workers in (1, 2, 3):
        data = config(4, 2, epochs=3, workers=workers)
        assert read(tokens, data, 2) == expected[0]
        assert read(tokens, data, 2, position=44) == expected[1]
    epochs = [flat(expected[0])[48 * epoch : 48 * epoch + 48] for epoch in range(3)]
    assert len(set(map(tuple, epochs))) == 3


def test_workers_read_a_mapped_file_and_an_endless_order(tmp_path):
    with TokenWriter(tmp_path / "a", 65536) as writer:
        for sample in range(10):
            writer.add(np.full(S, sample + 3))
    train, _ = open_tokens(tmp_path / "a").split(0.2)
    loader = build_loader(train, config(2, workers=2), seed=1, data_rank=0, data_ranks=1)
    plain = build_loader(train, config(2), seed=1, data_rank=0, data_ranks=1)
    assert ids(loader, 40) == ids(plain, 40)


def test_without_shuffling_rows_come_in_order():
    assert flat(read(numbered(6), config(2, shuffle=False, epochs=2), 2)) == [*range(6), *range(6)]


@pytest.mark.parametrize("n", [9, 10, 11])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_last_step_is_completed_with_padding_on_every_rank(n, ranks):
    data = config(8, 2, epochs=1)
    samples = flat(read(numbered(n), data, ranks))
    assert len(samples) == 16
    assert sorted(samples[:n]) == list(range(n))
    assert samples[n:] == [-1] * (16 - n)
    if ranks == 1:
        last = list(build_loader(numbered(n), data, seed=1, data_rank=0, data_ranks=1))[-1]
        assert last.labels.tolist() == [[IGNORE] * S] * 2


def test_steps_end_the_loader():
    assert len(read(numbered(64), config(8), 2, steps=3)) == 24
    assert len(read(numbered(9), config(8, epochs=1), steps=50)) == 16
    assert read(numbered(9), config(8), steps=0) == []


@pytest.mark.parametrize("n", [1, 3, 7])
def test_data_smaller_than_a_step_repeats_with_a_warning_or_is_padded(n):
    with pytest.warns(UserWarning, match=f"{n} rows of {S} tokens, less than data.global_batch 8"):
        samples = flat(read(numbered(n), config(8), steps=2))
    assert all(sorted(samples[n * epoch : n * epoch + n]) == list(range(n)) for epoch in range(16 // n))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert sorted(flat(read(numbered(n), config(8, epochs=1), 2))) == [-1] * (8 - n) + list(range(n))
        assert -1 not in flat(read(numbered(8), config(8), steps=2))


def test_no_data_is_refused_at_the_call():
    for empty in (numbered(0), numbered(5).split(0.0)[1]):
        with pytest.raises(ValueError, match=r"no tokens to read .*data.path"):
            build_loader(empty, config(8), seed=1, data_rank=0, data_ranks=1)
        with pytest.raises(ValueError, match=r"no tokens to read .*data.holdout"):
            validation_loader(empty, config(8), data_rank=0, data_ranks=1)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("seq_len", 0),
        ("global_batch", 0),
        ("micro_batch", -1),
        ("workers", -1),
        ("prefetch", 0),
        ("epochs", 0),
        ("holdout", 1.0),
        ("holdout", -0.5),
    ],
)
def test_numbers_out_of_range_are_refused_by_name(field, value):
    with pytest.raises(ValueError, match=f"data.{field} .*got {value}"):
        DataConfig(**{field: value})


@pytest.mark.parametrize(
    ("rank", "position", "reason"), [(2, 0, "data_rank"), (-1, 0, "data_rank"), (0, -1, "position")]
)
def test_places_out_of_range_are_refused(rank, position, reason):
    with pytest.raises(ValueError, match=reason):
        build_loader(numbered(9), config(8), seed=1, data_rank=rank, data_ranks=2, position=position)


def test_accumulation_is_what_the_global_batch_leaves():
    assert accumulation(config(32, 4), 2) == 4
    assert accumulation(config(32, 4), 2, 4) == 1
    assert accumulation(config(1, 1), 1) == 1


@pytest.mark.parametrize(
    ("sizes", "ranks", "pipeline", "reason"),
    [
        (
            (30, 4),
            2,
            1,
            r"global_batch 30 .* 8 = data ranks 2 \* data.micro_batch 4; .* 24 or 32, or .*micro_batch to 3$",
        ),
        ((3, 4), 1, 1, r"global_batch 3 .* 4 = .*; set data.global_batch to 4, or data.micro_batch to 3$"),
        ((9, 1), 2, 1, r"global_batch 9 .* 2 = .*; set data.global_batch to 8 or 10$"),
        (
            (24, 2),
            2,
            4,
            r"16 = .* \* pipeline micro_batches 4; set data.global_batch to 16 or 32, or .*micro_batch to 1$",
        ),
    ],
)
def test_a_batch_that_does_not_divide_is_refused_with_sizes_that_do(sizes, ranks, pipeline, reason):
    with pytest.raises(ValueError, match=reason):
        accumulation(config(*sizes), ranks, pipeline)
    if pipeline == 1:
        with pytest.raises(ValueError, match=reason):
            build_loader(numbered(9), config(*sizes), seed=1, data_rank=0, data_ranks=ranks)


def validate(tokens, data, ranks, steps):
    loaders = [validation_loader(tokens, data, data_rank=rank, data_ranks=ranks, steps=steps) for rank in range(ranks)]
    rounds = []
    for _ in range(2):
        each = [ids(loader) for loader in loaders]
        rounds.append(flat(batch for together in zip(*each, strict=True) for batch in together))
    return rounds


@pytest.mark.parametrize("ranks", [1, 2])
def test_each_validation_starts_again_at_the_first_row(ranks):
    assert validate(numbered(20), config(2), ranks, 3) == [list(range(6))] * 2


def test_a_validation_that_was_broken_off_starts_again_too():
    loader = validation_loader(numbered(20), config(2), data_rank=0, data_ranks=1, steps=3)
    assert ids(loader, 1) == ids(loader, 1) == [[0]]


@pytest.mark.parametrize("n", [1, 9, 10, 11])
@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("steps", [None, 0, 50])
def test_validation_counts_each_sample_once(n, ranks, steps):
    whole = -(-n // 4) * 4
    assert validate(numbered(n), config(4), ranks, steps) == [[*range(n), *[-1] * (whole - n)]] * 2


def test_validation_does_not_depend_on_training_options():
    data = config(4, epochs=1, workers=2, shuffle=True)
    assert validate(numbered(8), data, 2, 1) == [[0, 1, 2, 3]] * 2


def test_documents_and_positions_come_only_with_a_document_mask():
    tokens = numbered(3)
    plain = next(iter(validation_loader(tokens, config(2, 2), data_rank=0, data_ranks=1)))
    assert plain.positions is None
    assert plain.documents is None
    masked = validation_loader(
        tokens, DataConfig(seq_len=8, global_batch=1, micro_batch=1, document_mask=True), data_rank=0, data_ranks=1
    )
    first = next(iter(masked)).to("cpu")
    assert isinstance(first, MicroBatch)
    assert first.tokens.tolist() == [[3, 3, 3, 3, 4, 4, 4, 4]]
    assert first.labels.tolist() == [[3, 3, 3, IGNORE, 4, 4, 4, IGNORE]]
    assert first.positions.tolist() == [[0, 1, 2, 3, 0, 1, 2, 3]]
    assert first.documents.tolist() == [[0, 0, 0, 0, 1, 1, 1, 1]]
    assert {part.dtype for part in first if part is not None} == {torch.int64}


def test_loading_leaves_the_global_random_state_alone():
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    read(numbered(9), config(8, epochs=1))
    read(numbered(9), config(8, epochs=1, workers=1))
    assert torch.equal(torch.rand(1), expected)


def test_a_damaged_token_is_an_error_before_the_model_sees_it():
    tokens = Tokens(np.full(8, 9, np.uint8), np.array([0, 8]), 9, source="here")
    loader = build_loader(tokens, config(2), seed=1, data_rank=0, data_ranks=1)
    with pytest.raises(ValueError, match="token id 9, outside of its vocabulary of 9"):
        next(loader)


def test_ranks_together_read_each_sample_once(ranks):
    each = ranks(2, read_as_rank)
    assert sorted(flat(flat(each))) == list(range(16))
    assert len(each[0]) == len(each[1])


def read_as_rank():
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    data = config(8, 2, epochs=1, workers=1)
    return ids(build_loader(numbered(16), data, seed=3, data_rank=rank, data_ranks=world))


TRAINER = """
import multiprocessing, os, signal, sys
from composable.data.loader import DataConfig, build_loader
from tests.data.test_loader import config, numbered

if __name__ == "__main__":
    for one in (signal.SIGTERM, signal.SIGINT):
        signal.signal(one, lambda number, frame: print("saving first", flush=True))
    loader = build_loader(numbered(64), config(2, workers=2), seed=1, data_rank=0, data_ranks=1)
    next(loader)
    print(*(child.pid for child in multiprocessing.active_children()), flush=True)
    sys.stdin.read()
"""


def alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until_gone(pids, seconds=10.0):
    end = time.monotonic() + seconds
    while any(map(alive, pids)) and time.monotonic() < end:
        time.sleep(0.02)
    return [pid for pid in pids if alive(pid)]


def disposition(pid, number):
    """What the process does at a signal."""
    with open(f"/proc/{pid}/status") as file:
        status = dict(line.split(":", 1) for line in file)
    ignored, caught = (int(status[key], 16) >> (number - 1) & 1 for key in ("SigIgn", "SigCgt"))
    return "ignored" if ignored else "caught" if caught else "default"


def test_workers_end_by_sigterm_and_with_a_killed_trainer_that_handles_signals_itself(tmp_path):
    script = tmp_path / "trainer.py"
    script.write_text(TRAINER)
    trainer = subprocess.Popen(
        [sys.executable, str(script)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.getcwd()},
    )
    try:
        workers = [int(pid) for pid in trainer.stdout.readline().split()]
        assert len(workers) == 2
        assert all(map(alive, workers))
        assert [disposition(pid, signal.SIGTERM) for pid in [trainer.pid, *workers]] == ["caught", "default", "default"]
        assert [disposition(pid, signal.SIGINT) for pid in [trainer.pid, *workers]] == ["caught", "ignored", "ignored"]
    finally:
        trainer.kill()
        trainer.communicate()
    assert wait_until_gone(workers) == []


def test_workers_end_with_their_loader():
    before = {child.pid for child in multiprocessing.active_children()}
    loader = build_loader(numbered(8), config(2, workers=2), seed=1, data_rank=0, data_ranks=1)
    next(loader)
    workers = {child.pid for child in multiprocessing.active_children()} - before
    assert len(workers) == 2
    del loader
    assert wait_until_gone(workers) == []
