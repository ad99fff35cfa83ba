"""A run that starts from a folder of weights: what fits is taken, and what does not is said by name on every rank."""

import dataclasses
import json

import numpy as np
import pytest
import safetensors.torch
import torch
from torch.distributed.tensor import DTensor

from composable import train as train_module
from composable.checkpoint import latest, save
from composable.checkpoint.listing import list_folder
from composable.checkpoint.remote import as_folder
from composable.checkpoint.shards import pieces_of
from composable.data.tokens import Tokens
from composable.mesh import Mesh
from composable.models.decoder import Decoder
from composable.models.families import differences, to_hugging_face
from composable.models.names import in_file
from composable.moe.config import MoEConfig
from composable.optim.schedules import ScheduleConfig
from composable.recipe import CheckpointConfig, command_line
from composable.start import start_from
from composable.state import borders, checkpoints_of
from composable.train import build_model, train
from tests.checkpoint import object_store  # noqa: F401  (its protocol)
from tests.pool import RankError
from tests.test_train import MODEL, lines, recipe_of, same, text  # noqa: F401

EMBEDDING, HEAD, NORM = "model.embed_tokens.weight", "lm_head.weight", "model.layers.1.input_layernorm.weight"
EXPERT = "model.layers.1.mlp.experts.7.up_proj.weight"
BIAS = "model.layers.0.self_attn.q_proj.bias"
TIED = dataclasses.replace(MODEL, tied=True)
QWEN = dataclasses.replace(MODEL, qkv_bias=True)
EXPERTS = dataclasses.replace(MODEL, qk_norm=True, moe=MoEConfig(experts=8, top_k=2, ffn=8))


def publish(folder, config, change=lambda tensors: None):
    """A folder as a publisher has it, in two files with an index, with what `change` does to its tensors."""
    torch.manual_seed(3)
    parts = pieces_of(in_file(Decoder(config).state_dict(), config))
    tensors = {name: torch.randn(part.shape) for name, part in parts.items()}
    good = dict(tensors)
    change(tensors)
    folder.mkdir()
    weight_map = {}
    for number in (0, 1):
        half = {name: tensor for i, (name, tensor) in enumerate(sorted(tensors.items())) if i % 2 == number}
        safetensors.torch.save_file(half, folder / f"{'ab'[number]}.safetensors", {"format": "pt"})
        weight_map |= dict.fromkeys(half, f"{'ab'[number]}.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (folder / "config.json").write_text(json.dumps(to_hugging_face(config)))
    return good


def start(folder, config, mesh, missing=()):
    """What starting from the folder says, and every weight after it; or the error."""
    recipe, _ = recipe_of("", folder, model=config, mesh=mesh, init_missing=tuple(missing)).resolve(2)
    model = build_model(recipe, torch.device("cpu"))
    before = {name: full(tensor).clone() for name, tensor in model.saved.items()}
    try:
        remarks = start_from(as_folder(folder), recipe, model)
    except ValueError as error:
        return str(error)
    return remarks, before, {name: full(tensor) for name, tensor in model.saved.items()}


def full(tensor):
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()


def without(name):
    return lambda tensors: tensors.pop(name)


def taller(tensors):
    tensors[NORM] = torch.ones(17)


MESHES = {"sharded": Mesh(tp=2), "stages": Mesh(pp=2)}


@pytest.mark.parametrize(
    ("config", "change", "named"),
    [
        (MODEL, without(NORM), NORM),
        (MODEL, without(HEAD), HEAD),
        (MODEL, without(EMBEDDING), EMBEDDING),
        (MODEL, taller, f"{NORM} has shape (17,)"),
        (EXPERTS, without(EXPERT), EXPERT),
        (QWEN, without(BIAS), BIAS),
        (TIED, without(EMBEDDING), EMBEDDING),
        (TIED, lambda tensors: tensors.update({HEAD: tensors[EMBEDDING] + 1}), "differ"),
    ],
)
def test_what_a_folder_lacks_or_has_otherwise_is_refused_by_name_on_every_rank(ranks, tmp_path, config, change, named):
    publish(tmp_path / "hf", config, change)
    errors = ranks(2, start, tmp_path / "hf", config, MESHES["stages"] if config is TIED else MESHES["sharded"])
    assert errors[0] == errors[1]
    assert named in errors[0]


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("also", ["only the head", "both", "only the embedding"])
def test_a_tied_weight_is_taken_under_either_name(ranks, tmp_path, mesh, also):
    def change(tensors):
        if also != "only the embedding":
            tensors[HEAD] = tensors[EMBEDDING].clone()
        if also == "only the head":
            del tensors[EMBEDDING]

    good = publish(tmp_path / "hf", TIED, change)
    for remarks, _, weights in ranks(2, start, tmp_path / "hf", TIED, MESHES[mesh]):
        assert len(remarks) == 1
        assert EMBEDDING in weights
        assert all(torch.equal(weight, good[name].to(weight.dtype)) for name, weight in weights.items())


def test_what_config_json_says_beyond_the_family_is_named(ranks, tmp_path):
    publish(tmp_path / "hf", MODEL)
    path = tmp_path / "hf" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"sparkle": 0.5, "twinkle": 0}))
    for remarks, _, _ in ranks(2, start, tmp_path / "hf", MODEL, MESHES["sharded"]):
        assert remarks[1:] == [f"warning: not read of {path}: sparkle"]


