"""The training of dense_debug written out as a plain loop over the same parts, for people who want their own loop.

torchrun --standalone --nproc-per-node 2 recipes/by_hand.py --steps 100 --out runs/by_hand
"""

from itertools import islice

import torch
import torch.distributed as dist
from dense_debug import RECIPE

from composable.checkpoint.folder import latest, step_folder
from composable.checkpoint.load import load
from composable.checkpoint.save import save
from composable.data.loader import accumulation, build_loader
from composable.data.tokens import load_tokens
from composable.mesh import distributed
from composable.models.loss import IGNORE
from composable.optim.clip import clip_by_global_norm
from composable.optim.optimizers import build_optimizer, optimizer_tensors, set_learning_rate
from composable.optim.schedules import learning_rate
from composable.parallel.architecture import decoder_architecture
from composable.parallel.compose import Shape, compose
from composable.parallel.tied import copy_tied_weight
from composable.recipe import command_line


def main() -> None:
    recipe = command_line(RECIPE)
    with distributed() as device:
        mesh = recipe.mesh.resolve(dist.get_world_size(), replicate=recipe.parallel.data == "ddp")
        data = recipe.data
        tokens, _held_out = load_tokens(data.path).split(data.holdout)
        ranks = {"data_rank": mesh.data_rank(dist.get_rank()), "data_ranks": mesh.data_ranks}

        count = accumulation(data, mesh.data_ranks)
        architecture = decoder_architecture(recipe.model, recipe.torch_dtype, recipe.parallel.loss_chunk)
        shape = Shape(data.micro_batch, data.seq_len, count)
        model = compose(architecture, mesh, recipe.parallel, recipe.pipeline, shape, seed=recipe.seed, device=device)
        optimizer = build_optimizer(model.parts, recipe.optimizer, only=model.named)
        weights, state = model.named, optimizer_tensors(None, optimizer)

        checkpoints = recipe.folder / "checkpoints"
        start = 0
        if newest := latest(checkpoints):
            load(newest, weights, state)
            copy_tied_weight(model.parts)
            start = int(newest.name.removeprefix("step-"))

        batches = build_loader(tokens, data, seed=recipe.seed, position=start * data.global_batch, **ranks)
        for step in range(start + 1, recipe.steps + 1):
            micro_batches = list(islice(batches, count))
            valid = torch.tensor(sum(int((b.labels != IGNORE).sum()) for b in micro_batches), device=device)
            dist.all_reduce(valid)
            valid //= mesh.copies_of_batch
            losses = model.train(micro_batches, valid, step)  # forward and backward passes
            norm = clip_by_global_norm(
                model.parameters, recipe.optimizer.max_norm, ranks_per_stage=mesh.stage_ranks, counted=model.counted
            )
            set_learning_rate(optimizer, learning_rate(recipe.schedule, step, recipe.steps, recipe.peak_lr))
            model.update(optimizer)
            optimizer.zero_grad()
            loss = losses.sum() / valid / mesh.copies_of_loss
            dist.all_reduce(loss)
            if dist.get_rank() == 0:
                print(f"step {step} loss {loss.item()!r} grad_norm {norm.item()!r}", flush=True)
        if start < recipe.steps:
            save(step_folder(checkpoints, recipe.steps), weights, state, files={})


if __name__ == "__main__":
    main()
