"""Weights in blocks of few bits: their values by a decoder that goes number by number, and by that of transformers."""

import json
import math

import pytest
import torch
from safetensors.torch import save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from composable.checkpoint import quantised
from composable.checkpoint.listing import list_folder
from composable.checkpoint.quantised import (
    Quantised,
    fill_dequantised,
    quantisation_of,
    quantised_tensors,
    read_dequantised,
    refuse_quantised,
)
from composable.checkpoint.shards import Box, Piece, full_box

FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128], "fmt": "e4m3"}
MXFP4 = {"quant_method": "mxfp4"}
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def random(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def bytes_of(low, high, *shape, seed=0):
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)


def fp8_folder(folder, rows=300, columns=200):
    tensors = {
        "a.weight": random(rows, columns).mul(100).clamp(-448, 448).to(torch.float8_e4m3fn),
        "a.weight_scale_inv": random(-(-rows // 128), -(-columns // 128), seed=1).abs() * 1e-3,
        "norm.weight": random(columns, seed=2).to(torch.bfloat16),
    }
    return saved(folder, tensors, FP8)


def mxfp4_folder(folder, experts=3, outputs=10, groups=4):
    tensors = {
        "e.gate_up_proj_blocks": bytes_of(0, 256, experts, outputs, groups, 16),
        "e.gate_up_proj_scales": bytes_of(110, 135, experts, outputs, groups, seed=1),
        "e.gate_up_proj_bias": random(experts, outputs).to(torch.bfloat16),
    }
    return saved(folder, tensors, MXFP4)


def saved(folder, tensors, quantisation):
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    if quantisation:
        (folder / "config.json").write_text(json.dumps({"quantization_config": quantisation}))
    return tensors


def found(folder):
    return quantised_tensors(list_folder(folder, ["weights"]).tensors["weights"], quantisation_of(folder))


def fp8_by_number(tensors):
    values, scales = tensors["a.weight"].to(torch.float32), tensors["a.weight_scale_inv"]
    return torch.stack(
        [
            torch.stack([values[r, c] * scales[r // 128, c // 128] for c in range(values.size(1))])
            for r in range(values.size(0))
        ]
    )


def mxfp4_by_number(tensors):
    blocks, scales = tensors["e.gate_up_proj_blocks"], tensors["e.gate_up_proj_scales"]
    experts, outputs, groups, _ = blocks.shape
    out = torch.empty(experts, groups * 32, outputs)
    for e in range(experts):
        for o in range(outputs):
            for i in range(groups * 32):
                group, within = divmod(i, 32)
                byte = blocks[e, o, group, within // 2].item()
                half = byte >> 4 if within % 2 else byte & 15
                sign = -1.0 if half & 8 else 1.0
                out[e, i, o] = math.ldexp(sign * E2M1[half & 7], scales[e, o, group].item() - 127)
    return out


FORMS = {
    "fp8": (fp8_folder, "a.weight", fp8_by_number, [Box((0, 0), (300, 200)), Box((120, 130), (20, 3))]),
    "mxfp4": (
        mxfp4_folder,
        "e.gate_up_proj",
        mxfp4_by_number,
        [Box((0, 0, 0), (3, 128, 10)), Box((1, 30, 3), (2, 37, 5)), Box((2, 33, 9), (1, 1, 1))],
    ),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("chunk", [1 << 22, 100])
def test_every_box_has_the_values_that_each_number_is_decoded_to(form, chunk, tmp_path, monkeypatch):
    make, name, decoded, boxes = FORMS[form]
    wanted = decoded(make(tmp_path))
    monkeypatch.setattr(quantised, "CHUNK", chunk)
    tensor = found(tmp_path)[name]
    assert isinstance(tensor, Quantised)
    assert tensor.shape == tuple(wanted.shape)
    for box in boxes:
        for dtype in (torch.float32, torch.bfloat16):
            got = read_dequantised(tmp_path, tensor, box, dtype)
            assert torch.equal(got, wanted[box.slices()].to(dtype))


def test_mxfp4_is_what_transformers_makes_of_it(tmp_path):
    tensors = mxfp4_folder(tmp_path)
    theirs = convert_moe_packed_tensors(tensors["e.gate_up_proj_blocks"], tensors["e.gate_up_proj_scales"])
    tensor = found(tmp_path)["e.gate_up_proj"]
    ours = read_dequantised(tmp_path, tensor, full_box(tensor.shape), torch.bfloat16)
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("form", FORMS)
def test_what_is_not_quantised_stays_and_scales_are_no_tensors_of_the_model(form, tmp_path):
    make, name, _, _ = FORMS[form]
    plain = {"fp8": "norm.weight", "mxfp4": "e.gate_up_proj_bias"}[form]
    make(tmp_path)
    assert set(found(tmp_path)) == {name, plain}
    assert not isinstance(found(tmp_path)[plain], Quantised)


def test_a_rank_fills_its_part_through_any_strides(tmp_path):
    wanted = mxfp4_by_number(mxfp4_folder(tmp_path))
    tensor = found(tmp_path)["e.gate_up_proj"]
    local = torch.zeros(2, 4, 64)  # of a stack [E, O, I] experts 1 and 2, outputs 4 to 7, half of the inputs
    box = Box((1, 64, 4), (2, 64, 4))
    fill_dequantised(tmp_path, tensor, Piece(local.mT, tensor.shape, box))
    assert torch.equal(local, wanted[box.slices()].mT)
    with pytest.raises(ValueError, match=r"gate_up_proj has shape \(3, 128, 10\).*\(3, 10, 128\) is asked for"):
        fill_dequantised(tmp_path, tensor, Piece(torch.zeros(3, 10, 128), (3, 10, 128), full_box((3, 10, 128))))


@pytest.mark.parametrize("form", FORMS)
def test_without_the_option_the_error_names_the_quantisation_and_the_option(form, tmp_path):
    make, name, _, _ = FORMS[form]
    make(tmp_path)
    for _ in range(2):  # with config.json, and by the names alone
        with pytest.raises(ValueError, match=rf"are quantised \({form}\); write --this to read them dequantised"):
            refuse_quantised(tmp_path, list_folder(tmp_path, ["weights"]).tensors["weights"], "--this")
        assert isinstance(found(tmp_path)[name], Quantised)
        (tmp_path / "config.json").unlink(missing_ok=True)


def test_a_folder_of_ordinary_numbers_is_as_it_is(tmp_path):
    saved(tmp_path, {"a.weight": random(3, 3)}, {})
    listed = list_folder(tmp_path, ["weights"]).tensors["weights"]
    refuse_quantised(tmp_path, listed, "--this")
    assert quantised_tensors(listed, {}) == listed


def test_what_somebody_has_dequantised_before_is_ordinary_whatever_config_json_still_says(tmp_path):
    for quantisation in (FP8, MXFP4):
        saved(tmp_path, {"a.weight": random(3, 3).to(torch.bfloat16)}, quantisation)
        refuse_quantised(tmp_path, list_folder(tmp_path, ["weights"]).tensors["weights"], "--this")
        assert not isinstance(found(tmp_path)["a.weight"], Quantised)


@pytest.mark.parametrize(
    ("make", "change", "quantisation", "message"),
    [
        (fp8_folder, lambda t: t.pop("a.weight_scale_inv"), FP8, "has no a.weight_scale_inv beside it"),
        (fp8_folder, lambda t: t.pop("a.weight"), FP8, "a.weight_scale_inv stands without a.weight"),
        (
            fp8_folder,
            lambda t: t.update({"a.weight_scale_inv": torch.ones(2, 2)}),
            FP8,
            r"shape \(2, 2\): blocks of \(128, 128\) of a.weight \(300, 200\) have scales of shape \(3, 2\)",
        ),
        (mxfp4_folder, lambda t: t.pop("e.gate_up_proj_blocks"), MXFP4, "_scales stands without e.gate_up_proj_blocks"),
        (mxfp4_folder, lambda t: t.pop("e.gate_up_proj_scales"), MXFP4, "_blocks stands without e.gate_up_proj_scales"),
        (
            mxfp4_folder,
            lambda t: t.update({"e.gate_up_proj_scales": torch.zeros(3, 10, 5, dtype=torch.uint8)}),
            MXFP4,
            r"are \[experts, outputs, groups, 16\]",
        ),
        (fp8_folder, lambda t: None, {"quant_method": "awq"}, "'awq' cannot be dequantised; fp8 and mxfp4 can"),
    ],
)
def test_what_is_not_whole_or_not_known_is_refused_by_name(make, change, quantisation, message, tmp_path):
    tensors = make(tmp_path)
    change(tensors)
    saved(tmp_path, tensors, quantisation)
    with pytest.raises(ValueError, match=message):
        found(tmp_path)
