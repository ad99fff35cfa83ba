"""Llama 3.1 405B's exact shape (405,853,388,800 parameters), set up for 128 nodes of 8 H100 of 80 GB and more.

torchrun --nnodes 128 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29400 recipes/dense_405b.py \
    --data.path corpus.safetensors --out runs/405b

On 1,024 ranks: tp 8 inside a node, pp 16, and 8 data ranks that shard the optimizer's state; on the 16,384 of the
report 128 of them. `--shrink` trains its small twin.
"""

from composable.data.loader import DataConfig
from composable.mesh import Mesh
from composable.models.config import DecoderConfig, RopeConfig
from composable.optim.optimizers import OptimizerConfig
from composable.optim.schedules import ScheduleConfig
from composable.parallel.config import Parallel, Pipeline
from composable.recipe import CheckpointConfig, Recipe, ValidationConfig
from composable.train import main

RECIPE = Recipe(
    name="dense_405b",
    model=DecoderConfig(
        vocab_size=128256,
        dim=16384,
        layers=126,
        heads=128,
        kv_heads=8,
        head_dim=128,
        ffn=53248,
        max_length=8192,
        norm_eps=1e-5,
        rope=RopeConfig(theta=500000.0),  # 3.1 stretches it to 131,072 tokens afterwards
    ),
    # The Llama 3 report (arXiv:2407.21783), section 3.4.1: peak 8e-5 after 8,000 steps of warm-up, a cosine to 8e-7
    # over 1,200,000 steps, and batches of 16M tokens in rows of 8,192 (of 4M in rows of 4,096 at first, then of 8M).
    # Table 4: tp 8, pp 16. Its scaling laws (3.2.1) have this weight decay.
    steps=1_200_000,
    mesh=Mesh(tp=8, pp=16),
    data=DataConfig(path="python-stdlib", seq_len=8192, global_batch=2048, micro_batch=1),
    parallel=Parallel(data="zero1", precision="bfloat16", recompute="full", compile=True, loss_chunk=2048),
    pipeline=Pipeline(schedule="1F1B"),
    optimizer=OptimizerConfig(lr=8e-5, weight_decay=0.1),
    schedule=ScheduleConfig(kind="cosine", warmup=8000, min_ratio=0.01),
    checkpoint=CheckpointConfig(every=250, asynchronous=True),
    validation=ValidationConfig(every=1000, steps=2),
)

if __name__ == "__main__":
    main(RECIPE)
