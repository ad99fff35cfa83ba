"""Tiny recipes for the law of layout invariance, and what must agree; the comparison itself is composable.verify."""

from composable.data.loader import DataConfig
from composable.mesh import Mesh
from composable.models.config import DecoderConfig
from composable.optim.optimizers import OptimizerConfig
from composable.parallel.config import Parallel
from composable.recipe import Recipe
from composable.verify import Numbers, compare, record

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


def trained(recipe: Recipe, silent_ranks: int) -> Numbers | None:
    """What `record` gives of three steps."""
    return record(recipe, STEPS, silent_ranks)


def worst(numbers: Numbers, reference: Numbers) -> tuple[float, str]:
    """The largest error and where it is."""
    result = compare(numbers, reference, 0.0)
    return result.worst, str(result.errors)
