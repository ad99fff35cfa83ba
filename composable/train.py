"""The training loop, from an empty folder or a checkpoint to the last step."""

import contextlib
import dataclasses
import os
import signal
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.elastic.multiprocessing.errors import record

import composable
from composable.checkpoint.folder import locked
from composable.checkpoint.together import together
from composable.data.loader import accumulation, build_loader, validation_loader
from composable.data.packing import sample_count
from composable.data.text import bigram_entropy, load_tokenizer
from composable.mesh import distributed
from composable.models.count import count_parameters, flops_per_token
from composable.models.decoder import Decoder
from composable.models.generate import generate
from composable.models.init import decoder_init
from composable.observe.clock import StepClock
from composable.observe.console import Progress
from composable.observe.memory import memory_snapshot, peak_memory_gib, record_memory
from composable.observe.metrics import MetricsWriter
from composable.observe.profile import trace
from composable.optim.optimizers import build_optimizer
from composable.optim.schedules import learning_rate
from composable.parallel.compose import compose
from composable.parallel.data import reshard
from composable.plan.devices import peak_flops
from composable.recipe import Recipe, command_line
from composable.state import Corpus, TrainState, resume, save_checkpoint
from composable.step import StepResult, evaluate, train_step


@record
def main(recipe: Recipe) -> None:
    """What a recipe script runs: options from the command line, then `train`; bad input ends it with one line a rank."""
    try:
        train(command_line(recipe))
    except (ValueError, OSError) as error:
        print(f"[rank {os.environ.get('RANK', '0')}] error: {error}", file=sys.stderr, flush=True)
        raise SystemExit(2) from error


def train(recipe: Recipe) -> TrainState:
    """Train to the last step, from the newest complete checkpoint in the run folder if there is one; on every rank.

    Raises:
        ValueError: what does not go together, on every rank.
        NonFinite: a loss or gradient norm that is not finite, on every rank, before weights are touched.
    """
    recipe, remarks = recipe.resolve(int(os.environ.get("WORLD_SIZE", "1")))
    if recipe.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    with contextlib.ExitStack() as stack:
        device = stack.enter_context(distributed())
        stop = stack.enter_context(stop_signals())
        claim_folder(stack, recipe.folder)
        corpus = together(None, lambda: Corpus.open(recipe.data, recipe.model.vocab_size))[dist.get_rank()]
        model = build_model(recipe, device)
        optimizer = build_optimizer(model, recipe.optimizer)
        state = resume(recipe, model, optimizer, corpus)
        recipe = dataclasses.replace(recipe, steps=last_step(recipe, corpus, state))
        metrics = MetricsWriter(recipe.folder, rank=dist.get_rank(), resume_step=state.step)
        stack.callback(metrics.close)
        progress = Progress(recipe.steps, state.step, enabled=dist.get_rank() == 0, note=recipe.name)
        stack.callback(progress.close)
        announce(recipe, corpus, state, device, progress, metrics, remarks)
        started = state
        state = loop(recipe, model, optimizer, corpus, state, device, stop, metrics, progress)
        finish(recipe, model, corpus, started, state, device, progress)
        return state


def build_model(recipe: Recipe, device: torch.device) -> nn.Module:
    """The recipe's model, composed on its mesh, with its initial weights."""
    with torch.device("meta"):
        model = Decoder(recipe.model).to(recipe.torch_dtype)
    return compose(
        model,
        recipe.mesh,
        recipe.parallel,
        blocks=model.blocks,
        init=decoder_init(recipe.model),
        seed=recipe.seed,
        device=device,
    )


