"""Llama 3.1 8B (8,030,261,248 parameters) fine-tuned on conversations, on one node of 8 accelerators.

python tools/prepare_data.py chats.jsonl --out chats.safetensors --tokenizer Llama-3.1-8B-Instruct --template tokenizer
torchrun --standalone --nproc-per-node 8 recipes/finetune_8b.py --init-from Llama-3.1-8B-Instruct --out runs/chat \
    --data.path chats.safetensors

Only answers have a loss. A row holds whole conversations, which do not see each other; a step has 64 rows, and the run
ends after three passes over the data.
"""

from composable.data.loader import DataConfig
from composable.models.config import DecoderConfig, RopeConfig
from composable.optim.optimizers import OptimizerConfig
from composable.optim.schedules import ScheduleConfig
from composable.parallel.config import Parallel
from composable.recipe import CheckpointConfig, Recipe, ValidationConfig
from composable.train import main

RECIPE = Recipe(
    name="finetune_8b",
    model=DecoderConfig(
        vocab_size=128256,
        dim=4096,
        layers=32,
        heads=32,
        kv_heads=8,
        head_dim=128,
        ffn=14336,
        max_length=131072,
        norm_eps=1e-5,
        rope=RopeConfig(
            theta=500000.0,
            scaling="llama3",
            factor=8.0,
            original_length=8192,
            low_frequency=1.0,
            high_frequency=4.0,
        ),
    ),
    init_from="Llama-3.1-8B-Instruct",  # a folder; where there is none, the run says so
    steps=1000,
    data=DataConfig(
        path="chats.safetensors",
        seq_len=4096,
        global_batch=64,
        micro_batch=1,
        packing="whole",
        document_mask=True,
        epochs=3,
    ),
    parallel=Parallel(data="zero3", precision="bfloat16", recompute="full", compile=True, loss_chunk=2048),
    optimizer=OptimizerConfig(lr=1e-5, weight_decay=0.0),
    schedule=ScheduleConfig(kind="cosine", warmup=20),
    checkpoint=CheckpointConfig(every=200),
    validation=ValidationConfig(every=50, steps=4),
)

if __name__ == "__main__":
    main(RECIPE)
