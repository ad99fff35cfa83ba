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

    def __post_init__(self) -> None:
        if self.theta <= 0:
            raise ValueError(f"rope.theta={self.theta}: the base of the wavelengths is positive, for example 10000")
        if self.scaling != "none" and self.factor < 1:
            raise ValueError(f"rope.factor={self.factor}: contexts are stretched by 1 or more")


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
        if self.head_dim % 2:
            raise ValueError(
                f"model.head_dim={self.head_dim}: rotary embedding turns pairs, so it is even: {self.head_dim + 1}"
            )
        if self.moe is not None and self.moe.first_dense >= self.layers:
            raise ValueError(
                f"model.moe.first_dense={self.moe.first_dense}: the model has {self.layers} layers; write "
                f"{self.layers - 1} or less"
            )

    @property
    def expert_layers(self) -> range:
        """Global indices of the layers that have experts."""
        return range(self.layers, self.layers) if self.moe is None else range(self.moe.first_dense, self.layers)
