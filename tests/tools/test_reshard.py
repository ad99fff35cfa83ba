"""The same tensors in other files, to the bit; the target is there wholly or not at all."""

import json
import os
import sys

import pytest
import safetensors.torch
import torch
import transformers
from torch.distributed.device_mesh import init_device_mesh

from composable.checkpoint import load, save
from composable.checkpoint.draft import drafted
from composable.checkpoint.listing import list_folder
from composable.checkpoint.rewrite import plan_checkpoint, rewrite
from composable.checkpoint.shards import Piece, full_box, local_box, pieces_of
from composable.checkpoint.verify import find_damage
from composable.models.config import DecoderConfig
from composable.models.decoder import Decoder
from composable.models.families import to_hugging_face
from composable.models.names import in_file
from composable.moe.config import MoEConfig
from composable.moe.experts import Experts
from composable.parallel.expert import expert_parallel
from composable.parallel.for_ranks import Layout, held_boxes
from composable.parallel.tensor import tensor_parallel
from tests.checkpoint import reader
from tests.checkpoint.simulate import save_as_ranks
from tests.checkpoint.test_save_load import bits, many_kinds

DENSE = DecoderConfig(
    vocab_size=37,
    dim=16,
    layers=3,
    heads=4,
    kv_heads=2,
    head_dim=4,
    ffn=24,
    qkv_bias=True,
    output_bias=True,
    mlp_bias=True,
)
MIXTRAL = DecoderConfig(
    vocab_size=32,
    dim=16,
    layers=2,
    heads=4,
    kv_heads=4,
    head_dim=4,
    ffn=24,
    moe=MoEConfig(experts=4, top_k=2, ffn=24, score="softmax", normalise=True),
)
SHARED = DecoderConfig(
    vocab_size=32,
    dim=16,
    layers=2,
    heads=4,
    kv_heads=4,
    head_dim=4,
    ffn=24,
    qk_norm=True,
    tied=True,
    moe=MoEConfig(experts=4, top_k=2, ffn=8, shared_ffn=8, first_dense=1, correction=True, score="sigmoid"),
)


@pytest.fixture
def reshard(run_tool):
    return run_tool("reshard")


def weights_of(config):
    torch.manual_seed(0)
    model = Decoder(config)
    for tensor in model.state_dict().values():
        tensor.copy_(torch.randn(tensor.shape))
    return {
        name: value.local if isinstance(value, Piece) else value
        for name, value in in_file(dict(model.state_dict()), config).items()
    }


def saved(folder, config, **options):
    weights = weights_of(config)
    moments = {f"{name}.exp_avg": torch.randn(tensor.shape) for name, tensor in weights.items()}
    moments |= {f"{name}.step": torch.tensor(3.0) for name in weights}
    files = {"config.json": json.dumps(to_hugging_face(config)), "train_state.json": "{}", "tokenizer.json": "[]"}
    save(folder, weights, moments, files, **options)
    return folder


def contents(folder):
    """Relative name -> bytes of every file but the manifest."""
    files = (path for path in folder.rglob("*") if path.is_file() and path.name != "manifest.json")
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def tensors(folder, section="weights"):
    return {name: bits(tensor) for name, tensor in reader.read(folder, section).items()}


def test_files_come_back_byte_for_byte_from_every_other_form(reshard, tmp_path):
    first = saved(tmp_path / "a", DENSE, max_file_size=4000)
    forms = [
        ("--max-file-size", "1kB"),
        ("--writer", "per_rank", "--ranks", "3"),
        ("--writer", "per_rank", "--ranks", "70"),
    ]
    source = first
    for number, how in enumerate(forms):
        assert reshard(source, tmp_path / str(number), *how)[0] == 0
        source = tmp_path / str(number)
        assert find_damage(source, list_folder(source).manifest) == []
        for section in ("weights", "optimizer"):
            assert tensors(source, section) == tensors(first, section)
    assert reshard(source, tmp_path / "back", "--max-file-size", "4kB")[0] == 0
    assert contents(tmp_path / "back") == contents(first)
    assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize("chunk", [7, 1 << 20])
