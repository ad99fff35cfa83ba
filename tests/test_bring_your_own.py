"""A model of another library by the same laws: every layout has the numbers of one process, and of our own decoder."""

import dataclasses
import json

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import RowwiseParallel
from transformers import LlamaConfig, LlamaForCausalLM

from composable.data.loader import DataConfig
from composable.mesh import Mesh
from composable.models.attention import LOCAL
from composable.models.config import DecoderConfig
from composable.models.families import to_hugging_face
from composable.models.init import materialise
from composable.models.rotary import inverse_frequencies
from composable.parallel.config import Parallel, Pipeline
from composable.parallel.foreign import foreign_architecture
from composable.parallel.split import Stage
from composable.recipe import Recipe, command_line
from composable.train import build_model
from composable.verify import compare, micro_batch, record
from recipes.bring_your_own import PLAN, RECIPE, call, llama
from tests.test_commands import ROOT, run
from tests.test_commands import TINY as SMALL

MODEL = DecoderConfig(
    vocab_size=32, dim=16, layers=4, heads=4, kv_heads=2, head_dim=4, ffn=24, init_std=0.2, max_length=64
)
TINY = dataclasses.replace(
    RECIPE,
    model=MODEL,
    dtype="float64",
    data=DataConfig(seq_len=8, micro_batch=2, global_batch=16),
    parallel=Parallel(data="zero3"),
)


def eager(recipe: Recipe):
    """The same model with attention written out, and the embedding in shards too."""
    config = LlamaConfig(**to_hugging_face(recipe.model), attn_implementation="eager")
    return foreign_architecture(
        lambda: LlamaForCausalLM(config),
        call,
        blocks="model.layers",
        first=["model.embed_tokens"],
        last=["model.norm", "lm_head"],
        plan=PLAN | {"model.embed_tokens": RowwiseParallel(input_layouts=Replicate())},
        width=recipe.model.dim,
        dtype=recipe.torch_dtype,
        std=recipe.model.init_std,
    )


LAYOUTS = {
    "dp": (Mesh(dp_shard=2), {}),
    "tp": (Mesh(dp_shard=1, tp=2), {}),
    "pp": (Mesh(dp_shard=1, pp=2), {}),
    "pp-documents-eager": (Mesh(dp_shard=1, pp=2), {"foreign": eager, "data.document_mask": True}),
    "tp-zero2-recompute-eager": (
        Mesh(dp_shard=1, dp_replicate=1, tp=2),
        {"foreign": eager, "parallel": Parallel(data="zero2", recompute="selective")},
    ),
    "dp-tp-documents": (Mesh(dp_shard=2, tp=2), {"data.document_mask": True}),
    "pp-v": (Mesh(dp_shard=2, pp=2), {"pipeline": Pipeline(schedule="ZBVZeroBubble")}),
    "dp-tp-pp": (Mesh(dp_shard=2, tp=2, pp=2), {}),
}


def recipe_of(mesh: Mesh, changes: dict) -> Recipe:
    data = dataclasses.replace(TINY.data, document_mask=changes.get("data.document_mask", False))
    rest = {name: value for name, value in changes.items() if name != "data.document_mask"}
    return dataclasses.replace(TINY, mesh=mesh, data=data, **rest)


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_of_a_transformers_llama_has_the_numbers_of_one_process(name, ranks, reference):
    recipe = recipe_of(*LAYOUTS[name])
    numbers = ranks(recipe.mesh.world, record, recipe, 2, 3)[0]
    result = compare(numbers, reference(recipe), 1e-9)
    assert not result.first, f"{result.first}; {result.errors}"
    assert result.errors.keys() >= {"loss", "norm", "norms gradient", "attention weight", "head weight"}


@pytest.mark.slow
def test_compiled_blocks_agree_up_to_the_float32_in_which_the_model_has_its_norms(ranks, reference):
    recipe = recipe_of(Mesh(dp_shard=1, tp=2), {"parallel": Parallel(compile=True)})
    result = compare(ranks(2, record, recipe, 2, 3)[0], reference(recipe), 1e-5)
    assert not result.first, f"{result.first}; {result.errors}"


@pytest.mark.parametrize("documents", [False, True])
def test_it_computes_what_our_decoder_does_with_the_same_weights(documents, ranks):
    recipe = dataclasses.replace(recipe_of(Mesh(), {"data.document_mask": documents}), dtype="float32")
    ours = dataclasses.replace(recipe, foreign=None)
    theirs = ranks(1, first_losses, recipe)[0]
    assert theirs == pytest.approx(ranks(1, first_losses, ours)[0], rel=1e-5)


