"""What each family's config.json calls what ours tells: the table, and what cannot be told by a name alone."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from composable.models import deepseek, windows
from composable.models.config import DecoderConfig, LatentConfig
from composable.moe.config import MoEConfig


@dataclass(frozen=True)
class Family:
    """How a family's config.json tells what ours tells; "moe.x" is a field of `DecoderConfig.moe`, and so on."""

    architecture: str
    keys: Mapping[str, str] = field(default_factory=dict)
    """ours -> theirs, beyond those of all families"""
    fixed: Mapping[str, Any] = field(default_factory=dict)
    """ours -> what every model of the family has"""
    absent: Mapping[str, Any] = field(default_factory=dict)
    """theirs -> what its absence means, where that is not our default"""
    only: Mapping[str, Any] = field(default_factory=dict)
    """theirs -> the one value that our decoder computes"""
    rope: Mapping[str, Any] = field(default_factory=dict)
    """what the absence of `rope_scaling` means; empty: that nothing is stretched"""
    told: Callable[[DecoderConfig], Mapping[str, Any]] = lambda config: {}
    """theirs -> value, of keys that several of our fields make, or that are told otherwise than elsewhere"""
    heard: Callable[[Mapping[str, Any]], Mapping[str, Any]] = lambda config: {}
    """config.json -> ours -> value, the other way"""

    @property
    def parts(self) -> set[str]:
        """The parts of a configuration that its models have, of those in `PARTS`."""
        return {ours.partition(".")[0] for ours in self.keys if "." in ours}


