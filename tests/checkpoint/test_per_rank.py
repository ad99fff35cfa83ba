"""The writer of whole files by each rank: on a disk and at a URL, read by the same loader as the common files."""

import contextlib
import json
import os
import shutil
from pathlib import Path
from unittest import mock

import pytest
import safetensors
import safetensors.torch
import torch
import transformers
from fsspec.implementations.memory import MemoryFileSystem
from torch.distributed.device_mesh import init_device_mesh

from composable.checkpoint import Box, Piece, is_complete, latest, load, prune, save, step_folder
from composable.checkpoint.folder import steps
from composable.checkpoint.format import TensorSpec
from composable.checkpoint.owners import plan_owners
from composable.checkpoint.plan import plan_sections, table_of
from composable.checkpoint.remote import RemotePath, as_folder
from composable.checkpoint.shards import full_box, pieces_of
from tests.checkpoint import object_store  # noqa: F401  (its protocol)
from tests.checkpoint.simulate import save_as_ranks
from tests.checkpoint.test_folder import die_at, names, value
from tests.checkpoint.test_ranks import error_of, load_placed, placed, values
from tests.checkpoint.test_save_load import bits, many_kinds, zeros

WRITERS = ("shared", "per_rank")


@pytest.fixture
def memory():
    """The root of an empty store in memory."""
    yield as_folder("memory://run")
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]


def save_placed(folder, mesh_shape, choice):
    tensors = placed(values(), init_device_mesh("cpu", mesh_shape), choice)
    moments = {f"{name}.m": tensor for name, tensor in tensors.items()}
    save(folder, tensors, moments, {"x.json": "{}"}, max_file_size=30_000, writer="per_rank")


@pytest.mark.parametrize("protocol", ["", "objects://"])
def test_what_four_ranks_wrote_on_their_own_is_loaded_in_every_layout(ranks, tmp_path, protocol):
    folder = f"{protocol}{tmp_path}/c"
    ranks(4, save_placed, folder, (2, 2), 1)
    assert is_complete(folder)
    load(folder, loaded := zeros(values()))
    assert {n: bits(t) for n, t in loaded.items()} == {n: bits(t) for n, t in values().items()}
    for mesh, choice in [((2,), 0), ((4,), 1), ((4,), 2), ((2, 2), 0), ((2, 2), 3)]:
        assert all(ranks(4 if mesh != (2,) else 2, load_placed, folder, mesh, choice))


def test_the_files_are_standard_ones_of_each_rank_with_an_index_of_every_entry(ranks, tmp_path):
    ranks(4, save_placed, tmp_path, (4,), 0)  # one has three files: a tensor above the limit has its own
    found = {}
    for path in sorted(tmp_path.glob("*.safetensors")):
        with safetensors.safe_open(path, "pt") as file:
            found |= dict.fromkeys(file.keys(), path.name)
            parts = json.loads(file.metadata().get("composable.parts", "{}"))
            for entry, part in parts.items():
                box = tuple(slice(o, o + n) for o, n in zip(part["offsets"], file.get_tensor(entry).shape, strict=True))
                assert torch.equal(file.get_tensor(entry), values()[part["name"]][box])
                assert part["shape"] == list(values()[part["name"]].shape)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["weight_map"] == found
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in values().values())
    assert sorted(set(found.values())) == [f"model-{i:05d}-of-00006.safetensors" for i in range(1, 7)]
    assert json.loads((tmp_path / "manifest.json").read_text())["version"] == 2


def test_every_kind_of_tensor_comes_back_from_a_disk_and_from_a_url(tmp_path, memory):
    for folder in (tmp_path / "c", memory / "c"):
        save(folder, many_kinds(), {"float32.m": torch.ones(3)}, {}, writer="per_rank", max_file_size=100)
        load(folder, loaded := zeros(many_kinds()), {"float32.m": torch.zeros(3)})
        assert {n: bits(t) for n, t in loaded.items()} == {n: bits(t) for n, t in many_kinds().items()}


def test_replicated_tensors_lie_whole_in_files_that_transformers_opens(tmp_path):
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2
    )
    weights = dict(transformers.LlamaForCausalLM(config).state_dict())
    save_as_ranks(tmp_path, [{"weights": pieces_of(weights), "optimizer": {}}] * 2, "per_rank")
    (tmp_path / "config.json").write_text(config.to_json_string())
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).state_dict()
    assert all(torch.equal(weights[name], again[name]) for name in weights)
    sizes = [path.stat().st_size for path in tmp_path.glob("*.safetensors")]
    assert len(sizes) == 2
    assert max(sizes) < 1.3 * min(sizes)
    assert json.loads((tmp_path / "manifest.json").read_text())["version"] == 1