def loop(
    recipe: Recipe,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    corpus: Corpus,
    state: TrainState,
    device: torch.device,
    stop: dict[str, bool],
    metrics: MetricsWriter,
    progress: Progress,
) -> TrainState:
    """Steps, and what happens between them, until the last one or a signal."""
    rank, mesh, data = dist.get_rank(), recipe.mesh, recipe.data
    ranks = {"data_rank": mesh.data_rank(rank), "data_ranks": mesh.data_ranks}
    batches = iter(())
    if state.step < recipe.steps:
        batches = build_loader(corpus.train, data, seed=recipe.seed, position=state.samples, **ranks)
    held_out = (
        validation_loader(corpus.held_out, data, steps=recipe.validation.steps, **ranks) if validates(recipe) else ()
    )
    count, clock, peak = accumulation(data, mesh.data_ranks), StepClock(), recipe.peak_lr
    snapshot = recipe.observe.memory_snapshot
    if snapshot:
        record_memory(device)
    profiled = trace(
        recipe.folder,
        max(recipe.observe.profile, 1),
        recipe.observe.profile_steps * bool(recipe.observe.profile),
        rank,
        start=state.step + 1,
    )
    with profiled as profile_step:
        while state.step < recipe.steps and not stop["asked"]:
            step = state.step + 1
            torch.manual_seed(hash((recipe.seed, step)))
            clock.start()
            micro_batches = list(islice(batches, count))
            clock.data_ready()
            lr = learning_rate(recipe.schedule, step, recipe.steps, peak)
            result = train_step(
                model,
                optimizer,
                micro_batches,
                step=step,
                lr=lr,
                max_norm=recipe.optimizer.max_norm,
                mesh=mesh,
                data=recipe.parallel.data,
                device=device,
                report=[stop["signalled"], peak_memory_gib(device)],
            )
            clock.stop(result.tokens)
            state = state.after(result)
            stop["asked"] = any(row[0] for row in result.reports)  # the same on all ranks
            profile_step()
            final = step == recipe.steps or stop["asked"]
            if step % recipe.observe.every == 0 or final:
                log(recipe, result, state, lr, clock, device, metrics, progress)
            if step == snapshot:
                memory_snapshot(recipe.folder / f"memory-step-{step:08d}-rank-{rank}.json", device)
            if validates(recipe) and (step % recipe.validation.every == 0 or step == recipe.steps):
                loss = evaluate(model, held_out, mesh=mesh, device=device)
                metrics.write({"step": step, "validation_loss": loss})
                progress.say(f"step {step}: validation loss {loss:.4f}")
            if final or (recipe.checkpoint.every and step % recipe.checkpoint.every == 0):
                folder = save_checkpoint(recipe, model, optimizer, state, corpus)
                progress.say(f"step {step}: saved {folder}")
    return state


def log(
    recipe: Recipe,
    result: StepResult,
    state: TrainState,
    lr: float,
    clock: StepClock,
    device: torch.device,
    metrics: MetricsWriter,
    progress: Progress,
) -> None:
    """A line of metrics.jsonl, its scalars in TensorBoard, and the progress line."""
    times = clock.report()
    values: dict[str, float | int] = {
        "step": state.step,
        "loss": result.loss,
        "grad_norm": result.grad_norm,
        "lr": lr,
        "tokens": state.tokens,
        "valid_tokens": state.valid_tokens,
        "samples": state.samples,
        "tokens_per_second": times.tokens_per_second,
        "step_seconds": times.step_seconds,
        "data_wait": times.data_wait,
        "memory_gib": max(row[1] for row in result.reports),
    }
    peak = device_peak(recipe, device)
    if peak is not None:
        needed = flops_per_token(recipe.model, recipe.data.seq_len)
        values["mfu"] = times.tokens_per_second * needed / (peak * dist.get_world_size())
    metrics.write(values)
    progress.update(state.step, loss=result.loss, tokens_per_second=times.tokens_per_second)


def device_peak(recipe: Recipe, device: torch.device) -> float | None:
    """Peak FLOP/s of one device in the dtype of computation, None if it is not known."""
    if device.type == "cpu":
        return None
    dtype = recipe.torch_dtype if recipe.parallel.precision == "none" else torch.bfloat16
    return peak_flops(torch.get_device_module(device).get_device_name(device), dtype)


def validates(recipe: Recipe) -> bool:
    """Whether the held-out part is looked at."""
    return recipe.validation.every > 0


