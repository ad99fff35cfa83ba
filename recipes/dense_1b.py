"""Llama 3.2 1B's exact shape (1,235,814,400 parameters), set up for one node of 8 accelerators.

torchrun --standalone --nproc-per-node 8 recipes/dense_1b.py --data.path corpus.safetensors --out runs/1b

A step has 2.1 million tokens. `tools/bench_gpu.py` measures the model on one accelerator.
"""

from composable.data.loader import DataConfig
from composable.models.config import DecoderConfig, RopeConfig
from composable.optim.optimizers import OptimizerConfig
from composable.optim.schedules import ScheduleConfig
from composable.parallel.config import Parallel
from composable.recipe import CheckpointConfig, Recipe, ValidationConfig
from composable.train import main

RECIPE = Recipe(
    name="dense_1b",
    model=DecoderConfig(
        vocab_size=128256,
        dim=2048,
        layers=16,
        heads=32,
        kv_heads=8,
        head_dim=64,
        ffn=8192,
        max_length=131072,
        tied=True,
        norm_eps=1e-5,
        rope=RopeConfig(
            theta=500000.0,
            scaling="llama3",
            factor=32.0,
            original_length=8192,
            low_frequency=1.0,
            high_frequency=4.0,
        ),
    ),
    steps=10000,
    data=DataConfig(path="python-stdlib", seq_len=4096, global_batch=512, micro_batch=4),
    parallel=Parallel(data="zero3", precision="bfloat16", recompute="selective", compile=True, loss_chunk=2048),
    optimizer=OptimizerConfig(lr=4e-4, weight_decay=0.1),
    schedule=ScheduleConfig(kind="cosine", warmup=500),
    checkpoint=CheckpointConfig(every=500),
    validation=ValidationConfig(every=500, steps=2),
)

if __name__ == "__main__":
    main(RECIPE)
