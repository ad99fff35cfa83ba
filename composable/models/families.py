"""Hugging Face's config.json <-> ours: tables, and no class per family.

A family holds a configuration if reading what it writes gives the same model; one that no family holds is written in
our own terms. Names of weights are in `names.py`.
"""

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, get_args, get_type_hints

from composable.models import deepseek, windows
from composable.models.config import DecoderConfig, LatentConfig, RopeConfig
from composable.moe.config import MoEConfig

OWN = "composable"
"""`model_type` of a configuration that no family holds, and the key under which its config.json keeps our fields"""


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
    told: Callable[[DecoderConfig], Mapping[str, Any]] = lambda config: {}
    """theirs -> value, of keys that several of our fields make, or that are told otherwise than elsewhere"""
    heard: Callable[[Mapping[str, Any]], Mapping[str, Any]] = lambda config: {}
    """config.json -> ours -> value, the other way"""

    @property
    def parts(self) -> set[str]:
        """The parts of a configuration that its models have, of those in `_PARTS`."""
        return {ours.partition(".")[0] for ours in self.keys if "." in ours}


_PARTS: Mapping[str, type] = {"moe": MoEConfig, "latent": LatentConfig}  # of DecoderConfig, where it has them
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
        "mscale": "mscale",
        "mscale_all_dim": "mscale_all_dim",
        "truncate": "truncate",
    },
}
_BIAS = {"qkv_bias": "attention_bias", "output_bias": "attention_bias"}
_QWEN_EXPERTS = {
    "moe.experts": "num_experts",
    "moe.top_k": "num_experts_per_tok",
    "moe.ffn": "moe_intermediate_size",
    "moe.normalise": "norm_topk_prob",
    "moe.first_dense": "mlp_only_layers",
}
_QWEN_ABSENT = {"norm_topk_prob": False, "qkv_bias": True}
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
    "llama": Family("LlamaForCausalLM", _BIAS | {"mlp_bias": "mlp_bias"}),
    "mistral": Family("MistralForCausalLM", told=windows.MISTRAL.told, heard=windows.MISTRAL.heard),
    "qwen2": Family("Qwen2ForCausalLM", fixed={"qkv_bias": True}, told=windows.QWEN.told, heard=windows.QWEN.heard),
    "qwen3": Family("Qwen3ForCausalLM", _BIAS, {"qk_norm": True}, told=windows.QWEN.told, heard=windows.QWEN.heard),
    "olmo2": Family("Olmo2ForCausalLM", _BIAS, {"norm_place": "post", "qk_norm": True, "qk_norm_wide": True}),
    "mixtral": Family(
        "MixtralForCausalLM",
        {"moe.experts": "num_local_experts", "moe.top_k": "num_experts_per_tok", "moe.ffn": "intermediate_size"},
        {"moe.score": "softmax", "moe.normalise": True},
        told=windows.MIXTRAL.told,
        heard=windows.MIXTRAL.heard,
    ),
    "olmoe": Family(
        "OlmoeForCausalLM",
        _BIAS
        | {"moe.experts": "num_experts", "moe.top_k": "num_experts_per_tok", "moe.ffn": "intermediate_size"}
        | {"moe.normalise": "norm_topk_prob"},
        {"qk_norm": True, "qk_norm_wide": True, "moe.score": "softmax"},
        {"norm_topk_prob": False},
        {"clip_qkv": None},
        heard=lambda config: {"head_dim": config["hidden_size"] // config["num_attention_heads"]},  # no other is read
    ),
    "qwen3_moe": Family(
        "Qwen3MoeForCausalLM",
        _BIAS | _QWEN_EXPERTS,
        {"qk_norm": True, "moe.score": "softmax"},
        _QWEN_ABSENT,
        {"decoder_sparse_step": 1},
        windows.QWEN3_MOE.told,
        windows.QWEN3_MOE.heard,
    ),
    "qwen2_moe": Family(
        "Qwen2MoeForCausalLM",
        {"qkv_bias": "qkv_bias"} | _QWEN_EXPERTS | {"moe.shared_ffn": "shared_expert_intermediate_size"},
        {"moe.score": "softmax", "moe.shared_gate": True},
        _QWEN_ABSENT,
        {"decoder_sparse_step": 1},
        windows.QWEN2_MOE.told,
        windows.QWEN2_MOE.heard,
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
        {"head_dim": 64, "attention_bias": True, "swiglu_limit": 7.0},
        {"swiglu_alpha": 1.702},
        windows.GPT_OSS.told,
        windows.GPT_OSS.heard,
    ),
    "deepseek_v2": Family(
        "DeepseekV2ForCausalLM",
        _DEEPSEEK | {"mlp_bias": "mlp_bias"},
        {"moe.score": "softmax", "moe.normalise": False, "latent.interleaved": True},
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
        only={"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1},
        told=deepseek.told,
        heard=deepseek.heard,
    ),
}
_OPTIONS = ("balance", "capacity", "exploration", "upcycle", "granularity", "dispatcher")  # of MoEConfig: of training
_ALSO = {"num_experts": "num_local_experts"}  # theirs -> what transformers 5 calls it in some families


def _bottom(layers: list[int]) -> int:
    if sorted(layers) != list(range(len(layers))):
        raise ValueError(f"config.json: mlp_only_layers={layers}: the dense layers must be the lowest, [0, 1...]")
    return len(layers)


_THROUGH: Mapping[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {  # theirs -> (to theirs, to ours)
    "mlp_only_layers": (lambda first_dense: list(range(first_dense)), _bottom),
    "q_lora_rank": (lambda rank: rank or None, lambda rank: rank),
}


def family_of(config: DecoderConfig) -> str:
    """The `model_type` under which the configuration is saved: `OWN` if no family of Hugging Face's holds it.

    Training options (balance, capacity, exploration, upcycling) have no say.
    """
    plain = computed(config)
    for name, family in FAMILIES.items():
        if family.parts == {part for part in _PARTS if getattr(plain, part) is not None} and _holds(family, plain):
            return name
    return OWN


def has_family(config: DecoderConfig) -> bool:
    """Whether `transformers`, given what is saved, computes the same: there is no temperature of routers there."""
    return family_of(config) != OWN and (config.moe is None or config.moe.exploration.temperature_end == 1)


def to_hugging_face(config: DecoderConfig, dtype: str = "float32") -> dict[str, Any]:
    """The content of config.json: what `transformers` needs to build the same model, or our own fields if it cannot."""
    name = family_of(config)
    if name == OWN:
        return {"model_type": OWN, "torch_dtype": dtype, OWN: dataclasses.asdict(config)}
    head = {"architectures": [FAMILIES[name].architecture], "model_type": name, "torch_dtype": dtype}
    balance = {} if config.moe is None else {"router_aux_loss_coef": config.moe.balance.switch}
    return head | _written(config, FAMILIES[name]) | balance


def from_hugging_face(config: Mapping[str, Any]) -> DecoderConfig:
    """Read the content of a config.json; training options that it does not tell have their defaults.

    Raises:
        ValueError: a family that is not in the table, or a model of one that our decoder does not compute.
    """
    name = str(config.get("model_type"))
    if name == OWN:
        return _built(DecoderConfig, config[OWN])
    if name not in FAMILIES:
        raise ValueError(
            f"config.json: model_type {name!r} is not supported; supported are {', '.join([*FAMILIES, OWN])}"
        )
    return _read(config, FAMILIES[name])


def computed(config: DecoderConfig) -> DecoderConfig:
    """What the outputs are computed with: training options, and fields that have no effect beside others, at their
    default. (The router's last temperature counts as an option of training.)"""
    rope = RopeConfig(
        theta=config.rope.theta,
        scaling=config.rope.scaling,
        **{ours: getattr(config.rope, ours) for ours in _ROPE[config.rope.scaling]},
    )
    told = ("init_std", "max_length", "mtp")
    plain = dataclasses.replace(config, rope=rope, **{name: getattr(DecoderConfig, name) for name in told})
    if len(config.window_layers) == config.layers:
        plain = dataclasses.replace(plain, window_layers=())
    if config.moe is None:
        return plain
    options: dict[str, Any] = {name: getattr(MoEConfig(), name) for name in _OPTIONS}
    moe = dataclasses.replace(config.moe, **options)
    if moe.groups == moe.groups_kept:
        moe = dataclasses.replace(moe, groups=1, groups_kept=1, group_score=MoEConfig.group_score)
    if moe.score == "topk_softmax":
        moe = dataclasses.replace(moe, normalise=True)
    return dataclasses.replace(plain, moe=moe, ffn=config.ffn if moe.first_dense else moe.ffn)


def differences(there: DecoderConfig, here: DecoderConfig) -> list[str]:
    """What makes two models different functions of their weights: each field as it is there and here."""
    was, now = (flat(dataclasses.asdict(computed(config))) for config in (there, here))
    fields = [name for name in {**was, **now} if was.get(name) != now.get(name)]
    return [f"model.{name} is {was.get(name)} there and {now.get(name)} here" for name in fields]


def _holds(family: Family, plain: DecoderConfig) -> bool:
    fixed = all(_get(plain, ours) == value for ours, value in family.fixed.items())
    return fixed and computed(_read(_written(plain, family), family)) == plain


def _get(config: DecoderConfig, ours: str) -> Any:
    part, _, name = ours.rpartition(".")
    return getattr(getattr(config, part) if part else config, name)


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested dictionaries as one, its names joined by dots."""
    out: dict[str, Any] = {}
    for name, value in values.items():
        out |= flat(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {prefix + name: value}
    return out


def _written(config: DecoderConfig, family: Family) -> dict[str, Any]:
    out: dict[str, Any] = {"hidden_act": "silu"}
    for ours, theirs in {**_SAME, **family.keys}.items():
        value = _get(config, ours)
        out[theirs] = _THROUGH[theirs][0](value) if theirs in _THROUGH else value
    rope = config.rope
    scaling = {theirs: getattr(rope, ours) for ours, theirs in _ROPE[rope.scaling].items()}
    scaling = {key: value for key, value in scaling.items() if value is not None}
    return {**out, **family.only, **family.told(config)} | {
        "rope_theta": rope.theta,
        "rope_scaling": None if rope.scaling == "none" else {"rope_type": rope.scaling, **scaling},
    }


def _read(config: Mapping[str, Any], family: Family) -> DecoderConfig:
    for theirs, only in ({"hidden_act": "silu"} | dict(family.only)).items():
        if config.get(theirs, only) != only:
            raise ValueError(f"config.json: {theirs}={config[theirs]!r} is not supported; supported is {only!r}")
    flat_values = dict(family.fixed)
    for ours, theirs in {**_SAME, **family.keys}.items():
        value = config.get(theirs, config.get(_ALSO.get(theirs, "")))
        value = family.absent.get(theirs) if value is None else value
        if value is not None:
            flat_values[ours] = _THROUGH[theirs][1](value) if theirs in _THROUGH else value
    flat_values |= family.heard(config)
    values: dict[str, Any] = {part: {} for part in family.parts}
    for ours, value in flat_values.items():
        part, _, name = ours.rpartition(".")
        (values[part] if part else values)[name] = value
    values.setdefault("kv_heads", values["heads"])
    values.setdefault("head_dim", values["dim"] // values["heads"])
    built = {part: _PARTS[part](**values.pop(part)) for part in family.parts}
    return DecoderConfig(**values, **built, rope=_rope(config))


def mtp_names(config: Mapping[str, Any]) -> Callable[[str], bool]:
    """Which tensors of a model's files are its layers for multi-token prediction.

    These come after the others, `model.layers.61.` in DeepSeek-V3, and hold copies of the embedding and of the head.

    Args:
        config: the content of config.json.

    Returns:
        name of a tensor -> whether it is theirs; of a model without such layers, and of a family that is not in the
        table, never.
    """
    name = str(config.get("model_type"))
    model = from_hugging_face(config) if name in (OWN, *FAMILIES) else None
    layers = range(model.layers, model.layers + model.mtp) if model else range(0)
    prefixes = tuple(f"model.layers.{layer}." for layer in layers)
    return lambda name: name.startswith(prefixes)


def _rope(config: Mapping[str, Any]) -> RopeConfig:
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


def _built(kind: type, values: Mapping[str, Any]) -> Any:
    """The dataclass of `dataclasses.asdict`'s values, those in it included."""
    hints = get_type_hints(kind)
    if unknown := sorted(values.keys() - hints.keys()):
        raise ValueError(
            f"config.json: {OWN} has {', '.join(unknown)}, of which this version's {kind.__name__} knows nothing; "
            "update composable"
        )
    out = {}
    for name, value in values.items():
        inner = [hint for hint in (hints[name], *get_args(hints[name])) if dataclasses.is_dataclass(hint)]
        value = tuple(value) if isinstance(value, list) else value  # JSON has no tuples
        out[name] = _built(inner[0], value) if inner and isinstance(value, Mapping) else value  # type: ignore[arg-type]
    return kind(**out)
