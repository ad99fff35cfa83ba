"""gpt-oss: fused, transposed experts with biases in the files of `transformers`, and its published MXFP4."""

import dataclasses
import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import GptOssConfig

from composable.checkpoint.remote import as_folder
from composable.checkpoint.shards import Box, full_box, pieces_of
from composable.mesh import Mesh
from composable.models.config import DecoderConfig, RopeConfig
from composable.models.decoder import Decoder
from composable.models.families import family_of, from_hugging_face, to_hugging_face
from composable.models.names import in_file
from composable.moe.config import gpt_oss
from composable.parallel.for_ranks import Layout, held_boxes
from composable.start import start_from
from composable.train import build_model
from tests.models.published import check, made
from tests.test_train import recipe_of, text  # noqa: F401

YARN = dict(rope_type="yarn", rope_theta=150000.0, factor=4.0, original_max_position_embeddings=1024)
YARN |= dict(beta_fast=32.0, beta_slow=1.0, truncate=False)
TINY = dict(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=32,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    num_local_experts=8,
    num_experts_per_tok=2,
    sliding_window=5,
    swiglu_limit=0.5,  # so that many values meet it
    max_position_embeddings=4096,
    initializer_range=0.1,
    rope_parameters=YARN,
)


def test_a_model_of_transformers_is_the_same_here_on_every_layout(ranks, tmp_path):
    ours = check(ranks, GptOssConfig(**TINY), tmp_path)
    assert family_of(ours) == "gpt_oss"
    assert ours.moe is not None
    assert (ours.moe.swiglu_limit, ours.rope.truncate, ours.sinks, ours.window) == (0.5, False, True, 5)


PUBLISHED = {  # openai/gpt-oss-20b: config.json, without what only generation reads
    "architectures": ["GptOssForCausalLM"],
    "attention_bias": True,
    "attention_dropout": 0.0,
    "eos_token_id": 200002,
    "experts_per_token": 4,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2880,
    "initial_context_length": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 2880,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "max_position_embeddings": 131072,
    "model_type": "gpt_oss",
    "num_attention_heads": 64,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 24,
    "num_key_value_heads": 8,
    "num_local_experts": 32,
    "output_router_logits": False,
    "quantization_config": {"quant_method": "mxfp4"},
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "rope_type": "yarn",
        "truncate": False,
    },
    "rope_theta": 150000,
    "router_aux_loss_coef": 0.9,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "tie_word_embeddings": False,
    "use_cache": True,
    "vocab_size": 201088,
}
LARGE = {"num_hidden_layers": 36, "num_local_experts": 128, "layer_types": ["sliding_attention", "full_attention"] * 18}
PUBLISHED_LARGE = PUBLISHED | LARGE  # openai/gpt-oss-120b
OURS = DecoderConfig(
    vocab_size=201088,
    dim=2880,
    layers=24,
    heads=64,
    kv_heads=8,
    head_dim=64,
    ffn=2880,
    max_length=131072,
    qkv_bias=True,
    output_bias=True,
    sinks=True,
    window=128,
    window_layers=tuple(range(0, 24, 2)),
    rope=RopeConfig(150000.0, "yarn", 32.0, 4096, truncate=False),
    moe=gpt_oss(32),
)


def test_the_published_config_is_read_and_written():
    read = from_hugging_face(PUBLISHED)
    assert read.moe is not None
    assert read == dataclasses.replace(OURS, moe=dataclasses.replace(gpt_oss(32), normalise=read.moe.normalise))
    assert family_of(read) == "gpt_oss"
    written = to_hugging_face(read)
    for key in ("layer_types", "sliding_window", "swiglu_limit", "num_local_experts", "head_dim", "attention_bias"):
        assert written[key] == PUBLISHED[key]
    assert written["rope_scaling"]["truncate"] is False
    assert GptOssConfig(**{k: v for k, v in written.items() if k != "model_type"}).rope_parameters["truncate"] is False


def test_another_slope_of_the_sigmoid_is_refused():
    with pytest.raises(ValueError, match=r"swiglu_alpha=1.5 is not supported; supported is 1.702"):
        from_hugging_face(PUBLISHED | {"swiglu_alpha": 1.5})