def first_losses(recipe: Recipe) -> tuple[float, float]:
    """Losses of two batches, with the foreign model's initial weights: those of ours depend on the depth."""
    resolved, _ = recipe.resolve(dist.get_world_size())
    model = build_model(resolved, torch.device("cpu"))
    materialise(model.parts[0], torch.device("cpu"), llama(recipe).init, recipe.seed)
    batches = [micro_batch(step, 1, recipe.data, MODEL.vocab_size) for step in (1, 2)]
    return tuple(model.evaluate(batch).item() for batch in batches)


def test_a_stage_has_its_own_layers_alone_under_their_global_names():
    architecture = llama(TINY)
    with torch.device("meta"):
        part = architecture.build(Stage(False, range(2, 3), False), LOCAL)
    assert {name.rsplit(".", 2)[0] for name, _ in part.named_parameters()} <= {
        "model.layers.2",
        "model.layers.2.self_attn",
        "model.layers.2.mlp",
    }
    assert len(architecture.blocks(part)) == 1
    assert all(parameter.is_meta and parameter.dtype is torch.float64 for parameter in part.parameters())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_buffers_have_their_values_after_materialising_in_the_dtype_they_were_made_in(dtype):
    architecture = llama(dataclasses.replace(TINY, dtype=dtype))
    with torch.device("meta"):
        part = architecture.build(Stage(True, range(4), True), LOCAL)
    materialise(part, torch.device("cpu"), architecture.init, 1)
    buffers = dict(part.named_buffers())
    wanted, _ = inverse_frequencies(MODEL.rope, MODEL.head_dim)
    assert buffers
    for buffer in buffers.values():
        assert buffer.dtype is torch.float32
        torch.testing.assert_close(buffer, wanted.float())


def test_buffers_without_values_are_refused():
    with torch.device("meta"):
        model = nn.BatchNorm1d(2)
    with pytest.raises(ValueError, match=r"no rule initialises the buffers .*running_mean"):
        materialise(model, torch.device("cpu"), lambda name: None, 1)


def small(**changes):
    model = nn.ModuleDict(
        {"embed": nn.Embedding(4, 2), "blocks": nn.ModuleList([nn.Linear(2, 2)]), "head": nn.Linear(2, 4)}
    )
    names = {"blocks": "blocks", "first": ["embed"], "last": ["head"]} | changes
    return lambda make=lambda: model: foreign_architecture(make, call, plan={}, width=2, dtype=torch.float32, **names)


def test_names_that_the_model_lacks_or_leaves_over_are_refused():
    with pytest.raises(ValueError, match="no module 'layers'"):
        small(blocks="layers")()
    with pytest.raises(ValueError, match=r"parameter head.weight is in none of the parts"):
        small(last=[])()


def test_tied_weights_are_refused():
    with pytest.raises(ValueError, match=r"lm_head.weight and model.embed_tokens.weight are one tied weight"):
        llama(dataclasses.replace(TINY, model=dataclasses.replace(MODEL, tied=True)))


def test_a_shared_sequence_is_refused():
    with pytest.raises(ValueError, match=r"mesh\.cp"):
        llama(TINY).build(Stage(True, range(4), True), dataclasses.replace(LOCAL, mask=lambda documents: None))


def test_the_model_of_a_recipe_is_no_option_and_stays_through_the_command_line():
    recipe = command_line(RECIPE, ["--steps", "5"])
    assert recipe.foreign is llama
    assert recipe.steps == 5
    assert "foreign" not in json.loads(recipe.to_json())


@pytest.mark.slow
def test_verify_passes_on_the_recipe_and_a_run_saves_what_transformers_opens(tmp_path):
    layout = ("--mesh.tp", "2", "--mesh.pp", "2", "--report", str(tmp_path / "verify.json"))
    output = run("tools/verify.py", 4, str(ROOT / "recipes/bring_your_own.py"), *layout)
    assert "agrees: worst error" in output
    out = tmp_path / "run"
    sizes = [*SMALL, "--model.kv-heads", "2", "--data.global-batch", "16"]
    run("recipes/bring_your_own.py", 4, *sizes, "--mesh.tp", "2", "--mesh.pp", "2", "--steps", "2", "--out", str(out))
    model, facts = LlamaForCausalLM.from_pretrained(
        out / "checkpoints/step-00000002", output_loading_info=True, dtype=torch.float32
    )
    assert model.config.num_hidden_layers == 2
    assert not any(facts.values())


def test_the_recipe_is_short():
    assert len((ROOT / "recipes/bring_your_own.py").read_text().splitlines()) < 80
