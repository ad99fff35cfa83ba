"""A recipe made small: the same kinds of layers, divisible by the same degrees, on as many ranks as there are."""

import dataclasses
import math
from collections.abc import Collection, Sequence
from itertools import product

from composable.mesh import Mesh
from composable.moe.config import MoEConfig
from composable.parallel.config import recompute_every
from composable.recipe import Recipe, options_over

STEPS = 20
"""of a small twin"""
LENGTH = 4
"""how many times longer its rows are than `shrink` makes them"""
BYTES = 256
"""its vocabulary: tokens of the sample corpus"""
DIMENSIONS = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
"""of a mesh, whose degrees multiply to the number of ranks"""


def small_twin(recipe: Recipe, ranks: int, words: Sequence[str] = ()) -> tuple[Recipe, list[str]]:
    """A recipe that goes the way of another one, in minutes on a CPU: what `--shrink` trains.

    It has the same kinds of layers, the same schedule, sharding, recomputation, checkpoints and validation, and every
    dimension of the mesh as far as the ranks go (`fit`), in float32, without a compiler, for 20 steps on the sample
    corpus, from initial weights. Its run folder, and a folder of checkpoints elsewhere, have `-shrink` at the end.

    Args:
        recipe: with the options of the command line over it.
        ranks: how many there are.
        words: these options: they hold for the twin too, its sizes and steps included.

    Returns:
        the twin, and each degree of the mesh that is not the recipe's, as it was and is.

    Raises:
        ValueError: degrees among the options do not fit in the number of ranks.
    """
    typed = {word.partition("=")[0].replace("_", "-") for word in words}
    kept = [name for name in Mesh.__dataclass_fields__ if f"--mesh.{name.replace('_', '-')}" in typed]
    mesh = fit(recipe.mesh, ranks, replicate=recipe.parallel.data == "ddp", kept=kept)
    twin = options_over(_twin(recipe, mesh), words)
    folder = recipe.checkpoint.folder
    twin = dataclasses.replace(
        twin,
        shrink=False,
        init_from="",  # those weights are of another size
        init_model=False,
        out=f"{recipe.folder}-shrink",
        checkpoint=dataclasses.replace(twin.checkpoint, folder=f"{folder.rstrip('/')}-shrink" if folder else ""),
    )
    degrees = [(name, getattr(recipe.mesh, name), getattr(mesh, name)) for name in Mesh.__dataclass_fields__]
    return twin, [f"{name} {was} -> {now}" for name, was, now in degrees if was not in (-1, now)]