def test_a_tensor_too_many_is_left_out_and_named(ranks, tmp_path):
    good = publish(tmp_path / "hf", MODEL, lambda tensors: tensors.update({"model.extra": torch.ones(2)}))
    for remarks, _, weights in ranks(2, start, tmp_path / "hf", MODEL, MESHES["sharded"]):
        assert "warning: 1 tensors (model.extra)" in remarks[1]
        assert all(torch.equal(weight, good[name].to(weight.dtype)) for name, weight in weights.items())


def test_what_may_be_missing_keeps_its_initial_values_and_is_listed(ranks, tmp_path):
    good = publish(tmp_path / "hf", QWEN, without(BIAS))
    for remarks, before, weights in ranks(2, start, tmp_path / "hf", QWEN, MESHES["sharded"], ["*.q_proj.bias"]):
        assert f"warning: 1 tensors ({BIAS})" in remarks[1]
        assert "keep their initial values" in remarks[1]
        assert torch.equal(weights[BIAS], before[BIAS])
        assert all(torch.equal(weights[name], good[name].to(weights[name].dtype)) for name in weights if name != BIAS)


def test_weights_that_a_model_has_more_may_be_missing_and_the_error_says_how(ranks, tmp_path):
    good = publish(tmp_path / "hf", MODEL)
    more = dataclasses.replace(MODEL, qk_norm=True)
    for error in ranks(2, start, tmp_path / "hf", more, MESHES["sharded"]):
        assert "model.qk_norm is False there and True here; name the weights that this adds as --init-missing" in error
    for error in ranks(2, start, tmp_path / "hf", more, MESHES["sharded"], ["*.q_norm.weight"]):
        assert "lacks 2 tensors (model.layers.0.self_attn.k_norm.weight" in error
        assert "--init-missing" in error
    for error in ranks(2, start, tmp_path / "hf", dataclasses.replace(more, ffn=32), MESHES["sharded"], ["*"]):
        assert "model.ffn is 24 there and 32 here" in error
    for remarks, before, weights in ranks(2, start, tmp_path / "hf", more, MESHES["sharded"], ["*.[qk]_norm.weight"]):
        assert "warning: 4 tensors" in remarks[1]
        for name, weight in weights.items():
            assert torch.equal(weight, good[name].to(weight.dtype) if name in good else before[name])


def test_a_router_that_had_no_correction_bias_starts_with_one_of_zeros(ranks, tmp_path):
    publish(tmp_path / "hf", EXPERTS)
    more = dataclasses.replace(EXPERTS, moe=dataclasses.replace(EXPERTS.moe, correction=True))
    bias = "model.layers.0.mlp.gate.e_score_correction_bias"
    for remarks, _, weights in ranks(2, start, tmp_path / "hf", more, MESHES["stages"], ["*e_score_correction_bias"]):
        assert "warning: 2 tensors" in remarks[1]
        assert bias not in weights or not weights[bias].any()


def test_a_name_in_two_files_and_a_file_that_is_not_there_are_refused(ranks, tmp_path):
    for name in ("twice", "gone"):
        publish(tmp_path / name, MODEL)
    index = tmp_path / "gone" / "model.safetensors.index.json"
    index.write_text(index.read_text().replace("b.safetensors", "c.safetensors"))
    a, b = (safetensors.torch.load_file(tmp_path / "twice" / f"{name}.safetensors") for name in "ab")
    safetensors.torch.save_file(a | {EMBEDDING: b[EMBEDDING]}, tmp_path / "twice" / "a.safetensors")
    for name, words in (("twice", f"{EMBEDDING} stands in two files"), ("gone", "c.safetensors is missing")):
        errors = ranks(2, start, tmp_path / name, MODEL, MESHES["sharded"])
        assert errors[0] == errors[1]
        assert words in errors[0]


def trained(recipe):
    return train(recipe)  # by a function of this module: to find it, a rank imports the store above


