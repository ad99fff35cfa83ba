"""What a run tells while it goes on and when it ends: numbers, pictures, warnings, and a text that the model writes."""

from dataclasses import dataclass

import torch
import torch.distributed as dist

from composable.checkpoint.background import BackgroundSaver
from composable.checkpoint.together import together
from composable.data.text import load_tokenizer
from composable.models.count import flops_per_token
from composable.models.generate import generate
from composable.moe.log import Totals
from composable.observe.clock import StepClock
from composable.observe.console import Progress
from composable.observe.metrics import MetricsWriter
from composable.observe.routing import LoadWindow, RoutingReport, draw, scalars
from composable.parallel.compose import Composed
from composable.parallel.data import reshard
from composable.plan.devices import peak_flops
from composable.recipe import Recipe
from composable.state import Corpus, TrainState, tokenizer_path
from composable.step import StepResult


@dataclass(frozen=True)
class Run:
    """The parts of a run on one rank."""

    recipe: Recipe
    device: torch.device
    corpus: Corpus
    model: Composed
    optimizer: torch.optim.Optimizer
    metrics: MetricsWriter
    progress: Progress
    loads: LoadWindow
    saver: BackgroundSaver | None
    """None: the loop waits until a checkpoint is complete"""


def log(run: Run, result: StepResult, state: TrainState, lr: float, clock: StepClock) -> None:
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
    if times.save_seconds is not None:
        values["save_seconds"] = times.save_seconds
    peak = device_peak(run.recipe, run.device)
    if peak is not None:
        needed = flops_per_token(run.recipe.model, run.recipe.data.seq_len)
        values["mfu"] = times.tokens_per_second * needed / (peak * dist.get_world_size())
    if run.model.routing is not None:
        values |= log_routing(run, run.model.routing(), state.step)
    run.metrics.write(values)
    run.progress.update(state.step, loss=result.loss, tokens_per_second=times.tokens_per_second)


def log_routing(run: Run, totals: Totals, step: int) -> dict[str, float]:
    """Numbers of the experts since the last line; pictures of them, and warnings when their load collapses."""
    moe = run.recipe.model.moe
    assert moe is not None
    report = RoutingReport(
        tuple(totals.layers),
        moe.top_k,
        totals.chosen.cpu(),
        totals.executed.cpu(),
        {name: loss.cpu() for name, loss in totals.losses.items()},
        moe.balance.losses,
        totals.bias.cpu() if moe.correction else None,
    )
    run.loads.add(report)
    if run.loads.picture_due:
        draw(run.metrics, report.chosen, report.layers, step)
    for warning in run.loads.collapse():
        run.progress.say(f"step {step}: warning: {warning}")
    counting = {"moe/count_seconds": totals.count_seconds} if totals.count_seconds else {}
    return scalars(report, run.loads.executed) | counting


def device_peak(recipe: Recipe, device: torch.device) -> float | None:
    """Peak FLOP/s of one device in the dtype of computation, None if it is not known."""
    if device.type == "cpu":
        return None
    dtype = recipe.torch_dtype if recipe.parallel.precision == "none" else torch.bfloat16
    return peak_flops(torch.get_device_module(device).get_device_name(device), dtype)


def finish(run: Run, state: TrainState) -> None:
    """Say where the run lies, and show what the model writes."""
    recipe, held_out = run.recipe, run.corpus.held_out
    if state.step < recipe.steps:
        run.progress.say(f"stopped by a signal after step {state.step}; the same command goes on from there")
        return
    run.progress.say(f"done: {recipe.folder} (tensorboard --logdir {recipe.folder})")
    why = together(None, lambda: no_sample(run) if dist.get_rank() == 0 else "")[0]
    if why:
        run.progress.say(f"(no sample text: {why})")
        return
    prompt = torch.tensor(held_out.tokens[:64].astype("int64"), device=run.device)
    tokens = generate(run.model.parts[0], prompt, 240, temperature=0.8, context=recipe.data.seq_len, seed=recipe.seed)
    reshard(run.model.parts[0])
    if dist.get_rank() == 0:
        text = load_tokenizer(tokenizer_path(held_out)).decode(tokens.tolist())
        run.progress.say(f"what the model writes after 64 held-out tokens:\n{'-' * 72}\n{text}\n{'-' * 72}")


def no_sample(run: Run) -> str:
    """Why there can be no sample text; empty if there can."""
    mesh, held_out = run.recipe.mesh, run.corpus.held_out
    if mesh.pp * mesh.cp > 1:
        return "a part of a model or of a sequence writes none; use mesh.pp=1 and mesh.cp=1"
    if len(held_out) < 64:
        return f"it starts from 64 held-out tokens, and data.holdout leaves {len(held_out)}"
    try:
        load_tokenizer(tokenizer_path(held_out))
    except (OSError, ValueError) as error:
        return str(error)
    return ""
