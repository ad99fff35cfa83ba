"""DeepSeek-V3's exact shape (671,026,419,200 parameters with its routers' biases), for 256 nodes of 8 H100 of 80 GB.

torchrun --nnodes 256 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29400 recipes/moe_671b.py \
    --data.path corpus.safetensors --out runs/671b

Its module for multi-token prediction is left out. Experts are shared by 64 ranks, layers by 16, as in the report; a
token crosses to each node once. recipes/moe_671b.slurm starts it under Slurm; `--shrink` trains its small twin.
"""

from composable.data.loader import DataConfig
from composable.mesh import Mesh
from composable.models.config import DecoderConfig, LatentConfig, RopeConfig
from composable.moe.config import Balance, MoEConfig
from composable.optim.optimizers import OptimizerConfig
from composable.optim.schedules import ScheduleConfig
from composable.parallel.config import Parallel, Pipeline
from composable.recipe import CheckpointConfig, Recipe, ValidationConfig
from composable.train import main

RECIPE = Recipe(
    name="moe_671b",
    model=DecoderConfig(
        vocab_size=129280,
        dim=7168,
        layers=61,
        heads=128,
        kv_heads=128,
        head_dim=192,
        ffn=18432,  # of the first three layers
        max_length=4096,
        norm_eps=1e-6,
        init_std=0.006,
        rope=RopeConfig(theta=10000.0),  # stretched to 131,072 tokens afterwards
        latent=LatentConfig(q_rank=1536, kv_rank=512, nope_dim=128, rope_dim=64, value_dim=128),
        moe=MoEConfig(
            experts=256,
            top_k=8,
            ffn=2048,
            shared_ffn=2048,
            score="sigmoid",
            scale=2.5,
            correction=True,
            groups=8,
            groups_kept=4,
            first_dense=3,
            dispatcher="hierarchical",
            balance=Balance(sequence=1e-4, bias_rate=1e-3),
        ),
    ),
    # The DeepSeek-V3 report (arXiv:2412.19437), section 4.2: this optimizer; 2,000 steps of warm-up to 2.2e-4, which
    # stays for 10T tokens and falls to 2.2e-5 over the next 4.3T (along a cosine; here linearly: `wsd`); batches that
    # grow from 3,072 to 15,360 rows over the first 469B tokens (here 15,360 throughout). Left out are the last 0.5T, at
    # a lower rate without the bias's update. Section 3.2: pp 16 under DualPipe, ep 64 over 8 nodes, ZeRO-1.
    steps=227_000,
    mesh=Mesh(pp=16, ep=64),
    data=DataConfig(path="python-stdlib", seq_len=4096, global_batch=15360, micro_batch=1),
    parallel=Parallel(data="zero1", precision="bfloat16", recompute="full", compile=True, loss_chunk=2048),
    pipeline=Pipeline(schedule="DualPipeV", micro_batches=60),  # all 120 at once: 28 GB more in buffers
    optimizer=OptimizerConfig(lr=2.2e-4, betas=(0.9, 0.95), weight_decay=0.1, max_norm=1.0),
    schedule=ScheduleConfig(kind="wsd", warmup=2000, min_ratio=0.1, decay=0.3),
    checkpoint=CheckpointConfig(every=250, asynchronous=True),
    validation=ValidationConfig(every=1000, steps=1),
)

if __name__ == "__main__":
    main(RECIPE)
