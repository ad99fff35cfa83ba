"""Stacked experts in a checkpoint: one tensor an expert, whatever layout saves or loads them."""

import re
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from composable.checkpoint import Piece, load, save
from composable.models.config import DecoderConfig
from composable.models.decoder import Decoder
from composable.models.names import in_file
from composable.moe.config import MoEConfig, deepseek_v3, gpt_oss, mixtral, qwen3_moe
from composable.optim.optimizers import OptimizerConfig, build_optimizer, optimizer_tensors

SIZES = dict(vocab_size=16, dim=8, layers=2, heads=2, kv_heads=1, head_dim=4, ffn=12)
CONFIGS = {
    "mixtral": DecoderConfig(**SIZES, moe=mixtral(4, 2, 12)),
    "qwen3_moe": DecoderConfig(**SIZES, qk_norm=True, moe=replace(qwen3_moe(4, 2, 6), first_dense=1)),
    "qwen2_moe": DecoderConfig(**SIZES, qkv_bias=True, moe=MoEConfig(4, 2, 6, 10, shared_gate=True, normalise=False)),
    "own": DecoderConfig(**SIZES, moe=deepseek_v3(4, 2, 6, 10, 2, 1, first_dense=1)),
    "gpt_oss": DecoderConfig(**SIZES, qkv_bias=True, output_bias=True, sinks=True, moe=gpt_oss(4, 2, 12)),
    "own fused": DecoderConfig(**SIZES, moe=replace(gpt_oss(4, 2, 12), first_dense=1)),
    "own biased": DecoderConfig(**SIZES, moe=replace(gpt_oss(4, 2, 12), fused=False)),
}
EXPERT = {  # what layer 1's feed-forward is called in the file; of the experts, number 3
    "mixtral": {
        "block_sparse_moe.gate.weight",
        *(f"block_sparse_moe.experts.3.{part}.weight" for part in ("w1", "w2", "w3")),
    },
    "qwen3_moe": {"mlp.gate.weight", *(f"mlp.experts.3.{part}_proj.weight" for part in ("gate", "up", "down"))},
}
EXPERT["qwen2_moe"] = EXPERT["qwen3_moe"] | {
    "mlp.shared_expert_gate.weight",
    *(f"mlp.shared_expert.{part}_proj.weight" for part in ("gate", "up", "down")),
}
EXPERT["own"] = EXPERT["qwen3_moe"] | {
    "mlp.gate.e_score_correction_bias",
    *(f"mlp.shared_experts.{part}_proj.weight" for part in ("gate", "up", "down")),
}
LAYOUTS = {  # ranks -> placements of a stack [E, F, D] on a mesh of two dimensions (efsdp, ep)
    1: ((1, 1), (Shard(1), Shard(0))),
    2: ((2, 1), (Shard(1), Replicate())),
    4: ((2, 2), (Shard(1), Shard(0))),
    3: ((1, 3), (Shard(2), Shard(0))),  # uneven: two experts, two, none
}


def model_of(name):
    """The model of a configuration with weights that a seed gives, and its optimizer after a step."""
    torch.manual_seed(3)
    model = Decoder(CONFIGS[name])
    optimizer = build_optimizer(model, OptimizerConfig())
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    return model, optimizer


def tensors_of(name, blank=False):
    """(weights, optimizer state) under our names; zeros of the same kinds if blank."""
    model, optimizer = model_of(name)
    weights = {n: t.detach() for n, t in [*model.named_parameters(), *model.named_buffers()]}
    tables = weights, optimizer_tensors(None, optimizer)
    return [{n: torch.zeros_like(t) if blank else t for n, t in table.items()} for table in tables]


def placed(table, layout):
    """The table with stacks in shards as `layout` says, and other matrices in shards of rows."""
    mesh = init_device_mesh("cpu", layout[0], mesh_dim_names=("efsdp", "ep"))
    out = {}
    for name, tensor in table.items():
        if tensor.ndim == 3:
            out[name] = distribute_tensor(tensor, mesh, layout[1])
        elif tensor.ndim == 2:
            out[name] = distribute_tensor(tensor, mesh, (Shard(0), Replicate()))
        else:
            out[name] = tensor
    return out


