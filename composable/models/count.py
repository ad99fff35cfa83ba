"""Parameters and training FLOPs of a configuration, by arithmetic alone."""

from dataclasses import dataclass

from composable.models.config import DecoderConfig, LatentConfig


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
    if config.latent is not None:
        return _latent_matrices(config, config.latent)
    queries, keys = config.heads * config.head_dim, config.kv_heads * config.head_dim
    return config.dim * (2 * queries + 2 * keys)


def _latent_matrices(config: DecoderConfig, latent: LatentConfig) -> int:
    queries = config.heads * latent.head_dim
    for_queries = (config.dim + queries) * latent.q_rank if latent.q_rank else config.dim * queries
    down = config.dim * (latent.kv_rank + latent.rope_dim)
    up = latent.kv_rank * config.heads * (latent.nope_dim + latent.value_dim)
    return for_queries + down + up + config.heads * latent.value_dim * config.dim


def attention_flops(config: DecoderConfig, seq_len: int, layer: int = 0) -> int:
    """Of one layer, forward and backward for one token: scores and weighted values of `seq_len` tokens, or those of
    its window."""
    seen = min(seq_len, config.window_of(layer) or seq_len)
    return 6 * config.heads * (config.head_dim + config.value_dim) * seen


def block_matrices(config: DecoderConfig, layer: int = 0) -> int:
    """Elements of the matrices that one token is multiplied with in one layer: of experts, those it goes to."""
    moe = config.moe
    if moe is None or layer not in config.expert_layers:
        return attention_matrices(config) + 3 * config.dim * config.ffn
    experts = 3 * config.dim * (moe.top_k * moe.ffn + moe.shared_ffn)
    return attention_matrices(config) + experts + config.dim * (moe.experts + moe.shared_gate)


def count_parameters(config: DecoderConfig) -> ParameterCount:
    """Exactly the elements of a built model's parameters."""
    embedding = config.vocab_size * config.dim
    active = config.dim + (0 if config.tied else embedding)
    for layer in range(config.layers):
        active += block_matrices(config, layer) + 2 * config.dim
        active += _attention_vectors(config) + config.dim * config.output_bias
        active += _mlp_biases(config, layer)
    moe = config.moe
    idle = 0
    if moe is not None:
        expert = 3 * config.dim * moe.ffn + (2 * moe.ffn + config.dim) * moe.expert_bias
        idle = len(config.expert_layers) * (moe.experts - moe.top_k) * expert
    return ParameterCount(active + idle + embedding, active + embedding, active + idle)


def _attention_vectors(config: DecoderConfig) -> int:
    """Elements of the norms within one layer's attention, and of the biases on what they are made of."""
    if (latent := config.latent) is not None:
        made = latent.q_rank + latent.kv_rank
        return made + (made + latent.rope_dim) * config.qkv_bias
    queries, keys = config.heads * config.head_dim, config.kv_heads * config.head_dim
    normed = queries + keys if config.qk_norm_wide else 2 * config.head_dim
    return normed * config.qk_norm + (queries + 2 * keys) * config.qkv_bias + config.heads * config.sinks


def _mlp_biases(config: DecoderConfig, layer: int) -> int:
    moe = config.moe
    if moe is None or layer not in config.expert_layers:
        return (2 * config.ffn + config.dim) * config.mlp_bias
    shared = (2 * moe.shared_ffn + config.dim) * config.mlp_bias if moe.shared_ffn else 0
    routed = moe.top_k * (2 * moe.ffn + config.dim) * moe.expert_bias
    return shared + routed + moe.experts * moe.router_bias


def flops_per_token(config: DecoderConfig, seq_len: int) -> int:
    """Floating-point operations of forward and backward for one token of a sequence of `seq_len` tokens.

    6 for every element of the matrices that a token meets (the head in, the embedding's look-up out, tied or not; norms
    and biases out), and 6 * layers * heads * (head_dim + value_dim) * seq_len for attention, as if it were not causal:
    half of these are above the diagonal (PaLM, Chowdhery et al. 2022, appendix B). Of layers with a window its tokens
    count in place of `seq_len`. Recomputation does not count.
    """
    matrices = sum(block_matrices(config, layer) for layer in range(config.layers)) + config.vocab_size * config.dim
    return 6 * matrices + sum(attention_flops(config, seq_len, layer) for layer in range(config.layers))
