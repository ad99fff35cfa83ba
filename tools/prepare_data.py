"""Make a token file from text: `python tools/prepare_data.py SRC... --out FILE`.

SRC is a .txt file (one document), a .jsonl, .jsonl.gz or .jsonl.zst file (a document a line), or a folder of them.
What each source gives is counted and reported; nothing is dropped without a word. A document is its tokens between
one BOS and one EOS, where the tokenizer has them; a text that spells such a token is encoded as plain characters. An
empty text is no document. The file is the same for any number of workers, and appears under its name when it is
complete.
"""

import functools
import os
import signal
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Annotated

import numpy as np
import tyro
from tqdm import tqdm

from composable.data.documents import Document, other_files, read_documents, source_files
from composable.data.text import load_tokenizer
from composable.data.tokens import TokenWriter

BATCH_BYTES = 1 << 20  # text that goes to a worker at once: enough to hide the cost of sending it
SHOWN = 5  # skipped records that the report shows; it counts all


@dataclass(frozen=True)
class Args:
    """Make a token file from text."""

    sources: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="SRC...")]
    """Text files (.txt), records (.jsonl, .jsonl.gz, .jsonl.zst), or folders of them."""
    out: str
    """The token file to write."""
    tokenizer: str = "byte"
    """byte (UTF-8, 257 tokens), a tokenizer.json, or a folder that holds one."""
    bos: bool = True
    """Begin each document with the tokenizer's beginning-of-text token, if it has one."""
    eos: bool = True
    """End each document with the tokenizer's end-of-text token, if it has one."""
    suffix: tuple[str, ...] = ()
    """In folders read files with these endings (.py .md ...), each as one document, instead of the usual ones."""
    field: str = "text"
    """The field of a record that holds its text."""
    workers: int = 0
    """Processes that encode; 0: one for each CPU."""
    strict: bool = False
    """End with an error at the first record that has no text, instead of counting it."""
    overwrite: bool = False
    """Replace an existing file."""


@dataclass(frozen=True)
class Encoded:
    """A batch of documents as ids: `ids` end to end, `lengths` [documents]; and what became of its records."""

    ids: np.ndarray
    lengths: np.ndarray
    read: int
    text_bytes: int = 0
    empty: int = 0
    undecodable: int = 0
    skipped: tuple[str, ...] = ()


@dataclass
class Report:
    """What the sources gave."""

    documents: int = 0
    tokens: int = 0
    text_bytes: int = 0
    empty: int = 0
    undecodable: int = 0
    skipped: int = 0
    reasons: list[str] = field(default_factory=list)
    others: int = 0
    """files in folders that are of another kind"""

    def add(self, batch: Encoded) -> None:
        self.documents += len(batch.lengths)
        self.tokens += len(batch.ids)
        self.text_bytes += batch.text_bytes
        self.empty += batch.empty
        self.undecodable += batch.undecodable
        self.skipped += len(batch.skipped)
        self.reasons += batch.skipped[: SHOWN - len(self.reasons)]

    def lines(self) -> Iterator[str]:
        yield f"documents          {self.documents:,}"
        yield f"tokens             {self.tokens:,}"
        yield f"bytes of text      {self.text_bytes:,}"
        yield f"empty texts        {self.empty:,}"
        yield f"skipped records    {self.skipped:,}"
        yield from (f"    {reason}" for reason in self.reasons)
        if self.skipped > len(self.reasons):
            yield f"    and {self.skipped - len(self.reasons):,} more"
        yield f"undecodable bytes  {self.undecodable:,}"
        if self.others:
            yield f"files not read     {self.others:,} of other kinds in folders; --suffix .py reads those that end so"


_load = functools.cache(load_tokenizer)  # once in each process


