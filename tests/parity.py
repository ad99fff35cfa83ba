"""Law of layout invariance: what any layout computes, against one process.

`trained` runs on every rank of a pool: it builds a recipe's model on the recipe's mesh, trains some steps on batches
that are a function of (step, micro-batch) alone, and gives rank 0 every number in full.
"""

import dataclasses
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from composable.data.loader import DataConfig, MicroBatch, accumulation
from composable.mesh import Mesh
from composable.models.config import DecoderConfig
from composable.models.loss import IGNORE
from composable.optim.optimizers import OptimizerConfig, build_optimizer, named_parameters
from composable.parallel.config import Parallel
from composable.recipe import Recipe
from composable.step import train_step
from composable.train import build_model

STEPS = 3
MODEL = DecoderConfig(vocab_size=37, dim=16, layers=3, heads=4, kv_heads=2, head_dim=4, ffn=24, init_std=0.2)
ADAMW = OptimizerConfig(lr=0.01, max_norm=0.5)


def recipe_of(
    ranks: int,
    accumulate: int,
    *,
    mesh: Mesh | None = None,
    parallel: Parallel | None = None,
    model: DecoderConfig = MODEL,
    dtype: str = "float64",
    optimizer: OptimizerConfig = ADAMW,
) -> Recipe:
    """A tiny recipe whose step is ranks x accumulate micro-batches of 2 rows."""
    return Recipe(
        "parity",
        model,
        dtype=dtype,
        mesh=mesh or Mesh(),
        parallel=parallel or Parallel(),
        data=DataConfig(seq_len=8, micro_batch=2, global_batch=2 * ranks * accumulate),
        optimizer=optimizer,
    )


@dataclass(frozen=True)
class Numbers:
    """Everything that layouts must agree on."""

    losses: list[float]
    norms: list[float]
    gradients: dict[str, torch.Tensor]
    """"step name" -> as the optimizer saw it, after clipping"""
    weights: dict[str, torch.Tensor]


def micro_batch(step: int, index: int, config: DataConfig, vocab: int, silent: bool) -> MicroBatch:
    """Micro-batch `index` of a step; labels are ignored raggedly, and wholly if silent."""
    generator = torch.Generator().manual_seed(1000 * step + index)
    tokens = torch.randint(0, vocab, (config.micro_batch, config.seq_len + 1), generator=generator)
    labels = tokens[:, 1:].clone()
    drop = torch.rand(labels.shape, generator=generator) < 0.15 * (index % 5)
    labels[drop | torch.tensor(silent)] = IGNORE
    documents = positions = None
    if config.document_mask:
        border = int(torch.randint(1, config.seq_len, (), generator=generator))
        documents = (torch.arange(config.seq_len) >= border).long().expand(config.micro_batch, -1).contiguous()
        positions = torch.arange(config.seq_len) - border * documents
    samples = torch.arange(config.micro_batch) + index * config.micro_batch
    return MicroBatch(tokens[:, :-1].contiguous(), labels, positions, documents, samples)


def full(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def trained(recipe: Recipe, silent_ranks: int, steps: int = STEPS) -> Numbers | None:
    """Train; the micro-batches m with m % silent_ranks == silent_ranks - 1 have no valid label (0: none is silent)."""
    recipe, _ = recipe.resolve(dist.get_world_size())
    device = torch.device("cpu")
    model = build_model(recipe, device)
    optimizer = build_optimizer(model.parts, recipe.optimizer)
    gradients: dict[str, torch.Tensor] = {}
    step_of_optimizer = optimizer.step

    def recording_step() -> None:
        for name, parameter in named_parameters(model.parts).items():
            gradients[f"{step} {name}"] = full(parameter.grad)
        step_of_optimizer()

    optimizer.step = recording_step  # type: ignore[method-assign]
    ranks, count = recipe.mesh.data_ranks, accumulation(recipe.data, recipe.mesh.data_ranks)
    mine = recipe.mesh.data_rank(dist.get_rank())
    losses, norms = [], []
    for step in range(1, steps + 1):
        batches = [
            micro_batch(
                step,
                m,
                recipe.data,
                recipe.model.vocab_size,
                bool(silent_ranks) and m % silent_ranks == silent_ranks - 1,
            )
            for m in range(mine, ranks * count, ranks)
        ]
        result = train_step(
            model,
            optimizer,
            batches,
            step=step,
            lr=recipe.optimizer.lr,
            max_norm=recipe.optimizer.max_norm,
        )
        losses.append(result.loss)
        norms.append(result.grad_norm)
    weights = {name: full(parameter) for name, parameter in named_parameters(model.parts).items()}
    everyone: list = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (losses, norms))
    assert all(each == everyone[0] for each in everyone), "ranks disagree on loss or norm"
    return Numbers(losses, norms, gradients, weights) if dist.get_rank() == 0 else None


def reference_of(recipe: Recipe) -> Recipe:
    """The same training on one process: no mesh, no parallelism."""
    return dataclasses.replace(recipe, mesh=Mesh(), parallel=Parallel())


def error(a: torch.Tensor | float, b: torch.Tensor | float) -> float:
    """max|a - b| / max|b|, absolute where b is zero."""
    a, b = (torch.as_tensor(x, dtype=torch.float64) for x in (a, b))
    assert a.shape == b.shape
    scale = b.abs().max().item() if b.numel() else 0.0
    return ((a - b).abs().max().item() if b.numel() else 0.0) / (scale or 1.0)


def worst(numbers: Numbers, reference: Numbers) -> tuple[float, str]:
    """The largest error and where it is."""
    errors = [(error(a, b), f"loss {i}") for i, (a, b) in enumerate(zip(numbers.losses, reference.losses, strict=True))]
    errors += [(error(a, b), f"norm {i}") for i, (a, b) in enumerate(zip(numbers.norms, reference.norms, strict=True))]
    for ours, theirs in ((numbers.gradients, reference.gradients), (numbers.weights, reference.weights)):
        assert list(ours) == list(theirs), "names depend on the layout"
        errors += [(error(ours[name], theirs[name]), name) for name in theirs]
    assert all(value == value for value, _ in errors), "a number is NaN"
    return max(errors)
