import json

import pytest
import safetensors.torch
import torch

from composable.checkpoint.format import DTYPES, TensorSpec, encode_header, encode_index, plan_files, read_header

SPECS = [TensorSpec(f"t{i}", torch.float32, (100,)) for i in range(5)]  # 400 bytes each


@pytest.mark.parametrize(
    ("limit", "names"),
    [
        (10_000, [["t0", "t1", "t2", "t3", "t4"]]),
        (800, [["t0", "t1"], ["t2", "t3"], ["t4"]]),
        (799, [["t0"], ["t1"], ["t2"], ["t3"], ["t4"]]),
        (1, [["t0"], ["t1"], ["t2"], ["t3"], ["t4"]]),
    ],
)
def test_files_are_cut_on_tensor_borders_and_numbered_without_gaps(limit, names):
    files = plan_files(SPECS, limit, "model")
    assert [[place.spec.name for place in file.places] for file in files] == names
    if len(names) == 1:
        assert [file.name for file in files] == ["model.safetensors"]
    else:
        n = len(names)
        assert [file.name for file in files] == [f"model-{i:05d}-of-{n:05d}.safetensors" for i in range(1, n + 1)]
    index = json.loads(encode_index(files))
    assert index["metadata"]["total_size"] == 2000
    assert index["weight_map"] == {place.spec.name: file.name for file in files for place in file.places}


def test_every_tensor_lies_aligned_to_its_item_and_the_header_to_eight_bytes():
    specs = [TensorSpec("b", torch.bool, (3,)), TensorSpec("d", torch.float64, (2,)), TensorSpec("h", torch.half, (1,))]
    (file,) = plan_files(specs, 10**6, "model")
    assert len(file.header) % 8 == 0
    assert all(place.offset % place.spec.dtype.itemsize == 0 for place in file.places)
    assert file.size == len(file.header) + 3 + 16 + 2


@pytest.mark.parametrize("name", DTYPES)
def test_a_header_gives_back_every_dtype_and_shape(name, tmp_path):
    specs = [TensorSpec("x.y", DTYPES[name], (2, 3)), TensorSpec("empty", DTYPES[name], (0, 4))]
    header = encode_header(specs)
    (tmp_path / "f").write_bytes(header + bytes(6 * DTYPES[name].itemsize))
    places = read_header(tmp_path / "f", "f")
    assert [places[spec.name].spec for spec in specs] == specs
    assert places["x.y"].offset == len(header)


def test_a_header_of_the_safetensors_library_is_read(tmp_path):
    tensors = {"b": torch.tensor([True]), "a": torch.randn(2, 3), "s": torch.tensor(7)}
    safetensors.torch.save_file(tensors, tmp_path / "f")
    content = (tmp_path / "f").read_bytes()
    for name, place in read_header(tmp_path / "f", "f").items():
        size = place.spec.nbytes
        values = torch.frombuffer(bytearray(content[place.offset : place.offset + size]), dtype=place.spec.dtype)
        assert torch.equal(values.view(place.spec.shape), tensors[name])


@pytest.mark.parametrize("cut", [1, 20, 10_000])
def test_a_truncated_file_is_refused_with_its_name(cut, tmp_path):
    safetensors.torch.save_file({"a": torch.ones(8)}, tmp_path / "f.safetensors")
    content = (tmp_path / "f.safetensors").read_bytes()
    (tmp_path / "f.safetensors").write_bytes(content[: max(0, len(content) - cut)])
    with pytest.raises(ValueError, match=r"f\.safetensors"):
        read_header(tmp_path / "f.safetensors", "f.safetensors")


def test_a_name_twice_in_a_header_is_refused(tmp_path):
    entry = '"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}'
    text = f"{{{entry},{entry}}}".encode()
    (tmp_path / "f").write_bytes(len(text).to_bytes(8, "little") + text + b"\0")
    with pytest.raises(ValueError, match="twice"):
        read_header(tmp_path / "f", "f")


@pytest.mark.parametrize("dtype", [torch.complex128, torch.quint8])
def test_a_dtype_that_the_format_lacks_is_refused_with_the_tensors_name(dtype):
    with pytest.raises(ValueError, match=r"layers\.0\.odd.*" + str(dtype)):
        plan_files([TensorSpec("layers.0.odd", dtype, (1,))], 100, "model")
