"""Activation recomputation (Chen et al. 2016, arXiv:1604.06174), in place: no wrapper, so names stay as they are."""

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from composable.models.decoder import Block
from composable.moe.layer import MoE
from composable.parallel.config import recompute_every

_KEPT = (  # dear to compute; the rest is element-wise and cheap
    "aten::mm",
    "aten::addmm",
    "aten::bmm",
    "aten::_grouped_mm",
    "aten::_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_flash_attention_for_cpu",
    "aten::_scaled_dot_product_efficient_attention",
    "aten::_scaled_dot_product_cudnn_attention",
    "composable::onednn_linear",
    "mkldnn::_linear_pointwise",
)


def _policy(context: object, op: torch._ops.OpOverload, *args: object, **kwargs: object) -> CheckpointPolicy:
    name = op.name().partition(".")[0]
    return CheckpointPolicy.MUST_SAVE if name in _KEPT else CheckpointPolicy.PREFER_RECOMPUTE


def recompute(blocks: Sequence[nn.Module], kind: str) -> None:
    """Let the chosen blocks keep only their inputs (or, if selective, also matrix products and attention).

    Of a layer with experts, selective recomputation takes the attention: experts keep little more than their products
    by themselves, and torch's selection allows no sharded module within (its hooks do other things the second time).

    Args:
        blocks: in order; every N-th is chosen, the first included.
        kind: as `Parallel.recompute`.
    """
    every = recompute_every(kind)
    for block in blocks[::every] if every else ():
        options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
        chosen = block
        if kind == "selective":
            options["context_fn"] = functools.partial(create_selective_checkpoint_contexts, _policy)
            if isinstance(block, Block) and isinstance(block.mlp, MoE):
                chosen = block.self_attn
        chosen.forward = functools.partial(checkpoint, chosen.forward, **options)
