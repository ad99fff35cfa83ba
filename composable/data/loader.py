"""Micro-batches for training and validation.

The position of a run is one number, the samples consumed so far. Sample order, rows and their place in a step are
functions of it, so nothing of the loader is ever saved, and a run resumes exactly with other ranks, workers or batch
sizes.
"""

import itertools
import multiprocessing
import os
import signal
import threading
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torchdata.stateful_dataloader import StatefulDataLoader

from composable.data.order import Order
from composable.data.packing import Packing, Starts, make_row, row_starts, tokens_cut_off
from composable.data.tokens import Tokens


class MicroBatch(NamedTuple):
    """B samples of S tokens, int64. `positions` and `documents` are None without a document mask.

    `labels` holds -100 where there is no loss; `samples` the index of each row in the data, -1 for padding rows. The
    last four are for layers with experts (`Decoder.token_info`), and are filled in when a model is trained.
    """

    tokens: torch.Tensor  # [B, S]
    labels: torch.Tensor  # [B, S]
    positions: torch.Tensor | None  # [B, S]
    documents: torch.Tensor | None  # [B, S]
    samples: torch.Tensor  # [B]
    indices: torch.Tensor | None = None  # [B, S]
    scale: torch.Tensor | None = None  # [B]
    step: torch.Tensor | None = None  # [B]
    loads: torch.Tensor | None = None  # [1, L, E]

    @property
    def told(self) -> dict[str, torch.Tensor]:
        """What a model is told beside its tokens, by the names of its arguments."""
        names = ("labels", "positions", "documents", "indices", "scale", "step", "loads")
        return {name: value for name in names if (value := getattr(self, name)) is not None}

    def to(self, device: torch.device | str) -> "MicroBatch":
        """The same on `device`."""
        return MicroBatch(*(None if part is None else part.to(device, non_blocking=True) for part in self))  # type: ignore[arg-type]


