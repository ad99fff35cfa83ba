import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM, MixtralConfig, Qwen2MoeConfig, Qwen3MoeConfig

from composable.checkpoint import load, save
from composable.models.config import DecoderConfig, RopeConfig
from composable.models.decoder import Decoder
from composable.models.families import differences, family_of, from_hugging_face, has_family, to_hugging_face, unread
from composable.models.family_table import FAMILIES
from composable.models.names import in_file
from composable.moe.config import Balance, Capacity, Exploration, MoEConfig, deepseek_v3, mixtral, qwen3_moe
from composable.moe.router import route
from tests.models.test_decoder import KINDS, SMALL, built, tokens

MODELS = KINDS | {
    "qwen2": DecoderConfig(**SMALL, qkv_bias=True, norm_eps=1e-6),
    "llama3": DecoderConfig(**SMALL, rope=RopeConfig(5e5, "llama3", 8.0, 16), max_length=128),
    "yarn": DecoderConfig(**SMALL, rope=RopeConfig(1e4, "yarn", 4.0, 16), max_length=64),
}
EXPERTS = {
    "mixtral": DecoderConfig(**SMALL | {"ffn": 96}, moe=mixtral(8, 2, 96)),
    "qwen3_moe": DecoderConfig(**SMALL, qk_norm=True, moe=replace(qwen3_moe(8, 2, 32), first_dense=1)),
    "qwen2_moe": DecoderConfig(
        **SMALL | {"ffn": 32},
        qkv_bias=True,
        moe=MoEConfig(8, 2, 32, 48, shared_gate=True, normalise=False),
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_transformers_opens_the_model_and_gives_the_same_logits(name, tmp_path):
    config = MODELS[name]
    model = built(config)
    with torch.no_grad():
        for index, parameter in enumerate(model.parameters()):  # norms and biases that are not trivial
            if parameter.ndim == 1:
                parameter += 0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(index))
    (tmp_path / "config.json").write_text(json.dumps(to_hugging_face(config)))
    save_file(dict(model.named_parameters()), tmp_path / "model.safetensors", {"format": "pt"})
    theirs, report = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    ids = tokens()
    torch.testing.assert_close(model(ids), theirs(ids).logits, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", MODELS | EXPERTS)
def test_a_configuration_survives_the_way_through_config_json(name, tmp_path):
    ours = (MODELS | EXPERTS)[name]
    assert from_hugging_face(json.loads(json.dumps(to_hugging_face(ours)))) == ours
    (tmp_path / "config.json").write_text(json.dumps(to_hugging_face(ours)))
    assert from_hugging_face(AutoConfig.from_pretrained(tmp_path).to_dict()) == ours


ODD = {
    "dense": DecoderConfig(**SMALL, qk_norm=True, mlp_bias=True, rope=RopeConfig(5e5, "yarn", 8.0)),
    "deepseek_router": DecoderConfig(**SMALL, moe=deepseek_v3(8, 2, 16, 16, 4, 2, first_dense=1)),
    "trained_otherwise": DecoderConfig(
        **SMALL,
        moe=MoEConfig(
            score="topk_softmax",
            balance=Balance(switch=0.01, scope="global"),
            capacity=Capacity(1.25, "next"),
            exploration=Exploration(jitter=0.1),
        ),
    ),
}


@pytest.mark.parametrize("name", ODD)
def test_what_no_family_holds_is_kept_in_full_under_our_own_name(name):
    config = ODD[name]
    assert not has_family(config)
    text = json.loads(json.dumps(to_hugging_face(config, "bfloat16")))
    assert text["model_type"] == "composable"
    assert text["torch_dtype"] == "bfloat16"
    assert from_hugging_face(text) == config


def test_a_newer_field_and_an_unknown_family_are_refused_by_name():
    text = to_hugging_face(ODD["dense"])
    with pytest.raises(ValueError, match="composable has sparkle, of which this version's DecoderConfig knows nothing"):
        from_hugging_face(text | {"composable": {**text["composable"], "sparkle": 1}})
    with pytest.raises(ValueError, match=r"'gpt2' is not supported; supported are llama, .*, composable"):
        from_hugging_face({"model_type": "gpt2"})


@pytest.mark.parametrize(
    ("name", "there", "words"),
    [
        ("llama", {"hidden_act": "gelu"}, "hidden_act='gelu' is not supported; supported is 'silu'"),
        ("llama", {"attention_dropout": 0.1}, "attention_dropout=0.1 is not supported; supported is 0"),
        ("mixtral", {"router_jitter_noise": 0.02}, "router_jitter_noise=0.02 is not supported; supported is 0"),
        ("qwen3_moe", {"mlp_only_layers": [1]}, r"mlp_only_layers=\[1\]: the dense layers must be the lowest"),
        ("qwen3_moe", {"decoder_sparse_step": 2}, "decoder_sparse_step=2 is not supported; supported is 1"),
    ],
)
def test_a_model_of_a_family_that_computes_otherwise_is_refused(name, there, words):
    with pytest.raises(ValueError, match=words):
        from_hugging_face(to_hugging_face((MODELS | EXPERTS)[name]) | there)


@pytest.mark.parametrize("name", FAMILIES)
def test_all_keys_of_a_family_are_known_and_others_are_told(name):
    text = AutoConfig.for_model(name).to_dict()
    assert unread(text) == []
    assert unread(text | {"sparkle": 0.5, "glitter": [1], "twinkle": 0, "glow": None, "shine": False}) == [
        "glitter",
        "sparkle",
    ]


def test_a_key_of_another_family_is_not_known():
    assert unread(to_hugging_face(MODELS["llama"]) | {"qk_rope_head_dim": 8}) == ["qk_rope_head_dim"]


def test_a_key_that_is_absent_or_null_means_what_it_means_to_transformers():
    text = to_hugging_face(EXPERTS["qwen2_moe"])
    for key in ("norm_topk_prob", "qkv_bias", "num_key_value_heads", "mlp_only_layers", "decoder_sparse_step"):
        del text[key]
    read, theirs = from_hugging_face(text | {"head_dim": None}), Qwen2MoeConfig(**{**text, "num_key_value_heads": 4})
    assert read == replace(EXPERTS["qwen2_moe"], kv_heads=4)
    assert (theirs.norm_topk_prob, theirs.qkv_bias, theirs.mlp_only_layers) == (False, True, [])


@pytest.mark.parametrize("name", MODELS | EXPERTS)
def test_training_options_change_no_family_and_are_not_told(name):
    config = (MODELS | EXPERTS)[name]
    assert has_family(config)
    if config.moe is not None:
        options = dict(
            balance=Balance(switch=0.5, z=0.1),
            capacity=Capacity(2.0),
            exploration=Exploration(noise="gumbel", temperature_end=0.5, temperature_steps=10),
            upcycle=True,
        )
        trained = replace(config, moe=replace(config.moe, **options))
        assert family_of(trained) == family_of(config) == name
        assert not has_family(trained)  # the last temperature is not in what transformers gets
        text = to_hugging_face(trained)
        assert from_hugging_face(text) == config
        assert text["router_aux_loss_coef"] == 0.5
        assert differences(trained, config) == []


def test_differences_name_what_changes_the_outputs_alone():
    config = EXPERTS["mixtral"]
    assert differences(config, replace(config, max_length=9, init_std=1.0, ffn=1000)) == []  # no layer is dense
    other = replace(config, dim=32, moe=replace(config.moe, top_k=3))
    assert differences(config, other) == ["model.dim is 64 there and 32 here", "model.moe.top_k is 2 there and 3 here"]
    assert "model.ffn is 128 there and 1000 here" in differences(
        EXPERTS["qwen3_moe"], replace(EXPERTS["qwen3_moe"], ffn=1000)
    )


def test_a_part_that_one_of_two_models_lacks_is_one_difference():
    dense = MODELS["llama"]
    sparse = replace(dense, moe=EXPERTS["mixtral"].moe, dim=32)
    assert differences(sparse, dense)[:2] == ["model.moe is there alone", f"model.dim is 32 there and {dense.dim} here"]
    assert differences(dense, sparse)[0] == "model.moe is here alone"


THEIRS = dict(
    vocab_size=64,
    hidden_size=16,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    intermediate_size=24,
    num_experts_per_tok=2,
    initializer_range=0.3,
)
SAVED_BY_TRANSFORMERS = {
    "mixtral": MixtralConfig(**THEIRS, num_local_experts=6),
    "qwen3_normalised": Qwen3MoeConfig(
        **THEIRS, num_experts=6, moe_intermediate_size=12, norm_topk_prob=True, mlp_only_layers=[0]
    ),
    "qwen3_plain": Qwen3MoeConfig(**THEIRS, num_experts=6, moe_intermediate_size=12, norm_topk_prob=False),
    "qwen2": Qwen2MoeConfig(
        **THEIRS, num_experts=6, moe_intermediate_size=12, shared_expert_intermediate_size=20, mlp_only_layers=[0]
    ),
}


def choices(gates, run):
    """The logits of one pass, and what each gate gave: ours logits [T, E], theirs (logits, weights, ids [T, K])."""
    seen = []
    hooks = [gate.register_forward_hook(lambda module, inputs, output: seen.append(output)) for gate in gates]
    logits = run()
    for hook in hooks:
        hook.remove()
    return logits, seen


def same_model(ours: Decoder, theirs) -> None:
    """Logits to 1e-5, and the same experts for every token."""
    layers = list(ours.config.expert_layers)
    ids = tokens(2, 16, 64)
    with torch.no_grad():
        mine, logits = choices([ours.model.layers[str(i)].mlp.gate for i in layers], lambda: ours(ids))
        wanted, outputs = choices([theirs.model.layers[i].mlp.gate for i in layers], lambda: theirs(ids).logits)
    torch.testing.assert_close(mine, wanted, rtol=0, atol=1e-5)
    assert len(logits) == len(outputs) == len(layers) > 0
    for scores, (_, _, chosen) in zip(logits, outputs, strict=True):
        assert torch.equal(route(scores, ours.config.moe).ids.sort(-1).values, chosen.sort(-1).values)
        assert chosen.unique().numel() > 2


def named(model: Decoder):
    return dict(model.named_parameters()) | dict(model.named_buffers())


@pytest.mark.parametrize("name", SAVED_BY_TRANSFORMERS)
def test_experts_saved_by_transformers_are_the_same_model_here(name, tmp_path):
    torch.manual_seed(5)
    theirs = AutoModelForCausalLM.from_config(SAVED_BY_TRANSFORMERS[name]).float().eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    theirs.save_pretrained(tmp_path)
    config = from_hugging_face(json.loads((tmp_path / "config.json").read_text()))
    assert config.moe is not None
    ours = Decoder(config)
    load(tmp_path, in_file(named(ours), config))
    same_model(ours, theirs)


@pytest.mark.parametrize("name", EXPERTS)
def test_experts_saved_here_are_the_same_model_in_transformers(name, tmp_path):
    config = replace(EXPERTS[name], vocab_size=64, init_std=0.1)
    ours = built(config)
    with torch.no_grad():
        for index, parameter in enumerate(ours.parameters()):
            parameter += 0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(index))
    save(tmp_path, in_file(named(ours), config), {}, {"config.json": json.dumps(to_hugging_face(config))})
    theirs, report = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    same_model(ours, theirs)


ABSENT = {  # family -> keys that a trimmed file lacks, and `transformers` fills in
    "llama": ("rms_norm_eps",),
    "mistral": ("rms_norm_eps", "sliding_window"),
    "qwen2": ("rms_norm_eps",),
    "qwen3": ("rms_norm_eps",),
    "mixtral": ("rms_norm_eps", "rope_theta", "num_experts_per_tok"),
    "olmoe": ("rms_norm_eps", "num_experts_per_tok", "norm_topk_prob"),
    "qwen2_moe": ("rms_norm_eps", "num_experts_per_tok", "norm_topk_prob"),
    "qwen3_moe": ("rms_norm_eps", "num_experts_per_tok", "norm_topk_prob"),
    "gpt_oss": ("rms_norm_eps", "num_experts_per_tok", "rope_theta", "rope_scaling", "swiglu_limit"),
    "deepseek_v3": ("rms_norm_eps", "num_experts_per_tok", "routed_scaling_factor", "n_group", "topk_group"),
}


@pytest.mark.parametrize("name", ABSENT)
def test_what_a_trimmed_file_leaves_out_is_what_transformers_takes_it_for(name):
    whole = AutoConfig.for_model(name).to_dict()
    whole |= {"model_type": name}
    text = {key: value for key, value in whole.items() if key not in (*ABSENT[name], "rope_parameters")}
    theirs = AutoConfig.for_model(**text)
    ours = from_hugging_face(text)
    rope = theirs.rope_parameters
    assert ours.norm_eps == theirs.rms_norm_eps
    assert ours.rope.theta == rope["rope_theta"]
    assert ours.rope.scaling == ("none" if rope["rope_type"] == "default" else rope["rope_type"])
    if ours.rope.scaling == "yarn":
        assert (ours.rope.factor, ours.rope.truncate) == (rope["factor"], rope["truncate"])
        assert ours.rope.original_length == rope["original_max_position_embeddings"]
    if ours.moe is not None:
        assert ours.moe.top_k == theirs.num_experts_per_tok
    if name == "deepseek_v3":
        moe = ours.moe
        wanted = (theirs.routed_scaling_factor, theirs.n_group, theirs.topk_group)
        assert (moe.scale, moe.groups, moe.groups_kept) == wanted


def test_a_model_that_is_not_supported_is_refused_with_all_that_it_has():
    text = to_hugging_face(MODELS["llama"]) | {"hidden_act": "gelu", "is_causal": False}
    with pytest.raises(ValueError, match=r"hidden_act='gelu' is not supported.*is_causal=False is not supported"):
        from_hugging_face(text)
    gemma = AutoConfig.for_model("gemma2").to_dict()
    with pytest.raises(
        ValueError, match=r"'gemma2' is not.*no family here has its .*final_logit_softcapping"
    ) as caught:
        from_hugging_face(gemma)
    has = str(caught.value).partition("no family here has its ")[2].split(", ")
    assert "query_pre_attn_scalar" in has
    assert not {"hidden_size", "rms_norm_eps", "vocab_size", "head_dim", "use_cache", "id2label"} & set(has)


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}


