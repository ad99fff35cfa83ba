"""Parameters and training FLOPs of a configuration, by arithmetic alone."""

from dataclasses import dataclass

from composable.models.config import DecoderConfig


@dataclass(frozen=True)
class ParameterCount:
    """Numbers of elements."""

    total: int
    active: int
    """used by one token: all of a dense model, of experts those that a token goes to"""
    without_embedding: int
    """total less the embedding; with tied weights the one matrix counts as the embedding"""


def attention_matrices(config: DecoderConfig) -> int:
    """Elements of the matrices of one layer's attention."""
    queries, keys = config.heads * config.head_dim, config.kv_heads * config.head_dim
    return config.dim * (2 * queries + 2 * keys)


def block_matrices(config: DecoderConfig, layer: int = 0) -> int:
    """Elements of the matrices that one token is multiplied with in one layer: of experts, those it goes to."""
    moe = config.moe
    if moe is None or layer not in config.expert_layers:
        return attention_matrices(config) + 3 * config.dim * config.ffn
    experts = 3 * config.dim * (moe.top_k * moe.ffn + moe.shared_ffn)
    return attention_matrices(config) + experts + config.dim * (moe.experts + moe.shared_gate)


def count_parameters(config: DecoderConfig) -> ParameterCount:
    """Exactly the elements of a built model's parameters."""
    queries, keys = config.heads * config.head_dim, config.kv_heads * config.head_dim
    embedding = config.vocab_size * config.dim
    active = config.dim + (0 if config.tied else embedding)
    for layer in range(config.layers):
        active += block_matrices(config, layer) + 2 * config.dim + 2 * config.head_dim * config.qk_norm
        active += (queries + 2 * keys) * config.qkv_bias + config.dim * config.output_bias
        active += _mlp_biases(config, layer)
    moe = config.moe
    idle = 0 if moe is None else len(config.expert_layers) * (moe.experts - moe.top_k) * 3 * config.dim * moe.ffn
    return ParameterCount(active + idle + embedding, active + embedding, active + idle)


def _mlp_biases(config: DecoderConfig, layer: int) -> int:
    moe = config.moe
    if moe is None or layer not in config.expert_layers:
        return (2 * config.ffn + config.dim) * config.mlp_bias
    shared = (2 * moe.shared_ffn + config.dim) * config.mlp_bias if moe.shared_ffn else 0
    return shared + moe.experts * moe.router_bias


def flops_per_token(config: DecoderConfig, seq_len: int) -> int:
    """Floating-point operations of forward and backward for one token of a sequence of `seq_len` tokens.

    6 for every element of the matrices that a token meets (the head in, the embedding's look-up out, tied or not; norms
    and biases out), and 12 * layers * heads * head_dim * seq_len for attention, as if it were not causal: half of these
    are above the diagonal (PaLM, Chowdhery et al. 2022, appendix B). Recomputation does not count.
    """
    matrices = sum(block_matrices(config, layer) for layer in range(config.layers)) + config.vocab_size * config.dim
    return 6 * matrices + 12 * config.layers * config.heads * config.head_dim * seq_len
