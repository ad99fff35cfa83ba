import json
import resource

import pytest
import safetensors.torch
import torch
import transformers

from composable.checkpoint import Box, Piece, latest, load, save, transfer
from composable.checkpoint.load import widens
from composable.checkpoint.transfer import read_box


def many_kinds() -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    base = torch.arange(40, dtype=torch.float32).view(5, 8)
    return {
        "float32": torch.randn(4, 4, generator=g),
        "nan": torch.tensor([float("nan"), float("-inf"), -0.0]),
        "float64": torch.randn(2, 3, generator=g, dtype=torch.float64),
        "bfloat16": torch.randn(3, generator=g).bfloat16(),
        "float16": torch.randn(3, generator=g).half(),
        "int64": torch.tensor([1, -2, 2**62]),
        "int32": torch.tensor([1, -2], dtype=torch.int32),
        "bool": torch.tensor([True, False]),
        "scalar": torch.tensor(2.5),
        "scalar_int64": torch.tensor(7),
        "uint8": torch.arange(5, dtype=torch.uint8),
        "uint16": torch.tensor([1, 65535], dtype=torch.uint16),
        "empty": torch.empty(0, 4),
        "transposed": base.t(),
        "slice": base[1:3],
        "columns": base[:, 2:5],
        "complex64": torch.randn(3, 2, dtype=torch.complex64, generator=g),
        "conjugate": torch.randn(3, dtype=torch.complex64, generator=g).conj(),
        "float8": torch.randn(6, generator=g).to(torch.float8_e4m3fn),
        "float8_e5m2": torch.randn(6, generator=g).to(torch.float8_e5m2),
    }


def bits(tensor):
    return (
        tensor.dtype,
        tuple(tensor.shape),
        bytes(tensor.resolve_conj().contiguous().view(-1).view(torch.uint8).numpy()),
    )


def zeros(tensors):
    return {name: torch.zeros_like(tensor.resolve_conj()) for name, tensor in tensors.items()}


@pytest.mark.parametrize("limit", [1, 100, 10**9])
def test_every_kind_of_tensor_comes_back_bit_for_bit(tmp_path, limit):
    weights = many_kinds()
    save(tmp_path / "c", weights, {"float32.exp_avg": weights["columns"]}, {}, max_file_size=limit)
    loaded, state = zeros(weights), {"float32.exp_avg": torch.zeros(5, 3)}
    load(tmp_path / "c", loaded, state)
    assert {n: bits(t) for n, t in loaded.items()} == {n: bits(t) for n, t in weights.items()}
    assert torch.equal(state["float32.exp_avg"], weights["columns"])


def test_the_standard_reader_opens_the_files_and_a_view_takes_its_own_bytes_only(tmp_path):
    weights = many_kinds()
    save(tmp_path / "c", weights, {}, {})
    loaded = safetensors.torch.load_file(tmp_path / "c" / "model.safetensors")
    assert {n: bits(t) for n, t in loaded.items()} == {n: bits(t) for n, t in weights.items()}
    index = json.loads((tmp_path / "c" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(t.numel() * t.element_size() for t in weights.values())
    assert not (tmp_path / "c" / "optimizer").exists()


@pytest.mark.parametrize("limit", [20_000, 10**9])
def test_transformers_opens_the_folder(tmp_path, limit):
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2
    )
    model = transformers.LlamaForCausalLM(config)
    weights = dict(model.state_dict())
    save(tmp_path / "c", weights, {}, {"config.json": config.to_json_string()}, max_file_size=limit)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "c").state_dict()
    assert weights.keys() == again.keys()
    assert all(torch.equal(weights[name], again[name]) for name in weights)
    assert len(list((tmp_path / "c").glob("*.safetensors"))) == (1 if limit == 10**9 else 2)


def test_the_files_do_not_depend_on_the_order_of_the_names(tmp_path):
    names = [f"layers.{i}.w" for i in (10, 2, 9, 1)]
    save(tmp_path / "a", {name: torch.full((4,), 1.0) for name in names}, {}, {})
    save(tmp_path / "b", {name: torch.full((4,), 1.0) for name in sorted(names)}, {}, {})
    content = (tmp_path / "a" / "model.safetensors").read_bytes()
    assert content == (tmp_path / "b" / "model.safetensors").read_bytes()
    assert content.index(b"layers.9.w") < content.index(b"layers.10.w")


def test_an_unsupported_dtype_is_refused_with_its_name_before_anything_is_written(tmp_path):
    with pytest.raises(ValueError, match=r"w\.odd.*complex128"):
        save(tmp_path / "c", {"w.odd": torch.zeros(2, dtype=torch.complex128)}, {}, {})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["manifest.json", "../x", "/x", "optimizer/x", "x.safetensors", ""])
def test_an_extra_file_cannot_take_the_place_of_a_part_of_the_checkpoint(tmp_path, name):
    with pytest.raises(ValueError, match="extra file"):
        save(tmp_path / "c", {"w": torch.zeros(2)}, {}, {name: "x"})
    assert list(tmp_path.iterdir()) == []


