"""The training loop, from an empty folder or a checkpoint to the last step."""

import contextlib
import dataclasses
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record

from composable.announce import announce
from composable.checkpoint.background import BackgroundSaver
from composable.checkpoint.folder import locked
from composable.checkpoint.together import together
from composable.data.loader import accumulation, build_loader, validation_loader
from composable.mesh import distributed
from composable.models.families import has_family
from composable.observe.clock import StepClock
from composable.observe.console import Progress
from composable.observe.memory import memory_snapshot, peak_memory_gib, record_memory
from composable.observe.metrics import MetricsWriter
from composable.observe.profile import trace
from composable.observe.routing import LoadWindow
from composable.optim.optimizers import build_optimizer
from composable.optim.schedules import learning_rate
from composable.parallel.compose import Composed, compose
from composable.recipe import Recipe, options_over, with_init_model
from composable.report import Run, finish, log
from composable.shrink import small_twin
from composable.state import (
    Corpus,
    TrainState,
    checkpoints_of,
    last_step,
    resume,
    save_checkpoint,
    saved_tensors,
    starting_point,
)
from composable.step import NonFinite, evaluate, train_step


@record
def main(recipe: Recipe) -> None:
    """What a recipe script runs: options from the command line, then `train`; bad input ends it with a line a rank."""
    try:
        train(from_command_line(recipe, sys.argv[1:]))
    except (ValueError, OSError) as error:
        print(f"[rank {os.environ.get('RANK', '0')}] error: {error}", file=sys.stderr, flush=True)
        raise SystemExit(2) from error
    except NonFinite as error:
        print(f"[rank {os.environ.get('RANK', '0')}] {error}", file=sys.stderr, flush=True)
        raise SystemExit(1) from error


def from_command_line(recipe: Recipe, words: Sequence[str]) -> Recipe:
    """The recipe with options over it, or its small twin if they ask for that."""
    whole = options_over(with_init_model(recipe, words), words)
    if not whole.shrink:
        return whole
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    twin, reduced = small_twin(whole, ranks, words)
    if os.environ.get("RANK", "0") == "0":
        print(f"small twin of {recipe.name} on {ranks} ranks: {', '.join(reduced) or 'every degree fits'}", flush=True)
    return twin


def train(recipe: Recipe) -> TrainState:
    """Train to the last step, from the newest complete checkpoint in the run folder if there is one; on every rank.

    Raises:
        ValueError: what does not go together, on every rank.
        NonFinite: a loss or gradient norm that is not finite, on every rank, before weights are touched.
        OSError: a checkpoint cannot be written, on every rank; in the background, at the step in which that is known.
    """
    recipe, remarks = recipe.resolve(int(os.environ.get("WORLD_SIZE", "1")))
    remarks += recipe.mesh.across_nodes(ranks_per_node())
    if recipe.foreign is None and not has_family(recipe.model):
        remarks.append("no model of Hugging Face's computes this; config.json in checkpoints has our own fields")
    if recipe.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    with contextlib.ExitStack() as stack:
        device = stack.enter_context(distributed())
        stop = stack.enter_context(stop_signals())
        claim_folder(stack, recipe.folder)
        root = checkpoints_of(recipe)
        if recipe.checkpoint.folder and isinstance(root, Path) and root.resolve() != recipe.folder.resolve():
            claim_folder(stack, root)
        rank = dist.get_rank()
        corpus = Corpus.open(recipe.data, recipe.model.vocab_size)
        starting_point(recipe, corpus)  # what is wrong with it is said before a large model is built
        model = build_model(recipe, device)
        optimizer = build_optimizer(model.parts, recipe.optimizer, only=model.named)
        start, changes = resume(recipe, model, optimizer, corpus)
        recipe = dataclasses.replace(recipe, steps=last_step(recipe, corpus, start))
        progress = Progress(recipe.steps, start.step, enabled=rank == 0, note=recipe.name)
        stack.callback(progress.close)
        if rank == 0:
            announce(recipe, corpus, start, device, progress, [*remarks, *changes])
        if start.step >= recipe.steps:
            return start
        metrics = MetricsWriter(recipe.folder, rank=rank, resume_step=start.step)
        stack.callback(metrics.close)
        metrics.text("recipe", f"```json\n{recipe.to_json()}```")
        metrics.hparams(recipe.options(), ["train/loss", "validation/loss"])
        window = LoadWindow(recipe.observe.routing)
        saver = stack.enter_context(BackgroundSaver()) if recipe.checkpoint.asynchronous else None
        if saver is not None:
            saver.prepare(*saved_tensors(recipe, model, optimizer), writer=recipe.checkpoint.writer)
        run = Run(recipe, device, corpus, model, optimizer, metrics, progress, window, saver)
        state = loop(run, start, stop)
        finish(run, state)
        return state