def test_tensors_in_parts_are_put_together_and_what_is_larger_than_a_share_is_cut(tmp_path, chunk):
    whole = {"w": torch.randn(6, 10), "big": torch.arange(3 << 18, dtype=torch.float32).view(3, -1)}
    boxes = [full_box((6, 10)).narrow(1, start, size) for start, size in ((0, 3), (3, 7))]
    held = [pieces_of({"w": Piece(whole["w"][box.slices()], (6, 10), box), "big": whole["big"]}) for box in boxes]
    save_as_ranks(tmp_path / "a", [{"weights": pieces, "optimizer": {}} for pieces in held], "per_rank")
    if chunk == 7:  # one value at a time: of the small tensor alone
        del whole["big"]
        save_as_ranks(
            tmp_path / "small", [{"weights": {"w": pieces["w"]}, "optimizer": {}} for pieces in held], "per_rank"
        )
    source = tmp_path / ("small" if chunk == 7 else "a")
    assert len(list_folder(source).tensors["weights"]["w"].places) == 2
    rewrite(plan_checkpoint(source, 10**9), tmp_path / "b", chunk)
    save(tmp_path / "c", whole, {}, {"config.json": "{}"})
    assert contents(tmp_path / "b") == contents(tmp_path / "c")
    rewrite(plan_checkpoint(tmp_path / "b", 10**9, "per_rank", 3), tmp_path / "d", chunk)
    assert tensors(tmp_path / "d") == tensors(tmp_path / "c")
    assert ("big" not in whole) or len(list_folder(tmp_path / "d").tensors["weights"]["big"].places) == 3
    for folder in ("b", "d"):
        assert find_damage(tmp_path / folder, list_folder(tmp_path / folder).manifest) == []


def test_it_is_what_that_many_ranks_would_have_saved(ranks, reshard, tmp_path):
    first = saved(tmp_path / "a", DENSE)
    assert reshard(first, tmp_path / "b", "--writer", "per_rank", "--ranks", "2")[0] == 0
    ranks(2, saved, tmp_path / "c", DENSE, writer="per_rank")
    written = {name: data for name, data in contents(tmp_path / "c").items() if name.startswith("model")}
    assert written == {name: data for name, data in contents(tmp_path / "b").items() if name.startswith("model")}


@pytest.mark.parametrize("chunk", [1, 24, 1 << 20])
@pytest.mark.parametrize("writer", ["shared", "per_rank"])
def test_every_kind_of_tensor_passes_in_chunks_of_no_more_than_was_said(tmp_path, monkeypatch, chunk, writer):
    save(tmp_path / "a", many_kinds(), {"x.m": torch.ones(3)}, {}, writer=writer, max_file_size=100)
    module = sys.modules["composable.checkpoint.rewrite"]
    read, sizes = module.read_region, []

    def counted(*arguments):
        values = read(*arguments)
        sizes.append((values.nbytes, values.numel()))
        return values

    monkeypatch.setattr(module, "read_region", counted)
    other = "shared" if writer == "per_rank" else "per_rank"
    rewrite(plan_checkpoint(tmp_path / "a", 60, other, 1 if other == "shared" else 4), tmp_path / "b", chunk)
    assert tensors(tmp_path / "b") == {name: bits(tensor) for name, tensor in many_kinds().items()}
    assert all(nbytes <= chunk or numel == 1 for nbytes, numel in sizes)
    assert sum(nbytes for nbytes, _ in sizes) == sum(t.numel() * t.element_size() for t in many_kinds().values()) + 12


def test_a_published_folder_becomes_a_checkpoint_that_transformers_opens(reshard, tmp_path):
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2
    )
    model = transformers.LlamaForCausalLM(config)
    model.save_pretrained(tmp_path / "hf", max_shard_size="10KB")
    (tmp_path / "hf" / "pytorch_model.bin").write_bytes(b"the same in another format")
    assert reshard(tmp_path / "hf", tmp_path / "c")[0] == 0
    names = {
        "config.json",
        "generation_config.json",
        "manifest.json",
        "model.safetensors",
        "model.safetensors.index.json",
    }
    assert {path.name for path in (tmp_path / "c").iterdir()} == names
    opened = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "c").state_dict()
    assert all(torch.equal(tensor, opened[name]) for name, tensor in model.state_dict().items())


