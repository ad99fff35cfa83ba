"""Hugging Face's config.json <-> ours: tables, no classes.

Our modules have the names that Hugging Face gives the same weights, so the families here need no table of names.
"""

from typing import Any

from composable.models.config import DecoderConfig, RopeConfig

_SAME = {  # ours -> theirs, for every family below
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
_ROPE = {  # scaling -> ours -> theirs
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
    },
}
_FEATURES = {  # family -> (qk_norm, qkv_bias, output_bias, mlp_bias) that it can hold
    ("llama", "LlamaForCausalLM"): {(False, bias, bias, mlp) for bias in (False, True) for mlp in (False, True)},
    ("qwen2", "Qwen2ForCausalLM"): {(False, True, False, False)},
    ("qwen3", "Qwen3ForCausalLM"): {(True, bias, bias, False) for bias in (False, True)},
}


def to_hugging_face(config: DecoderConfig, dtype: str = "float32") -> dict[str, Any]:
    """The content of config.json: what `transformers` needs to build the same model.

    Raises:
        ValueError: no family of Hugging Face's has this combination of norms and biases.
    """
    features = (config.qk_norm, config.qkv_bias, config.output_bias, config.mlp_bias)
    fitting = [family for family, combinations in _FEATURES.items() if features in combinations]
    if not fitting:
        raise ValueError(
            f"no Hugging Face family has qk_norm={config.qk_norm}, qkv_bias={config.qkv_bias}, "
            f"output_bias={config.output_bias}, mlp_bias={config.mlp_bias} together; Llama has qkv_bias = output_bias, "
            "Qwen2 qkv_bias alone, Qwen3 qk_norm"
        )
    family, architecture = fitting[0]
    out: dict[str, Any] = {
        "architectures": [architecture],
        "model_type": family,
        "torch_dtype": dtype,
        "hidden_act": "silu",
    }
    out |= {theirs: getattr(config, ours) for ours, theirs in _SAME.items()}
    out |= {"attention_bias": config.qkv_bias, "mlp_bias": config.mlp_bias}
    rope = config.rope
    scaling = {theirs: getattr(rope, ours) for ours, theirs in _ROPE[rope.scaling].items()}
    scaling = {key: value for key, value in scaling.items() if value is not None}
    return out | {
        "rope_theta": rope.theta,
        "rope_scaling": None if rope.scaling == "none" else {"rope_type": rope.scaling, **scaling},
    }


def from_hugging_face(config: dict[str, Any]) -> DecoderConfig:
    """Read the content of a config.json.

    Raises:
        ValueError: a family that is not in the table.
    """
    family = config.get("model_type")
    known = [name for name, _ in _FEATURES]
    if family not in known:
        raise ValueError(f"config.json: model_type {family!r} is not supported; supported are {', '.join(known)}")
    values = {ours: config[theirs] for ours, theirs in _SAME.items() if theirs in config}
    values.setdefault("head_dim", values["dim"] // values["heads"])
    bias = bool(config.get("attention_bias", False))
    values |= {
        "qk_norm": family == "qwen3",
        "qkv_bias": bias or family == "qwen2",
        "output_bias": bias and family != "qwen2",
        "mlp_bias": bool(config.get("mlp_bias", False)),
    }
    return DecoderConfig(**values, rope=_rope(config))


def _rope(config: dict[str, Any]) -> RopeConfig:
    theirs = config.get("rope_parameters") or config.get("rope_scaling") or {}
    scaling = theirs.get("rope_type", theirs.get("type", "default"))
    scaling = "none" if scaling == "default" else scaling
    if scaling not in _ROPE:
        raise ValueError(f"config.json: rope type {scaling!r} is not supported; supported are {', '.join(_ROPE)}")
    values = {ours: theirs[key] for ours, key in _ROPE[scaling].items() if key in theirs}
    if scaling == "yarn" and "original_length" not in values:
        values["original_length"] = config["max_position_embeddings"]
    theta = theirs.get("rope_theta", config.get("rope_theta", 10000.0))
    return RopeConfig(**{"theta": float(theta), "scaling": scaling, **values})
