import json

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

from composable.models.config import DecoderConfig, RopeConfig
from composable.models.families import from_hugging_face, to_hugging_face
from tests.models.test_decoder import KINDS, SMALL, built, tokens

MODELS = KINDS | {
    "qwen2": DecoderConfig(**SMALL, qkv_bias=True, norm_eps=1e-6),
    "llama3": DecoderConfig(**SMALL, rope=RopeConfig(5e5, "llama3", 8.0, 16), max_length=128),
    "yarn": DecoderConfig(**SMALL, rope=RopeConfig(1e4, "yarn", 4.0, 16), max_length=64),
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


@pytest.mark.parametrize("name", MODELS)
def test_a_configuration_survives_the_way_through_config_json(name, tmp_path):
    ours = MODELS[name]
    assert from_hugging_face(json.loads(json.dumps(to_hugging_face(ours)))) == ours
    (tmp_path / "config.json").write_text(json.dumps(to_hugging_face(ours)))
    assert from_hugging_face(AutoConfig.from_pretrained(tmp_path).to_dict()) == ours


def test_what_no_family_can_hold_is_refused():
    with pytest.raises(ValueError, match="no Hugging Face family has qk_norm=True"):
        to_hugging_face(DecoderConfig(**SMALL, qk_norm=True, mlp_bias=True))
    with pytest.raises(ValueError, match="'gpt2' is not supported; supported are llama, qwen2, qwen3"):
        from_hugging_face({"model_type": "gpt2"})
