"""Mixtral 8x7B's exact shape (46,702,792,704 parameters, of which a token uses 12,879,925,248), for 8 nodes of 8.

torchrun --nnodes 8 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29400 recipes/moe_8x7b.py \
    --data.path corpus.safetensors --out runs/8x7b

Experts are shared by the ranks of a node, and tokens never leave it; a step has 4.2 million tokens.
"""

from composable.data.loader import DataConfig
from composable.mesh import Mesh
from composable.models.config import DecoderConfig, RopeConfig
from composable.moe.config import Balance, MoEConfig
from composable.optim.optimizers import OptimizerConfig
from composable.optim.schedules import ScheduleConfig
from composable.parallel.config import Parallel
from composable.recipe import CheckpointConfig, Recipe, ValidationConfig
from composable.train import main

RECIPE = Recipe(
    name="moe_8x7b",
    model=DecoderConfig(
        vocab_size=32000,
        dim=4096,
        layers=32,
        heads=32,
        kv_heads=8,
        head_dim=128,
        ffn=14336,
        max_length=32768,
        norm_eps=1e-5,
        rope=RopeConfig(theta=1e6),
        moe=MoEConfig(experts=8, top_k=2, ffn=14336, balance=Balance(switch=0.02, z=0.001)),
    ),
    steps=10000,
    mesh=Mesh(ep=8),
    data=DataConfig(path="python-stdlib", seq_len=4096, global_batch=1024, micro_batch=1),
    parallel=Parallel(data="zero3", precision="bfloat16", recompute="full", compile=True, loss_chunk=2048),
    optimizer=OptimizerConfig(lr=3e-4, weight_decay=0.1),
    schedule=ScheduleConfig(kind="cosine", warmup=500),
    checkpoint=CheckpointConfig(every=500),
    validation=ValidationConfig(every=500, steps=2),
)

if __name__ == "__main__":
    main(RECIPE)
