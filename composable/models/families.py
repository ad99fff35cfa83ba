"""Hugging Face's config.json <-> ours, by the table of `family_table.py`.

A family holds a configuration if reading what it writes gives the same model; one that no family holds is written in
our own terms. Names of weights are in `names.py`.
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any, get_args, get_type_hints

from composable.models.config import DecoderConfig, RopeConfig
from composable.models.family_table import ALSO, FAMILIES, OTHER, PARTS, ROPE, SAME, THROUGH, Family
from composable.moe.config import MoEConfig

OWN = "composable"
"""`model_type` of a configuration that no family holds, and the key under which its config.json keeps our fields"""


ONLY = {"hidden_act": "silu", "is_causal": True, "attention_dropout": 0, "router_jitter_noise": 0}
"""theirs -> the one value that is computed here, in all families"""
_OPTIONS = ("balance", "capacity", "exploration", "upcycle", "granularity", "dispatcher")  # of MoEConfig: of training


def family_of(config: DecoderConfig) -> str:
    """The `model_type` under which the configuration is saved: `OWN` if no family of Hugging Face's holds it.

    Training options (balance, capacity, exploration, upcycling) have no say.
    """
    plain = computed(config)
    for name, family in FAMILIES.items():
        if family.parts == {part for part in PARTS if getattr(plain, part) is not None} and _holds(family, plain):
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
        others = sorted(config.keys() - known_keys())
        has = f"; no family here has its {', '.join(others)}" if others else ""
        raise ValueError(
            f"config.json: model_type {name!r} is not supported; supported are {', '.join([*FAMILIES, OWN])}{has}"
        )
    return _read(config, FAMILIES[name])


def known_keys(families: Iterable[Family] = FAMILIES.values()) -> set[str]:
    """Keys of config.json that one of the families is read from, or that have no say in what is computed."""
    tables = [SAME, *(family.keys for family in families)]
    read = {theirs for table in tables for theirs in table.values()}
    read |= {theirs for family in families for table in (family.absent, family.only) for theirs in table}
    return read | {*ALSO.values(), *ONLY} | OTHER


def unread(config: Mapping[str, Any]) -> list[str]:
    """Keys that a family's config.json has and no model of it is read from, but for those that say null, false or 0."""
    if (name := str(config.get("model_type"))) not in FAMILIES:
        return []
    return sorted(key for key in config.keys() - known_keys([FAMILIES[name]]) if config[key])


def computed(config: DecoderConfig) -> DecoderConfig:
    """What the outputs are computed with: training options, and fields that have no effect beside others, at their
    default. (The router's last temperature counts as an option of training.)"""
    rope = RopeConfig(
        theta=config.rope.theta,
        scaling=config.rope.scaling,
        **{ours: getattr(config.rope, ours) for ours in ROPE[config.rope.scaling]},
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
    one = [part for part in PARTS if (getattr(there, part) is None) != (getattr(here, part) is None)]
    only = [f"model.{part} is {'here' if getattr(there, part) is None else 'there'} alone" for part in one]
    plain = (dataclasses.asdict(computed(config)) for config in (there, here))
    was, now = (flat({name: value for name, value in fields.items() if name not in one}) for fields in plain)
    fields = [name for name in {**was, **now} if was.get(name) != now.get(name)]
    return only + [f"model.{name} is {was.get(name)} there and {now.get(name)} here" for name in fields]


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
    for ours, theirs in {**SAME, **family.keys}.items():
        value = _get(config, ours)
        out[theirs] = THROUGH[theirs][0](value) if theirs in THROUGH else value
    rope = config.rope
    scaling = {theirs: getattr(rope, ours) for ours, theirs in ROPE[rope.scaling].items()}
    scaling = {key: value for key, value in scaling.items() if value is not None}
    return {**out, **family.only, **family.told(config)} | {
        "rope_theta": rope.theta,
        "rope_scaling": {"rope_type": rope.scaling, **scaling} if rope.scaling != "none" else _unscaled(family),
    }


def _unscaled(family: Family) -> dict[str, str] | None:
    """What says that nothing is stretched: nothing, unless that would say something else."""
    return {"rope_type": "default"} if family.rope else None


def _read(config: Mapping[str, Any], family: Family) -> DecoderConfig:
    wanted = {**ONLY, **family.only}
    others = [
        f"{theirs}={config[theirs]!r} is not supported; supported is {only!r}"
        for theirs, only in wanted.items()
        if config.get(theirs, only) not in (only, None)
    ]
    if others:
        raise ValueError(f"config.json: {'; '.join(others)}")
    flat_values = dict(family.fixed)
    for ours, theirs in {**SAME, **family.keys}.items():
        value = config.get(theirs, config.get(ALSO.get(theirs, "")))
        value = family.absent.get(theirs) if value is None else value
        if value is not None:
            flat_values[ours] = THROUGH[theirs][1](value) if theirs in THROUGH else value
    flat_values |= family.heard(config)
    values: dict[str, Any] = {part: {} for part in family.parts}
    for ours, value in flat_values.items():
        part, _, name = ours.rpartition(".")
        (values[part] if part else values)[name] = value
    values.setdefault("kv_heads", values["heads"])
    values.setdefault("head_dim", values["dim"] // (values["heads"] or 1))  # 0 is refused below
    built = {part: PARTS[part](**values.pop(part)) for part in family.parts}
    return DecoderConfig(**values, **built, rope=_rope(config, family))


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


def _rope(config: Mapping[str, Any], family: Family) -> RopeConfig:
    given = [config[key] for key in ("rope_scaling", "rope_parameters") if config.get(key)]
    if len(given) == 2 and given[0] != given[1]:
        raise ValueError("config.json: rope_scaling and rope_parameters differ; leave one of them out")
    theirs = given[0] if given else family.rope
    if not isinstance(theirs, Mapping) or any(isinstance(value, Mapping) for value in theirs.values()):
        raise ValueError(f"config.json: rotary embedding {theirs!r} is not supported: layers all have the same one")
    scaling = theirs.get("rope_type") or theirs.get("type") or "default"
    scaling = "none" if scaling == "default" else scaling
    if scaling not in ROPE:
        raise ValueError(f"config.json: rope type {scaling!r} is not supported; supported are {', '.join(ROPE)}")
    if "latent" in family.parts and scaling in ("linear", "llama3") and theirs.get("mscale_all_dim"):
        raise ValueError(f"config.json: mscale_all_dim with rope type {scaling} is not supported; it is with yarn")
    values = {ours: theirs[key] for ours, key in ROPE[scaling].items() if theirs.get(key) is not None}
    if scaling in ("yarn", "llama3"):
        original = config.get("original_max_position_embeddings") or values.get("original_length")
        values["original_length"] = original or config["max_position_embeddings"]
        if scaling == "yarn":
            values.setdefault("factor", config["max_position_embeddings"] / values["original_length"])
    if scaling != "none" and "factor" not in values:
        raise ValueError(
            f"config.json: rope type {scaling} without a factor; say how many times contexts are stretched"
        )
    theta = theirs.get("rope_theta", config.get("rope_theta", family.absent.get("rope_theta", 10000.0)))
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
