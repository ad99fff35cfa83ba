"""One accelerator in under five minutes: are bfloat16 results right, and how fast are real sizes?

    python tools/bench_gpu.py

First `dense_debug` in bfloat16 on the accelerator against float32 on the CPU, with the same data. Then tokens/s, MFU
and peak memory of `dense_1b`, and of as many blocks of Llama 3.1 8B's width as fit, for {eager, compile} x {recompute
none, selective, full}: a line `BENCH {json}` a case, and a table at the end. A case that runs out of memory is
reported as such, and the rest goes on. Without an accelerator everything runs at a tiny size on the CPU. The exit code
is 1 if results are not right, or a case failed for another reason than memory or time.
"""

import dataclasses
import gc
import itertools
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import torch
import tyro
from bench_step import Options as StepOptions
from bench_step import measure

from composable.data.loader import DataConfig, accumulation, build_loader
from composable.mesh import distributed
from composable.models.config import DecoderConfig
from composable.models.count import count_parameters
from composable.observe.memory import peak_memory_gib
from composable.optim.optimizers import build_optimizer
from composable.optim.schedules import learning_rate
from composable.recipe import Recipe, recipe_of
from composable.state import Corpus
from composable.step import train_step
from composable.train import build_model
from composable.verify import error

RECIPES = Path(__file__).parent.parent / "recipes"
TOLERANCE = 1e-2
"""largest relative error of a loss in bfloat16"""
STATE = 16
"""bytes of a parameter in training: float32 weight, gradient and AdamW's two averages"""
WIDE_8B = DecoderConfig(
    vocab_size=128256, dim=4096, layers=32, heads=32, kv_heads=8, head_dim=128, ffn=14336, max_length=131072
)


@dataclass(frozen=True)
class Options:
    """How much is measured."""

    tiny: bool = False
    """tiny sizes, which run anywhere; so it is on a machine without an accelerator"""
    steps: int = 6
    """measured steps of a case"""
    warmup: int = 3
    """steps before them"""
    minutes: float = 4.5
    """no case is begun that would probably end later than this after the start"""
    only: str = ""
    """cases whose name contains this; all if empty"""


@dataclass(frozen=True)
class Case:
    """One model, compiled or not, with one way of recomputation."""

    name: str
    recipe: Recipe


@dataclass(frozen=True)
class Result:
    """What was measured of a case; None where it was not."""

    name: str
    tok_s: float | None = None
    mfu: float | None = None
    peak_gib: float | None = None
    seconds: float = 0.0
    """that the case took in all, compilation included"""
    note: str = ""
    """why there are no numbers"""
    failed: bool = False
    """for another reason than memory or time"""


def losses(recipe: Recipe, device: torch.device, steps: int) -> list[float]:
    """The losses of some steps on one process, on a device of choice."""
    recipe, _ = recipe.resolve(1)
    model = build_model(recipe, device)
    optimizer = build_optimizer(model.parts, recipe.optimizer, only=model.named)
    corpus = Corpus.open(recipe.data, recipe.model.vocab_size)
    batches = build_loader(corpus.train, recipe.data, seed=recipe.seed, data_rank=0, data_ranks=1)
    count, out = accumulation(recipe.data, 1), []
    for step in range(1, steps + 1):
        lr = learning_rate(recipe.schedule, step, recipe.steps, recipe.peak_lr)
        micro_batches = list(islice(batches, count))
        result = train_step(
            model, optimizer, micro_batches, step=step, lr=lr, max_norm=recipe.optimizer.max_norm
        )  # fmt: skip
        out.append(result.loss)
    return out


def agreement(device: torch.device, tiny: bool) -> float:
    """The worst relative error of the losses of `dense_debug` in bfloat16 on the device, against float32 on the CPU."""
    recipe = recipe_of(RECIPES / "dense_debug.py")
    if tiny:
        recipe = dataclasses.replace(recipe, model=_tiny(recipe.model), data=_rows(recipe, 32, 2, 4))
    half = dataclasses.replace(recipe, parallel=dataclasses.replace(recipe.parallel, precision="bfloat16"))
    steps = 3 if tiny else 8
    pairs = zip(losses(half, device, steps), losses(recipe, torch.device("cpu"), steps), strict=True)
    return max(error(ours, reference) for ours, reference in pairs)


def cases(device: torch.device, tiny: bool) -> Iterator[Case]:
    """Two models times {eager, compile} times {none, selective, full}; the second is left out where no block fits."""
    base = recipe_of(RECIPES / "dense_1b.py")
    wide = dataclasses.replace(WIDE_8B, rope=dataclasses.replace(base.model.rope, factor=8.0))
    if tiny:
        models = [
            ("dense_1b", _tiny(base.model), _rows(base, 32, 2)),
            ("8b_width_2_blocks", _tiny(wide), _rows(base, 32, 1)),
        ]
    else:
        models = [("dense_1b", base.model, _rows(base, 4096, 4))]
        blocks = blocks_that_fit(wide, torch.get_device_module(device).mem_get_info(device)[0], tokens=4096)
        if blocks:
            wide = dataclasses.replace(wide, layers=blocks)
            models.append((f"8b_width_{blocks}_blocks", wide, _rows(base, 4096, 1)))
    for (name, model, data), compiled, recompute in itertools.product(
        models, (False, True), ("none", "selective", "full")
    ):
        parallel = dataclasses.replace(base.parallel, compile=compiled, recompute=recompute)
        label = f"{name} {'compile' if compiled else 'eager'} {recompute}"
        yield Case(label, dataclasses.replace(base, name=name, model=model, data=data, parallel=parallel))


