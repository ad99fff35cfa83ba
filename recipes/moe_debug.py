"""A small decoder with 8 experts a layer on the text of Python's standard library: minutes on a CPU, on any mesh.

torchrun --standalone --nproc-per-node 2 recipes/moe_debug.py --mesh.ep 2 --steps 100 --out runs/try-moe
"""

from composable.data.loader import DataConfig
from composable.models.config import DecoderConfig
from composable.moe.config import Balance, MoEConfig
from composable.optim.optimizers import OptimizerConfig
from composable.optim.schedules import ScheduleConfig
from composable.parallel.config import Parallel
from composable.recipe import CheckpointConfig, Recipe, ValidationConfig
from composable.train import main

RECIPE = Recipe(
    name="moe_debug",
    model=DecoderConfig(
        vocab_size=256,
        dim=192,
        layers=4,
        heads=8,
        kv_heads=2,
        head_dim=24,
        max_length=2048,
        qk_norm=True,
        moe=MoEConfig(experts=8, top_k=2, ffn=256, balance=Balance(switch=0.01, z=0.001)),
    ),
    steps=300,
    data=DataConfig(path="python-stdlib", seq_len=256, global_batch=32, micro_batch=4),
    parallel=Parallel(data="zero3", unit=0),
    optimizer=OptimizerConfig(lr=3e-3, weight_decay=0.1),
    schedule=ScheduleConfig(kind="cosine", warmup=40),
    checkpoint=CheckpointConfig(every=100),
    validation=ValidationConfig(every=100, steps=8),
)

if __name__ == "__main__":
    main(RECIPE)
