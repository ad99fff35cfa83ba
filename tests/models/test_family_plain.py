"""Llama, Qwen and Mixtral as `transformers` makes them."""

import pytest
from transformers import LlamaConfig, MixtralConfig, Qwen2Config, Qwen2MoeConfig, Qwen3Config, Qwen3MoeConfig

from tests.models.published import check

DENSE = dict(
    vocab_size=64,
    hidden_size=32,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    intermediate_size=48,
    initializer_range=0.1,
    max_position_embeddings=64,
)
EXPERTS = DENSE | dict(num_experts=8, moe_intermediate_size=16, num_experts_per_tok=2)
LLAMA3 = dict(rope_type="llama3", rope_theta=5e5, factor=8.0, original_max_position_embeddings=16)
LLAMA3 |= dict(low_freq_factor=1.0, high_freq_factor=4.0)
MODELS = {
    "llama2": LlamaConfig(**DENSE | dict(num_key_value_heads=4)),
    "llama3": LlamaConfig(**DENSE, rope_parameters=LLAMA3),
    "llama3 tied": LlamaConfig(**DENSE, rope_parameters=LLAMA3, tie_word_embeddings=True),
    "llama biased": LlamaConfig(**DENSE, attention_bias=True, mlp_bias=True),
    "qwen2": Qwen2Config(**DENSE),
    "qwen3": Qwen3Config(**DENSE, tie_word_embeddings=True),
    "mixtral": MixtralConfig(**DENSE, num_local_experts=8, num_experts_per_tok=2),
    "qwen3_moe": Qwen3MoeConfig(**EXPERTS, norm_topk_prob=True, mlp_only_layers=[0]),
    "qwen2_moe": Qwen2MoeConfig(**EXPERTS, shared_expert_intermediate_size=24),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_model_of_transformers_is_the_same_here_on_every_layout(name, ranks, tmp_path):
    check(ranks, MODELS[name], tmp_path)
