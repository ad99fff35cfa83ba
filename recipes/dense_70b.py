"""Llama 3 70B's exact shape (70,553,706,496 parameters), set up for 8 to 64 nodes of 8 H100 of 80 GB.

torchrun --nnodes 64 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29400 recipes/dense_70b.py \
    --data.path corpus.safetensors --out runs/70b

The ranks of a node share each matrix; over nodes, parameters, gradients and optimizer state are sharded. `--shrink`
trains its small twin.
"""

from composable.data.loader import DataConfig
from composable.mesh import Mesh
from composable.models.config import DecoderConfig, RopeConfig
from composable.optim.optimizers import OptimizerConfig
from composable.optim.schedules import ScheduleConfig
from composable.parallel.config import Parallel
from composable.recipe import CheckpointConfig, Recipe, ValidationConfig
from composable.train import main

RECIPE = Recipe(
    name="dense_70b",
    model=DecoderConfig(
        vocab_size=128256,
        dim=8192,
        layers=80,
        heads=64,
        kv_heads=8,
        head_dim=128,
        ffn=28672,
        max_length=8192,
        norm_eps=1e-5,
        rope=RopeConfig(theta=500000.0),  # 3.1 stretches it to 131,072 tokens afterwards
    ),
    # The Llama 3 report (arXiv:2407.21783) gives the peak in table 3, and for 405B alone, in section 3.4.1, what is
    # taken over here: 8,000 steps of warm-up, a cosine to 1 % of the peak over 1,200,000 steps, and batches of 16M
    # tokens in rows of 8,192 (of 4M in rows of 4,096 at first, then of 8M). Its scaling laws (3.2.1) have this weight
    # decay.
    steps=1_200_000,
    mesh=Mesh(tp=8),
    data=DataConfig(path="python-stdlib", seq_len=8192, global_batch=2048, micro_batch=2),
    parallel=Parallel(data="zero3", precision="bfloat16", recompute="every:2", compile=True, loss_chunk=2048),
    optimizer=OptimizerConfig(lr=1.5e-4, weight_decay=0.1),
    schedule=ScheduleConfig(kind="cosine", warmup=8000, min_ratio=0.01),
    checkpoint=CheckpointConfig(every=500),
    validation=ValidationConfig(every=1000, steps=2),
)

if __name__ == "__main__":
    main(RECIPE)