@pytest.mark.parametrize(
    ("there", "words"),
    [
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}, "rope_scaling": YARN}, "differ; leave one"),
        ({"rope_parameters": {"full_attention": YARN, "sliding_attention": YARN}}, "layers all have the same one"),
        ({"rope_scaling": "yarn"}, "layers all have the same one"),
        ({"rope_scaling": {"rope_type": "linear"}}, "without a factor"),
        ({"is_causal": False}, "is_causal=False is not supported"),
    ],
)
def test_rotary_embeddings_that_would_be_read_wrongly_are_refused(there, words):
    text = {key: value for key, value in to_hugging_face(MODELS["qwen2"]).items() if not key.startswith("rope_sc")}
    with pytest.raises(ValueError, match=words):
        from_hugging_face(text | there)


def test_the_length_before_the_stretch_may_stand_beside_it():
    text = to_hugging_face(MODELS["qwen2"]) | {"max_position_embeddings": 1000}
    stretched = {"rope_type": "yarn", "factor": 4.0}
    assert from_hugging_face(text | {"rope_scaling": stretched}).rope.original_length == 1000
    text |= {"original_max_position_embeddings": 250}
    rope = from_hugging_face(text | {"rope_scaling": {"rope_type": "yarn"}}).rope
    assert (rope.original_length, rope.factor) == (250, 4.0)
