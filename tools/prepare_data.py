"""Make a token file from text or conversations: `python tools/prepare_data.py SRC... --out FILE`.

SRC is a .txt file (one document), a .jsonl, .jsonl.gz or .jsonl.zst file (a document a line), or a folder of them.
What each source gives is counted and reported; nothing is dropped without a word. A document is its tokens between
one BOS and one EOS, where the tokenizer has them; a text that spells such a token is encoded as plain characters. An
empty text is no document. The file is the same for any number of workers, and appears under its name when it is
complete.

With --template a record is a conversation: {"messages": [{"role", "content"}...]} with the roles system, user,
assistant and tool; {"prompt", "completion"}; {"instruction", "output"}; or ShareGPT's {"conversations"}. The template
writes it as one text, with control tokens as it has them, which is encoded as a whole; what has a loss are the answers
and the tokens that end them. --preview 3 shows it, and writes nothing. Train with --data.packing whole
--data.document-mask, so that each answer sees its question and no other conversation.
"""

import functools
import os
import signal
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from datetime import date
from itertools import islice
from multiprocessing import get_context
from pathlib import Path
from typing import Annotated

import numpy as np
import tyro
from tqdm import tqdm

from composable.data.chat import Mask, chat_encoder, marked
from composable.data.conversations import conversation_of
from composable.data.documents import RECORD_SUFFIXES, Document, other_files, read_documents, source_files
from composable.data.encode import Encoded, How, Report, document_encoder, encode_batch
from composable.data.text import load_tokenizer
from composable.data.token_writer import TokenWriter

BATCH_BYTES = 1 << 20  # text that goes to a worker at once: enough to hide the cost of sending it
SHOWN = 5  # files that a plan shows; it counts all


@dataclass(frozen=True)
class Args:
    """Make a token file from text or conversations."""

    sources: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="SRC...")]
    """Text files (.txt), records (.jsonl, .jsonl.gz, .jsonl.zst), or folders of them."""
    out: str = ""
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
    template: str = ""
    """Records are conversations, written by: tokenizer (its own chat template), chatml, llama3, plain, or a Jinja file.
    Beginnings and ends of texts are then the template's: --bos and --eos say nothing."""
    mask: Mask = "answers"
    """Which tokens of a conversation have a loss: those of all answers, of the last one, or (none) all tokens."""
    max_tokens: int = 0
    """Leave out documents of more tokens, and count them; 0: none. Training cuts what is longer than its rows."""
    date: str = ""
    """What templates that write today's date write, as 2024-07-26; today's if not given."""
    preview: int = 0
    """Print so many conversations, with what has a loss in colour or between [[ and ]], and write nothing."""
    plan: bool = False
    """Print what would be read and written, and write nothing."""
    workers: int = 0
    """Processes that encode; 0: one for each CPU."""
    strict: bool = False
    """End with an error at the first record that has no text, instead of counting it."""
    overwrite: bool = False
    """Replace an existing file."""


_load = functools.cache(load_tokenizer)  # once in each process
_encoder = functools.cache(document_encoder)


def encode(batch: list[Document], how: How) -> Encoded:
    """Encode documents; runs in a worker process."""
    return encode_batch(batch, how, _encoder(how))


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
    here = functools.partial(encode, how=how_of(args))
    if workers == 1:
        yield from map(here, batches(documents))
        return
    # An executor notices a worker that was killed (for its memory, say); multiprocessing.Pool would wait on.
    with ProcessPoolExecutor(
        workers, get_context("spawn"), initializer=signal.signal, initargs=(signal.SIGINT, signal.SIG_IGN)
    ) as pool:
        waiting: deque[Future[Encoded]] = deque()
        try:
            for batch in batches(documents):
                waiting.append(pool.submit(here, batch))
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


def how_of(args: Args) -> How:
    """What the options say of encoding."""
    today = date.fromisoformat(args.date)
    return How(args.tokenizer, args.bos, args.eos, args.template, args.mask, today, args.max_tokens, args.strict)


def documents_of(args: Args) -> Iterator[Document]:
    """All documents of all sources."""
    suffixes, name = (RECORD_SUFFIXES, None) if args.template else (args.suffix, args.field)
    for source in args.sources:
        yield from read_documents(source, suffixes, name, args.strict)


def files_of(args: Args) -> list[Path]:
    """All files of all sources. Raises ValueError or OSError for one that is not read."""
    if not args.sources:
        raise ValueError("name at least one source")
    suffixes = RECORD_SUFFIXES if args.template else args.suffix
    files = [file for source in args.sources for file in source_files(source, suffixes)]
    wrong = next((file for file in files if args.template and not file.name.endswith(RECORD_SUFFIXES)), None)
    if wrong is not None:
        raise ValueError(
            f"{wrong}: conversations are records of {', '.join(RECORD_SUFFIXES)} files; leave out --template"
        )
    return files


