"""DeepSeek-V2 and V3 as `transformers` makes them: latent attention, their routers, layers that come after."""

import json
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, DeepseekV2Config, DeepseekV3Config

from composable.models.config import DecoderConfig, LatentConfig, RopeConfig
from composable.models.families import family_of, from_hugging_face, has_family, mtp_names, to_hugging_face
from composable.moe.config import MoEConfig, deepseek_v3
from composable.recipe import Recipe
from composable.start import start_from
from composable.train import build_model
from tests.models.published import check, made

YARN = dict(rope_type="yarn", rope_theta=1e4, factor=8.0, original_max_position_embeddings=8, beta_fast=32, beta_slow=1)
TINY = dict(
    vocab_size=64,
    hidden_size=32,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=4,
    intermediate_size=48,
    moe_intermediate_size=16,
    num_experts_per_tok=2,
    n_routed_experts=8,
    first_k_dense_replace=1,
    q_lora_rank=20,
    kv_lora_rank=12,
    qk_nope_head_dim=10,
    qk_rope_head_dim=6,
    v_head_dim=8,
    initializer_range=0.1,
    max_position_embeddings=64,
)
GROUPS = dict(n_group=4, topk_group=2)
V2 = TINY | dict(rope_parameters=YARN | dict(mscale=0.707, mscale_all_dim=0.707))
V3 = TINY | GROUPS | dict(rope_parameters=YARN | dict(mscale=0.9, mscale_all_dim=0.7))
MODELS = {
    "v2": DeepseekV2Config(
        **V2, **GROUPS, n_shared_experts=2, topk_method="group_limited_greedy", routed_scaling_factor=16.0
    ),
    "v2 lite": DeepseekV2Config(**V2 | dict(q_lora_rank=None), n_group=1, topk_group=1, n_shared_experts=2),
    "v3": DeepseekV3Config(**V3, n_shared_experts=1),
    "v3 in halves": DeepseekV3Config(
        **V3, n_shared_experts=2, rope_interleave=False, norm_topk_prob=False, attention_bias=True, num_mtp_layers=0
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_model_of_transformers_is_the_same_here_on_every_layout(name, ranks, tmp_path):
    ours = check(ranks, MODELS[name], tmp_path)
    assert ours.latent == LatentConfig(0 if name == "v2 lite" else 20, 12, 10, 6, 8, name != "v3 in halves")
    assert ours.rope.mscale_all_dim == V2["rope_parameters"]["mscale_all_dim"] if "v2" in name else 0.7


@pytest.mark.parametrize("name", MODELS)
def test_a_configuration_survives_the_way_through_config_json(name, tmp_path):
    theirs = MODELS[name].to_dict() | {"model_type": MODELS[name].model_type}
    ours = from_hugging_face(theirs)
    assert family_of(ours) == theirs["model_type"]
    text = json.loads(json.dumps(to_hugging_face(ours)))
    assert from_hugging_face(text) == ours
    (tmp_path / "config.json").write_text(json.dumps(text))
    again = AutoConfig.from_pretrained(tmp_path).to_dict()
    assert from_hugging_face(again) == ours
    for key in ("n_shared_experts", "topk_method", "head_dim", "q_lora_rank", "num_nextn_predict_layers", "n_group"):
        assert again.get(key) == theirs.get(key) or key == "topk_method", key


PUBLISHED = {  # what deepseek-ai's config.json say, but for tokens and options of training
    "DeepSeek-V2-Lite": dict(
        model_type="deepseek_v2",
        vocab_size=102400,
        hidden_size=2048,
        num_hidden_layers=27,
        num_attention_heads=16,
        num_key_value_heads=16,
        intermediate_size=10944,
        moe_intermediate_size=1408,
        n_routed_experts=64,
        n_shared_experts=2,
        num_experts_per_tok=6,
        n_group=1,
        topk_group=1,
        topk_method="greedy",
        scoring_func="softmax",
        norm_topk_prob=False,
        routed_scaling_factor=1.0,
        first_k_dense_replace=1,
        moe_layer_freq=1,
        q_lora_rank=None,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        hidden_act="silu",
        attention_bias=False,
        rms_norm_eps=1e-6,
        initializer_range=0.02,
        max_position_embeddings=163840,
        tie_word_embeddings=False,
        rope_theta=10000,
        rope_scaling=dict(
            type="yarn",
            factor=40,
            original_max_position_embeddings=4096,
            beta_fast=32,
            beta_slow=1,
            mscale=0.707,
            mscale_all_dim=0.707,
        ),
    )
}
PUBLISHED["DeepSeek-V2"] = PUBLISHED["DeepSeek-V2-Lite"] | dict(
    hidden_size=5120,
    num_hidden_layers=60,
    num_attention_heads=128,
    num_key_value_heads=128,
    intermediate_size=12288,
    moe_intermediate_size=1536,
    n_routed_experts=160,
    n_group=8,
    topk_group=3,
    topk_method="group_limited_greedy",
    routed_scaling_factor=16.0,
    q_lora_rank=1536,
)
PUBLISHED["DeepSeek-V3"] = PUBLISHED["DeepSeek-V2"] | dict(
    model_type="deepseek_v3",
    vocab_size=129280,
    hidden_size=7168,
    num_hidden_layers=61,
    intermediate_size=18432,
    moe_intermediate_size=2048,
    n_routed_experts=256,
    n_shared_experts=1,
    num_experts_per_tok=8,
    topk_group=4,
    topk_method="noaux_tc",
    scoring_func="sigmoid",
    norm_topk_prob=True,
    routed_scaling_factor=2.5,
    first_k_dense_replace=3,
    num_nextn_predict_layers=1,
    rope_scaling=PUBLISHED["DeepSeek-V2"]["rope_scaling"] | dict(mscale=1.0, mscale_all_dim=1.0),
)


def test_the_published_configurations_are_read_as_what_they_say():
    v3 = from_hugging_face(PUBLISHED["DeepSeek-V3"])
    assert v3.moe == deepseek_v3()
    assert v3.latent == LatentConfig(q_rank=1536)
    assert (v3.head_dim, v3.mtp) == (192, 1)
    rope = RopeConfig(1e4, "yarn", 40, 4096, mscale=1.0, mscale_all_dim=1.0)
    assert v3.rope == rope
    v2 = from_hugging_face(PUBLISHED["DeepSeek-V2"])
    assert v2.rope == replace(rope, mscale=0.707, mscale_all_dim=0.707)
    assert v2.moe == MoEConfig(
        *(160, 6, 1536, 3072), normalise=False, scale=16.0, groups=8, groups_kept=3, group_score="max", first_dense=1
    )
    lite = from_hugging_face(PUBLISHED["DeepSeek-V2-Lite"])
    assert lite.latent == LatentConfig()
    assert lite.moe == MoEConfig(64, 6, 1408, 2816, normalise=False, first_dense=1)
    for name, text in PUBLISHED.items():
        written = to_hugging_face(from_hugging_face(text))
        told = {key: value for key, value in text.items() if key != "rope_scaling"}
        assert {key: written[key] for key in told} == told, name
        scaling = {"rope_type" if key == "type" else key: value for key, value in text["rope_scaling"].items()}
        assert written["rope_scaling"].items() >= scaling.items(), name


@pytest.mark.parametrize(
    ("name", "there", "words"),
    [
        ("DeepSeek-V2", {"topk_method": "noaux_tc"}, "topk_method='noaux_tc' is not supported; supported are 'greedy'"),
        ("DeepSeek-V2", {"norm_topk_prob": True}, "norm_topk_prob=True is not supported; supported is False"),
        ("DeepSeek-V3", {"topk_method": "greedy"}, "topk_method='greedy' is not supported; supported is 'noaux_tc'"),
        ("DeepSeek-V3", {"scoring_func": "softmax"}, "scoring_func='softmax' is not supported"),
        ("DeepSeek-V3", {"moe_layer_freq": 2}, "moe_layer_freq=2 is not supported; supported is 1"),
        ("DeepSeek-V3", {"num_key_value_heads": 8}, "model.kv_heads=8 with model.latent"),
    ],
)
def test_a_model_of_a_family_that_computes_otherwise_is_refused(name, there, words):
    with pytest.raises(ValueError, match=words):
        from_hugging_face(PUBLISHED[name] | there)


def test_what_the_families_cannot_say_is_kept_under_our_own_name():
    v3 = from_hugging_face(PUBLISHED["DeepSeek-V3"])
    assert v3.moe is not None
    assert has_family(v3)
    for other in (
        replace(v3, moe=replace(v3.moe, shared_ffn=0)),  # theirs have one at least
        replace(v3, moe=replace(v3.moe, shared_ffn=3000)),
        replace(v3, moe=None),
        replace(v3, moe=replace(v3.moe, correction=False)),
    ):
        assert not has_family(other)
        assert from_hugging_face(json.loads(json.dumps(to_hugging_face(other)))) == other


def test_layers_for_multi_token_prediction_are_told_by_name():
    ahead = mtp_names(PUBLISHED["DeepSeek-V3"])
    assert ahead("model.layers.61.eh_proj.weight")
    assert ahead("model.layers.61.shared_head.head.weight")
    assert not ahead("model.layers.60.self_attn.o_proj.weight")
    assert not ahead("model.layers.6.self_attn.o_proj.weight")
    assert not ahead("model.layers.62.self_attn.o_proj.weight")
    assert not ahead("lm_head.weight")
    for other in (PUBLISHED["DeepSeek-V3"] | dict(num_nextn_predict_layers=0), dict(model_type="gpt2"), {}):
        assert not mtp_names(other)("model.layers.61.eh_proj.weight")
    own = replace(from_hugging_face(PUBLISHED["DeepSeek-V3"]), tied=True, layers=30, moe=None)
    assert mtp_names(to_hugging_face(own))("model.layers.30.enorm.weight")


def test_training_starts_without_them_and_says_so(ranks, tmp_path):
    made(MODELS["v3"], tmp_path)
    tensors = load_file(tmp_path / "model.safetensors") | {"model.stray": torch.ones(1)}
    tensors |= {"model.layers.4.enorm.weight": torch.ones(32), "model.layers.4.eh_proj.weight": torch.ones(32, 64)}
    save_file(tensors, tmp_path / "model.safetensors")
    config = from_hugging_face(json.loads((tmp_path / "config.json").read_text()))
    assert config.mtp == 1
    (remarks,) = ranks(1, remarks_of, config, tmp_path)
    assert [remark.replace(str(tmp_path), "it") for remark in remarks[1:]] == [
        "notice: 2 tensors (model.layers.4.eh_proj.weight, model.layers.4.enorm.weight) of it are for multi-token "
        "prediction and were left out",
        "warning: 1 tensors (model.stray) of it are not of this model and were left out",
    ]


def remarks_of(config: DecoderConfig, folder) -> list[str]:
    recipe, _ = Recipe("ahead", config).resolve(dist.get_world_size())
    return start_from(folder, recipe, build_model(recipe, torch.device("cpu")))
