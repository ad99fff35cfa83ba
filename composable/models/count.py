"""Parameters and training FLOPs of a configuration, by arithmetic alone."""

from dataclasses import dataclass

from composable.models.config import DecoderConfig


@dataclass(frozen=True)
class ParameterCount:
    """Numbers of elements."""

    total: int
    active: int
    """used by one token: all of a dense model"""
    without_embedding: int
    """total less the embedding; with tied weights the one matrix counts as the embedding"""


def block_matrices(config: DecoderConfig) -> int:
    """Elements of the matrices that one token is multiplied with in one block."""
    queries, keys = config.heads * config.head_dim, config.kv_heads * config.head_dim
    return config.dim * (2 * queries + 2 * keys) + 3 * config.dim * config.ffn


def count_parameters(config: DecoderConfig) -> ParameterCount:
    """Exactly the elements of a built model's parameters."""
    queries, keys = config.heads * config.head_dim, config.kv_heads * config.head_dim
    block = block_matrices(config) + 2 * config.dim
    block += 2 * config.head_dim * config.qk_norm
    block += (queries + 2 * keys) * config.qkv_bias + config.dim * config.output_bias
    block += (2 * config.ffn + config.dim) * config.mlp_bias
    embedding = config.vocab_size * config.dim
    rest = config.layers * block + config.dim + (0 if config.tied else embedding)
    return ParameterCount(rest + embedding, rest + embedding, rest)


def flops_per_token(config: DecoderConfig, seq_len: int) -> int:
    """Floating-point operations of forward and backward for one token of a sequence of `seq_len` tokens.

    6 for every element of the matrices that a token meets (the head in, the embedding's look-up out, tied or not; norms
    and biases out), and 12 * layers * heads * head_dim * seq_len for attention, as if it were not causal: half of these
    are above the diagonal (PaLM, Chowdhery et al. 2022, appendix B). Recomputation does not count.
    """
    matrices = config.layers * block_matrices(config) + config.vocab_size * config.dim
    return 6 * matrices + 12 * config.layers * config.heads * config.head_dim * seq_len
