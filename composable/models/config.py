"""What a decoder is: values only."""

from dataclasses import dataclass, field
from typing import Literal

from composable.moe.config import MoEConfig


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding and how its frequencies are stretched to longer contexts."""

    theta: float = 10000.0
    """base of the geometric series of wavelengths"""
    scaling: Literal["none", "linear", "llama3", "yarn"] = "none"
    factor: float = 1.0
    """how many times longer the context became"""
    original_length: int = 8192
    """context length of the training before the stretch, in tokens"""
    low_frequency: float = 1.0
    """llama3: wavelengths above original_length / low_frequency are stretched by the whole factor"""
    high_frequency: float = 4.0
    """llama3: wavelengths below original_length / high_frequency are left alone"""
    beta_fast: float = 32.0
    """yarn: dimensions that turn more often than this within original_length are left alone"""
    beta_slow: float = 1.0
    """yarn: dimensions that turn less often than this are stretched by the whole factor"""
    attention_factor: float | None = None
    """yarn: scale of the tables; None: 0.1 ln(factor) + 1"""
    truncate: bool = True
    """yarn: the two borders between dimensions are whole numbers, the lower rounded down and the upper up"""
    mscale: float | None = None
    """yarn of DeepSeek: with `mscale_all_dim`, the tables' scale is (0.1 mscale ln(factor) + 1) over the same of
    mscale_all_dim"""
    mscale_all_dim: float | None = None
    """yarn of DeepSeek: latent attention's scores are multiplied by (0.1 mscale_all_dim ln(factor) + 1) squared"""

    def __post_init__(self) -> None:
        if self.theta <= 0:
            raise ValueError(f"rope.theta={self.theta}: the base of the wavelengths is positive, for example 10000")
        if self.scaling != "none" and self.factor < 1:
            raise ValueError(f"rope.factor={self.factor}: contexts are stretched by 1 or more")


@dataclass(frozen=True)
class LatentConfig:
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1): widths, in elements."""

    q_rank: int = 0
    """of the latent that queries are made from; 0: they are made from the hidden states (DeepSeek-V2-Lite)"""
    kv_rank: int = 512
    """of the latent that keys and values are made from"""
    nope_dim: int = 128
    """of a query or key head, the part without positions"""
    rope_dim: int = 64
    """the part with them, in keys one for all heads; the two parts together are `head_dim`"""
    value_dim: int = 128
    """of a value head"""
    interleaved: bool = True
    """rotary embedding turns the pairs (2i, 2i + 1) of the weights' order, not (i, i + rope_dim / 2)"""

    def __post_init__(self) -> None:
        for name in ("kv_rank", "nope_dim", "rope_dim", "value_dim"):
            if getattr(self, name) < 1:
                raise ValueError(f"model.latent.{name}={getattr(self, name)}: a width is 1 or more")
        if self.q_rank < 0:
            raise ValueError(f"model.latent.q_rank={self.q_rank}: it is 0 (no latent of queries) or positive")
        if self.rope_dim % 2:
            raise ValueError(
                f"model.latent.rope_dim={self.rope_dim}: rotary embedding turns pairs, so it is even: "
                f"{self.rope_dim + 1}"
            )
        if self.value_dim > self.head_dim:
            raise ValueError(
                f"model.latent.value_dim={self.value_dim}: a value head is at most as wide as a query head, which has "
                f"nope_dim + rope_dim = {self.head_dim}"
            )

    @property
    def head_dim(self) -> int:
        """Width of a query or key head."""
        return self.nope_dim + self.rope_dim