PARTS: Mapping[str, type] = {"moe": MoEConfig, "latent": LatentConfig}  # of DecoderConfig, where it has them
SAME = {  # ours -> theirs, for every family below
    "vocab_size": "vocab_size",
    "dim": "hidden_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "ffn": "intermediate_size",
    "max_length": "max_position_embeddings",
    "tied": "tie_word_embeddings",
    "norm_eps": "rms_norm_eps",
    "init_std": "initializer_range",
}
ROPE = {  # scaling -> ours -> theirs
    "none": {},
    "linear": {"factor": "factor"},
    "llama3": {
        "factor": "factor",
        "original_length": "original_max_position_embeddings",
        "low_frequency": "low_freq_factor",
        "high_frequency": "high_freq_factor",
    },
    "yarn": {
        "factor": "factor",
        "original_length": "original_max_position_embeddings",
        "beta_fast": "beta_fast",
        "beta_slow": "beta_slow",
        "attention_factor": "attention_factor",
        "mscale": "mscale",
        "mscale_all_dim": "mscale_all_dim",
        "truncate": "truncate",
    },
}
_EPS = {"rms_norm_eps": 1e-6}  # of `transformers`' classes, where it is not ours
_BIAS = {"qkv_bias": "attention_bias", "output_bias": "attention_bias"}
_QWEN_EXPERTS = {
    "moe.experts": "num_experts",
    "moe.top_k": "num_experts_per_tok",
    "moe.ffn": "moe_intermediate_size",
    "moe.normalise": "norm_topk_prob",
    "moe.first_dense": "mlp_only_layers",
}
_QWEN_ABSENT = _EPS | {"norm_topk_prob": False, "qkv_bias": True}
_DEEPSEEK = _BIAS | {
    "latent.q_rank": "q_lora_rank",
    "latent.kv_rank": "kv_lora_rank",
    "latent.nope_dim": "qk_nope_head_dim",
    "latent.rope_dim": "qk_rope_head_dim",
    "latent.value_dim": "v_head_dim",
    "moe.experts": "n_routed_experts",
    "moe.top_k": "num_experts_per_tok",
    "moe.ffn": "moe_intermediate_size",
    "moe.scale": "routed_scaling_factor",
    "moe.groups": "n_group",
    "moe.groups_kept": "topk_group",
    "moe.first_dense": "first_k_dense_replace",
}
FAMILIES: Mapping[str, Family] = {
    "llama": Family("LlamaForCausalLM", _BIAS | {"mlp_bias": "mlp_bias"}, absent=_EPS),
    "mistral": Family("MistralForCausalLM", absent=_EPS, told=windows.MISTRAL.told, heard=windows.MISTRAL.heard),
    "qwen2": Family(
        "Qwen2ForCausalLM", fixed={"qkv_bias": True}, absent=_EPS, told=windows.QWEN.told, heard=windows.QWEN.heard
    ),
    "qwen3": Family(
        "Qwen3ForCausalLM", _BIAS, {"qk_norm": True}, _EPS, told=windows.QWEN.told, heard=windows.QWEN.heard
    ),
    "olmo2": Family("Olmo2ForCausalLM", _BIAS, {"norm_place": "post", "qk_norm": True, "qk_norm_wide": True}),
    "mixtral": Family(
        "MixtralForCausalLM",
        {"moe.experts": "num_local_experts", "moe.top_k": "num_experts_per_tok", "moe.ffn": "intermediate_size"},
        {"moe.score": "softmax", "moe.normalise": True},
        {"num_experts_per_tok": 2, "rope_theta": 1e6},
        told=windows.MIXTRAL.told,
        heard=windows.MIXTRAL.heard,
    ),
    "olmoe": Family(
        "OlmoeForCausalLM",
        _BIAS
        | {"moe.experts": "num_experts", "moe.top_k": "num_experts_per_tok", "moe.ffn": "intermediate_size"}
        | {"moe.normalise": "norm_topk_prob"},
        {"qk_norm": True, "qk_norm_wide": True, "moe.score": "softmax"},
        {"norm_topk_prob": False, "num_experts_per_tok": 8},
        {"clip_qkv": None},
        heard=lambda config: {"head_dim": config["hidden_size"] // config["num_attention_heads"]},  # no other is read
    ),
    "qwen3_moe": Family(
        "Qwen3MoeForCausalLM",
        _BIAS | _QWEN_EXPERTS,
        {"qk_norm": True, "moe.score": "softmax"},
        _QWEN_ABSENT | {"num_experts_per_tok": 8},
        {"decoder_sparse_step": 1},
        told=windows.QWEN3_MOE.told,
        heard=windows.QWEN3_MOE.heard,
    ),
    "qwen2_moe": Family(
        "Qwen2MoeForCausalLM",
        {"qkv_bias": "qkv_bias"} | _QWEN_EXPERTS | {"moe.shared_ffn": "shared_expert_intermediate_size"},
        {"moe.score": "softmax", "moe.shared_gate": True},
        _QWEN_ABSENT | {"num_experts_per_tok": 4},
        {"decoder_sparse_step": 1},
        told=windows.QWEN2_MOE.told,
        heard=windows.QWEN2_MOE.heard,
    ),
    "gpt_oss": Family(
        "GptOssForCausalLM",
        _BIAS
        | {
            "moe.experts": "num_local_experts",
            "moe.top_k": "num_experts_per_tok",
            "moe.ffn": "intermediate_size",
            "moe.swiglu_limit": "swiglu_limit",
        },
        {
            "sinks": True,
            "moe.score": "topk_softmax",
            "moe.router_bias": True,
            "moe.expert_bias": True,
            "moe.fused": True,
        },
        {"head_dim": 64, "attention_bias": True, "swiglu_limit": 7.0, "num_experts_per_tok": 4, "rope_theta": 150000.0},
        {"swiglu_alpha": 1.702},
        {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096, "truncate": False},
        windows.GPT_OSS.told,
        windows.GPT_OSS.heard,
    ),
    "deepseek_v2": Family(
        "DeepseekV2ForCausalLM",
        _DEEPSEEK | {"mlp_bias": "mlp_bias"},
        {"moe.score": "softmax", "moe.normalise": False, "latent.interleaved": True},
        _EPS,
        only={"scoring_func": "softmax", "norm_topk_prob": False, "moe_layer_freq": 1},
        told=deepseek.told_of_v2,
        heard=deepseek.heard_of_v2,
    ),
    "deepseek_v3": Family(
        "DeepseekV3ForCausalLM",
        _DEEPSEEK
        | {
            "moe.normalise": "norm_topk_prob",
            "latent.interleaved": "rope_interleave",
            "mtp": "num_nextn_predict_layers",
        },
        {"moe.score": "sigmoid", "moe.correction": True},
        _EPS | {"num_experts_per_tok": 8, "routed_scaling_factor": 2.5, "n_group": 8, "topk_group": 4},
        only={"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1},
        told=deepseek.told,
        heard=deepseek.heard,
    ),
}
OTHER = {  # keys of config.json that families are read from by functions, or that have no say in what is computed
    *("rope_theta", "rope_scaling", "rope_parameters", "original_max_position_embeddings", "quantization_config"),
    *("sliding_window", "use_sliding_window", "max_window_layers", "layer_types", "n_shared_experts", "topk_method"),
    *("model_type", "auto_map", "dtype", "torch_dtype", "transformers_version", "_name_or_path"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "use_cache", "pretraining_tp", "architectures"),
    *("aux_loss_alpha", "seq_aux", "ep_size", "experts_per_token", "initial_context_length", "qk_head_dim"),
    *("output_router_logits", "router_aux_loss_coef", "output_attentions", "output_hidden_states", "return_dict"),
    *("chunk_size_feed_forward", "id2label", "label2id", "problem_type", "is_encoder_decoder"),
}
ALSO = {"num_experts": "num_local_experts"}  # theirs -> what transformers 5 calls it in some families


def _bottom(layers: list[int]) -> int:
    if sorted(layers) != list(range(len(layers))):
        raise ValueError(f"config.json: mlp_only_layers={layers}: the dense layers must be the lowest, [0, 1...]")
    return len(layers)


THROUGH: Mapping[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {  # theirs -> (to theirs, to ours)
    "mlp_only_layers": (lambda first_dense: list(range(first_dense)), _bottom),
    "q_lora_rank": (lambda rank: rank or None, lambda rank: rank),
}
