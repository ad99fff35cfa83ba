"""A run that starts from published fp8 weights, on any layout."""

import dataclasses
import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from composable.checkpoint.remote import as_folder
from composable.checkpoint.shards import pieces_of
from composable.mesh import Mesh
from composable.models.decoder import Decoder
from composable.models.families import to_hugging_face
from composable.models.names import in_file
from composable.moe.config import MoEConfig
from composable.start import start_from
from composable.train import build_model
from tests.test_train import MODEL, recipe_of, text  # noqa: F401

CONFIG = dataclasses.replace(MODEL, qk_norm=True, moe=MoEConfig(experts=4, top_k=2, ffn=8))
BLOCK = 4  # so that these small matrices have several


def published(folder):
    """A folder with projections in fp8; what they are worth."""
    torch.manual_seed(4)
    pieces = pieces_of(in_file(Decoder(CONFIG).state_dict(), CONFIG))
    tensors, worth = {}, {}
    for name, piece in pieces.items():
        value = torch.randn(piece.shape)
        if not name.endswith("_proj.weight"):
            tensors[name] = worth[name] = value
            continue
        few = (100 * value).clamp(-448, 448).to(torch.float8_e4m3fn)
        scales = torch.rand([-(-size // BLOCK) for size in piece.shape]) * 1e-2
        spread = scales.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)[: value.size(0), : value.size(1)]
        tensors |= {name: few, f"{name}_scale_inv": scales}
        worth[name] = few.float() * spread
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    quantisation = {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK]}
    (folder / "config.json").write_text(json.dumps(to_hugging_face(CONFIG) | {"quantization_config": quantisation}))
    return worth


def started(folder, mesh, dequantise=True):
    """What is said, and this model's weights, whole, under their names in files."""
    recipe, _ = recipe_of("", folder, model=CONFIG, mesh=mesh, init_dequantise=dequantise).resolve(mesh.world)
    model = build_model(recipe, torch.device("cpu"))
    remarks = start_from(as_folder(folder), recipe, model)
    whole = {name: getattr(t, "full_tensor", lambda t=t: t)() for name, t in model.saved.items()}
    return remarks, {name: piece.local.clone() for name, piece in pieces_of(in_file(whole, CONFIG)).items()}


def refused(folder):
    with pytest.raises(ValueError, match=r"quantised \(fp8\); write --init-dequantise to read them dequantised"):
        started(folder, Mesh(dp_shard=1), dequantise=False)


@pytest.mark.parametrize("mesh", [Mesh(dp_shard=1), Mesh(dp_shard=2, tp=2, ep=2)], ids=["one", "four"])
def test_fp8_weights_are_worth_their_values_times_their_blocks_scales(mesh, ranks, tmp_path):
    worth = published(tmp_path / "fp8")
    remarks, weights = ranks(mesh.world, started, tmp_path / "fp8", mesh)[0]
    assert any("dequantised (fp8)" in remark for remark in remarks)
    assert not any("left out" in remark for remark in remarks)
    assert weights.keys() == worth.keys()
    for name, value in worth.items():
        assert torch.equal(weights[name], value), name


def test_fp8_weights_are_refused_without_the_option(ranks, tmp_path):
    published(tmp_path / "fp8")
    ranks(1, refused, tmp_path / "fp8")


def plain_numbers_refused(folder, words):
    with pytest.raises(ValueError, match=words):
        started(folder, Mesh(dp_shard=1))


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8])
def test_weights_of_eight_bits_that_nothing_explains_are_refused(dtype, ranks, tmp_path):
    published(tmp_path / "a")
    path = tmp_path / "a/model.safetensors"
    tensors = {n: t for n, t in load_file(path).items() if not n.endswith("_scale_inv")}
    tensors = {n: t.to(dtype) if n.endswith("_proj.weight") else t for n, t in tensors.items()}
    save_file(tensors, path, {"format": "pt"})
    (tmp_path / "a/config.json").write_text(json.dumps(to_hugging_face(CONFIG)))
    ranks(1, plain_numbers_refused, tmp_path / "a", rf"_proj.weight is {dtype}.*quantised")
