"""Qwen3-30B-A3B's exact shape (30,532,122,624 parameters, of which a token uses 3,353,032,704), for 4 or 8 nodes of 8.

torchrun --nnodes 8 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29400 recipes/moe_30b_a3b.py \
    --data.path corpus.safetensors --out runs/30b-a3b

Set up for H100 of 80 GB. Experts are shared by the ranks of a node, and tokens never leave it. `--shrink` trains its
small twin.
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
    name="moe_30b_a3b",
    model=DecoderConfig(
        vocab_size=151936,
        dim=2048,
        layers=48,
        heads=32,
        kv_heads=4,
        head_dim=128,
        ffn=6144,  # of dense layers, of which there are none
        max_length=40960,
        qk_norm=True,
        norm_eps=1e-6,
        rope=RopeConfig(theta=1e6),
        # The Qwen3 report (arXiv:2505.09388), section 2: the choices of the whole batch are balanced. Where a rank has
        # more than one micro-batch, a forward pass without gradients counts them first. Its weight is chosen here.
        moe=MoEConfig(experts=128, top_k=8, ffn=768, balance=Balance(switch=0.001, scope="global")),
    ),
    # The report, section 3.2: rows of 4,096 tokens in its first stage. It is silent on batch and learning rate: chosen
    # here.
    steps=100_000,
    mesh=Mesh(ep=8),
    data=DataConfig(path="python-stdlib", seq_len=4096, global_batch=1024, micro_batch=16),
    parallel=Parallel(data="zero3", precision="bfloat16", recompute="full", compile=True, loss_chunk=2048),
    optimizer=OptimizerConfig(lr=3e-4, weight_decay=0.1),
    schedule=ScheduleConfig(kind="cosine", warmup=2000),
    checkpoint=CheckpointConfig(every=500),
    validation=ValidationConfig(every=500, steps=2),
)

if __name__ == "__main__":
    main(RECIPE)
