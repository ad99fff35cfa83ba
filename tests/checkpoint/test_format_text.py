"""The description of the format is enough: a reader written from it alone reads what both writers wrote, to the bit."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch

from composable.checkpoint import latest, save
from composable.checkpoint.shards import pieces_of
from composable.mesh import Mesh
from composable.models.names import in_file
from composable.optim.optimizers import build_optimizer, optimizer_tensors
from composable.recipe import CheckpointConfig
from composable.train import build_model, train
from tests.checkpoint import reader
from tests.checkpoint.test_save_load import many_kinds
from tests.test_train import EXPERTS, MODEL, recipe_of, text  # noqa: F401

LAYOUTS = {
    "dense": (MODEL, Mesh(tp=2, dp_shard=2)),
    "experts": (dataclasses.replace(EXPERTS, layers=1), Mesh(tp=2, dp_shard=2, ep=2)),
}


def save_with_both(recipe, root):
    """Save a composed model and a state of its optimizer with both writers; what this rank holds of each, by name."""
    recipe, _ = recipe.resolve(4)
    model = build_model(recipe, torch.device("cpu"))
    optimizer = build_optimizer(model.parts, recipe.optimizer, only=model.named)
    weights, moments = model.saved, optimizer_tensors(None, optimizer)
    with torch.no_grad():
        for name, moment in moments.items():
            weight = weights[name.rpartition(".")[0]]
            moment.copy_(weight * 3 if name.endswith(".exp_avg") else weight**2 if moment.ndim else torch.tensor(7.0))
        for name, bias in weights.items():
            if name.endswith("e_score_correction_bias"):
                bias.copy_(torch.arange(bias.numel()))
    named = [in_file(each, recipe.model) for each in (weights, moments)]
    for writer in ("shared", "per_rank"):
        save(root / writer, *named, {}, writer=writer)
    return [
        {name: (piece.shape, piece.box.slices(), piece.local.clone()) for name, piece in pieces_of(each).items()}
        for each in named
    ]


@pytest.mark.parametrize("kind", LAYOUTS)
def test_a_reader_by_the_text_reads_weights_and_moments_of_both_writers(kind, ranks, tmp_path):
    model, mesh = LAYOUTS[kind]
    held = ranks(4, save_with_both, recipe_of("", tmp_path / "run", model=model, mesh=mesh), tmp_path)
    for number, section in enumerate(("weights", "optimizer")):
        both = [reader.read(tmp_path / writer, section) for writer in ("shared", "per_rank")]
        for tensors in both:
            assert tensors.keys() == {name for rank in held for name in rank[number]}
            for rank in held:
                for name, (shape, box, local) in rank[number].items():
                    assert tuple(tensors[name].shape) == shape
                    assert tensors[name].dtype == local.dtype
                    assert torch.equal(tensors[name][box], local)
    versions = [reader.manifest(tmp_path / writer)["version"] for writer in ("shared", "per_rank")]
    assert versions == [1, 2]
    if kind == "experts":
        bias = "model.layers.0.mlp.gate.e_score_correction_bias"
        assert reader.read(tmp_path / "per_rank")[bias].tolist() == list(range(8))
        assert "model.layers.0.mlp.experts.7.gate_proj.weight.exp_avg" in reader.read(tmp_path / "shared", "optimizer")


def test_every_kind_of_tensor_is_read_and_a_folder_without_an_optimizer_has_none(tmp_path):
    save(tmp_path, many_kinds(), {}, {}, writer="per_rank", max_file_size=50)
    tensors = reader.read(tmp_path)
    assert all(
        torch.equal(tensors[name].view(torch.uint8), tensor.resolve_conj().contiguous().view(torch.uint8))
        for name, tensor in many_kinds().items()
        if tensor.ndim
    )
    assert tensors["scalar_int64"].item() == 7
    assert reader.read(tmp_path, "optimizer") == {}


def test_the_reader_finds_the_newest_checkpoint_of_a_run_and_how_far_it_is(ranks, text, tmp_path):  # noqa: F811
    recipe = recipe_of(text, tmp_path / "run", 2)
    checkpoint = CheckpointConfig(every=1, keep=0, folder=f"{tmp_path}/elsewhere", writer="per_rank")
    ranks(2, train, dataclasses.replace(recipe, checkpoint=checkpoint))
    newest = reader.newest(tmp_path / "elsewhere")
    assert newest == latest(tmp_path / "elsewhere")
    assert (reader.state(newest)["step"], reader.state(newest)["samples"]) == (2, 16)
    assert reader.read(newest, "optimizer")["model.norm.weight.step"].item() == 2
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_the_reader_is_short_and_stands_alone():
    lines = Path(reader.__file__).read_text().splitlines()
    assert len(lines) <= 60
    imports = [line for line in lines if line.startswith(("import ", "from "))]
    assert imports == ["import json", "from pathlib import Path", "from safetensors import safe_open"]


@pytest.mark.parametrize("harm", [{"version": 3}, {"format": "another"}])
def test_the_reader_refuses_what_it_does_not_know(tmp_path, harm):
    save(tmp_path, {"w": torch.ones(2)}, {}, {})
    path = tmp_path / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | harm))
    with pytest.raises(ValueError, match="knows up to 2"):
        reader.read(tmp_path)
