"""Time of a layer with experts against its matrix products alone: what routing and moving tokens cost.

    python tools/bench_experts.py
    python tools/bench_experts.py --experts 64 --top-k 8 --dispatcher static

Forward and backward of three sides in turn, medians: the layer; its experts alone, on rows that lie in expert order
already; the nine matrix products of those rows alone, without activations and autograd. This script measures float32
on one thread of a CPU and prints a line `BENCH {json}`; `bench_gpu.py` measures bfloat16 on an accelerator.
"""

import dataclasses
import itertools
import json
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
import tyro
from torch import Tensor

from composable._torch import onednn_product
from composable.moe.config import Capacity, Dispatcher, MoEConfig
from composable.moe.experts import grouped_swiglu, swiglu
from composable.moe.layer import MoE, Routed, TokenInfo


@dataclass(frozen=True)
class Case:
    """One layer."""

    experts: int = 8
    """routed experts"""
    top_k: int = 2
    """experts of a token"""
    dim: int = 256
    """width of the residual stream"""
    ffn: int = 344
    """hidden width of an expert"""
    tokens: int = 2048
    """of a step"""
    dispatcher: Dispatcher = "all_to_all"
    """`static` has capacity factor 1.25, the others none"""
    compile: bool = False
    """torch.compile of the layer, and of its experts alone"""

    @property
    def name(self) -> str:
        return f"experts {self.experts} top-{self.top_k} {self.dispatcher} {'compile' if self.compile else 'eager'}"

    def layer(self, device: torch.device, dtype: torch.dtype) -> MoE:
        capacity = Capacity(1.25 if self.dispatcher == "static" else 0.0)
        config = MoEConfig(self.experts, self.top_k, self.ffn, capacity=capacity, dispatcher=self.dispatcher)
        with torch.device(device):
            return MoE(self.dim, config).to(dtype)


def cases(tiny: bool) -> Iterator[Case]:
    """Mixtral's layer and one of 64 fine experts, with as many tokens as fill an H200, in all four ways."""
    sizes = [(8, 2, 4096, 14336, 16384), (64, 8, 2048, 1408, 16384)]
    if tiny:
        sizes = [(8, 2, 32, 48, 64), (64, 8, 32, 16, 64)]
    dispatchers: tuple[Dispatcher, ...] = ("all_to_all", "static")
    for compiled, size, dispatcher in itertools.product((False, True), sizes, dispatchers):  # compilation takes long
        yield Case(*size, dispatcher, compiled)


@dataclass(frozen=True)
class Rows:
    """What the experts multiply: tensors of random numbers, rows [R, ...] in expert order, and the layer's weights."""

    x: Tensor
    """[R, D]"""
    hidden: Tensor
    """[R, F]"""
    for_y: Tensor
    """[R, D], a gradient"""
    for_hidden: Tensor
    """[R, F], a gradient"""
    weights: tuple[Tensor, Tensor, Tensor]
    """gate, up [E, F, D], down [E, D, F]"""
    counts: list[int]
    """rows of each expert"""
    ends: Tensor
    """[E] int32: where they end"""


def rows_of(layer: MoE, x: Tensor) -> Rows:
    """As many rows of each expert as the layer's own for x [B, S, D]."""
    routed: list[Routed] = []
    with torch.no_grad():
        layer(x, TokenInfo(record=routed.append))
    counts = routed[0].executed
    weights = (layer.experts.gate_proj, layer.experts.up_proj, layer.experts.down_proj)
    narrow, wide = ((int(counts.sum()), width) for width in (x.size(-1), layer.config.ffn))
    r, h, for_y, for_h = (torch.randn(shape, device=x.device).to(x.dtype) for shape in (narrow, wide, narrow, wide))
    return Rows(r.requires_grad_(), h, for_y, for_h, weights, counts.tolist(), counts.cumsum(0).to(torch.int32))


@torch.no_grad()
def grouped_products(rows: Rows) -> None:
    """The products of forward and backward by torch's grouped product."""
    (gate, up, down), mm = rows.weights, partial(F.grouped_mm, offs=rows.ends)
    for weight in (gate, up):
        mm(rows.x, weight.mT)
        mm(rows.for_hidden, weight)
        mm(rows.for_hidden.mT, rows.x)
    mm(rows.hidden, down.mT)
    mm(rows.for_y, down)
    mm(rows.for_y.mT, rows.hidden)


@torch.no_grad()
def loop_products(rows: Rows) -> None:
    """The products of forward and backward, expert by expert."""
    mm = onednn_product if rows.x.dtype == torch.float32 else F.linear
    of_experts = zip(*(t.split(rows.counts) for t in (rows.x, rows.hidden, rows.for_y, rows.for_hidden)), strict=True)
    for (x, hidden, for_y, for_hidden), gate, up, down in zip(of_experts, *rows.weights, strict=True):
        if len(x) == 0:
            continue
        for weight in (gate, up):
            mm(x, weight)
            mm(for_hidden, weight.t())
            mm(for_hidden.t(), x.t())
        mm(hidden, down)
        mm(for_y, down.t())
        mm(for_y.t(), hidden.t())