def test_a_complete_checkpoint_and_foreign_weights_are_not_overwritten_unasked(tmp_path):
    for folder in ("ours", "theirs"):
        (tmp_path / folder).mkdir()
    save(tmp_path / "ours", {"w": torch.zeros(2), "v": torch.zeros(2)}, {"w.m": torch.zeros(2)}, {}, max_file_size=8)
    safetensors.torch.save_file({"w": torch.zeros(2)}, tmp_path / "theirs" / "model.safetensors")
    for folder in ("ours", "theirs"):
        with pytest.raises(FileExistsError, match="overwrite"):
            save(tmp_path / folder, {"w": torch.ones(2)}, {}, {})
        load(tmp_path / folder, {"w": torch.ones(2)}, allow_extra=["v"])
        save(tmp_path / folder, {"w": torch.ones(2)}, {}, {}, overwrite=True)
        assert sorted(path.name for path in (tmp_path / folder).iterdir()) == [
            "manifest.json",
            "model.safetensors",
            "model.safetensors.index.json",
        ]
        load(tmp_path / folder, loaded := {"w": torch.zeros(2)})
        assert torch.equal(loaded["w"], torch.ones(2))


def test_missing_and_extra_names_are_one_error_with_both_lists(tmp_path):
    save(tmp_path / "c", {"a": torch.ones(2), "b": torch.ones(2)}, {}, {})
    with pytest.raises(ValueError, match=r"1 missing there \(c\), 1 not asked for \(b\)"):
        load(tmp_path / "c", {"a": torch.zeros(2), "c": torch.zeros(2)})
    loaded = {"a": torch.zeros(2), "c": torch.full((2,), 5.0)}
    load(tmp_path / "c", loaded, allow_missing=["c"], allow_extra=["b*"])
    assert loaded["a"].tolist() == [1, 1]
    assert loaded["c"].tolist() == [5, 5]
    with pytest.raises(ValueError, match=r"optimizer.*1 missing"):
        load(tmp_path / "c", {"a": torch.zeros(2), "b": torch.zeros(2)}, {"a.exp_avg": torch.zeros(2)})


def test_another_shape_is_refused_with_both_shapes(tmp_path):
    save(tmp_path / "c", {"a": torch.ones(2, 3)}, {}, {})
    with pytest.raises(ValueError, match=r"a has shape \(2, 3\).*\(3, 2\)"):
        load(tmp_path / "c", {"a": torch.zeros(3, 2)})


def test_a_widening_cast_is_made_and_a_narrowing_one_must_be_asked_for(tmp_path):
    values = torch.tensor([1.0, 1 / 3])
    save(tmp_path / "c", {"a": values}, {}, {})
    load(tmp_path / "c", wide := {"a": torch.zeros(2, dtype=torch.float64)})
    assert torch.equal(wide["a"], values.double())
    narrow = {"a": torch.zeros(2, dtype=torch.bfloat16)}
    with pytest.raises(ValueError, match="allow_cast"):
        load(tmp_path / "c", narrow)
    load(tmp_path / "c", narrow, allow_cast=True)
    assert torch.equal(narrow["a"], values.bfloat16())


def test_a_cast_widens_only_if_every_value_survives():
    t = torch
    yes = [(t.bfloat16, t.float32), (t.float16, t.float32), (t.float32, t.float64), (t.uint8, t.int16)]
    yes += [(t.float8_e4m3fn, t.bfloat16), (t.float8_e5m2, t.float16), (t.complex64, t.complex128), (t.bool, t.bool)]
    no = [(t.float32, t.bfloat16), (t.bfloat16, t.float16), (t.float16, t.bfloat16), (t.int64, t.float64)]
    no += [(t.uint8, t.int8), (t.int8, t.uint8), (t.bool, t.uint8), (t.float32, t.complex64)]
    assert [widens(*pair) for pair in yes + no] == [True] * len(yes) + [False] * len(no)


def test_a_piece_of_a_stacked_tensor_is_filled_from_its_part_of_the_file(tmp_path):
    whole = torch.arange(24.0).view(6, 4)
    save(tmp_path / "c", {"w": whole}, {}, {})
    stacked = torch.zeros(2, 3, 2)
    for i in range(2):
        load(tmp_path / "c", {"w": Piece(stacked[i], (6, 4), Box((3 * i, 1), (3, 2)))})
    assert torch.equal(stacked, torch.stack([whole[:3, 1:3], whole[3:, 1:3]]))


@pytest.mark.parametrize("columns", [1, 3, 5000])  # read between, read apart, and rows long enough to be read apart
def test_inner_shards_are_read_exactly_however_long_their_rows(tmp_path, columns):
    whole = torch.randn(7, columns * 40)
    save(tmp_path / "c", {"w": whole}, {}, {})
    for cut in (20, 2):
        width = whole.shape[1] // cut
        for target in (torch.zeros(7, width), torch.zeros(width, 7).t(), torch.zeros(7, width, dtype=torch.float64)):
            load(tmp_path / "c", {"w": Piece(target, tuple(whole.shape), Box((0, width), (7, width)))})
            assert torch.equal(target, whole[:, width : 2 * width].to(target.dtype))


