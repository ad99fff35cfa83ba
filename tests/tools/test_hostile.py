"""What strangers' folders may hold: names that lead elsewhere, links in place of folders, JSON of odd kinds."""

import importlib
import json

import pytest
import torch
from safetensors.torch import save_file

from composable.checkpoint import save
from composable.models.config import DecoderConfig
from composable.models.families import to_hugging_face
from tests.models.test_decoder import built
from tests.test_commands import ROOT

CONFIG = DecoderConfig(32, 16, 2, 2, 1, 8, 24, init_std=0.1)


@pytest.fixture
def tool(monkeypatch, capsys):
    """`tool(name, arguments...)`: exit status and lines of errors."""
    monkeypatch.syspath_prepend(str(ROOT / "tools"))

    def run(name, *arguments):
        capsys.readouterr()
        memory = () if name == "generate" else ("--memory", "64GB")  # this process has what other tests left
        status = importlib.import_module(name).main([*map(str, arguments), *memory])
        return status, capsys.readouterr().err.splitlines()

    return run


def plain(folder, config=None, extra=None):
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(to_hugging_face(CONFIG) | (config or {})))
    save_file({**dict(built(CONFIG).named_parameters()), **(extra or {})}, folder / "model.safetensors")
    return folder


WAYS = {
    "convert": ("--to", "composable"),
    "convert to dcp": ("--to", "dcp"),
    "convert to torch": ("--to", "torch"),
    "reshard": (),
}


@pytest.mark.parametrize("name", ["../x", "/tmp/x", "a/../../x", ""])
@pytest.mark.parametrize("way", WAYS)
def test_no_file_is_written_outside_of_the_target(way, name, tool, tmp_path):
    source = tmp_path / "deep/source"
    save(source, dict(built(CONFIG).named_parameters()), {}, {"config.json": json.dumps(to_hugging_face(CONFIG))})
    manifest = json.loads((source / "manifest.json").read_text())
    manifest["files"][name] = {"size": 1, "xxh3_64": "0" * 16}
    (source / "manifest.json").write_text(json.dumps(manifest))
    (tmp_path / "deep/x").write_text("y")
    status, err = tool(way.split()[0], source, tmp_path / "deep/out/target", *WAYS[way])
    assert status == 2
    assert len(err) == 1
    assert "is no name of a file within the folder" in err[0]
    assert not (tmp_path / "deep/out/target").exists()
    assert not (tmp_path / "deep/out/x").exists()


@pytest.mark.parametrize("weight_map", [{"a": "../y.safetensors"}, {"a": 1}, {"a": ["x"]}, {}])
def test_an_index_names_files_of_its_folder(weight_map, tool, tmp_path):
    source = plain(tmp_path / "source")
    (source / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    for way in ("convert to dcp", "reshard"):
        status, err = tool(way.split()[0], source, tmp_path / "target", *WAYS[way])
        assert (status, len(err)) == (2, 1)
        assert not (tmp_path / "target").exists()


def test_a_link_in_the_place_of_the_draft_is_not_followed(tool, tmp_path):
    source, precious = plain(tmp_path / "source"), tmp_path / "precious"
    precious.mkdir()
    (precious / "thesis.txt").write_text("all of it")
    (tmp_path / ".target.draft").symlink_to(precious)
    status, err = tool("convert", source, tmp_path / "target", "--to", "composable")
    assert status == 2
    assert "is a link" in err[0]
    assert (precious / "thesis.txt").read_text() == "all of it"


@pytest.mark.parametrize(
    "config",
    [
        {"quantization_config": "fp8"},
        {"quantization_config": {"quant_method": ["fp8"]}},
        {"quantization_config": {"quant_method": "fp8", "weight_block_size": 0}},
        {"num_attention_heads": 0},
        {"rope_scaling": "yarn"},
        {"rope_scaling": {"rope_type": "yarn", "factor": None, "original_max_position_embeddings": None}},
        {"rope_scaling": {"rope_type": "linear"}},
    ],
)
def test_a_config_of_odd_values_is_one_line(config, tool, tmp_path):
    folder = plain(tmp_path / "source", config, {"a_scale_inv": torch.ones(2)})
    status, err = tool("convert", folder, tmp_path / "target", "--to", "composable", "--dequantise", "float32")
    assert status == 2
    assert len(err) == 1


def test_json_without_an_end_and_a_pickle_that_holds_itself_are_one_line(tool, tmp_path):
    source = plain(tmp_path / "source")
    (source / "config.json").write_text("[" * 100_000)
    for name, more in (("convert", (tmp_path / "target", "--to", "composable")), ("generate", ("--prompt", "x"))):
        status, err = tool(name, source, *more)
        assert (status, len(err)) == (2, 1)
    endless = {}
    endless["self"] = endless
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/config.json").write_text(json.dumps(to_hugging_face(CONFIG)))
    torch.save({**built(CONFIG).state_dict(), "d": endless}, tmp_path / "bin/pytorch_model.bin")
    status, err = tool("convert", tmp_path / "bin", tmp_path / "target", "--to", "composable")
    assert (status, len(err)) == (2, 1)
    assert "without an end" in err[0]
