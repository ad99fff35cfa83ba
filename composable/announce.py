"""What a run says of itself before its first step: what is trained, on what, where."""

import numpy as np
import torch
import torch.distributed as dist

import composable
from composable.data.answers import total
from composable.data.loader import accumulation
from composable.data.text import bigram_entropy
from composable.models.count import count_parameters, flops_per_token
from composable.observe.console import Progress
from composable.parallel.compose import split
from composable.parallel.split import describe
from composable.recipe import Recipe
from composable.state import Corpus, TrainState

BIGRAM_TOKENS = 1 << 26
"""tokens whose bigrams are counted at most: a fraction of a second"""


def announce(
    recipe: Recipe, corpus: Corpus, start: TrainState, device: torch.device, progress: Progress, remarks: list[str]
) -> None:
    """Say what is trained, on what, where; keep the recipe beside the run."""
    model, data, steps = recipe.model, recipe.data, recipe.steps
    count = count_parameters(model)
    active = "" if count.active == count.total else f", {count.active:,} used by a token"
    lines = [
        f"composable {composable.__version__}: {recipe.name}",
        f"  model   {count.total:,} parameters ({count.without_embedding:,} without embedding{active}), {model.layers} "
        f"layers of width {model.dim}, {flops_per_token(model, data.seq_len):,} FLOPs per token",
        f"  mesh    {recipe.mesh} on {dist.get_world_size()} x {device.type}, {recipe.dtype}, "
        f"{recipe.parallel.data}, accumulation {accumulation(data, recipe.mesh.data_ranks)}",
        f"  data    {data.path}: {len(corpus.train):,} tokens to train on, {len(corpus.held_out):,} held out"
        + with_a_loss(corpus.train.answers),
        f"  batch   {data.global_batch} rows of {data.seq_len} tokens, learning rate {recipe.peak_lr:g} at its peak",
    ]
    plain = corpus.train.answers is None and corpus.train.vocab_size <= 4096
    if plain and len(corpus.train) > 1 and not start.step:
        first = corpus.train.slice(0, min(len(corpus.train), BIGRAM_TOKENS))
        some = f" (of the first {len(first):,})" if len(first) < len(corpus.train) else ""
        lines[3] += f"; bigram entropy {bigram_entropy(first):.4f} nats per token{some}"
    if recipe.optimizer.scale != "none":
        config = recipe.optimizer
        lines[4] += f", scaled ({config.scale}) from {config.lr:g} at a batch of {config.reference_batch}"
    if start.step >= steps:
        hint = "raise --steps to go on, or choose another --out"
        lines.append(f"  run     {recipe.folder} is complete at step {start.step}: {hint}")
        remarks = []
    else:
        resumed = f", resumed after step {start.step}" if start.step else ""
        lines.append(f"  run     {recipe.folder}: steps {start.step + 1} to {steps}{resumed}")
        (recipe.folder / "recipe.json").write_text(recipe.to_json())
    if recipe.mesh.pp > 1:
        stages, ranks = split(recipe.architecture, recipe.mesh, recipe.pipeline, data.seq_len)
        table = describe(stages, recipe.architecture.costs(data.seq_len), ranks)
        lines.append("  stages  " + table.replace("\n", "\n          "))
    progress.say("\n".join(lines + [f"  note    {remark}" for remark in remarks]))


def with_a_loss(answers: np.ndarray | None) -> str:
    """How many tokens of the data to train on are labels, if not all."""
    return "" if answers is None else f"; {total(answers):,} of those to train on have a loss"
