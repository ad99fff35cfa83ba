"""Families whose attention has a form of its own, as `transformers` makes them."""

import json
from dataclasses import replace

import pytest
from transformers import (
    AutoConfig,
    MistralConfig,
    MixtralConfig,
    Olmo2Config,
    OlmoeConfig,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from composable.models.config import DecoderConfig
from composable.models.families import family_of, from_hugging_face, has_family, to_hugging_face
from composable.moe.config import olmoe
from tests.models.published import check
from tests.models.test_family_plain import DENSE, EXPERTS

WINDOW = dict(use_sliding_window=True, sliding_window=5)
ALTERNATING = ["sliding_attention", "full_attention"] * 2
OLMO = DENSE | dict(pad_token_id=None)  # transformers gives the embedding of padding, by default token 1, no gradient
OLMOE = {name: value for name, value in OLMO.items() if name != "head_dim"} | dict(intermediate_size=16)
MODELS = {
    "mistral": MistralConfig(**DENSE, sliding_window=6),
    "olmo2": Olmo2Config(**OLMO),
    "olmo2, heads of their own": Olmo2Config(**OLMO | dict(num_key_value_heads=4), attention_bias=True),
    "olmoe": OlmoeConfig(**OLMOE, num_experts=8, num_experts_per_tok=2),
    "qwen2": Qwen2Config(**DENSE, **WINDOW, max_window_layers=2),
    "qwen3": Qwen3Config(**DENSE, **WINDOW, layer_types=ALTERNATING),
}
READ = {
    "mistral": dict(window=6),
    "olmo2": dict(norm_place="post", qk_norm=True, qk_norm_wide=True),
    "olmo2, heads of their own": dict(norm_place="post", kv_heads=4, qkv_bias=True, output_bias=True),
    "olmoe": dict(norm_place="pre", qk_norm=True, qk_norm_wide=True),
    "qwen2": dict(window=5, window_layers=(2, 3)),
    "qwen3": dict(window=5, window_layers=(0, 2), qk_norm=True, qk_norm_wide=False),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_model_of_transformers_is_the_same_here_on_every_layout(name, ranks, tmp_path):
    read = check(ranks, MODELS[name], tmp_path)
    assert replace(read, **READ[name]) == read
    assert family_of(read) == name.partition(",")[0]


TOLD = {  # what transformers makes of each is what we make of it
    "mixtral": MixtralConfig(**DENSE, num_local_experts=8, num_experts_per_tok=2, sliding_window=5),
    "qwen3_moe": Qwen3MoeConfig(**EXPERTS, **WINDOW),
    "qwen2_moe": Qwen2MoeConfig(**EXPERTS, shared_expert_intermediate_size=24, **WINDOW, max_window_layers=3),
    "mistral without": MistralConfig(**DENSE, sliding_window=None),
} | MODELS


@pytest.mark.parametrize("name", TOLD)
def test_windows_survive_the_way_through_config_json(name, tmp_path):
    TOLD[name].save_pretrained(tmp_path / "theirs")
    ours = from_hugging_face(json.loads((tmp_path / "theirs" / "config.json").read_text()))
    assert has_family(ours)
    theirs = TOLD[name]
    chosen = [kind == "sliding_attention" for kind in getattr(theirs, "layer_types", None) or []]
    chosen = chosen or [bool(getattr(theirs, "sliding_window", None))] * 4
    assert [bool(ours.window_of(layer)) for layer in range(4)] == chosen
    assert from_hugging_face(json.loads(json.dumps(to_hugging_face(ours)))) == ours
    (tmp_path / "config.json").write_text(json.dumps(to_hugging_face(ours)))
    assert from_hugging_face(AutoConfig.from_pretrained(tmp_path).to_dict()) == ours


def test_absence_means_what_it_means_to_transformers():
    mistral = to_hugging_face(DecoderConfig(window=7))
    assert mistral["model_type"] == "mistral"
    assert from_hugging_face({k: v for k, v in mistral.items() if k != "sliding_window"}).window == 4096
    assert from_hugging_face(mistral | {"sliding_window": None}).window == 0
    qwen = to_hugging_face(DecoderConfig(window=7, window_layers=(1, 3), qkv_bias=True))
    assert qwen["layer_types"] == ["full_attention", "sliding_attention"] * 2
    assert from_hugging_face(qwen | {"use_sliding_window": False}).window == 0
    old = {k: v for k, v in qwen.items() if k != "layer_types"}
    assert from_hugging_face(old).window_layers == (1, 2, 3)  # from max_window_layers on
    assert from_hugging_face(old | {"max_window_layers": 0}).window_layers == ()
    assert from_hugging_face(old | {"max_window_layers": 4}).window == 0


def test_layers_of_another_kind_and_clipped_projections_are_refused():
    qwen = to_hugging_face(DecoderConfig(window=7, window_layers=(1, 3), qkv_bias=True))
    with pytest.raises(ValueError, match="layer_types has chunked_attention"):
        from_hugging_face(qwen | {"layer_types": ["chunked_attention"] * 4})
    with pytest.raises(ValueError, match="tells of 1 layers, and there are 4"):
        from_hugging_face(qwen | {"layer_types": ["sliding_attention"]})
    wide = DecoderConfig(qk_norm=True, qk_norm_wide=True, moe=olmoe(8, 2, 16))
    told = to_hugging_face(wide)
    assert told["model_type"] == "olmoe"
    with pytest.raises(ValueError, match=r"clip_qkv=8\.0 is not supported"):
        from_hugging_face(told | {"clip_qkv": 8.0})


@pytest.mark.parametrize(
    "config",
    [
        DecoderConfig(window=7, window_layers=(1, 3)),  # a mistral has windows everywhere
        DecoderConfig(sinks=True, window=7),
        DecoderConfig(norm_place="post"),  # without OLMo's norms
        DecoderConfig(qk_norm=True, qk_norm_wide=True, head_dim=64, moe=olmoe(8, 2, 16)),  # its heads are dim / heads
    ],
    ids=["some windows", "sinks", "post-norm", "wide heads"],
)
def test_a_form_that_no_family_has_is_kept_under_our_own_name(config):
    told = json.loads(json.dumps(to_hugging_face(config)))
    assert told["model_type"] == "composable"
    assert from_hugging_face(told) == config
