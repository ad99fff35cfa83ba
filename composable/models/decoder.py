"""One decoder for every family; with parts left out it is a pipeline stage."""

from typing import Any

import torch
from torch import Tensor, nn

from composable.linear import Linear, linear
from composable.models.attention import LOCAL, Attention, Method
from composable.models.config import DecoderConfig
from composable.models.feedforward import SwiGLU
from composable.models.latent import LatentAttention
from composable.models.loss import Loss, chunked_loss, cross_entropy_sum
from composable.models.rotary import tables
from composable.moe.layer import ALONE, MoE, Runtime, TokenInfo


class Block(nn.Module):
    """Attention and feed-forward beside the residual stream; each has a norm before it, or after it."""

    def __init__(self, config: DecoderConfig, method: Method, layer: int, runtime: Runtime) -> None:
        super().__init__()
        self.post_norm = config.norm_place == "post"
        self.window = config.window_of(layer)
        if not self.post_norm:
            self.input_layernorm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.self_attn = LatentAttention(config, method) if config.latent else Attention(config, method, layer)
        self.post_attention_layernorm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.mlp: nn.Module = SwiGLU(config)
        if config.moe is not None and layer in config.expert_layers:
            shared = SwiGLU(config, config.moe.shared_ffn) if config.moe.shared_ffn else None
            self.mlp = MoE(config.dim, config.moe, layer, shared)
        if self.post_norm:
            self.post_feedforward_layernorm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.groups = runtime.groups

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Any, info: TokenInfo | None = None) -> Tensor:
        """x [B, S, D] -> [B, S, D]; `info` is for experts."""
        if self.post_norm:
            x = x + self.post_attention_layernorm(self.self_attn(x, cos, sin, mask))
            return x + self.post_feedforward_layernorm(self.feed_forward(x, info))
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, mask)
        return x + self.feed_forward(self.post_attention_layernorm(x), info)

    def feed_forward(self, x: Tensor, info: TokenInfo | None) -> Tensor:
        """x [B, S, D] -> [B, S, D] through the layer's SwiGLU or experts."""
        return self.mlp(x, info, **self.groups) if isinstance(self.mlp, MoE) else self.mlp(x)


class Body(nn.Module):
    """Embedding, blocks and last norm: what Hugging Face keeps under `model.`; a part may be absent."""

    def __init__(
        self, config: DecoderConfig, layers: range, first: bool, last: bool, method: Method, runtime: Runtime
    ) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.dim) if first or (last and config.tied) else None
        self.layers = nn.ModuleDict({str(index): Block(config, method, index, runtime) for index in layers})
        self.norm = nn.RMSNorm(config.dim, eps=config.norm_eps) if last else None


class Decoder(nn.Module):
    """A decoder-only language model, or the stage of one.

    Layers keep their global index, and every weight the name that Hugging Face gives it, whatever part is built.
    A tied head has no weight of its own: it reads the embedding's.
    """

    def __init__(
        self,
        config: DecoderConfig,
        *,
        layers: range | None = None,
        first: bool = True,
        last: bool = True,
        method: Method = LOCAL,
        runtime: Runtime = ALONE,
    ) -> None:
        super().__init__()
        self.config = config
        self.first = first
        self.mask = method.mask
        self.narrow = method.narrow
        self.runtime = runtime
        self.loss: Loss = cross_entropy_sum
        self.loss_chunk = 0  # tokens of which logits exist at once when there are labels; 0: all
        chosen = range(config.layers) if layers is None else layers
        self.model = Body(config, chosen, first, last, method, runtime)
        self.lm_head = Linear(config.dim, config.vocab_size, bias=False) if last and not config.tied else None

    @property
    def blocks(self) -> list[Block]:
        """The blocks in order: the units of recomputation, compilation and sharding."""
        return list(self.model.layers.values())  # type: ignore[arg-type]

    def forward(
        self,
        x: Tensor,
        labels: Tensor | None = None,
        positions: Tensor | None = None,
        documents: Tensor | None = None,
        indices: Tensor | None = None,
        scale: Tensor | None = None,
        step: Tensor | None = None,
        loads: Tensor | None = None,
    ) -> Tensor:
        """Logits, or the summed loss when labels are given, or hidden states in a stage without the head.

        Args:
            x: tokens [B, S], or hidden states [B, S, D] in a stage without the embedding.
            labels: [B, S], IGNORE where there is no loss.
            positions: [S] or [B, S]; 0, 1, 2... if None.
            documents: [B, S]; tokens attend only within their document. Causal attention alone if None.
            indices, scale, step, loads: what layers with experts are told, as `token_info` has it; without them there
                are no balance losses and no exploration.
        """
        if positions is None:
            positions = torch.arange(x.size(1), device=x.device)
        embed = self.model.embed_tokens
        hidden = embed(x) if self.first and embed is not None else x  # [B, S, D]
        cos, sin = tables(self.config.rope, self.config.rotary_dim, positions, hidden.dtype)
        mask = self.mask(documents)
        windows = {block.window for block in self.blocks}
        masks = {window: self.narrow(mask, window, positions) if window else mask for window in windows}
        info = None if self.config.moe is None else self.token_info(indices, scale, step, loads)
        for block in self.blocks:
            hidden = block(hidden, cos, sin, masks[block.window], info)
        if self.model.norm is None:
            return hidden
        hidden = self.model.norm(hidden)
        if labels is None:
            return self.head(hidden)
        if self.loss_chunk:
            return chunked_loss(self.loss, hidden, self.head_weight(), labels, self.loss_chunk)
        return self.loss(self.head(hidden), labels)

    def token_info(
        self, indices: Tensor | None, scale: Tensor | None, step: Tensor | None, loads: Tensor | None
    ) -> TokenInfo:
        """What `forward` was told, as layers with experts take it.

        Args:
            indices: [B, S] int64, each token's index in the step; -1: padding.
            scale: [B], all the micro-batch's share of the step's tokens.
            step: [B] int64, all the optimizer's step; what is done is recorded if there is one.
            loads: [1, L, E] int64, choices of each layer's experts among all tokens of the step.
        """
        return TokenInfo(
            indices,
            None if indices is None else indices >= 0,
            None if scale is None else scale[0],
            self.runtime.seed,
            None if step is None else step[0],
            None if loads is None else dict(zip(self.config.expert_layers, loads[0], strict=True)),
            None if step is None else self.runtime.record,
        )

    def head(self, hidden: Tensor) -> Tensor:
        """hidden [B, S, D] -> logits [B, S, V]."""
        return linear(hidden, self.head_weight())

    def head_weight(self) -> Tensor:
        """[V, D]; a tied head reads the embedding's."""
        owner = self.model.embed_tokens if self.lm_head is None else self.lm_head
        assert owner is not None
        return owner.weight