def test_a_plain_hugging_face_folder_is_read(tmp_path):
    one, two = {"a": torch.randn(2), "s": torch.tensor(3)}, {"b": torch.randn(3)}
    safetensors.torch.save_file(one, tmp_path / "a.safetensors")
    safetensors.torch.save_file(two, tmp_path / "model-1-of-2.safetensors")
    for write_index in (False, True):
        if write_index:
            weight_map = dict.fromkeys(one, "a.safetensors") | dict.fromkeys(two, "model-1-of-2.safetensors")
            (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
            safetensors.torch.save_file(one, tmp_path / "consolidated.safetensors")  # not in the index: not looked at
        load(tmp_path, loaded := zeros(one | two))
        assert {n: bits(t) for n, t in loaded.items()} == {n: bits(t) for n, t in (one | two).items()}


def test_a_name_in_two_files_a_missing_file_and_a_wrong_index_are_refused(tmp_path):
    safetensors.torch.save_file({"a": torch.ones(2)}, tmp_path / "x.safetensors")
    safetensors.torch.save_file({"a": torch.ones(2), "b": torch.ones(2)}, tmp_path / "y.safetensors")
    wanted = {"a": torch.zeros(2), "b": torch.zeros(2)}
    index = tmp_path / "model.safetensors.index.json"
    with pytest.raises(ValueError, match="a stands in two files"):
        load(tmp_path, wanted)
    index.write_text(json.dumps({"weight_map": {"a": "x.safetensors", "b": "z.safetensors"}}))
    with pytest.raises(ValueError, match=r"z\.safetensors is missing"):
        load(tmp_path, wanted)
    index.write_text(json.dumps({"weight_map": {"a": "x.safetensors", "b": "x.safetensors"}}))
    with pytest.raises(ValueError, match=r"b is in x\.safetensors"):
        load(tmp_path, wanted)


def test_a_folder_without_weights_is_refused_with_its_name(tmp_path):
    for path in (tmp_path, tmp_path / "none"):
        with pytest.raises(FileNotFoundError, match=str(path)):
            load(path, {"a": torch.ones(2)})


@pytest.mark.parametrize("file", ["model.safetensors", "optimizer/optimizer.safetensors", "config.json"])
@pytest.mark.parametrize("harm", ["truncate", "delete", "flip"])
def test_a_damaged_file_is_refused_with_its_name(tmp_path, file, harm):
    save(tmp_path / "c", {"a": torch.ones(4)}, {"a.m": torch.ones(4)}, {"config.json": "{}"})
    path = tmp_path / "c" / file
    content = path.read_bytes()
    if harm == "delete":
        path.unlink()
    else:
        path.write_bytes(content[:-1] if harm == "truncate" else content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(ValueError, match=file):
        load(tmp_path / "c", {"a": torch.zeros(4)}, {"a.m": torch.zeros(4)})
    if harm == "flip":
        load(tmp_path / "c", {"a": torch.zeros(4)}, {"a.m": torch.zeros(4)}, verify=False)


def test_what_was_read_wrongly_is_found_by_the_checksums(tmp_path, monkeypatch):
    save(tmp_path / "c", {"a": torch.arange(4.0)}, {}, {})

    def wrong(file, place, piece, *rest):
        read_box(file, place, piece, *rest)
        piece.local[0] = 9

    monkeypatch.setattr(transfer, "read_box", wrong)
    with pytest.raises(ValueError, match="checksum"):
        load(tmp_path / "c", {"a": torch.zeros(4)})


def test_a_manifest_of_a_newer_version_is_refused_by_name(tmp_path):
    save(tmp_path / "c", {"a": torch.ones(4)}, {}, {})
    path = tmp_path / "c" / "manifest.json"
    document = json.loads(path.read_text())
    path.write_text(json.dumps(document | {"version": 3, "unknown": 1}))
    with pytest.raises(ValueError, match=r"manifest\.json has version 3, this composable reads up to 2; update compos"):
        load(tmp_path / "c", {"a": torch.zeros(4)})
    for version in ("2", 0, True, None):
        path.write_text(json.dumps(document | {"version": version}))
        with pytest.raises(ValueError, match=r"manifest\.json has version"):
            load(tmp_path / "c", {"a": torch.zeros(4)})


def test_a_file_that_cannot_grow_raises_and_leaves_no_manifest_and_the_checkpoints_before(tmp_path):
    weights = {"w": torch.ones(1000)}
    save(tmp_path / "step-00000001", weights, {}, {})
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, before[1]))
    try:
        with pytest.raises(OSError, match=r"model\.safetensors.*too large"):
            save(tmp_path / "step-00000002", weights, {}, {})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert latest(tmp_path) == tmp_path / "step-00000001"
    assert list((tmp_path / "step-00000002").rglob("*.safetensors")) == []
    save(tmp_path / "step-00000002", weights, {}, {})
    assert latest(tmp_path) == tmp_path / "step-00000002"
