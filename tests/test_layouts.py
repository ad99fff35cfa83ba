"""Every data-parallel layout has the numbers of one process: float64, loss, norm, each gradient, each weight."""

import dataclasses
import functools
import itertools
import random

import pytest
import torch

from composable.mesh import Mesh
from composable.models.config import DecoderConfig
from composable.optim.optimizers import OptimizerConfig
from composable.parallel.config import Parallel
from composable.verify import Numbers, reference_of
from tests.parity import MODEL, recipe_of, trained, worst

SHAPES = [("ddp", n, 1) for n in (1, 2, 4, 8)]
SHAPES += [(kind, 1, n) for kind in ("zero1", "zero2", "zero3") for n in (1, 2, 4, 8)]
SHAPES += [(kind, r, s) for kind in ("zero1", "zero2", "zero3") for r, s in ((2, 2), (2, 4), (4, 2))]
MATRIX = list(itertools.product(SHAPES, (1, 3), ("none", "full", "selective")))


def sample(matrix: list, count: int) -> list:
    """A fixed choice in which every shape occurs, with every accumulation and recomputation."""
    chosen = [entry for index, entry in enumerate(matrix) if index % 6 == (index // 6) % 6]
    return chosen + random.Random(0).sample([entry for entry in matrix if entry not in chosen], count - len(chosen))


DEFAULT = sample(MATRIX, 30)


def name(entry: tuple) -> str:
    (kind, replicate, shards), accumulate, recompute = entry
    return f"{kind}-{replicate}x{shards}-accumulate{accumulate}-{recompute}"


@pytest.fixture(scope="module")
def reference(pool):
    """One process over the same micro-batches; the same for many layouts, so kept."""

    @functools.lru_cache
    def run(recipe, silent) -> Numbers:
        return pool.run(1, trained, recipe, silent)[0]

    return lambda recipe, silent: run(reference_of(recipe), silent)


def layout_of(kind: str, replicate: int, shards: int, accumulate: int, **changes):
    parallel = Parallel(data=kind, **changes.pop("parallel", {}))
    mesh = Mesh(dp_replicate=replicate, dp_shard=-1 if kind == "ddp" else shards)
    return recipe_of(replicate * shards, accumulate, mesh=mesh, parallel=parallel, **changes)


@pytest.mark.parametrize(
    "entry",
    [pytest.param(e, id=name(e), marks=[] if e in DEFAULT else [pytest.mark.slow]) for e in MATRIX],
)
def test_a_data_layout_has_the_numbers_of_one_process(entry, ranks, reference):
    (kind, replicate, shards), accumulate, recompute = entry
    world = replicate * shards
    recipe = layout_of(kind, replicate, shards, accumulate, parallel={"recompute": recompute})
    silent = world if world > 1 else 3 * (accumulate > 1)  # one rank has no valid token at all
    numbers = ranks(world, trained, recipe, silent)[0]
    error, where = worst(numbers, reference(recipe, silent))
    assert error <= 1e-9, f"{where}: {error}"


OTHER = {
    "whole model as one unit": ("zero3", {"parallel": {"unit": 0}}),
    "two blocks a unit": ("zero3", {"parallel": {"unit": 2}}),
    "every second block recomputed": ("zero2", {"parallel": {"recompute": "every:2"}}),
    "offload to the host": ("zero3", {"parallel": {"offload": True}}),
    "offload with whole gradients": ("zero1", {"parallel": {"offload": True}}),
    "compiled": ("zero3", {"parallel": {"compile": True}}),
    "compiled and recomputed": ("zero1", {"parallel": {"compile": True, "recompute": "selective"}}),
    "tied head": ("zero3", {"model": dataclasses.replace(MODEL, tied=True)}),
    "tied head in ddp": ("ddp", {"model": dataclasses.replace(MODEL, tied=True)}),
    "q/k norm and biases": (
        "zero3",
        {"model": dataclasses.replace(MODEL, qk_norm=True, qkv_bias=True, output_bias=True, mlp_bias=True)},
    ),
    "SGD without clipping": ("zero2", {"optimizer": OptimizerConfig(kind="sgd", lr=0.1, momentum=0.9, max_norm=0)}),
}


@pytest.mark.parametrize("case", OTHER)
def test_an_option_leaves_the_numbers_as_they_are(case, ranks, reference):
    kind, changes = OTHER[case]
    shape = (2, 1) if kind == "ddp" else (2, 2) if "compiled" not in case else (1, 2)
    recipe = layout_of(kind, *shape, 2, **changes)
    world = shape[0] * shape[1]
    error, where = worst(ranks(world, trained, recipe, world)[0], reference(recipe, world))
    assert error <= 1e-9, f"{where}: {error}"


def test_documents_packed_in_rows_train_alike_on_every_layout(ranks, reference):
    recipe = layout_of("zero3", 1, 4, 2)
    recipe = dataclasses.replace(recipe, data=dataclasses.replace(recipe.data, document_mask=True))
    error, where = worst(ranks(4, trained, recipe, 4)[0], reference(recipe, 4))
    assert error <= 1e-9, f"{where}: {error}"


@pytest.mark.parametrize("kind", ["ddp", "zero1", "zero2", "zero3"])
def test_float32_layouts_agree_to_a_hundred_thousandth(kind, ranks, reference):
    shape = (2, 1) if kind == "ddp" else (1, 2)
    changes = {"dtype": "float32", "optimizer": OptimizerConfig(kind="sgd", lr=0.1, max_norm=0.5)}
    recipe = layout_of(kind, *shape, 3, **changes)
    error, where = worst(ranks(2, trained, recipe, 2)[0], reference(recipe, 2))
    assert error <= 1e-5, f"{where}: {error}"


@pytest.mark.parametrize("kind", ["ddp", "zero1", "zero3"])
def test_mixed_precision_keeps_float32_weights_and_sums_gradients_in_float32(kind, ranks, reference):
    shape = (2, 1) if kind == "ddp" else (1, 2)
    changes = {"dtype": "float32", "optimizer": OptimizerConfig(kind="sgd", lr=0.1, max_norm=0.5)}
    mixed = layout_of(kind, *shape, 3, parallel={"precision": "bfloat16"}, **changes)
    alone = dataclasses.replace(mixed, mesh=Mesh(), parallel=Parallel(data=kind, precision="bfloat16"))
    two, one = ranks(2, trained, mixed, 2)[0], ranks(1, trained, alone, 2)[0]
    kinds = {tensor.dtype for tensors in (two.weights, *two.gradients) for tensor in tensors.values()}
    assert kinds == {torch.float32}
    error, where = worst(two, one)
    assert error <= 1e-5, f"{where}: {error}"  # the same casts, and sums of float32
    error, _ = worst(two, reference(mixed, 2))
    assert 1e-5 < error < 0.1  # and really computed in bfloat16


def test_a_wider_model_with_uneven_shards_agrees(ranks, reference):
    model = DecoderConfig(vocab_size=37, dim=20, layers=2, heads=5, kv_heads=1, head_dim=6, ffn=26, init_std=0.2)
    recipe = layout_of("zero3", 1, 8, 1, model=model)
    error, where = worst(ranks(8, trained, recipe, 8)[0], reference(recipe, 8))
    assert error <= 1e-9, f"{where}: {error}"