def save_placed(folder, name, layout):
    weights, state = (in_file(placed(table, layout), CONFIGS[name]) for table in tensors_of(name))
    save(folder, weights, state, {})
    return sorted(name for name, tensor in weights.items() if isinstance(tensor, Piece))


def load_placed(folder, name, layout):
    """Names of tensors that are not what they were after loading them into zeros, through their pieces."""
    tables = [placed(table, layout) for table in tensors_of(name, blank=True)]
    load(folder, *(in_file(table, CONFIGS[name]) for table in tables))
    wanted = [placed(table, layout) for table in tensors_of(name)]
    empty = layout[0][1] == 3 and dist.get_rank() == 2  # no expert here: no number of steps either
    return [
        key
        for got, right in zip(tables, wanted, strict=True)
        for key in right
        if not torch.equal(*(t.to_local() if isinstance(t, DTensor) else t for t in (got[key], right[key])))
        and not (empty and re.search(r"experts\.\w+\.step$", key))
    ]


@pytest.mark.parametrize("name", EXPERT)
def test_each_expert_has_its_familys_name_in_a_file_that_any_reader_opens(name, tmp_path):
    weights, state = tensors_of(name)
    save(tmp_path, in_file(weights, CONFIGS[name]), in_file(state, CONFIGS[name]), {})
    file, moments = load_file(tmp_path / "model.safetensors"), load_file(tmp_path / "optimizer/optimizer.safetensors")
    layer = [key.removeprefix("model.layers.1.") for key in file if key.startswith("model.layers.1.")]
    ours = {key for key in layer if "mlp" in key or "moe" in key}
    assert {key for key in ours if not re.search(r"experts\.[012]\.", key)} == EXPERT[name]
    parts = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"} if name == "mixtral" else {}
    block = "block_sparse_moe" if name == "mixtral" else "mlp"
    for part in ("gate_proj", "up_proj", "down_proj"):
        for e in range(4):
            theirs, stack = f"model.layers.1.{block}.experts.{e}.{parts.get(part, part)}.weight", "model.layers.1.mlp"
            assert torch.equal(file[theirs], weights[f"{stack}.experts.{part}"][e])
            for moment in ("exp_avg", "exp_avg_sq"):
                assert torch.equal(moments[f"{theirs}.{moment}"], state[f"{stack}.experts.{part}.{moment}"][e])
            assert moments[f"{theirs}.step"] == 1
    gate = f"model.layers.1.{block}.gate.weight"
    assert torch.equal(moments[f"{gate}.exp_avg"], state["model.layers.1.mlp.gate.weight.exp_avg"])
    assert len(file) == len(weights) + 3 * 3 * len(CONFIGS[name].expert_layers)  # four for one, three times a layer


@pytest.mark.parametrize("saved_on", [1, 2, 3, 4])
def test_experts_in_any_shards_make_one_file_and_are_filled_from_it(ranks, tmp_path, saved_on):
    one = tmp_path / "one"
    weights, state = tensors_of("mixtral")
    save(one, in_file(weights, CONFIGS["mixtral"]), in_file(state, CONFIGS["mixtral"]), {})
    names = ranks(saved_on, save_placed, tmp_path / "c", "mixtral", LAYOUTS[saved_on])
    for file in ("model.safetensors", "optimizer/optimizer.safetensors"):
        assert (tmp_path / "c" / file).read_bytes() == (one / file).read_bytes()
    if saved_on == 4:
        assert [len(found) for found in names] == [2 * 3 * 2] * 4  # layers, matrices, experts of a rank
    for loaded_on in (1, 2, 3, 4):
        assert ranks(loaded_on, load_placed, tmp_path / "c", "mixtral", LAYOUTS[loaded_on]) == [[]] * loaded_on