def test_weights_only_leaves_out_the_optimizer_and_the_state_of_the_run(reshard, tmp_path):
    first = saved(tmp_path / "a", DENSE)
    assert reshard(first, tmp_path / "b", "--weights-only")[0] == 0
    names = {"config.json", "tokenizer.json", "manifest.json", "model.safetensors", "model.safetensors.index.json"}
    assert {str(path.relative_to(tmp_path / "b")) for path in (tmp_path / "b").rglob("*")} == names
    assert tensors(tmp_path / "b") == tensors(first)


@pytest.mark.parametrize(
    ("config", "layout"),
    [
        (DENSE, "tp=2,pp=3"),
        (DENSE, "tp=4"),  # key/value heads that do not divide
        (MIXTRAL, "tp=4,ep=2,pp=2"),
        (MIXTRAL, "tp=4,ep=4"),
        (SHARED, "tp=4,pp=2"),
        (DENSE, "tp=1"),
    ],
)
def test_files_for_ranks_hold_parts_under_plain_names_and_become_a_checkpoint_again(reshard, tmp_path, config, layout):
    first, weights, degrees = saved(tmp_path / "a", config), weights_of(config), Layout.parse(layout)
    assert reshard(first, tmp_path / "l", "--layout", layout)[0] == 0
    held = held_boxes(config, {name: tuple(tensor.shape) for name, tensor in weights.items()}, degrees)
    assert list(held) == [f"pp{p}-tp{t}" for p in range(degrees.pp) for t in range(degrees.tp)]
    for rank, boxes in held.items():
        loaded = safetensors.torch.load_file(tmp_path / "l" / f"{rank}.safetensors")
        assert loaded.keys() == boxes.keys()
        assert all(torch.equal(loaded[name], weights[name][box.slices()]) for name, box in boxes.items())
    names = {f"{rank}.safetensors" for rank in held} | {"config.json", "tokenizer.json", "layout.json"}
    assert {path.name for path in (tmp_path / "l").iterdir()} == names
    assert reshard(tmp_path / "l", tmp_path / "back")[0] == 0
    assert reshard(first, tmp_path / "w", "--weights-only")[0] == 0
    assert contents(tmp_path / "back") == contents(tmp_path / "w")
    load(tmp_path / "l", again := {name: torch.zeros_like(tensor) for name, tensor in weights.items()})
    assert all(torch.equal(again[name], tensor) for name, tensor in weights.items())


def test_a_tied_embedding_is_in_both_ends_and_layers_are_in_one_stage():
    shapes = {name: tuple(tensor.shape) for name, tensor in weights_of(SHARED).items()}
    held = held_boxes(SHARED, shapes, Layout(tp=2, pp=2))
    assert held["pp0-tp1"]["model.embed_tokens.weight"] == held["pp1-tp1"]["model.embed_tokens.weight"]
    assert held["pp0-tp1"]["model.embed_tokens.weight"].sizes == (16, 16)
    for name in shapes:
        if name.startswith("model.layers."):
            assert {rank[:3] for rank, boxes in held.items() if name in boxes} == {f"pp{name.split('.')[2]}"}
    assert [str(stage) for stage in Layout(pp=3).stages(8)] == ["range(0, 2)", "range(2, 5)", "range(5, 8)"]


def test_ranks_of_the_same_experts_follow_each_other_and_cut_their_width():
    shapes = {name: tuple(tensor.shape) for name, tensor in weights_of(MIXTRAL).items()}
    held = held_boxes(MIXTRAL, shapes, Layout(tp=4, ep=2))
    expert = "model.layers.1.block_sparse_moe.experts.{}.{}.weight"
    for rank, experts, half in ((0, {0, 1}, 0), (1, {0, 1}, 12), (2, {2, 3}, 0), (3, {2, 3}, 12)):
        boxes = held[f"pp0-tp{rank}"]
        for number in range(4):
            assert (expert.format(number, "w1") in boxes) == (number in experts)
            if number in experts:
                assert boxes[expert.format(number, "w3")].slices() == (slice(half, half + 12), slice(0, 16))
                assert boxes[expert.format(number, "w2")].slices() == (slice(0, 16), slice(half, half + 12))