def _twin(recipe: Recipe, mesh: Mesh) -> Recipe:
    """The twin on a mesh, before options of the command line."""
    pipeline = recipe.pipeline
    passes = pipeline.micro_batches > 0
    if mesh.pp != recipe.mesh.pp:  # as many micro-batches as every schedule takes, in stages of any number
        count = min(pipeline.micro_batches, 2 * mesh.pp)
        pipeline = dataclasses.replace(pipeline, split="", micro_batches=count)
    small = shrink(dataclasses.replace(recipe, mesh=mesh, pipeline=pipeline), mesh)
    moe = small.model.moe
    return dataclasses.replace(
        small,
        name=f"{recipe.name}-shrink",
        model=dataclasses.replace(
            small.model,
            vocab_size=_smaller(recipe.model.vocab_size, mesh.tp, BYTES),
            init_std=recipe.model.init_std,
            moe=None if moe is None else dataclasses.replace(moe, upcycle=False),
        ),
        steps=STEPS,
        dtype="float32",
        init_from="",
        init_missing=(),
        init_dequantise=False,
        parallel=dataclasses.replace(small.parallel, precision="none", reduce="float32", compile=False),
        data=dataclasses.replace(
            small.data,
            path="python-stdlib",
            seq_len=LENGTH * small.data.seq_len,
            global_batch=small.data.global_batch * (2 if passes and mesh.pp > 1 else 1),  # two passes of the pipeline
        ),
        optimizer=dataclasses.replace(recipe.optimizer, lr=3e-3, scale="none"),
        schedule=dataclasses.replace(recipe.schedule, warmup=min(recipe.schedule.warmup, 2)),
        checkpoint=dataclasses.replace(recipe.checkpoint, every=STEPS // 2),
        validation=dataclasses.replace(recipe.validation, every=STEPS // 2 if recipe.validation.every else 0, steps=2),
        observe=dataclasses.replace(recipe.observe, every=1),
    )


def fit(mesh: Mesh, ranks: int, *, replicate: bool = False, kept: Collection[str] = ()) -> Mesh:
    """The mesh of `ranks` ranks that is nearest to another one.

    Degrees are divisors of those of `mesh`, and data ranks take what is left. First come meshes in which most of the
    dimensions that `mesh` uses have 2 ranks or more (experts sharded by FSDP too), then those whose degrees are
    nearest by ratio.

    Args:
        mesh: a degree of -1 is used, and near to any.
        replicate: as in `Mesh.resolve`.
        kept: degrees that stay.

    Raises:
        ValueError: those do not fit.
    """
    rest = "dp_replicate" if replicate else "dp_shard"
    if replicate:  # as Mesh.resolve has it
        mesh = dataclasses.replace(mesh, dp_shard=1, dp_replicate=-1 if mesh.dp_replicate == 1 else mesh.dp_replicate)

    def choices(name: str) -> list[int]:
        degree = getattr(mesh, name)
        if name in kept and degree != -1:
            return [degree]
        return [n for n in range(1, ranks + 1) if ranks % n == 0 and (name == rest or degree == -1 or degree % n == 0)]

    found = []
    for degrees in product(*map(choices, DIMENSIONS)):
        if math.prod(degrees) == ranks:
            dense = Mesh(**dict(zip(DIMENSIONS, degrees, strict=True)))
            found += _with_experts(dense, mesh, kept)
    if not found:
        Mesh(**{name: getattr(mesh, name) for name in kept}).resolve(ranks, replicate=replicate)
    return max(found, key=lambda each: _nearness(each, mesh, sharded=not replicate))


def _with_experts(dense: Mesh, mesh: Mesh, kept: Collection[str]) -> list[Mesh]:
    """A mesh with each legal degree of experts."""
    etp = mesh.etp if "etp" in kept else dense.tp if mesh.etp > 1 else 1
    if etp not in (1, dense.tp):
        return []
    shared = dense.dp_shard * dense.cp * dense.tp
    degrees = [mesh.ep] if "ep" in kept else [ep for ep in range(1, mesh.ep + 1) if mesh.ep % ep == 0]
    return [dataclasses.replace(dense, ep=ep, etp=etp) for ep in degrees if shared % (ep * etp) == 0]


def _nearness(small: Mesh, mesh: Mesh, *, sharded: bool) -> tuple[int, float, tuple[int, ...]]:
    """How well a mesh stands for another one; more is nearer."""
    used = [name for name in Mesh.__dataclass_fields__ if getattr(mesh, name) != 1]
    wide = sum(getattr(small, name) > 1 for name in used)
    if sharded and mesh.ep > 1 and (mesh.dp_shard == -1 or mesh.efsdp > 1):
        wide += small.efsdp > 1
    ratios = [getattr(mesh, name) / getattr(small, name) for name in used if getattr(mesh, name) > 1]
    return wide, -sum(math.log2(ratio) ** 2 for ratio in ratios), tuple(getattr(small, name) for name in DIMENSIONS)


def shrink(recipe: Recipe, mesh: Mesh) -> Recipe:
    """A recipe of the same shape that runs anywhere: the same kinds of layers, divisible by the same degrees.

    Args:
        mesh: resolved.
    """
    model, data, stages = recipe.model, recipe.data, recipe.pipeline.stages_per_rank
    unit = mesh.tp * mesh.cp
    kv_heads = _smaller(model.kv_heads, unit, 2)
    group = min(model.heads // model.kv_heads, 2)
    heads = kv_heads * group
    while heads % unit or heads % kv_heads:
        heads += kv_heads
    head_dim, latent = 8, model.latent
    if latent is not None:  # each query head has keys of its own
        kv_heads = heads
        latent = dataclasses.replace(
            latent, q_rank=min(latent.q_rank, 12), kv_rank=10, nope_dim=4, rope_dim=4, value_dim=6
        )
    layers = model.layers if recipe.pipeline.split else min(model.layers, max(4, mesh.pp * max(2, stages)))
    windows = tuple(layer for layer in model.window_layers if layer < layers)
    tiny = dataclasses.replace(
        model,
        vocab_size=_smaller(model.vocab_size, mesh.tp, 48),
        dim=heads * head_dim if model.heads * model.head_dim == model.dim else heads * head_dim + 8,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        latent=latent,
        ffn=_smaller(model.ffn, mesh.tp, 24),
        window=min(model.window, 5),
        window_layers=windows or (layers - 1,) if model.window_layers else (),
        init_std=0.2,
        moe=None if model.moe is None else _shrunk_experts(model.moe, mesh),
    )
    if tiny.moe is not None and tiny.moe.first_dense:
        tiny = dataclasses.replace(tiny, moe=dataclasses.replace(tiny.moe, first_dense=1))
    length = 2 * mesh.cp * mesh.tp
    seq_len = length * max(1, 16 // length)
    micro_batch = min(data.micro_batch, 2)
    a_pass = recipe.pipeline.micro_batches or 1
    batches = -(-max(2, 2 * mesh.pp) // a_pass) * a_pass
    data = dataclasses.replace(
        data, seq_len=seq_len, micro_batch=micro_batch, global_batch=mesh.data_ranks * micro_batch * batches
    )
    every = recipe.parallel.recompute
    parallel = dataclasses.replace(
        recipe.parallel,
        unit=min(recipe.parallel.unit, tiny.layers),
        recompute=f"every:{min(recompute_every(every), tiny.layers)}" if every.startswith("every:") else every,
        loss_chunk=min(recipe.parallel.loss_chunk, 5),  # so that a border of chunks is crossed
    )
    return dataclasses.replace(recipe, model=tiny, data=data, parallel=parallel)


def _shrunk_experts(moe: MoEConfig, mesh: Mesh) -> MoEConfig:
    """As many experts as the degrees and the router's groups need, and at least 8."""
    experts = moe.experts
    least = max(8, min(2 * moe.groups, experts))  # a group's score is that of two experts
    while experts % 2 == 0 and experts // 2 >= least and (experts // 2) % mesh.ep == (experts // 2) % moe.groups == 0:
        experts //= 2
    top_k = min(moe.top_k, experts // 4 or 1)
    if moe.groups > 1:
        top_k = min(top_k, experts // moe.groups * moe.groups_kept)
    return dataclasses.replace(
        moe, experts=experts, top_k=top_k, ffn=_smaller(moe.ffn, mesh.etp, 8), shared_ffn=min(moe.shared_ffn, 12)
    )


def _smaller(size: int, degree: int, least: int) -> int:
    """A size of at least `least` and at most `size` that `degree` divides exactly if it divides `size`."""
    if size <= least:
        return size
    step = degree if size % degree == 0 else 1
    small = -(-least // step) * step
    if step == 1 and degree > 1 and small % degree == 0:
        small += 1
    return min(size, small)