def check(args: Args) -> Args:
    """The options with today's date filled in. Raises ValueError for what does not go together."""
    for name in ("workers", "preview", "max_tokens"):
        if getattr(args, name) < 0:
            raise ValueError(f"--{name.replace('_', '-')} must not be negative; got {getattr(args, name)}")
    if args.preview and not args.template:
        raise ValueError("--preview shows conversations; say how they are written with --template")
    if args.template and (args.suffix or args.field != "text"):
        raise ValueError("--template reads whole records of .jsonl files; leave out --suffix and --field")
    if not (args.preview or args.out):
        raise ValueError("name the file to write: --out FILE")
    if args.out and Path(args.out).exists() and not args.overwrite:
        raise ValueError(f"{args.out} exists; choose another --out, or replace it with --overwrite")
    try:
        today = date.fromisoformat(args.date) if args.date else date.today()
    except ValueError as error:
        raise ValueError(f"--date {args.date}: write it as 2024-07-26") from error
    return replace(args, date=today.isoformat())


def prepare(args: Args) -> Report:
    """Write the token file. Raises ValueError or OSError, and leaves no file, where a source cannot be read."""
    out, coder, files = Path(args.out), _load(args.tokenizer), files_of(args)
    _encoder(how_of(args))  # tells what is wrong with tokenizer and template
    total = sum(file.stat().st_size for file in files)
    workers = args.workers or _cpus()
    if total < BATCH_BYTES:
        workers = 1  # a single batch: starting processes would take longer than encoding it
    suffixes = RECORD_SUFFIXES if args.template else args.suffix
    report = Report(others=sum(other_files(source, suffixes) for source in args.sources))
    out.parent.mkdir(parents=True, exist_ok=True)
    source, answers = " ".join(args.sources), how_of(args).answers
    writer = TokenWriter(
        out, coder.vocab_size, eos=coder.eos, bos=coder.bos, tokenizer=coder.name, source=source, answers=answers
    )
    with writer, tqdm(total=total, unit="B", unit_scale=True, disable=None) as progress:
        for batch in encode_all(documents_of(args), args, workers):
            borders = np.cumsum(batch.lengths)[:-1]
            counted = [None] * len(batch.lengths) if batch.counted is None else np.split(batch.counted, borders)
            for part, flags in zip(np.split(batch.ids, borders), counted, strict=False):
                writer.add(part, flags)
            report.add(batch)
            progress.update(batch.read)
        if not report.documents:
            why = f"{report.empty} empty, {report.skipped} skipped" + f", {report.long} too long" * bool(report.long)
            example = f"; {report.reasons[0]}" if report.reasons else ""
            raise ValueError(f"the sources hold no document with text ({why}){example}")
    return report


def preview(args: Args) -> Iterator[str]:
    """The first conversations as they are written, with what has a loss marked."""
    files_of(args)
    encode = chat_encoder(args.tokenizer, args.template, args.mask, date.fromisoformat(args.date))
    for document in islice(documents_of(args), args.preview):
        try:
            found = encode(conversation_of(str(document.text)))
        except ValueError as error:
            if args.strict:
                raise ValueError(f"{document.file}:{document.line}: {error}") from error
            yield f"--- {document.file}:{document.line}: skipped: {error}"
            continue
        size = len(found.ids)
        count = size if found.counted is None else int(found.counted.sum())
        yield f"--- {document.file}:{document.line}: {size:,} tokens, {count:,} with a loss"
        yield marked(found, sys.stdout.isatty())


def plan(args: Args) -> Iterator[str]:
    """What would be read and written."""
    coder, what = _load(args.tokenizer), f"conversations by {args.template}" if args.template else "texts"
    files = files_of(args)
    yield from (f"read   {file}: {file.stat().st_size:,} bytes" for file in files[:SHOWN])
    if len(files) > SHOWN:
        yield f"read   {len(files) - SHOWN:,} more files"
    size = sum(file.stat().st_size for file in files)
    yield f"       {size:,} bytes of {what}, tokenizer {coder.name} ({coder.vocab_size:,} tokens)"
    if args.out:
        width = TokenWriter(args.out, coder.vocab_size).token_bytes
        yield f"write  {args.out}: {width} bytes a token, 8 a document" + ", 16 an answer" * how_of(args).answers


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns the exit status."""
    args = tyro.cli(Args, args=arguments, description=__doc__)
    try:
        args = check(args)
        if args.plan or args.preview:
            for line in (*(plan(args) if args.plan else ()), *(preview(args) if args.preview else ())):
                print(line)
            return 0
        report = prepare(args)
    except (ValueError, OSError, BrokenProcessPool) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    coder = _load(args.tokenizer)
    print(f"{args.out}\n" + "\n".join(f"  {line}" for line in report.lines()))
    print(f"  vocabulary         {coder.vocab_size:,} (begin {coder.bos}, end {coder.eos})")
    rows = " --data.packing whole --data.document-mask" if args.template else ""
    print(f"train on it with --data.path {args.out} --model.vocab-size {coder.vocab_size} or more{rows}")
    if report.skipped > report.documents:
        option = "--template" if args.template else "--field"
        print(f"warning: more records were skipped than read; is {option} right?", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