def test_a_run_whose_checkpoints_lie_at_a_url_goes_on_from_there_and_starts_others(ranks, text, tmp_path):  # noqa: F811
    checkpoint = CheckpointConfig(every=2, keep=1, folder=f"objects://{tmp_path}/store", writer="per_rank")

    def recipe(name, steps, **changes):
        return recipe_of(text, tmp_path / name, steps, **({"checkpoint": checkpoint} | changes))

    constant = {"schedule": ScheduleConfig(kind="constant")}
    ranks(2, trained, recipe("run", 2, **constant))
    ranks(2, trained, recipe("run", 4, **constant))
    ranks(2, trained, recipe("same", 4, checkpoint=CheckpointConfig(), **constant))
    same(lines(tmp_path / "run"), lines(tmp_path / "same"), 1e-12)
    root = checkpoints_of(recipe("run", 4))
    assert [path.name for path in root.iterdir() if path.is_dir()] == ["step-00000004"]
    assert not (tmp_path / "run" / "checkpoints").exists()
    source = recipe("second", 1, init_from=str(latest(root)), checkpoint=CheckpointConfig())
    assert ranks(2, trained, source)[0].step == 1
    with pytest.raises(RankError, match=r"checkpoint\.writer=per_rank"):
        ranks(2, trained, recipe("third", 1, checkpoint=dataclasses.replace(checkpoint, writer="shared")))


def trained_as_told(words):
    """The model that a recipe of another one trains, and the family under which it is saved."""
    recipe = command_line(recipe_of(words["data"], words["out"], steps=2), words["options"])
    train(recipe)
    told = json.loads((latest(checkpoints_of(recipe)) / "config.json").read_text())
    return recipe.model, told["model_type"]


@pytest.mark.parametrize("config", [QWEN, EXPERTS], ids=["dense", "experts"])
def test_any_recipe_trains_the_model_of_the_folder_when_told_to(config, ranks, text, tmp_path):  # noqa: F811
    other = dataclasses.replace(config, layers=3, ffn=20)
    publish(tmp_path / "published", other)
    options = ["--init-from", str(tmp_path / "published"), "--init-model", "--model.max-length", "77"]
    options += [] if config.moe is None else ["--model.moe.balance.switch", "0.5"]
    words = {"data": text, "out": tmp_path / "run", "options": options}
    model, family = ranks(2, trained_as_told, words)[0]
    assert (model.layers, model.max_length) == (3, 77)
    assert differences(model, other) == []
    assert family == {True: "qwen2", False: "qwen3_moe"}[config.moe is None]
    assert config.moe is None or model.moe.balance.switch == 0.5


def test_a_model_cannot_be_taken_from_nowhere(tmp_path):
    for options in (["--init-model"], ["--init-model", "--init-from", str(tmp_path / "absent")]):
        with pytest.raises(ValueError, match=r"config.json is not there; give --init-from"):
            command_line(recipe_of("", tmp_path), options)


def refused_before_it_is_built(data, folder, source, build):
    """The error of a start from another model, where no model can be built."""
    train_module.build_model = build
    try:
        train(recipe_of(data, folder, init_from=str(source)))
    except ValueError as error:
        return str(error)
    finally:
        train_module.build_model = build_model


def never(*arguments):
    raise AssertionError("a model was built")


def test_another_model_is_refused_before_one_is_built(ranks, text, tmp_path):  # noqa: F811
    publish(tmp_path / "published", dataclasses.replace(QWEN, layers=3))
    said = ranks(1, refused_before_it_is_built, text, tmp_path / "run", tmp_path / "published", never)[0]
    assert "model.layers is 3 there and 2 here" in said
    assert "--init-model trains that one" in said


def test_what_was_meant_by_a_folder_without_weights_is_said(tmp_path):
    save(tmp_path / "run/checkpoints/step-00000005", {"w": torch.ones(2)}, {}, {})
    with pytest.raises(FileNotFoundError, match=r"the newest checkpoint below it is .*step-00000005"):
        list_folder(tmp_path / "run", ["weights"])
    (tmp_path / "torch").mkdir()
    torch.save({}, tmp_path / "torch/model.pt")
    with pytest.raises(FileNotFoundError, match=r"tools/convert.py --to composable makes"):
        list_folder(tmp_path / "torch", ["weights"])


def test_config_tells_of_a_beginning_only_where_texts_have_it():
    tokens = np.array([7, 1, 2, 7, 3], np.uint8)
    offsets = np.array([0, 3, 5])
    assert borders(Tokens(tokens, offsets, 9, eos=2, bos=7)) == {"bos_token_id": 7, "eos_token_id": 2}
    assert borders(Tokens(tokens[1:], np.array([0, 2, 4]), 9, eos=2, bos=7)) == {"eos_token_id": 2}