@pytest.mark.parametrize("writer", WRITERS)
def test_experts_and_what_all_ranks_share_are_spread_so_that_no_writer_idles(writer):
    # 8 experts on 4 ranks and dense weights on all of them; two of the ranks also have a stage that the others lack.
    dense = {f"d{i}": torch.empty(700, 1000, device="cpu") for i in range(12)}
    tables = []
    for rank in range(4):
        held = {f"e{i}": torch.empty(500, 1000) for i in (2 * rank, 2 * rank + 1)} | dense
        held |= {"stage": torch.empty(300, 1000)} if rank < 2 else {}
        tables.append(
            table_of({"weights": pieces_of(held), "optimizer": pieces_of({f"{n}.m": t for n, t in held.items()})})
        )
    load = [0] * 4
    for section in plan_sections(tables, 10**9, writer):
        for name, owned in section.owners.items():
            for rank, box in owned:
                load[rank] += box.numel * 4
                assert not name.startswith("e") or rank == int(name[1]) // 2
    assert min(load) > 0.9 * max(load)


def test_a_tensor_larger_than_a_share_is_cut_and_a_smaller_one_is_not():
    specs = [TensorSpec("large", torch.uint8, (8 << 20,)), TensorSpec("small", torch.uint8, (2 << 20,))]
    plan = plan_owners(specs, [{spec.name: full_box(spec.shape) for spec in specs}] * 2, whole=True)
    assert len(plan["large"]) == 2
    assert [box for _, box in plan["small"]] == [full_box((2 << 20,))]


def test_a_part_cannot_be_called_what_another_tensor_is_called():
    held = {"w": Piece(torch.ones(1), (2,), Box((0,), (1,))), "w[0:1]": Piece(torch.ones(1), (1,), Box((0,), (1,)))}
    other = {"w": Piece(torch.ones(1), (2,), Box((1,), (1,)))}
    with pytest.raises(ValueError, match=r"w\[0:1\] is what a part"):
        plan_sections([table_of({"weights": h, "optimizer": {}}) for h in (held, other)], 100, "per_rank")


def test_only_what_a_rank_needs_is_read_of_the_files_of_others(memory):
    whole = torch.arange(64.0 * 64).view(64, 64)
    rows = [Piece(whole[16 * r : 16 * r + 16], (64, 64), Box((16 * r, 0), (16, 64))) for r in range(4)]
    save_as_ranks(memory, [{"weights": {"w": row}, "optimizer": {}} for row in rows], "per_rank")
    reads = []
    real = RemotePath.read_bytes

    def counted(self, start=None, stop=None):
        data = real(self, start, stop)
        if self.name.endswith(".safetensors") and start != 0:
            reads.append((self.name, len(data)))
        return data

    with mock.patch.object(RemotePath, "read_bytes", counted):
        target = torch.zeros(20, 64)
        load(memory, {"w": Piece(target, (64, 64), Box((8, 0), (20, 64)))}, verify=False)
    assert torch.equal(target, whole[8:28])
    assert sorted(reads) == [(f"model-0000{i}-of-00004.safetensors", n * 64 * 4) for i, n in ((1, 8), (2, 12))]


def test_common_files_at_a_url_are_refused_with_what_to_write(memory):
    with pytest.raises(ValueError, match=r"checkpoint\.writer=per_rank"):
        save(memory / "c", {"w": torch.ones(2)}, {}, {})
    with pytest.raises(ValueError, match="write shared or per_rank"):
        save(memory / "c", {"w": torch.ones(2)}, {}, {}, writer="own")
    assert not memory.is_dir()


def test_a_folder_is_a_path_or_a_url_and_nothing_between(tmp_path):
    assert as_folder(f"file://{tmp_path}") == tmp_path
    assert as_folder(str(tmp_path)) == as_folder(tmp_path) == tmp_path
    assert str(as_folder("memory://a/b/")) == "memory:///a/b"
    with pytest.raises(ValueError, match="lost a slash"):
        as_folder(Path("s3://bucket/run"))
    with pytest.raises(ValueError, match="nonsense"):
        as_folder("nonsense://bucket/run")


