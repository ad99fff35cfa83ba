"""One accelerator in under five minutes: are bfloat16 results right, and how fast are real sizes?

    python tools/bench_gpu.py

First `dense_debug` in bfloat16 on the accelerator against float32 on the CPU, with the same data. Then tokens/s, MFU
and peak memory of `dense_1b`, and of as many blocks of Llama 3.1 8B's width as fit, for {eager, compile} x {recompute
none, selective, full}. Then the time of a layer with 8 and with 64 experts against that of its grouped matrix products
alone, dropless and with static shapes, for {eager, compile}, once its results are right too. A line `BENCH {json}` a
case, and tables at the end. A case that runs out of memory is reported as such, and the rest goes on. Without an
accelerator everything runs at a tiny size on the CPU. The exit code is 1 if results are not right, or a case failed for
another reason than memory or time.
"""

import dataclasses
import gc
import itertools
import json
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path

import bench_experts
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
EXPERTS_TOLERANCE = 2e-2
"""largest relative error (2-norm) of a tensor that a layer with experts computes in bfloat16"""
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
    """measured steps of a case, or rounds"""
    warmup: int = 3
    """steps before them"""
    minutes: float = 4.5
    """no case is begun that would probably end later than this after the start"""
    only: str = ""
    """cases whose name contains this; all if empty"""


@dataclass(frozen=True)
class Case:
    """One thing to measure."""

    name: str
    measure: Callable[[], dict[str, float | None]]
    """gives numbers by name"""


@dataclass(frozen=True)
class Result:
    """What was measured of a case."""

    name: str
    numbers: dict[str, float | None] = field(default_factory=dict)
    """by name; none where there is a note"""
    seconds: float = 0.0
    """that the case took in all, compilation included"""
    note: str = ""
    """why there are no numbers"""
    failed: bool = False
    """for another reason than memory or time"""

    @property
    def line(self) -> str:
        """The facts, to be read by a program."""
        facts = dataclasses.asdict(self)
        return f"BENCH {json.dumps({'name': facts.pop('name')} | facts.pop('numbers') | facts)}"


TRAINING = {"tokens/s": ("tok_s", ",.0f"), "MFU": ("mfu", ".1%"), "peak GiB": ("peak_gib", ".2f")}
"""column of the table -> (number, its format)"""
EXPERTS = {
    "layer ms": ("layer_ms", ".2f"),
    "experts ms": ("experts_ms", ".2f"),
    "products ms": ("products_ms", ".2f"),
    "layer/experts": ("to_experts", ".3f"),
    "layer/products": ("to_products", ".3f"),
    "TFLOP/s": ("tflops", ",.0f"),
    "deviation": ("deviation", ".1e"),
    "peak GiB": ("peak_gib", ".2f"),
}


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


def training_cases(device: torch.device, options: Options) -> Iterator[Case]:
    """Two models times {eager, compile} times {none, selective, full}; the second is left out where no block fits."""
    base = recipe_of(RECIPES / "dense_1b.py")
    wide = dataclasses.replace(WIDE_8B, rope=dataclasses.replace(base.model.rope, factor=8.0))
    if options.tiny:
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
        recipe = dataclasses.replace(base, name=name, model=model, data=data, parallel=parallel)
        yield Case(label, partial(train, recipe, device, options))


def train(recipe: Recipe, device: torch.device, options: Options) -> dict[str, float | None]:
    """Steps of a recipe: tokens/s, MFU and peak memory."""
    numbers = measure(StepOptions(Path(recipe.name), steps=options.steps, warmup=options.warmup), recipe)
    return {"tok_s": numbers["tok_s"], "mfu": numbers.get("mfu"), "peak_gib": peak_memory_gib(device)}  # type: ignore[dict-item]


def expert_cases(device: torch.device, options: Options) -> Iterator[Case]:
    """Two layers times {dropless, static} times {eager, compile}."""
    for case in bench_experts.cases(options.tiny):
        yield Case(case.name, partial(route_and_multiply, case, device, options))


def route_and_multiply(case: bench_experts.Case, device: torch.device, options: Options) -> dict[str, float | None]:
    """A layer with experts against its products alone, and peak memory of all."""
    deviation = bench_experts.deviation(case, device, torch.bfloat16)
    if not deviation <= EXPERTS_TOLERANCE:
        raise RuntimeError(f"results are not right: {deviation:.1e} off, more than {EXPERTS_TOLERANCE:g}")
    repeat = 1 if device.type == "cpu" else 5
    numbers = bench_experts.measure(
        case, device, torch.bfloat16, rounds=options.steps, warmup=options.warmup, repeat=repeat
    )
    return {**numbers, "deviation": deviation, "peak_gib": peak_memory_gib(device)}


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


def run(case: Case, device: torch.device) -> Result:
    """Measure one case; running out of memory is a result, and so is any other failure of torch's."""
    if device.type != "cpu":
        torch.accelerator.reset_peak_memory_stats(device)
    began = time.monotonic()
    try:
        result = Result(case.name, case.measure())
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


def table(results: list[Result], columns: dict[str, tuple[str, str]]) -> str:
    """A line a case."""
    width = max(len("case"), *(len(result.name) for result in results))
    lines = ["  ".join([f"{'case':<{width}}", *(f"{title:>10}" for title in columns), "   seconds"])]
    for result in results:
        if result.note:
            lines.append(f"{result.name:<{width}}  {result.note}")
            continue
        cells = []
        for title, (key, form) in columns.items():
            number = result.numbers[key]
            cells.append(f"{'-' if number is None else format(number, form):>{max(10, len(title))}}")
        lines.append("  ".join([f"{result.name:<{width}}", *cells, f"{result.seconds:>10.1f}"]))
    return "\n".join(lines)


def measured(cases: Iterable[Case], options: Options, device: torch.device, deadline: float) -> list[Result]:
    """All cases in turn, as long as there is time: the next is taken to last as long as the longest one so far."""
    results: list[Result] = []
    for case in cases:
        if options.only not in case.name:
            continue
        longest = max((result.seconds for result in results), default=0.0)
        if time.monotonic() + longest > deadline:
            results.append(Result(case.name, note=f"not run: the {options.minutes:g} minutes are over"))
        else:
            results.append(run(case, device))
        print(results[-1].line, flush=True)
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
        training = measured(training_cases(device, options), options, device, deadline)
        experts = measured(expert_cases(device, options), options, device, deadline)
    for results, columns in ((training, TRAINING), (experts, EXPERTS)):
        if results:
            print(table(results, columns))
    if not right or any(result.failed for result in training + experts):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
