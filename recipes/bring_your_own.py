"""A Llama of the `transformers` library, its own classes, trained on data, tensor and pipeline ranks.

torchrun --standalone --nproc-per-node 8 recipes/bring_your_own.py --mesh.tp 2 --mesh.pp 2 --steps 5

Any model takes part that has a list of blocks: say what stands before and after them, how it is called, and how torch's
tensor styles cut its matrices. In tools/verify.py add `--tolerance 1e-5` to `--parallel.compile`: these classes compute
norms and angles in float32 whatever the dtype is, and compiled code rounds otherwise.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from transformers import LlamaConfig, LlamaForCausalLM

from composable.data.loader import DataConfig
from composable.models.config import DecoderConfig
from composable.models.families import to_hugging_face
from composable.optim.optimizers import OptimizerConfig
from composable.optim.schedules import ScheduleConfig
from composable.parallel.architecture import Architecture
from composable.parallel.foreign import foreign_architecture
from composable.recipe import CheckpointConfig, Recipe
from composable.train import main

PLAN = {  # the embedding stays whole: the backward pass of one in shards fails before compiled blocks (torch 2.13)
    "model.layers.*.self_attn.[qkv]_proj": ColwiseParallel(),
    "model.layers.*.self_attn.o_proj": RowwiseParallel(),
    "model.layers.*.mlp.gate_proj": ColwiseParallel(),
    "model.layers.*.mlp.up_proj": ColwiseParallel(),
    "model.layers.*.mlp.down_proj": RowwiseParallel(),
    "lm_head": ColwiseParallel(output_layouts=Replicate()),
}


def call(forward: Callable[..., Any], x: Tensor, positions: Tensor, documents: Tensor | None) -> Tensor:
    """Documents need no mask here: the model finds their borders where positions start again."""
    return forward(input_ids=x, position_ids=positions, use_cache=False).logits


def llama(recipe: Recipe) -> Architecture:
    """Built from the recipe's sizes, so that every option of `model` holds for it."""
    shape = to_hugging_face(recipe.model)
    if shape["model_type"] != "llama":
        raise ValueError(
            f"model.* describes a {shape['model_type']}; Llama has no q/k norms, and biases on q, k, v, o alike"
        )
    config = LlamaConfig(**shape, attn_implementation="sdpa")
    return foreign_architecture(
        lambda: LlamaForCausalLM(config),
        call,
        blocks="model.layers",
        first=["model.embed_tokens"],
        last=["model.norm", "lm_head"],
        plan=PLAN,
        width=recipe.model.dim,
        dtype=recipe.torch_dtype,
        std=recipe.model.init_std,
    )


RECIPE = Recipe(
    name="bring_your_own",
    foreign=llama,
    model=DecoderConfig(vocab_size=256, dim=128, layers=4, heads=8, kv_heads=4, head_dim=16, ffn=352, max_length=2048),
    steps=200,
    data=DataConfig(path="python-stdlib", seq_len=256, global_batch=32, micro_batch=4),
    optimizer=OptimizerConfig(lr=3e-3),
    schedule=ScheduleConfig(warmup=20),
    checkpoint=CheckpointConfig(every=100),
)

if __name__ == "__main__":
    main(RECIPE)