def encode_batch(batch: list[Document], tokenizer: str, bos: bool, eos: bool, strict: bool) -> Encoded:
    """Encode documents; runs in a worker process."""
    coder = _load(tokenizer)
    before = [coder.bos] if bos and coder.bos is not None else []
    after = [coder.eos] if eos and coder.eos is not None else []
    parts: list[np.ndarray] = []
    skipped: list[str] = []
    text_bytes = empty = 0
    for document in batch:
        place = f"{document.file}:{document.line}" if document.line else document.file
        if document.skipped:
            skipped.append(f"{place}: {document.skipped}")
            continue
        if not document.text:
            empty += 1
            continue
        try:
            ids = coder.encode(document.text)
        except ValueError as error:
            if strict:
                raise ValueError(f"{place}: {error}") from error
            skipped.append(f"{place}: {error}")
            continue
        text_bytes += len(
            document.text if isinstance(document.text, bytes) else document.text.encode("utf-8", "replace")
        )
        parts.append(np.concatenate([before, ids, after]).astype(np.int64))
    return Encoded(
        np.concatenate([np.empty(0, np.int64), *parts]),
        np.array([len(part) for part in parts], np.int64),
        sum(document.read for document in batch),
        text_bytes,
        empty,
        sum(document.undecodable for document in batch),
        tuple(skipped),
    )


def batches(documents: Iterable[Document]) -> Iterator[list[Document]]:
    """Documents in lists of about BATCH_BYTES of text."""
    batch: list[Document] = []
    size = 0
    for document in documents:
        batch.append(document)
        size += len(document.text) + 256  # many short or empty ones are a batch, too
        if size >= BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def encode_all(documents: Iterable[Document], args: Args, workers: int) -> Iterator[Encoded]:
    """The batches of `documents`, encoded, in their order. Holds a few batches for each worker, never the data set."""
    encode = functools.partial(encode_batch, tokenizer=args.tokenizer, bos=args.bos, eos=args.eos, strict=args.strict)
    if workers == 1:
        yield from map(encode, batches(documents))
        return
    # An executor notices a worker that was killed (for its memory, say); multiprocessing.Pool would wait on.
    with ProcessPoolExecutor(
        workers, get_context("spawn"), initializer=signal.signal, initargs=(signal.SIGINT, signal.SIG_IGN)
    ) as pool:
        waiting: deque[Future[Encoded]] = deque()
        try:
            for batch in batches(documents):
                waiting.append(pool.submit(encode, batch))
                if len(waiting) > 3 * workers:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _cpus() -> int:
    return (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )  # macOS has no such


def prepare(args: Args) -> Report:
    """Write the token file. Raises ValueError or OSError, and leaves no file, where a source cannot be read."""
    out = Path(args.out)
    if out.exists() and not args.overwrite:
        raise ValueError(f"{out} exists; choose another --out, or replace it with --overwrite")
    if not args.sources:
        raise ValueError("name at least one source")
    coder = _load(args.tokenizer)
    files = [file for source in args.sources for file in source_files(source, args.suffix)]
    documents = (
        document for source in args.sources for document in read_documents(source, args.suffix, args.field, args.strict)
    )
    total = sum(file.stat().st_size for file in files)
    workers = args.workers or _cpus()
    if total < BATCH_BYTES:
        workers = 1  # a single batch: starting processes would take longer than encoding it
    report = Report(others=sum(other_files(source, args.suffix) for source in args.sources))
    out.parent.mkdir(parents=True, exist_ok=True)
    writer = TokenWriter(
        out, coder.vocab_size, eos=coder.eos, bos=coder.bos, tokenizer=coder.name, source=" ".join(args.sources)
    )
    with writer, tqdm(total=total, unit="B", unit_scale=True, disable=None) as progress:
        for batch in encode_all(documents, args, workers):
            for part in np.split(batch.ids, np.cumsum(batch.lengths)[:-1]):
                writer.add(part)
            report.add(batch)
            progress.update(batch.read)
        if not report.documents:
            raise ValueError(f"the sources hold no document with text ({report.empty} empty, {report.skipped} skipped)")
    return report


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns the exit status."""
    args = tyro.cli(Args, args=arguments, description=__doc__)
    if args.workers < 0:
        print(f"error: --workers must not be negative; got {args.workers}", file=sys.stderr)
        return 2
    try:
        report = prepare(args)
    except (ValueError, OSError, BrokenProcessPool) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    coder = _load(args.tokenizer)
    print(f"{args.out}\n" + "\n".join(f"  {line}" for line in report.lines()))
    print(f"  vocabulary         {coder.vocab_size:,} (begin {coder.bos}, end {coder.eos})")
    print(f"train on it with --data.path {args.out} --model.vocab-size {coder.vocab_size} or more")
    if report.skipped > report.documents:
        print("warning: more records were skipped than read; is --field right?", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