@pytest.mark.parametrize("name", ["qwen3_moe", "qwen2_moe", "own", "gpt_oss", "own fused", "own biased"])
def test_every_family_comes_back_on_another_layout(ranks, tmp_path, name):
    ranks(4, save_placed, tmp_path / "c", name, LAYOUTS[4])
    assert ranks(2, load_placed, tmp_path / "c", name, LAYOUTS[2]) == [[]] * 2


def test_stacks_that_a_family_has_in_its_files_are_transposed_there_and_one_file_on_any_layout(ranks, tmp_path):
    config = CONFIGS["gpt_oss"]
    weights, state = tensors_of("gpt_oss")
    save(tmp_path / "one", in_file(weights, config), in_file(state, config), {})
    file = load_file(tmp_path / "one/model.safetensors")
    moments = load_file(tmp_path / "one/optimizer/optimizer.safetensors")
    for part, dims in (("gate_up", (4, 8, 24)), ("down", (4, 12, 8))):
        stack = theirs = f"model.layers.1.mlp.experts.{part}_proj"
        assert file[theirs].shape == dims
        assert torch.equal(file[theirs], weights[stack].mT)
        assert torch.equal(file[f"{theirs}_bias"], weights[stack.replace("_proj", "_bias")])
        assert torch.equal(moments[f"{theirs}.exp_avg"], state[f"{stack}.exp_avg"].mT)
        assert moments[f"{theirs}.step"] == moments[f"{theirs}_bias.step"] == 1
    assert torch.equal(file["model.layers.1.mlp.router.bias"], weights["model.layers.1.mlp.gate.bias"])
    for size in (3, 4):
        ranks(size, save_placed, tmp_path / str(size), "gpt_oss", LAYOUTS[size])
        for name in ("model.safetensors", "optimizer/optimizer.safetensors"):
            assert (tmp_path / str(size) / name).read_bytes() == (tmp_path / "one" / name).read_bytes()


def test_experts_with_biases_that_no_family_has_lie_one_by_one_under_our_own_names():
    fused, biased = (set(in_file(tensors_of(name)[0], CONFIGS[name])) for name in ("own fused", "own biased"))
    expert = "model.layers.1.mlp.experts.3"
    assert {f"{expert}.{part}_proj.{kind}" for part in ("gate_up", "down") for kind in ("weight", "bias")} <= fused
    assert {f"{expert}.{part}_proj.{kind}" for part in ("gate", "up", "down") for kind in ("weight", "bias")} <= biased


def test_a_dense_model_and_a_module_of_another_make_keep_their_names():
    weights = {"model.layers.0.mlp.gate_proj.weight": torch.ones(2, 2), "blocks.0.experts.w": torch.ones(2, 2, 2)}
    dense = in_file(weights, DecoderConfig(**SIZES))
    assert list(dense) == list(weights)
    assert list(in_file(weights, CONFIGS["mixtral"])) == list(weights)
    assert all(dense[name] is tensor for name, tensor in weights.items())


def test_sgd_keeps_its_momentum_by_expert():
    model = Decoder(CONFIGS["qwen3_moe"])
    optimizer = build_optimizer(model, OptimizerConfig(kind="sgd", momentum=0.9))
    state = in_file(optimizer_tensors(None, optimizer), CONFIGS["qwen3_moe"])
    assert state["model.layers.1.mlp.experts.2.up_proj.weight.momentum_buffer"].shape == (6, 8)


def partial_stack():
    mesh = init_device_mesh("cpu", (1,))
    stack = DTensor.from_local(torch.ones(4, 6, 8), mesh, [Partial()])
    with pytest.raises(ValueError, match=r"layers\.1\.mlp.*has no place in a checkpoint"):
        in_file({"model.layers.1.mlp.experts.up_proj": stack}, CONFIGS["own"])


def test_what_says_not_which_experts_are_here_is_refused(ranks):
    with pytest.raises(ValueError, match=r"one number for all experts.*give the stack's other tensors"):
        in_file({"model.layers.1.mlp.experts.up_proj.step": torch.ones(())}, CONFIGS["own"])
    ranks(1, partial_stack)