def blocks_that_fit(config: DecoderConfig, free: int, tokens: int) -> int:
    """How many blocks can be trained in `free` bytes without recomputation, at most all; a tenth of it is spared.

    A block needs its state, and for the backward pass about 20 vectors of width D and 5 of the hidden width a token in
    bfloat16. Embedding and head have, beside their state, a gathered copy and a gradient in bfloat16, and the head's
    gradient is summed in float32.
    """
    one, two = (count_parameters(dataclasses.replace(config, layers=n)).total for n in (1, 2))
    block = STATE * (two - one) + tokens * 2 * (20 * config.dim + 5 * config.ffn)
    rest = (STATE + 4) * (2 * one - two) + 2 * 4 * config.vocab_size * config.dim
    return max(0, min(config.layers, int((0.9 * free - rest) // block)))


def run(case: Case, options: Options, device: torch.device) -> Result:
    """Measure one case; running out of memory is a result, and so is any other failure of torch's."""
    if device.type != "cpu":
        torch.accelerator.reset_peak_memory_stats(device)
    began = time.monotonic()
    try:
        numbers = measure(StepOptions(Path(case.recipe.name), steps=options.steps, warmup=options.warmup), case.recipe)
        result = Result(case.name, numbers["tok_s"], numbers.get("mfu"), peak_memory_gib(device))  # type: ignore[arg-type]
    except torch.OutOfMemoryError:
        result = Result(case.name, note="out of memory")
    except RuntimeError as problem:
        line = (str(problem).strip().splitlines() or [""])[0]
        result = Result(case.name, note=f"failed: {type(problem).__name__}: {line[:200]}", failed=True)
    free_memory(device)
    return dataclasses.replace(result, seconds=time.monotonic() - began)


def free_memory(device: torch.device) -> None:
    """Let go of the last case: its model (in cycles of references), its compiled code, and the allocator's blocks."""
    torch.compiler.reset()
    gc.collect()
    if device.type != "cpu":
        torch.accelerator.empty_cache()


def table(results: list[Result]) -> str:
    """A line a case."""
    width = max(len("case"), *(len(result.name) for result in results))
    lines = [f"{'case':<{width}}  {'tokens/s':>10}  {'MFU':>6}  {'peak GiB':>8}  {'seconds':>7}"]
    for result in results:
        if result.tok_s is None:
            lines.append(f"{result.name:<{width}}  {result.note}")
            continue
        mfu = "-" if result.mfu is None else f"{result.mfu:.1%}"
        lines.append(
            f"{result.name:<{width}}  {result.tok_s:>10,.0f}  {mfu:>6}  {result.peak_gib:>8.2f}  {result.seconds:>7.1f}"
        )
    return "\n".join(lines)


def measured(options: Options, device: torch.device, deadline: float) -> list[Result]:
    """All cases in turn, as long as there is time: the next is taken to last as long as the longest one so far."""
    results: list[Result] = []
    for case in cases(device, options.tiny):
        if options.only not in case.name:
            continue
        longest = max((result.seconds for result in results), default=0.0)
        if time.monotonic() + longest > deadline:
            results.append(Result(case.name, note=f"not run: the {options.minutes:g} minutes are over"))
        else:
            results.append(run(case, options, device))
        print(f"BENCH {json.dumps(dataclasses.asdict(results[-1]))}", flush=True)
    return results


def _tiny(model: DecoderConfig) -> DecoderConfig:
    return dataclasses.replace(model, vocab_size=256, dim=32, layers=2, heads=4, kv_heads=2, head_dim=8, ffn=64)


def _rows(recipe: Recipe, seq_len: int, micro_batch: int, global_batch: int = 0) -> DataConfig:
    """The recipe's data in rows of another length; a step is one micro-batch unless a global batch is given."""
    return dataclasses.replace(
        recipe.data, seq_len=seq_len, micro_batch=micro_batch, global_batch=global_batch or micro_batch
    )


def main() -> None:
    options = tyro.cli(Options, description=__doc__)
    deadline = time.monotonic() + 60 * options.minutes
    if not options.tiny and not torch.accelerator.is_available():
        print("no accelerator here: tiny sizes on the CPU, whose numbers say nothing about speed")
        options = dataclasses.replace(options, tiny=True)
    with distributed() as device:
        name = "CPU" if device.type == "cpu" else torch.get_device_module(device).get_device_name(device)
        print(f"{name}, torch {torch.__version__}{', tiny sizes' if options.tiny else ''}", flush=True)
        worst = agreement(device, options.tiny)
        right = worst <= TOLERANCE
        print(
            f"dense_debug, bfloat16 on {device.type} against float32 on cpu: loss within {worst:.1e} relative, "
            f"{'as it should be' if right else f'MORE than {TOLERANCE:g}'}"
        )
        print(f"BENCH {json.dumps({'name': 'dense_debug agreement', 'loss_error': worst, 'right': right})}", flush=True)
        free_memory(device)
        results = measured(options, device, deadline)
    if results:
        print(table(results))
    if not right or any(result.failed for result in results):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
