"""Files of torch.save are read where their bytes lie, whatever views of which storages were saved."""

import io
import os
import zlib

import pytest
import torch

from composable.checkpoint.formats import torch_file
from composable.checkpoint.formats.source import write
from tests.checkpoint.test_save_load import bits, many_kinds


def loaded(folder):
    return torch.load(folder / "model.pt", weights_only=True)


@pytest.mark.parametrize("chunk", [1, 100, 1 << 20])
def test_views_come_out_as_their_values(tmp_path, chunk):
    base = torch.arange(60.0).view(3, 4, 5)
    views = {
        "whole": base,
        "rows": base[1:],
        "columns": base[:, :, 1:3],
        "turned": base.permute(2, 0, 1),
        "expanded": torch.ones(1, 4).expand(3, 4),
        "odd": torch.arange(9, dtype=torch.uint8)[1:].view(2, 4),
        "parameter": torch.nn.Parameter(torch.ones(2)),
    }
    torch.save(views, tmp_path / "x.pt")
    write(torch_file.target(torch_file.source(tmp_path / "x.pt")), tmp_path / "b", chunk)
    assert {name: bits(tensor) for name, tensor in loaded(tmp_path / "b").items()} == {
        name: bits(tensor.detach()) for name, tensor in views.items()
    }


def test_what_torch_saved_and_what_we_write_are_loaded_alike(tmp_path):
    kinds = {name: tensor for name, tensor in many_kinds().items() if name != "conjugate"}
    torch.save(kinds, tmp_path / "x.pt")
    write(torch_file.target(torch_file.source(tmp_path / "x.pt")), tmp_path / "b", 1 << 20)
    assert list(loaded(tmp_path / "b")) == list(kinds)
    assert {n: bits(t) for n, t in loaded(tmp_path / "b").items()} == {n: bits(t) for n, t in kinds.items()}


def test_reading_gives_places_and_reads_no_tensor(tmp_path):
    with torch.serialization.skip_data():
        torch.save({"w": torch.empty(1 << 33, dtype=torch.uint8)}, tmp_path / "x.pt")  # 8 GiB that take no room
    assert os.stat(tmp_path / "x.pt").st_blocks < 100
    (entry,) = torch_file.source(tmp_path / "x.pt").sections["weights"].values()
    assert entry.spec.shape == (1 << 33,)
    assert len(list(entry.units(1 << 26))) == 128


def test_a_file_in_a_file_is_read_from_where_it_starts(tmp_path):
    buffer = io.BytesIO()
    torch.save(torch.arange(5), buffer)
    (tmp_path / "x").write_bytes(b"before!" + buffer.getvalue() + b"behind")
    entry = torch_file.loaded(tmp_path, "x", 7, len(buffer.getvalue()))
    (unit,) = entry.units(1 << 20)
    assert next(entry.values(unit, 1 << 20))[1].tolist() == [0, 1, 2, 3, 4]
    with pytest.raises(ValueError, match="is truncated"):
        torch_file.loaded(tmp_path, "x", 7, len(buffer.getvalue()) + 7)


@pytest.mark.parametrize("sizes", [(0,), (1, 2, 3), (100, 0, 7, 4096)])
def test_a_checksum_of_parts_is_that_of_the_whole(sizes):
    data = torch.randint(256, (sum(sizes),), dtype=torch.uint8).numpy().tobytes()
    parts, at = [], 0
    for size in sizes:
        parts.append((at, size, zlib.crc32(data[at : at + size])))
        at += size
    assert torch_file._joined(parts[::-1]) == zlib.crc32(data)