def measure(
    case: Case, device: torch.device, dtype: torch.dtype, *, rounds: int, warmup: int, repeat: int = 1
) -> dict[str, float]:
    """Milliseconds of forward and backward of each side, the layer's ratio to the others, and its TFLOP/s.

    Args:
        rounds: of which the median is taken.
        warmup: calls of each side before them, in which what is to be compiled is.
        repeat: calls of one side in a row, between two waits for the device.
    """
    torch.manual_seed(0)
    layer = case.layer(device, dtype)
    x, for_out = tokens(case, device, dtype)
    rows = rows_of(layer, x)
    grouped = device.type != "cpu"
    alone: Callable[..., Tensor] = grouped_swiglu if grouped else swiglu
    where: Tensor | list[int] = rows.ends if grouped else rows.counts
    if case.compile:
        layer.compile()
        alone = torch.compile(alone)
    sides: dict[str, Callable[[], object]] = {
        "layer": lambda: forward_backward(layer, x, for_out),
        "experts": lambda: torch.autograd.grad(
            alone(rows.x, *rows.weights, where), [rows.x, *rows.weights], rows.for_y
        ),
        "products": partial(grouped_products if grouped else loop_products, rows),
    }
    for side in sides.values():
        for _ in range(warmup):
            side()
    times = milliseconds(sides, device, rounds, repeat)
    flops = 18 * len(rows.x) * case.dim * case.ffn
    return {
        **{f"{side}_ms": time for side, time in times.items()},
        "to_experts": times["layer"] / times["experts"],
        "to_products": times["layer"] / times["products"],
        "tflops": flops / times["layer"] / 1e9,
    }


def tokens(case: Case, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Random hidden states [1, T, D] that want a gradient, and a gradient of the layer's result."""
    x, for_out = torch.randn(2, 1, case.tokens, case.dim, device=device).to(dtype)
    return x.requires_grad_(), for_out


def forward_backward(layer: MoE, x: Tensor, for_out: Tensor) -> list[Tensor]:
    """The layer's result, and the gradients of x and of all parameters."""
    out = layer(x)
    return [out.detach(), *torch.autograd.grad(out, [x, *layer.parameters()], for_out)]


def deviation(case: Case, device: torch.device, dtype: torch.dtype) -> float:
    """Whether results are right: the largest ||a - b|| / ||b|| of result and gradients.

    Eager ones are compared with float32 on the CPU, in a small layer; compiled ones with eager ones, in the layer that
    is measured.
    """
    torch.manual_seed(0)
    if case.compile:
        layer = case.layer(device, dtype)
        x, for_out = tokens(case, device, dtype)
        expected = forward_backward(layer, x, for_out)
        layer.compile()
        ours = forward_backward(layer, x, for_out)
    else:
        case = dataclasses.replace(case, dim=min(case.dim, 256), ffn=min(case.ffn, 352), tokens=min(case.tokens, 512))
        layer, cpu = case.layer(device, dtype), torch.device("cpu")
        x, for_out = tokens(case, device, dtype)
        ours = forward_backward(layer, x, for_out)
        wide = [t.detach().to(cpu, torch.float32) for t in (x, for_out)]
        expected = forward_backward(layer.to(cpu, torch.float32), wide[0].requires_grad_(), wide[1])
    pairs = zip(ours, expected, strict=True)
    return max(float((a.to(b).float() - b.float()).norm() / b.float().norm()) for a, b in pairs)


def milliseconds(
    sides: dict[str, Callable[[], object]], device: torch.device, rounds: int, repeat: int
) -> dict[str, float]:
    """Medians of a call of each side, in turn."""
    taken: dict[str, list[float]] = {side: [] for side in sides}
    for _ in range(rounds):
        for side, call in sides.items():
            synchronize(device)
            began = time.perf_counter()
            for _ in range(repeat):
                call()
            synchronize(device)
            taken[side].append((time.perf_counter() - began) * 1e3 / repeat)
    return {side: statistics.median(times) for side, times in taken.items()}


def synchronize(device: torch.device) -> None:
    """Wait until the device has done all."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


@dataclass(frozen=True)
class Options(Case):
    """What is measured, and how often."""

    rounds: int = 15
    """of each side"""
    warmup: int = 3
    """calls of each side before them"""


def main() -> None:
    options = tyro.cli(Options, description=__doc__)
    torch.set_num_threads(1)
    numbers = measure(
        options, torch.device("cpu"), torch.float32, rounds=options.rounds, warmup=options.warmup
    )  # fmt: skip
    print(f"BENCH {json.dumps({'name': options.name} | numbers)}", flush=True)


if __name__ == "__main__":
    main()