def test_latest_and_prune_at_a_url(memory):
    assert latest(memory) is None
    assert prune(memory, 1) == []
    for step in (1, 2, 10):
        save(step_folder(memory, step), {"w": torch.full((6,), float(step))}, {}, {}, writer="per_rank")
    (memory / "step-00000011").system.pipe_file((memory / "step-00000011/model.safetensors").path, b"partial")
    assert (memory / "latest").read_text() == "step-00000010\n"
    assert [step for step, _ in steps(memory)] == [11, 10, 2, 1]
    assert value(latest(memory)) == 10
    assert [path.name for path in prune(memory, 2)] == ["step-00000001"]
    (memory / "step-00000002" / "manifest.json").unlink()
    assert [path.name for path in prune(memory, 0)] == ["step-00000002"]
    assert value(latest(memory)) == 10
    with pytest.raises(FileExistsError, match="complete checkpoint"):
        save(step_folder(memory, 10), {"w": torch.ones(6)}, {}, {}, writer="per_rank")
    save(step_folder(memory, 11), {"w": torch.full((6,), 11.0)}, {}, {}, writer="per_rank")
    assert value(latest(memory)) == 11


class Died(BaseException):
    """The end of the process: no clean-up runs that catches exceptions."""


def test_a_death_at_any_change_of_the_store_leaves_a_checkpoint_complete_or_absent(memory):
    def store(step):
        save(step_folder(memory, step), {"w": torch.full((6,), float(step))}, {}, {"x": "{}"}, writer="per_rank")

    for call in range(1, 30):
        memory.rmtree()
        store(1)
        count = 0

        def counted(function):
            def wrapper(*args, **kwargs):
                nonlocal count
                count += 1
                if count == call:  # noqa: B023
                    raise Died
                return function(*args, **kwargs)

            return wrapper

        try:
            with contextlib.ExitStack() as stack:
                for name in ("create", "unlink", "rmtree"):
                    change = counted(getattr(RemotePath, name))
                    stack.enter_context(mock.patch.object(RemotePath, name, change))
                store(2)
                prune(memory, 1)
            ended = True
        except Died:
            ended = False
        newest = latest(memory)
        assert value(newest) == (2 if is_complete(step_folder(memory, 2)) else 1)
        for _, folder in steps(memory):
            if is_complete(folder):
                assert value(folder) == int(folder.name[5:])
        if newest == step_folder(memory, 1):
            store(2)
        prune(memory, 1)
        assert value(latest(memory)) == 2
        if ended:
            break
    assert ended
    assert call > 9


def test_a_kill_at_any_moment_on_a_disk_leaves_a_checkpoint_complete_or_absent(tmp_path):
    def write(root, step):
        tensors = {"w": torch.full((6,), float(step)), "v": torch.zeros(6)}
        save(step_folder(root, step), tensors, {"w.m": torch.zeros(6)}, {}, writer="per_rank", max_file_size=24)

    def read(folder):
        load(folder, loaded := {"w": torch.zeros(6)}, allow_extra=["v"])
        return loaded["w"][0].item()

    for call in range(1, 100):
        root = tmp_path / str(call)
        write(root, 1)
        ended = die_at(call, lambda root=root: write(root, 2))
        assert read(latest(root)) == (2 if is_complete(step_folder(root, 2)) else 1)
        if latest(root) == step_folder(root, 1):
            write(root, 2)
        assert read(latest(root)) == 2
        assert names(root) == ["step-00000001", "step-00000002"]
        if ended:
            break
    assert ended
    assert call > 15


def failing(folder, rank):
    import torch.distributed as dist

    real = os.fsync

    def full(handle):
        raise OSError(28, "No space left on device")

    if dist.get_rank() == rank:
        os.fsync = full
    try:
        return error_of(save_placed, folder, (2,), 0)
    finally:
        os.fsync = real


def test_a_full_disk_under_one_writer_raises_on_all_and_leaves_no_tensors(ranks, tmp_path):
    errors = ranks(2, failing, tmp_path / "c", 1)
    assert errors[0] == errors[1]
    assert errors[0][0] == "OSError"
    assert "rank 1: " in errors[0][1]
    assert "-of-" in errors[0][1]
    assert list((tmp_path / "c").rglob("*.safetensors")) == []
    ranks(2, save_placed, tmp_path / "c", (2,), 0)
    assert all(ranks(2, load_placed, tmp_path / "c", (2,), 1))


