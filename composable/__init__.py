"""Train language models with every parallelism of `torch.distributed` composed, and the numbers of one process."""

__version__ = "0.1.0"
