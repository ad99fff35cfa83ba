"""A model with experts starts as the dense model that it is made of."""

import json
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from composable.checkpoint import load, save
from composable.checkpoint.shards import local_box
from composable.models.config import DecoderConfig
from composable.models.decoder import Decoder
from composable.models.families import to_hugging_face
from composable.models.init import decoder_init, initialise
from composable.models.upcycle import check_upcycle, upcycle
from composable.moe.config import Exploration, MoEConfig
from tests.models.test_decoder import built, tokens

DENSE = DecoderConfig(vocab_size=32, dim=16, layers=3, heads=4, kv_heads=2, head_dim=4, ffn=24, init_std=0.2)
RULES = {
    "whole": MoEConfig(8, 2, 24, upcycle=True),
    "parts": MoEConfig(8, 4, 12, granularity=2, upcycle=True),
    "scaled": MoEConfig(
        8, 4, 12, granularity=2, upcycle=True, score="sigmoid", scale=2.5, correction=True, groups=2, groups_kept=1
    ),
    "some_layers": MoEConfig(
        6, 3, 8, granularity=3, upcycle=True, score="topk_softmax", normalise=False, first_dense=1
    ),
}
LAYOUTS = {  # ranks -> mesh, placements of a stack, of the router's rows
    2: ((2,), (Shard(0),), (Shard(0),)),
    4: ((2, 2), (Shard(1), Shard(0)), (Shard(0), Replicate())),
    3: ((3,), (Shard(0),), (Shard(0),)),  # experts of one copy on two ranks, and an uneven rest
}


def dense_folder(folder, dtype=torch.float32):
    """A saved dense model whose feed-forward counts for something."""
    model = built(DENSE, seed=11, dtype=dtype)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.mul_(3 if "mlp" in name else 1)
    files = {"config.json": json.dumps(to_hugging_face(DENSE))}
    save(folder, dict(model.named_parameters()), {}, files)
    return model


def named(model):
    return {name: tensor.detach() for name, tensor in [*model.named_parameters(), *model.named_buffers()]}


def expert_model(rule, dtype):
    """(configuration, model with experts that holds nothing of its initial weights)."""
    config = replace(DENSE, moe=RULES[rule])
    model = Decoder(config).to(dtype)
    for tensor in model.parameters():
        tensor.data.fill_(torch.nan)
    return config, model


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("rule", RULES)
def test_the_output_at_step_zero_is_the_dense_models(tmp_path, rule, dtype):
    dense = dense_folder(tmp_path / "dense", dtype)
    config, model = expert_model(rule, dtype)
    upcycle(tmp_path / "dense", named(model), config, seed=5)
    ids = tokens(4, 32, 32)
    with torch.no_grad():
        wanted, got = dense(ids), model(ids)
        for block in dense.blocks:
            block.mlp.down_proj.weight.zero_()
        without = dense(ids)
    tolerance = 1e-6 if dtype == torch.float32 else 1e-12
    assert (got - wanted).abs().max() <= tolerance * wanted.abs().max()
    assert (without - wanted).abs().max() > 0.1 * wanted.abs().max()


def test_an_expert_is_rows_of_the_dense_weights_and_the_router_starts_by_seed_and_name(tmp_path):
    dense = dict(dense_folder(tmp_path / "dense").named_parameters())
    config, model = expert_model("parts", torch.float32)
    upcycle(tmp_path / "dense", got := named(model), config, seed=5)
    mlp, name = "model.layers.1.mlp", "model.layers.1.mlp.gate.weight"
    for e in range(8):
        part = slice(e % 2 * 12, e % 2 * 12 + 12)
        assert torch.equal(got[f"{mlp}.experts.gate_proj"][e], dense[f"{mlp}.gate_proj.weight"][part])
        assert torch.equal(got[f"{mlp}.experts.up_proj"][e], dense[f"{mlp}.up_proj.weight"][part])
        assert torch.equal(got[f"{mlp}.experts.down_proj"][e], dense[f"{mlp}.down_proj.weight"][:, part] * 2)
    initialise([(name, gate := torch.empty(8, 16))], decoder_init(config), 5)
    assert torch.equal(got[name], gate[[0, 0, 2, 2, 4, 4, 6, 6]])
    assert torch.equal(got["model.embed_tokens.weight"], dense["model.embed_tokens.weight"])


def upcycled_in_shards(folder, rule, layout):
    """Names of the tensors of which this rank has something else than one process has."""
    mesh_shape, stacks, rows = layout
    config, model = expert_model(rule, torch.float32)
    whole = named(Decoder(config))
    mesh = init_device_mesh("cpu", mesh_shape)
    table = {
        name: distribute_tensor(tensor, mesh, stacks if tensor.ndim == 3 else rows) if tensor.ndim > 1 else tensor
        for name, tensor in named(model).items()
    }
    upcycle(folder, table, config, seed=5)
    load(folder / "whole", whole)
    return [
        name
        for name, tensor in table.items()
        if not torch.equal(
            tensor.to_local() if hasattr(tensor, "to_local") else tensor, whole[name][local_box(tensor).slices()]
        )
    ] + [f"rank {dist.get_rank()}"]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("count", LAYOUTS)
def test_every_layout_starts_with_the_same_weights(ranks, tmp_path, rule, count):
    dense_folder(tmp_path)
    config, model = expert_model(rule, torch.float32)
    upcycle(tmp_path, named(model), config, seed=5)
    save(tmp_path / "whole", named(model), {}, {})
    assert ranks(count, upcycled_in_shards, tmp_path, rule, LAYOUTS[count]) == [[f"rank {r}"] for r in range(count)]


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (dict(normalise=False), "score=softmax and moe.normalise=False.*write moe.normalise=True"),
        (dict(shared_ffn=8), "shared_ffn=8.*write moe.shared_ffn=0"),
        (
            dict(ffn=16),
            "ffn=16 and moe.granularity=2.*width model.ffn=24; write moe.ffn=12, or model.ffn=32 if that is",
        ),
        (dict(granularity=5), "write moe.ffn=4, and a granularity that divides 24"),
        (dict(top_k=3), "top_k=3 with moe.granularity=2.*a multiple of 2"),
        (dict(experts=6, groups=2, groups_kept=2), "experts / moe.groups=3 with moe.granularity=2"),
        (dict(exploration=Exploration(noise="gumbel")), "noise=gumbel.*tear apart.*granularity=1"),
    ],
)
def test_rules_by_which_the_output_would_be_another_are_refused(wrong, words):
    with pytest.raises(ValueError, match=words):
        check_upcycle(replace(DENSE, moe=replace(RULES["parts"], **wrong)))


def test_other_dense_models_are_refused_by_name(tmp_path):
    dense_folder(tmp_path / "dense")
    _, model = expert_model("parts", torch.float32)
    config = replace(DENSE, heads=2, kv_heads=1, head_dim=8, moe=RULES["parts"])
    with pytest.raises(ValueError, match=r"is another model: model\.heads is 4 there and 2 here; model\.kv_heads is 2"):
        upcycle(tmp_path / "dense", named(model), config, seed=5)
    with pytest.raises(ValueError, match="mlp_bias=True: experts have no biases"):
        check_upcycle(replace(config, mlp_bias=True))
    with pytest.raises(ValueError, match=r"model\.moe is not set"):
        check_upcycle(DENSE)
    (tmp_path / "dense/config.json").write_text(json.dumps(to_hugging_face(config)))
    with pytest.raises(ValueError, match=r"has experts already; write model\.moe\.upcycle=False"):
        upcycle(tmp_path / "dense", named(model), config, seed=5)
