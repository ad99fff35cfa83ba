"""A layout against one process: the same recipe, the same data, every number compared.

Batches are a function of (step, micro-batch) alone, with labels ignored raggedly, so that data ranks hold different
numbers of valid tokens. The error of a tensor is max|a - b| / max|b|, absolute where b is zero.
"""

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from composable.checkpoint.shards import Box, local_box
from composable.data.loader import DataConfig, MicroBatch, accumulation
from composable.mesh import Mesh
from composable.models.config import DecoderConfig
from composable.models.loss import IGNORE
from composable.optim.local import local
from composable.optim.optimizers import build_optimizer
from composable.parallel.config import Parallel, Pipeline
from composable.recipe import Recipe
from composable.step import train_step
from composable.train import build_model

GROUPS = {  # what the table calls a tensor -> a part of its name; the first that fits
    "embedding": "embed_tokens",
    "norms": "norm",
    "router": "mlp.gate.",
    "experts": "experts",
    "attention": "self_attn",
    "MLP": "mlp",
    "head": "lm_head",
}


COPY = " on rank "
"""between the name of a tensor and the rank whose copy differs"""
Row = tuple[str, str, float]
"""group, what it is, error"""


@dataclass(frozen=True)
class Numbers:
    """Everything that layouts must agree on, of some steps."""

    losses: list[float]
    norms: list[float]
    gradients: list[dict[str, Tensor]]
    """of each step, as the optimizer saw them: summed, and clipped"""
    weights: dict[str, Tensor]
    """after the last step, and the buffers"""


@dataclass(frozen=True)
class Comparison:
    """How far a layout is from the reference."""

    errors: dict[str, float] = field(default_factory=dict)
    """worst error of the loss, the norm, and each group's gradients and weights"""
    worst: float = 0.0
    first: str = ""
    """the first step and tensor beyond the tolerance; empty if all agree"""


def micro_batch(step: int, index: int, config: DataConfig, vocab_size: int, silent: bool = False) -> MicroBatch:
    """Micro-batch `index` of a step; without any valid label if silent."""
    generator = torch.Generator().manual_seed(1_000_003 * step + index)
    tokens = torch.randint(0, vocab_size, (config.micro_batch, config.seq_len + 1), generator=generator)
    labels = tokens[:, 1:].clone()
    ignored = torch.rand(labels.shape, generator=generator) < 0.15 * (index % 5)
    labels[ignored | torch.tensor(silent)] = IGNORE
    documents = positions = None
    if config.document_mask:
        border = torch.randint(1, config.seq_len, (config.micro_batch, 1), generator=generator)
        documents = (torch.arange(config.seq_len) >= border).long()
        positions = torch.arange(config.seq_len) - border * documents
    samples = torch.arange(config.micro_batch) + index * config.micro_batch
    return MicroBatch(tokens[:, :-1].contiguous(), labels, positions, documents, samples)


def record(recipe: Recipe, steps: int, silent_ranks: int = 0) -> Numbers | None:
    """Train some steps on the default process group, and keep every number; collective.

    Args:
        recipe: its mesh is resolved here.
        silent_ranks: micro-batches m with m % silent_ranks == silent_ranks - 1 have no valid label; 0: all have some.

    Returns:
        the numbers on rank 0, None elsewhere.
    """
    recipe, _ = recipe.resolve(dist.get_world_size())
    device = torch.device("cpu")
    model = build_model(recipe, device)
    optimizer = build_optimizer(model.parts, recipe.optimizer, only=model.named)
    gradients: list[dict[str, Tensor]] = []
    update = optimizer.step

    def recorded_update() -> None:
        gradients.append(_full({name: p.grad for name, p in model.named.items()}))
        update()

    optimizer.step = recorded_update  # type: ignore[method-assign,assignment]
    data, mesh = recipe.data, recipe.mesh
    count, mine = accumulation(data, mesh.data_ranks), mesh.data_rank(dist.get_rank())
    losses, norms = [], []
    for step in range(1, steps + 1):
        chosen = range(mine, mesh.data_ranks * count, mesh.data_ranks)
        silent = [bool(silent_ranks) and m % silent_ranks == silent_ranks - 1 for m in chosen]
        batches = [
            micro_batch(step, m, data, recipe.model.vocab_size, quiet) for m, quiet in zip(chosen, silent, strict=True)
        ]
        result = train_step(
            model, optimizer, batches, step=step, lr=recipe.optimizer.lr, max_norm=recipe.optimizer.max_norm
        )
        losses.append(result.loss)
        norms.append(result.grad_norm)
    weights = _full(dict(model.saved))
    return Numbers(losses, norms, gradients, weights) if dist.get_rank() == 0 else None