def two_parts(folder, writer, seed=0, **changes):
    """Two ranks' halves of a weight and its moment, and a weight of each."""
    g = torch.Generator().manual_seed(seed)
    held = []
    for r in range(2):
        tensors = {"w": Piece(torch.randn(4, 4, generator=g), (8, 4), Box((4 * r, 0), (4, 4)))}
        tensors |= pieces_of({f"{'ab'[r]}": torch.randn(64, generator=g)})
        held.append({"weights": tensors, "optimizer": {f"{n}.m": piece for n, piece in tensors.items()}})
    save_as_ranks(folder, held, writer, **changes)


def load_two(folder):
    tensors = {"w": torch.zeros(8, 4), "a": torch.zeros(64), "b": torch.zeros(64)}
    load(folder, tensors, {f"{name}.m": tensor.clone() for name, tensor in tensors.items()})


@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("section", ["model", "optimizer/optimizer"])
@pytest.mark.parametrize(
    "harm", ["flip a byte", "flip the header", "truncate", "delete", "swap", "stale index", "torn index"]
)
def test_every_harm_to_a_file_is_an_error_that_names_it(tmp_path, writer, section, harm):
    for name, seed in (("c", 0), ("d", 1)):
        two_parts(tmp_path / name, writer, seed, max_file_size=300)
    load_two(tmp_path / "c")
    path = tmp_path / "c" / f"{section}-00002-of-0000{4 if writer == 'per_rank' else 3}.safetensors"
    index = tmp_path / "c" / f"{section}.safetensors.index.json"
    content, named = path.read_bytes(), path.name
    if harm == "flip a byte":
        path.write_bytes(content[:-1] + bytes([content[-1] ^ 64]))
    elif harm == "flip the header":  # to one that says the same of what is there
        path.write_bytes(content.replace(b'"format":"pt"', b'"format":"np"'))
    elif harm == "truncate":
        path.write_bytes(content[:-1])
    elif harm == "delete":
        path.unlink()
    elif harm == "swap":
        shutil.copy(tmp_path / "d" / path.relative_to(tmp_path / "c"), path)
    else:
        named = index.name
        text = index.read_text()
        index.write_text(text.replace("00001-of", "00002-of", 1) if harm == "stale index" else "x" + text[1:])
    with pytest.raises(ValueError, match=named):
        load_two(tmp_path / "c")


@pytest.mark.parametrize("harm", ["a part of another cut", "no such entry", "outside"])
def test_parts_that_do_not_make_up_a_tensor_are_an_error_that_names_it(tmp_path, harm):
    two_parts(tmp_path / "c", "per_rank")
    (tmp_path / "c" / "manifest.json").unlink()  # no sizes and checksums that would tell first
    path = tmp_path / "c" / "model-00001-of-00002.safetensors"
    changes = {
        "a part of another cut": (b'\\"offsets\\":[0,0]', b'\\"offsets\\":[1,0]'),
        "no such entry": (b'\\"w[0:4,0:4]\\"', b'\\"v[0:4,0:4]\\"'),
        "outside": (b'\\"offsets\\":[0,0]', b'\\"offsets\\":[5,0]'),
    }
    content = path.read_bytes()
    assert changes[harm][0] in content
    path.write_bytes(content.replace(*changes[harm]))
    with pytest.raises(ValueError, match=r"model-00001-of-00002\.safetensors"):
        load(tmp_path / "c", {"w": torch.zeros(8, 4)}, allow_extra=["*"])


def test_a_checkpoint_of_old_is_read(tmp_path):
    save(tmp_path / "c", {"w": torch.arange(4.0)}, {"w.m": torch.ones(4)}, {"x": "{}"})
    path = tmp_path / "c" / "manifest.json"
    document = json.loads(path.read_text())
    assert document["version"] == 1
    for entry in document["files"].values():
        entry.pop("header_xxh3_64", None)
    path.write_text(json.dumps(document))
    load(tmp_path / "c", loaded := {"w": torch.zeros(4)}, {"w.m": torch.zeros(4)})
    assert torch.equal(loaded["w"], torch.arange(4.0))


def test_a_manifest_with_a_checksum_of_what_no_file_has_whole_is_refused(tmp_path):
    two_parts(tmp_path / "c", "per_rank")
    path = tmp_path / "c" / "manifest.json"
    document = json.loads(path.read_text())
    document["checksums"]["weights"]["w"] = [{"offsets": [0, 0], "sizes": [8, 4], "xxh3_64": "0"}]
    path.write_text(json.dumps(document))
    with pytest.raises(ValueError, match=r"manifest\.json.*no file has that part"):
        load_two(tmp_path / "c")