@dataclass(frozen=True)
class DataConfig:
    """What is read, and how much of it makes a step. Raises ValueError where a number is out of its range."""

    path: str = "python-stdlib"
    """A token file (made by tools/prepare_data.py), or python-stdlib: the bytes of Python's standard library."""
    seq_len: int = 256
    """Tokens in a row."""
    global_batch: int = 32
    """Rows in an optimizer step, over all ranks."""
    micro_batch: int = 4
    """Rows in one forward pass of one rank."""
    document_mask: bool = False
    """Whether documents packed in one row are hidden from each other. Off: attention crosses their borders."""
    packing: Packing = "cut"
    """cut: documents lie end to end, and a row is any seq_len tokens; whole: a row holds whole documents and padding,
    so that no answer loses its question; documents longer than a row are cut to it"""
    workers: int = 0
    """Processes of each rank that cut rows ahead of time; 0: the training process does. Changes no order."""
    prefetch: int = 2
    """Micro-batches that each worker holds ready."""
    shuffle: bool = True
    """Whether each epoch reads the rows in an order of its own."""
    epochs: int | None = None
    """Passes over the data after which training ends; None repeats it for ever."""
    holdout: float = 0.02
    """Share of the tokens, at the end of the data, that is kept for validation."""

    def __post_init__(self) -> None:
        for name, least in (("seq_len", 1), ("global_batch", 1), ("micro_batch", 1), ("workers", 0), ("prefetch", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"data.{name} must be at least {least}; got {getattr(self, name)}")
        if self.epochs is not None and self.epochs < 1:
            raise ValueError(f"data.epochs must be at least 1, or None to repeat for ever; got {self.epochs}")
        if not 0.0 <= self.holdout < 1.0:
            raise ValueError(f"data.holdout is a share, at least 0 and below 1; got {self.holdout}")


def accumulation(config: DataConfig, data_ranks: int, pipeline_micro_batches: int = 1) -> int:
    """Forward passes (pipeline passes, where a pass takes several micro-batches) of a rank in one optimizer step.

    Raises ValueError, with the nearest sizes that work, where the global batch does not divide by
    data_ranks * micro_batch * pipeline_micro_batches.
    """
    if data_ranks < 1 or pipeline_micro_batches < 1:
        raise ValueError(
            f"data ranks and pipeline micro-batches must be at least 1; got {data_ranks} and {pipeline_micro_batches}"
        )
    shares = data_ranks * pipeline_micro_batches
    unit = shares * config.micro_batch
    count, rest = divmod(config.global_batch, unit)
    if not rest:
        return count
    legal = [size for size in (count * unit, (count + 1) * unit) if size]
    advice = f"set data.global_batch to {' or '.join(map(str, legal))}"
    if config.global_batch % shares == 0:
        share = config.global_batch // shares
        smaller = max(size for size in range(1, config.micro_batch + 1) if share % size == 0)
        advice += f", or data.micro_batch to {smaller}"
    pipeline = f" * pipeline micro_batches {pipeline_micro_batches}" if pipeline_micro_batches > 1 else ""
    raise ValueError(
        f"data.global_batch {config.global_batch} is not a multiple of {unit} = data ranks {data_ranks} * "
        f"data.micro_batch {config.micro_batch}{pipeline}; {advice}"
    )


@dataclass(frozen=True)
class _Rows:
    """The data as a map: a tuple of sample indices gives a micro-batch. Travels to worker processes."""

    tokens: Tokens
    seq_len: int
    document_mask: bool
    starts: Starts

    def __getitem__(self, samples: tuple[int, ...]) -> MicroBatch:
        rows = [make_row(self.tokens, sample, self.seq_len, self.document_mask, self.starts) for sample in samples]
        tokens, labels, positions, documents = (
            None if parts[0] is None else torch.from_numpy(np.stack(parts)) for parts in zip(*rows, strict=True)
        )
        assert tokens is not None
        assert labels is not None
        return MicroBatch(tokens, labels, positions, documents, torch.tensor(samples))


@dataclass(frozen=True)
class _Schedule:
    """The micro-batches of one rank, as tuples of sample indices.

    A step takes the next `global_batch` positions; its micro-batch m is made of the m-th run of `micro_batch`
    positions and belongs to rank m mod `data_ranks`: whatever the layout, a micro-batch holds the same samples.
    """

    order: Order
    position: int
    steps: int | None
    config: DataConfig
    data_rank: int
    data_ranks: int

    def __iter__(self) -> Iterator[tuple[int, ...]]:
        size = self.config.micro_batch
        for step in itertools.count() if self.steps is None else range(self.steps):
            start = self.position + step * self.config.global_batch
            for micro in range(self.data_rank, self.config.global_batch // size, self.data_ranks):
                first = start + micro * size
                yield tuple(self.order.at(position) for position in range(first, first + size))


def _check(tokens: Tokens, config: DataConfig, data_rank: int, data_ranks: int) -> _Rows:
    """The rows; raises what is wrong with the arguments, on every rank alike."""
    accumulation(config, data_ranks)
    if not 0 <= data_rank < data_ranks:
        raise ValueError(f"data_rank must be from 0 to {data_ranks - 1}; got {data_rank}")
    if len(tokens) == 0:
        raise ValueError(
            f"there are no tokens to read (data.path {config.path}, data.holdout {config.holdout}): give a larger "
            f"file, or a holdout that leaves tokens on both sides"
        )
    starts = row_starts(tokens, config.seq_len, config.packing)
    return _Rows(tokens, config.seq_len, config.document_mask, starts)


def build_loader(
    tokens: Tokens,
    config: DataConfig,
    *,
    seed: int,
    data_rank: int,
    data_ranks: int,
    position: int = 0,
    steps: int | None = None,
) -> Iterator[MicroBatch]:
    """The micro-batches of one rank, accumulation(config, data_ranks) for each step, from the sample `position` on.

    Step s takes the samples position + [s * global_batch, (s + 1) * global_batch) of the order that `seed` gives. It
    ends after `steps` steps, or when all epochs are read: the last step is then completed with padding rows (no
    labels, sample -1). Every rank ends after the same number. Data smaller than a step is repeated within it, unless
    `epochs` says how often. Raises ValueError at the call, not at the first batch.
    """
    rows = _check(tokens, config, data_rank, data_ranks)
    n = len(rows.starts)
    if position < 0:
        raise ValueError(f"position is the number of samples consumed so far, so not negative; got {position}")
    if config.epochs is None and n < config.global_batch and data_rank == 0:
        warnings.warn(
            f"the data has {n} rows of {config.seq_len} tokens, less than data.global_batch {config.global_batch}: "
            f"each step reads rows more than once",
            stacklevel=2,
        )
    if config.packing == "whole" and data_rank == 0:
        _warn_of_long_documents(tokens, config.seq_len)
    order = Order(n, seed, config.shuffle, config.epochs)
    if order.total is not None:
        left = max(0, -(-(order.total - position) // config.global_batch))
        steps = left if steps is None else min(steps, left)
    schedule = _Schedule(order, position, steps, config, data_rank, data_ranks)
    parallel = config.workers > 0
    # One iterator lasts for all epochs, and its workers as long as it.
    with warnings.catch_warnings():
        # The call is torchdata's: nothing that a user could do.
        warnings.filterwarnings("ignore", message="'set_vital' is deprecated")
        loader: StatefulDataLoader = StatefulDataLoader(
            rows,
            batch_size=None,
            sampler=schedule,
            collate_fn=_identity,
            num_workers=config.workers,
            prefetch_factor=config.prefetch if parallel else None,
            multiprocessing_context=_worker_context() if parallel else None,
            worker_init_fn=_start_worker,
            # Without a generator of its own the loader draws a seed from the global one, which is the model's.
            generator=torch.Generator().manual_seed(0),
            snapshot_every_n_steps=None,
        )
    return iter(loader)


def _warn_of_long_documents(tokens: Tokens, seq_len: int) -> None:
    documents, beyond = tokens_cut_off(tokens, seq_len)
    if documents:
        warnings.warn(
            f"{documents:,} of {tokens.documents:,} documents are longer than data.seq_len {seq_len} and are cut to "
            f"it: {beyond:,} of {len(tokens):,} tokens are never read (tools/prepare_data.py --max-tokens {seq_len} "
            f"leaves such documents out)",
            stacklevel=3,
        )


def _identity(batch: MicroBatch) -> MicroBatch:
    return batch


def _worker_context() -> multiprocessing.context.BaseContext:
    """How workers start: from a fork server, a process that never had another thread.

    A training process has threads of gloo, of NCCL and of autograd; one of them may hold a lock at the moment of a
    fork, and the child would wait for it for ever. The server imports torch once; workers fork from it in
    milliseconds.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["composable.data.server"])
    return context


def _start_worker(worker: int) -> None:
    """Make a worker end with its training process: by its signal, and also when that process is killed."""
    # A trainer that handles SIGTERM (to save first) must not be imitated, and ends its workers in order.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    # The loader's own watch looks at the parent's process id: here that is the fork server, which outlives the trainer.
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


@dataclass(frozen=True)
class _Validation:
    rows: _Rows
    schedule: _Schedule

    def __iter__(self) -> Iterator[MicroBatch]:
        return (self.rows[samples] for samples in self.schedule)


def validation_loader(
    tokens: Tokens, config: DataConfig, *, data_rank: int, data_ranks: int, steps: int | None = None
) -> Iterable[MicroBatch]:
    """The first steps * global_batch rows in order, each once; all rows when `steps` is None or 0.

    Every iteration starts again at the first row. The last step is completed with padding rows (no labels, sample
    -1), so every rank yields the same number. Rows are cut in this process: they lie in memory, and a second set of
    workers would idle between validations. Raises ValueError as `build_loader` does.
    """
    rows = _check(tokens, config, data_rank, data_ranks)
    n = len(rows.starts)
    if steps is not None and steps < 0:
        raise ValueError(f"validation steps must not be negative; got {steps}")
    whole = -(-n // config.global_batch)
    order = Order(n, seed=0, shuffle=False, epochs=1)
    schedule = _Schedule(order, 0, min(steps or whole, whole), config, data_rank, data_ranks)
    return _Validation(rows, schedule)