def tensor_boxes(config, ep, etp):
    """What a rank of training holds of the weights with two tensor ranks."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    model = Decoder(config)
    tensor_parallel(model, mesh)
    experts = init_device_mesh("cpu", (ep, etp), mesh_dim_names=("ep", "etp"))
    for module in model.modules():
        if isinstance(module, Experts):
            expert_parallel(module, experts)
    held = in_file(dict(model.state_dict()), config)
    return {name: value.box if isinstance(value, Piece) else local_box(value) for name, value in held.items()}


@pytest.mark.parametrize(("config", "ep"), [(DENSE, 1), (MIXTRAL, 1), (MIXTRAL, 2), (SHARED, 2)])
def test_a_rank_of_inference_has_the_boxes_of_a_rank_of_training(ranks, config, ep):
    trained = ranks(2, tensor_boxes, config, ep, 2 // ep)
    shapes = {name: tuple(tensor.shape) for name, tensor in weights_of(config).items()}
    held = held_boxes(config, shapes, Layout(tp=2, ep=ep))
    assert [held["pp0-tp0"], held["pp0-tp1"]] == trained


def test_a_plan_tells_every_file_with_its_size_and_writes_nothing(reshard, tmp_path):
    first = saved(tmp_path / "a", DENSE)
    for how in (["--writer", "per_rank", "--ranks", "2"], ["--layout", "tp=2"]):
        status, told, _ = reshard(first, tmp_path / "b", "--plan", *how)
        assert status == 0
        assert [path.name for path in tmp_path.iterdir()] == ["a"]
        assert reshard(first, tmp_path / "b", *how)[0] == 0
        for path in (tmp_path / "b").rglob("*.safetensors"):
            assert f"write  {path}  {path.stat().st_size:,}" in told
        for path in sorted((tmp_path / "b").rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() else path.unlink()
        (tmp_path / "b").rmdir()


def test_bytes_that_were_changed_are_not_passed_on(reshard, tmp_path):
    first = saved(tmp_path / "a", DENSE)
    path = first / "optimizer" / "optimizer.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    status, _, err = reshard(first, tmp_path / "new" / "b")
    assert status == 2
    assert "optimizer/optimizer.safetensors): the bytes of " in err[0]
    assert reshard(first, tmp_path / "b", "--weights-only")[0] == 0
    (first / "tokenizer.json").write_text("{}")
    assert "tokenizer.json was changed" in reshard(first, tmp_path / "c")[2][0]
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["a", "b"]


def test_a_draft_that_was_left_is_replaced_and_one_in_use_is_not(reshard, tmp_path):
    first = saved(tmp_path / "a", DENSE)
    left = tmp_path / ".b.draft"
    (left / "optimizer").mkdir(parents=True)
    (left / "model.safetensors").write_bytes(b"left")
    (tmp_path / "b").mkdir()  # empty: taken
    assert reshard(first, tmp_path / "b")[0] == 0
    assert contents(tmp_path / "b") == contents(first)
    with drafted(tmp_path / "c", 0) as draft:
        assert "written by another process" in reshard(first, tmp_path / "c")[2][0]
        assert draft.is_dir()


def test_a_full_disk_is_told_before_anything_is_written(reshard, tmp_path, monkeypatch):
    first = saved(tmp_path / "a", DENSE)
    usage = os.statvfs(tmp_path)
    module = sys.modules["composable.checkpoint.draft"]
    monkeypatch.setattr(
        module.shutil, "disk_usage", lambda path: type("usage", (), {"free": 10, "total": usage.f_blocks})
    )
    status, _, err = reshard(first, tmp_path / "b")
    assert (status, len(err)) == (2, 1)
    assert "10 are free" in err[0]
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_bad_input_is_one_line_and_the_target_is_untouched(reshard, tmp_path):
    first = saved(tmp_path / "a", DENSE)
    moe = saved(tmp_path / "moe", MIXTRAL)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").write_text("mine")
    (tmp_path / "file").write_text("mine")
    foreign = tmp_path / "foreign"
    save(
        foreign,
        weights_of(DENSE) | {"model.layers.0.odd.weight": torch.ones(2, 2)},
        {},
        {"config.json": json.dumps(to_hugging_face(DENSE))},
    )
    bare = tmp_path / "bare"
    save(bare, {"w": torch.ones(2)}, {}, {})
    odd = tmp_path / "odd"
    save(odd, {"w": torch.ones(2)}, {}, {"config.json": '{"model_type": "rwkv"}'})
    short = tmp_path / "short"
    save(short, {"w": torch.ones(2)}, {}, {"config.json": '{"model_type": "llama"}'})
    assert reshard(first, tmp_path / "l", "--layout", "tp=2")[0] == 0
    (tmp_path / "l" / "pp0-tp1.safetensors").unlink()
    before = sorted(path.name for path in tmp_path.iterdir())
    to = tmp_path / "b"
    cases = [
        ((tmp_path / "none", to), "no folder"),
        ((first, tmp_path / "full"), "no empty folder"),
        ((first, tmp_path / "file"), "no empty folder"),
        ((first, first), "no empty folder"),
        ((first, "memory://b"), "is a URL"),
        ((first, to, "--max-file-size", "5 elephants"), "no size"),
        ((first, to, "--writer", "per_rank"), "say how many ranks"),
        ((first, to, "--ranks", "2"), "add --writer per_rank"),
        ((first, to, "--layout", "tp=2", "--ranks", "2"), "leave out"),
        ((first, to, "--layout", "dp=2"), "'dp=2': write degrees of tp, pp, ep"),
        ((first, to, "--layout", "tp=2,tp=2"), "each once"),
        ((first, to, "--layout", "tp=0"), "1 or more"),
        ((first, to, "--layout", "tp=3"), "model.heads=4 with mesh.tp=3"),
        ((first, to, "--layout", "pp=4"), "write pp=3"),
        ((moe, to, "--layout", "tp=4,ep=3"), "nearest is ep=2"),
        ((first, to, "--layout", "tp=2,ep=2"), "no experts"),
        (
            (foreign, to, "--layout", "tp=2"),
            "no weights of the model that config.json tells of: model.layers.0.odd.weight",
        ),
        ((bare, to, "--layout", "tp=2"), "config.json is missing"),
        ((odd, to, "--layout", "tp=2"), "model_type 'rwkv' is not supported"),
        ((short, to, "--layout", "tp=2"), "is no model's configuration"),
        ((tmp_path / "l", to), "pp0-tp1.safetensors is missing"),
    ]
    for arguments, text in cases:
        status, out, err = reshard(*arguments)
        assert (status, out, len(err)) == (2, [], 1), (arguments, err)
        assert text in err[0], err
        assert sorted(path.name for path in tmp_path.iterdir()) == before
    assert (tmp_path / "full" / "mine").read_text() == (tmp_path / "file").read_text() == "mine"


def test_a_layout_of_a_newer_version_is_refused_and_another_file_of_that_name_is_none(reshard, tmp_path):
    first = saved(tmp_path / "a", DENSE)
    assert reshard(first, tmp_path / "l", "--layout", "pp=2")[0] == 0
    document = json.loads((tmp_path / "l" / "layout.json").read_text())
    (tmp_path / "l" / "layout.json").write_text(json.dumps(document | {"version": 2}))
    assert "update composable" in reshard(tmp_path / "l", tmp_path / "b")[2][0]
    (first / "layout.json").write_text('{"format": "of somebody else"}')
    assert reshard(first, tmp_path / "b")[0] == 0
    assert not (tmp_path / "b" / "layout.json").exists()
    assert tensors(tmp_path / "b") == tensors(first)
