"""Llama 3 8B's exact shape (8,030,261,248 parameters), set up for one node of 8 H100 of 80 GB.

torchrun --standalone --nproc-per-node 8 recipes/dense_8b.py --data.path corpus.safetensors --out runs/8b

Parameters, gradients and optimizer state are sharded over all ranks, on more nodes too. `--shrink` trains its small
twin.
"""

from composable.data.loader import DataConfig
from composable.models.config import DecoderConfig, RopeConfig
from composable.optim.optimizers import OptimizerConfig
from composable.optim.schedules import ScheduleConfig
from composable.parallel.config import Parallel
from composable.recipe import CheckpointConfig, Recipe, ValidationConfig
from composable.train import main

RECIPE = Recipe(
    name="dense_8b",
    model=DecoderConfig(
        vocab_size=128256,
        dim=4096,
        layers=32,
        heads=32,
        kv_heads=8,
        head_dim=128,
        ffn=14336,
        max_length=8192,
        norm_eps=1e-5,
        rope=RopeConfig(theta=500000.0),  # 3.1 stretches it to 131,072 tokens afterwards
    ),
    # The Llama 3 report (arXiv:2407.21783) gives the peak in table 3, and for 405B alone, in section 3.4.1, what is
    # taken over here: 8,000 steps of warm-up, a cosine to 1 % of the peak over 1,200,000 steps, and the first batches,
    # of 4M tokens in rows of 4,096 (later of 8M and 16M in rows of 8,192). Its scaling laws (3.2.1) have this weight
    # decay.
    steps=1_200_000,
    data=DataConfig(path="python-stdlib", seq_len=4096, global_batch=1024, micro_batch=2),
    parallel=Parallel(data="zero3", precision="bfloat16", recompute="selective", compile=True, loss_chunk=2048),
    optimizer=OptimizerConfig(lr=3e-4, weight_decay=0.1),
    schedule=ScheduleConfig(kind="cosine", warmup=8000, min_ratio=0.01),
    checkpoint=CheckpointConfig(every=1000),
    validation=ValidationConfig(every=1000, steps=2),
)

if __name__ == "__main__":
    main(RECIPE)