def last_step(recipe: Recipe, corpus: Corpus, state: TrainState) -> int:
    """`recipe.steps`, or fewer where `data.epochs` ends the data before."""
    if recipe.data.epochs is None:
        return recipe.steps
    rows = recipe.data.epochs * sample_count(len(corpus.train), recipe.data.seq_len)
    left = max(0, -(-(rows - state.samples) // recipe.data.global_batch))
    return min(recipe.steps, state.step + left)


def claim_folder(stack: contextlib.ExitStack, folder: Path) -> None:
    """Make the run folder and hold its lock on rank 0, so that two jobs never write to one folder.

    Raises:
        BlockingIOError: on every rank, if another job holds it.
    """

    def claim() -> None:
        if dist.get_rank() == 0:
            folder.mkdir(parents=True, exist_ok=True)
            stack.enter_context(locked(folder))

    together(None, claim)


@contextlib.contextmanager
def stop_signals() -> Iterator[dict[str, bool]]:
    """Turn SIGTERM and SIGINT into a wish: "signalled" on this rank, "asked" once all ranks know of it."""
    state = {"signalled": False, "asked": False}

    def note(number: int, frame: object) -> None:
        state["signalled"] = True

    before = {number: signal.signal(number, note) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield state
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def announce(
    recipe: Recipe,
    corpus: Corpus,
    state: TrainState,
    device: torch.device,
    progress: Progress,
    metrics: MetricsWriter,
    remarks: list[str],
) -> None:
    """Say what is trained, on what, where; keep the recipe beside the run."""
    if dist.get_rank() != 0:
        return
    model, data, mesh = recipe.model, recipe.data, recipe.mesh
    count = count_parameters(model)
    say = progress.say
    say(f"composable {composable.__version__}: {recipe.name}")
    say(
        f"  model   {count.total:,} parameters ({count.without_embedding:,} without embedding), {model.layers} layers of "
        f"width {model.dim}, {model.heads} heads, {flops_per_token(model, data.seq_len):,} FLOPs per token"
    )
    say(
        f"  mesh    {mesh} on {dist.get_world_size()} x {device.type}, {recipe.dtype}, {recipe.parallel.data}, "
        f"accumulation {accumulation(data, mesh.data_ranks)}"
    )
    text = f"  data    {data.path}: {len(corpus.train):,} tokens to train on, {len(corpus.held_out):,} held out"
    if corpus.train.vocab_size <= 4096 and len(corpus.train) > 1:
        text += f"; bigram entropy {bigram_entropy(corpus.train):.4f} nats per token"
    say(text)
    say(f"  batch   {data.global_batch} rows of {data.seq_len} tokens, learning rate {recipe.peak_lr:g} at its peak")
    if recipe.optimizer.scale != "none":
        say(
            f"          scaled ({recipe.optimizer.scale}) from {recipe.optimizer.lr:g} at a batch of "
            f"{recipe.optimizer.reference_batch}"
        )
    if state.step >= recipe.steps:
        say(
            f"  run     {recipe.folder} is complete at step {state.step}; raise --steps to go on, or choose another --out"
        )
    else:
        resumed = f", resumed after step {state.step}" if state.step else ""
        say(f"  run     {recipe.folder}: steps {state.step + 1} to {recipe.steps}{resumed}")
    for remark in remarks:
        say(f"  note    {remark}")
    if state.step < recipe.steps:
        (recipe.folder / "recipe.json").write_text(recipe.to_json())
        metrics.text("recipe", f"```json\n{recipe.to_json()}```")


def finish(
    recipe: Recipe,
    model: nn.Module,
    corpus: Corpus,
    started: TrainState,
    state: TrainState,
    device: torch.device,
    progress: Progress,
) -> None:
    """Say where the run lies, and show what the model writes."""
    if state.step == started.step:
        return
    if state.step < recipe.steps:
        progress.say(f"stopped by a signal after step {state.step}; the same command goes on from there")
        return
    progress.say(f"done: {recipe.folder} (tensorboard --logdir {recipe.folder})")
    if not validates(recipe) or len(corpus.held_out) < 64:
        return
    prompt = torch.tensor(corpus.held_out.tokens[:64].astype("int64"), device=device)
    tokens = generate(model, prompt, 240, temperature=0.8, context=recipe.data.seq_len, seed=recipe.seed)
    reshard(model)
    with contextlib.suppress(FileNotFoundError):
        text = load_tokenizer(corpus.train.tokenizer).decode(tokens.tolist())
        progress.say(f"the model continues 64 held-out tokens:\n{'-' * 60}\n{text}\n{'-' * 60}")