def test_ranks_of_an_inference_engine_hold_their_experts_and_their_part_of_the_width():
    tiny = dataclasses.replace(
        OURS, vocab_size=64, dim=32, layers=2, heads=4, kv_heads=2, head_dim=8, ffn=16, window_layers=(0,)
    )
    tiny = dataclasses.replace(tiny, moe=gpt_oss(8, 2, 16))
    shapes = {name: piece.shape for name, piece in pieces_of(in_file(Decoder(tiny).state_dict(), tiny)).items()}
    held = held_boxes(tiny, shapes, Layout(tp=4, ep=2))
    experts = "model.layers.1.mlp.experts"
    assert all(boxes.keys() == shapes.keys() for boxes in held.values())
    third = held["pp0-tp2"]  # experts 4 to 7, the first half of the width
    assert third[f"{experts}.gate_up_proj"] == Box((4, 0, 0), (4, 32, 16))
    assert third[f"{experts}.gate_up_proj_bias"] == Box((4, 0), (4, 16))
    assert third[f"{experts}.down_proj"] == Box((4, 0, 0), (4, 8, 32))
    assert third[f"{experts}.down_proj_bias"] == Box((4, 0), (4, 32))
    assert third["model.layers.1.mlp.router.weight"] == full_box((8, 32))
    assert held["pp0-tp1"][f"{experts}.gate_up_proj"] == Box((0, 0, 16), (4, 32, 16))


def packed(source, folder):
    """The folder with its experts in MXFP4 of random bits, and the float32 values of these, by number."""
    generator = torch.Generator().manual_seed(3)
    lut = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    lut = torch.cat([lut, -lut])
    tensors, values = load_file(source / "model.safetensors"), {}
    for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        e, i, o = tensors.pop(name).shape
        blocks = torch.randint(0, 256, (e, o, i // 32, 16), generator=generator, dtype=torch.uint8)
        scales = torch.randint(120, 127, (e, o, i // 32), generator=generator, dtype=torch.uint8)
        numbers = torch.stack([lut[(blocks & 15).long()], lut[(blocks >> 4).long()]], -1).flatten(-2)
        values[name] = (numbers * torch.exp2(scales.float() - 127)[..., None]).flatten(2).mT.contiguous()
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "mxfp4"}}))
    return values


def started(folder, mesh, dequantise):
    """This rank's stacks after starting from the folder: gate, up and down of layer 0 as this rank holds them."""
    config = from_hugging_face(json.loads((folder / "config.json").read_text()))
    recipe, _ = recipe_of("", folder, model=config, mesh=mesh, init_dequantise=dequantise).resolve(mesh.world)
    model = build_model(recipe, torch.device("cpu"))
    remarks = start_from(as_folder(folder), recipe, model)
    whole = {name: getattr(t, "full_tensor", lambda t=t: t)() for name, t in model.saved.items()}
    return remarks, {name: tensor for name, tensor in whole.items() if name.endswith("_proj")}


def refused(folder):
    with pytest.raises(ValueError, match=r"are quantised \(mxfp4\); write --init-dequantise"):
        started(folder, Mesh(dp_shard=1), dequantise=False)


def test_a_run_starts_from_mxfp4_on_any_layout_and_not_without_being_told(ranks, tmp_path):
    made(GptOssConfig(**TINY), tmp_path / "theirs")
    values = packed(tmp_path / "theirs", tmp_path / "mxfp4")
    ranks(1, refused, tmp_path / "mxfp4")
    mesh = Mesh(dp_shard=2, tp=2, ep=2, etp=2)
    remarks, stacks = ranks(4, started, tmp_path / "mxfp4", mesh, dequantise=True)[0]
    assert "8 tensors" in remarks[1]
    assert "dequantised (mxfp4)" in remarks[1]
    assert not any("left out" in remark for remark in remarks)
    assert len(values) == len(stacks) == 8
    for name, value in values.items():
        assert torch.equal(stacks[name].mT, value)
