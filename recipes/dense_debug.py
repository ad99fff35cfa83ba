"""A small Llama-style decoder on the text of Python's standard library: minutes on a CPU, any mesh by options.

torchrun --standalone --nproc-per-node 2 recipes/dense_debug.py --steps 100 --out runs/try
"""

from composable.data.loader import DataConfig
from composable.models.config import DecoderConfig
from composable.optim.optimizers import OptimizerConfig
from composable.optim.schedules import ScheduleConfig
from composable.parallel.config import Parallel
from composable.recipe import CheckpointConfig, Recipe, ValidationConfig
from composable.train import main

RECIPE = Recipe(
    name="dense_debug",
    model=DecoderConfig(vocab_size=256, dim=192, layers=4, heads=8, kv_heads=2, head_dim=24, ffn=512, max_length=2048),
    steps=400,
    data=DataConfig(path="python-stdlib", seq_len=256, global_batch=32, micro_batch=4),
    parallel=Parallel(data="zero3", unit=0),
    optimizer=OptimizerConfig(lr=3e-3, weight_decay=0.1),
    schedule=ScheduleConfig(kind="cosine", warmup=40),
    checkpoint=CheckpointConfig(every=100),
    validation=ValidationConfig(every=100, steps=8),
)

if __name__ == "__main__":
    main(RECIPE)