def _full(tensors: dict[str, Tensor | None]) -> dict[str, Tensor]:
    """Whole tensors on rank 0, put together from the boxes of all ranks.

    A copy that is not equal to the first one to the bit stands beside it as "<name> on rank <rank>".
    """
    mine = {name: (tuple(t.shape), local_box(t), local(t).cpu()) for name, t in tensors.items() if t is not None}
    everyone: list[dict[str, tuple[tuple[int, ...], Box, Tensor]]] = [{} for _ in range(dist.get_world_size())]
    dist.gather_object(mine, everyone if dist.get_rank() == 0 else None)
    whole: dict[str, Tensor] = {}
    seen: dict[tuple[str, Box], Tensor] = {}
    for rank, parts in enumerate(everyone):
        for name, (shape, box, part) in parts.items():
            tensor = whole.setdefault(name, part.new_full(shape, math.nan))
            first = seen.setdefault((name, box), part)
            if first is part:
                tensor[box.slices()] = part
            elif not torch.equal(first, part):
                copy = whole.setdefault(f"{name}{COPY}{rank}", tensor.clone())
                copy[box.slices()] = part
    return dict(sorted(whole.items()))


def reference_of(recipe: Recipe) -> Recipe:
    """The same training on one process: no mesh, no parallelism."""
    return dataclasses.replace(recipe, mesh=Mesh(), parallel=Parallel(), pipeline=Pipeline())


def error(a: Tensor | float, b: Tensor | float) -> float:
    """max|a - b| / max|b|, absolute where b is zero; infinite where shapes differ or a number is not finite."""
    a, b = (torch.as_tensor(x, dtype=torch.float64) for x in (a, b))
    if a.shape != b.shape or not (a.isfinite().all() and b.isfinite().all()):
        return math.inf
    if b.numel() == 0:
        return 0.0
    return (a - b).abs().max().item() / (b.abs().max().item() or 1.0)


def compare(numbers: Numbers, reference: Numbers, tolerance: float) -> Comparison:
    """Compare in the order in which things happen: each step's loss, gradients and norm, then the weights."""
    found: list[Row] = []
    for step, (ours, theirs) in enumerate(zip(numbers.gradients, reference.gradients, strict=True)):
        found.append(("loss", f"step {step + 1}: loss", error(numbers.losses[step], reference.losses[step])))
        found += _tensors(ours, theirs, "gradient", f"step {step + 1}: gradient of ")
        found.append(("norm", f"step {step + 1}: norm", error(numbers.norms[step], reference.norms[step])))
    found += _tensors(numbers.weights, reference.weights, "weight", "after the last step: weight ")
    errors: dict[str, float] = {}
    for group, _, value in found:
        errors[group] = max(errors.get(group, 0.0), value)
    first = next((f"{text}, error {value:.2g}" for _, text, value in found if value > tolerance), "")
    return Comparison(errors, max(errors.values()), first)


def _tensors(ours: dict[str, Tensor], theirs: dict[str, Tensor], what: str, text: str) -> list[Row]:
    rows = []
    for name in sorted(ours.keys() | theirs.keys()):
        like = name.partition(COPY)[0]
        value = error(ours[name], theirs[like]) if name in ours and like in theirs else math.inf
        group = next((group for group, part in GROUPS.items() if part in name), "other")
        rows.append((f"{group} {what}", text + name, value))
    return sorted(rows, key=lambda row: -row[2])


def suspects(recipe: Recipe, disagrees: Callable[[Recipe, int], bool]) -> list[str]:
    """Which dimensions of a layout that disagrees are to blame.

    Each dimension is run alone, and the layout without it.

    Args:
        recipe: resolved.
        disagrees: (recipe, ranks) -> whether it differs from one process.

    Returns:
        dimensions that are wrong alone; if none is, those without which the rest is right; if none, the combination.
    """
    mesh = recipe.mesh
    wide = [name for name in ("dp_replicate", "dp_shard", "cp", "tp", "pp", "ep", "etp") if getattr(mesh, name) > 1]
    alone = [name for name in wide if _wrong_alone(recipe, name, getattr(mesh, name), disagrees)]
    if alone or len(wide) == 1:
        return alone or wide
    without = [name for name in wide if _runs(recipe, dataclasses.replace(mesh, **{name: 1}), disagrees) is False]
    return without or [" x ".join(wide)]


def _wrong_alone(recipe: Recipe, name: str, degree: int, disagrees: Callable[[Recipe, int], bool]) -> bool:
    """Whether a dimension disagrees where it is the only one; experts are shared by ranks of another dimension."""
    carrier = {"ep": "dp_shard", "etp": "tp"}.get(name)
    without = Mesh(**{"dp_shard": 1, carrier or name: degree})
    if carrier is None:
        return _runs(recipe, without, disagrees) is True
    shared = dataclasses.replace(without, **{name: degree})
    return _runs(recipe, shared, disagrees) is True and _runs(recipe, without, disagrees) is False


def _runs(recipe: Recipe, mesh: Mesh, disagrees: Callable[[Recipe, int], bool]) -> bool | None:
    """Whether the recipe disagrees on another mesh; None if that mesh is not legal for it."""
    try:
        changed = dataclasses.replace(recipe, mesh=mesh)
        changed.resolve(mesh.world)
    except (ValueError, TypeError):
        return None
    return disagrees(changed, mesh.world)


def model_of(config: DecoderConfig) -> str:
    """One line about a model's shape."""
    moe = config.moe
    experts = "" if moe is None else f", {moe.experts} experts of {moe.ffn} (top {moe.top_k})"
    return (
        f"{config.layers} layers, width {config.dim}, {config.heads} heads ({config.kv_heads} kv), ffn {config.ffn}, "
        f"vocabulary {config.vocab_size}{experts}"
    )