def build_model(recipe: Recipe, device: torch.device) -> Composed:
    """The recipe's model, composed on its mesh, with its initial weights."""
    return compose(
        recipe.architecture,
        recipe.mesh,
        recipe.parallel,
        recipe.pipeline,
        recipe.shape,
        seed=recipe.seed,
        device=device,
        ranks_per_node=ranks_per_node(),
    )


def ranks_per_node() -> int:
    """As torchrun says it; 1 without it."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def loop(run: Run, state: TrainState, stop: "StopWish") -> TrainState:
    """Steps, and what happens between them, until the last one or a signal."""
    recipe, data, mesh = run.recipe, run.recipe.data, run.recipe.mesh
    ranks = {"data_rank": mesh.data_rank(dist.get_rank()), "data_ranks": mesh.data_ranks}
    batches = build_loader(run.corpus.train, data, seed=recipe.seed, position=state.samples, **ranks)
    validating = recipe.validation.every > 0
    held_out = (
        validation_loader(run.corpus.held_out, data, steps=recipe.validation.steps, **ranks) if validating else ()
    )
    count, clock = accumulation(data, mesh.data_ranks), StepClock()
    if recipe.observe.memory_snapshot:
        record_memory(run.device)
    with traced(recipe, state.step + 1) as step_is_over:
        while state.step < recipe.steps and not stop.agreed:
            step = state.step + 1
            torch.manual_seed(hash((recipe.seed, step)))
            clock.start()
            micro_batches = list(islice(batches, count))
            clock.data_ready()
            lr = learning_rate(recipe.schedule, step, recipe.steps, recipe.peak_lr)
            result = train_step(
                run.model,
                run.optimizer,
                micro_batches,
                step=step,
                lr=lr,
                max_norm=recipe.optimizer.max_norm,
                report=[stop.here, peak_memory_gib(run.device), run.saver is not None and run.saver.failed],
            )
            clock.stop(result.tokens)
            state = state.after(result)
            stop.agreed = any(row[0] for row in result.reports)
            last = step == recipe.steps
            step_is_over()
            if last or stop.agreed or step % recipe.observe.every == 0:
                log(run, result, state, lr, clock)
            saved_in_background(run, step, [row[2] for row in result.reports])
            if validating and (last or step % recipe.validation.every == 0):
                validation_loss = evaluate(run.model, held_out)
                run.metrics.write({"step": step, "validation_loss": validation_loss})
                run.progress.say(f"step {step}: validation loss {validation_loss:.4f}")
            if last or stop.agreed or (recipe.checkpoint.every and step % recipe.checkpoint.every == 0):
                clock.saved(save(run, state))
            if step == recipe.observe.memory_snapshot:
                memory_snapshot(recipe.folder / "memory" / f"step-{step}-rank-{dist.get_rank()}", run.device)
    if run.saver is not None:
        run.saver.wait()
        saved_in_background(run, state.step)
    return state


def save(run: Run, state: TrainState) -> float:
    """Save, in the background if the run has a saver for it; gives the seconds for which that held the loop."""
    began = time.perf_counter()
    folder = save_checkpoint(run.recipe, run.model, run.optimizer, state, run.corpus, run.saver)
    seconds = time.perf_counter() - began
    how = f"saved {folder}" if run.saver is None else f"copied in {seconds:.3g} s, saving {folder} in the background"
    run.progress.say(f"step {state.step}: {how}")
    return seconds


def saved_in_background(run: Run, step: int, failed: Sequence[float] = ()) -> None:
    """Say which checkpoints became complete; stop on every rank if saving failed on any, as `failed` says of each."""
    if run.saver is None:
        return
    for saved in run.saver.take_saved():
        run.progress.say(f"step {step}: saved {saved.folder}, written in {saved.seconds:.3g} s")
    run.saver.stop_if_failed(failed)


def traced(recipe: Recipe, start: int) -> contextlib.AbstractContextManager:
    """The profiler over the recipe's chosen steps; gives what to call after each step."""
    config = recipe.observe
    count = config.profile_steps if config.profile else 0
    return trace(recipe.folder, max(config.profile, 1), count, dist.get_rank(), start=start)


def claim_folder(stack: contextlib.ExitStack, folder: Path) -> None:
    """Make a folder of the run and hold its lock on rank 0, so that two jobs never write to one folder.

    Raises:
        BlockingIOError: on every rank, if another job holds it.
    """

    def claim() -> None:
        if dist.get_rank() == 0:
            try:
                folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise ValueError(f"the run's folder {folder} cannot be made: {error.strerror}") from error
            stack.enter_context(locked(folder))

    together(None, claim)


@dataclass
class StopWish:
    """Whether the run is to end: asked for here, and agreed on by all ranks."""

    here: bool = False
    agreed: bool = False


@contextlib.contextmanager
def stop_signals() -> Iterator[StopWish]:
    """Turn SIGTERM and SIGINT into a wish, which all ranks fulfil after the same step."""
    wish = StopWish()

    def note(number: int, frame: object) -> None:
        wish.here = True

    before = {number: signal.signal(number, note) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield wish
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