@dataclass(frozen=True)
class DecoderConfig:
    """Shape of a decoder-only transformer with grouped-query attention and SwiGLU."""

    vocab_size: int = 256
    """rows of the embedding and of the head; at least the tokenizer's"""
    dim: int = 256
    """width of the residual stream"""
    layers: int = 4
    """blocks"""
    heads: int = 8
    """query heads"""
    kv_heads: int = 4
    """key/value heads, each shared by heads / kv_heads query heads"""
    head_dim: int = 32
    """width of a head; need not be dim / heads"""
    ffn: int = 688
    """hidden width of SwiGLU"""
    max_length: int = 8192
    """longest context that the model is made for, in tokens (written to config.json)"""
    tied: bool = False
    """the head uses the embedding's weight"""
    qk_norm: bool = False
    """RMSNorm over each query and key head"""
    qk_norm_wide: bool = False
    """that norm is over all query heads, and all key heads, together (OLMo)"""
    norm_place: Literal["pre", "post"] = "pre"
    """where attention and feed-forward have their RMSNorm: before them, or after them, within the residual branch"""
    window: int = 0
    """tokens that a token sees in attention, itself and those before it; 0: all"""
    window_layers: tuple[int, ...] = ()
    """the layers with that window, by index; none named: all"""
    sinks: bool = False
    """a learnt logit for each query head joins its softmax and takes its share of the weights (gpt-oss)"""
    qkv_bias: bool = False
    """biases on the query, key and value projections"""
    output_bias: bool = False
    """a bias on the attention's output projection"""
    mlp_bias: bool = False
    """biases on SwiGLU's projections"""
    norm_eps: float = 1e-5
    init_std: float = 0.02
    """standard deviation of initial weights; projections back into the residual stream get init_std / sqrt(2 layers)"""
    rope: RopeConfig = field(default_factory=RopeConfig)
    latent: LatentConfig | None = None
    """multi-head latent attention in place of grouped queries; `head_dim` is then its query head's; None: not"""
    mtp: int = 0
    """layers for multi-token prediction that a published model's files have after its `layers`: they are told of in
    config.json and carried by conversions; training leaves them out"""
    moe: MoEConfig | None = None
    """experts in place of SwiGLU, in the layers from `moe.first_dense` on; None: none"""

    def __post_init__(self) -> None:
        for name in ("vocab_size", "dim", "layers", "heads", "kv_heads", "head_dim", "ffn", "max_length"):
            if getattr(self, name) < 1:
                raise ValueError(f"model.{name}={getattr(self, name)}: a size is 1 or more")
        if self.heads % self.kv_heads:
            legal = [n for n in range(1, self.heads + 1) if self.heads % n == 0]
            near = min(legal, key=lambda n: abs(n - self.kv_heads))
            raise ValueError(
                f"model.kv_heads={self.kv_heads}: each key/value head serves the same number of the {self.heads} query "
                f"heads, so it must divide {self.heads}; the nearest is {near}"
            )
        if self.latent is None and self.head_dim % 2:
            raise ValueError(
                f"model.head_dim={self.head_dim}: rotary embedding turns pairs, so it is even: {self.head_dim + 1}"
            )
        self._check_attention()
        if self.mtp < 0:
            raise ValueError(f"model.mtp={self.mtp}: a number of layers is 0 or more")
        if self.latent is not None:
            self._check_latent(self.latent)
        if self.moe is not None and self.moe.first_dense >= self.layers:
            raise ValueError(
                f"model.moe.first_dense={self.moe.first_dense}: the model has {self.layers} layers; write "
                f"{self.layers - 1} or less"
            )

    def _check_attention(self) -> None:
        if self.qk_norm_wide and not self.qk_norm:
            raise ValueError("model.qk_norm_wide=True with model.qk_norm=False: there is no norm to widen; set qk_norm")
        if self.norm_place not in ("pre", "post"):
            raise ValueError(f"model.norm_place={self.norm_place!r}: write pre or post")
        if self.window < 0:
            raise ValueError(f"model.window={self.window}: it is 0 (no window) or a number of tokens")
        if self.latent is not None and (self.window or self.sinks):
            raise ValueError(
                "model.window and model.sinks are of grouped-query attention; leave them out of model.latent"
            )
        if self.window_layers and not self.window:
            raise ValueError(f"model.window_layers={self.window_layers} with model.window=0: say how wide it is")
        if list(self.window_layers) != sorted(set(self.window_layers) & set(range(self.layers))):
            raise ValueError(
                f"model.window_layers={self.window_layers}: write indices of the {self.layers} layers, each once and "
                "in order"
            )

    def _check_latent(self, latent: LatentConfig) -> None:
        for name, value, why in (
            ("head_dim", latent.head_dim, "latent.nope_dim + latent.rope_dim, the width of a query head"),
            ("kv_heads", self.heads, "the number of query heads: each has keys and values of its own"),
        ):
            if getattr(self, name) != value:
                raise ValueError(f"model.{name}={getattr(self, name)} with model.latent: it is {why}: {value}")
        if self.qk_norm:
            raise ValueError("model.qk_norm with model.latent: its latents have norms of their own; leave it out")

    def window_of(self, layer: int) -> int:
        """Tokens that a token sees in the attention of a layer; 0: all."""
        return self.window if not self.window_layers or layer in self.window_layers else 0

    @property
    def rotary_dim(self) -> int:
        """Elements of a query or key head that rotary embedding turns."""
        return self.head_dim if self.latent is None else self.latent.rope_dim

    @property
    def value_dim(self) -> int:
        """Width of a value head."""
        return self.head_dim if self.latent is None else self.latent.value_dim

    @property
    def expert_layers(self) -> range:
        """Global indices of the layers that have experts."""
        return range(self.layers, self.layers) if self.moe is None else range(self.moe.first_dense, self.layers)
