"""A published model fine-tuned on conversations: loss on answers alone, on any layout, there and back."""

import dataclasses
import importlib
import json
import os

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from composable.checkpoint.folder import latest
from composable.data.loader import build_loader
from composable.data.packing import IGNORE
from composable.data.tokens import open_tokens
from composable.mesh import Mesh
from composable.models.count import count_parameters
from composable.models.families import to_hugging_face
from composable.observe.metrics import read_metrics
from composable.optim.schedules import ScheduleConfig
from composable.parallel.config import Parallel
from composable.recipe import CheckpointConfig, Recipe, ValidationConfig, recipe_of
from composable.shrink import shrink
from composable.state import ORDER_FIELDS, Corpus, check_same_run
from composable.train import train
from composable.verify import compare, record, reference_of
from tests.data.test_chat import WITH_GENERATION, save_bpe
from tests.pool import RankError
from tests.test_commands import ROOT

SCRIPT = ROOT / "recipes" / "finetune_8b.py"
SHAPE = dict(dim=16, layers=2, heads=4, kv_heads=2, head_dim=4, ffn=24, vocab_size=320)


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """A tiny Llama 3.1 with its tokenizer, as `transformers` saves them."""
    folder = tmp_path_factory.mktemp("published")
    rope = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0}
    rope |= {"original_max_position_embeddings": 8192, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=SHAPE["vocab_size"],
        hidden_size=SHAPE["dim"],
        intermediate_size=SHAPE["ffn"],
        num_hidden_layers=SHAPE["layers"],
        num_attention_heads=SHAPE["heads"],
        num_key_value_heads=SHAPE["kv_heads"],
        head_dim=SHAPE["head_dim"],
        max_position_embeddings=131072,
        rms_norm_eps=1e-5,
        rope_parameters=rope,
        tie_word_embeddings=False,
        initializer_range=0.2,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    save_bpe(folder, WITH_GENERATION)
    return folder


@pytest.fixture(scope="module")
def chats(published):
    """Conversations as a token file, made by the tool."""
    folder = published.parent / "chats"
    folder.mkdir(exist_ok=True)
    records = [
        {
            "messages": [
                {"role": "user", "content": f"How are {n}?" + " there" * (n % 5)},
                {"role": "assistant", "content": f"Fine {n * n}" + " thanks" * (n % 3)},
                *([{"role": "user", "content": "You?"}, {"role": "assistant", "content": "Helpful."}] if n % 4 else []),
            ]
        }
        for n in range(60)
    ]
    (folder / "chats.jsonl").write_text("\n".join(map(json.dumps, records)))
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "tools"))
        tool = importlib.import_module("prepare_data")
        out = str(folder / "chats.safetensors")
        options = ["--tokenizer", str(published), "--template", "tokenizer", "--overwrite"]
        assert tool.main([str(folder / "chats.jsonl"), "--out", out, *options]) == 0
    return out


def recipe_for(published, chats, out, steps=4, **changes) -> Recipe:
    """`finetune_8b`, but small."""
    recipe = recipe_of(SCRIPT)
    data = dataclasses.replace(recipe.data, path=chats, seq_len=64, global_batch=4, holdout=0.2)
    small = dataclasses.replace(
        recipe,
        model=dataclasses.replace(recipe.model, **SHAPE),
        init_from=str(published),
        steps=steps,
        out=str(out),
        data=data,
        parallel=Parallel(data="zero3", recompute="full", loss_chunk=16),
        optimizer=dataclasses.replace(recipe.optimizer, lr=1e-3),
        schedule=dataclasses.replace(recipe.schedule, warmup=1),
        checkpoint=CheckpointConfig(every=2, keep=0),
        validation=ValidationConfig(every=4, steps=0),
    )
    return dataclasses.replace(small, **changes)


def losses(out) -> list[tuple[float, float]]:
    return [(line["loss"], line["grad_norm"]) for line in read_metrics(out / "metrics.jsonl") if "loss" in line]


def counted(out) -> list[int]:
    return [line["valid_tokens"] for line in read_metrics(out / "metrics.jsonl") if "loss" in line]


def batches_of(recipe: Recipe):
    train_part, _ = open_tokens(recipe.data.path).split(recipe.data.holdout)
    return build_loader(train_part, recipe.data, seed=recipe.seed, data_rank=0, data_ranks=1)


def test_the_shape_is_the_published_one():
    model = recipe_of(SCRIPT).model
    assert count_parameters(model).total == 8_030_261_248
    config = to_hugging_face(model)
    assert config["model_type"] == "llama"
    assert (config["hidden_size"], config["intermediate_size"], config["num_hidden_layers"]) == (4096, 14336, 32)


def test_without_weights_to_start_from_a_run_ends_with_what_is_missing(ranks, chats, tmp_path):
    for words in ("Llama-3.1-8B-Instruct", "elsewhere"):
        init = {} if words == "Llama-3.1-8B-Instruct" else {"init_from": words}
        recipe = recipe_for(recipe_of(SCRIPT).init_from, chats, tmp_path / "run", **init)
        with pytest.raises(RankError, match=rf"init_from={words} is not a folder"):
            ranks(1, train, recipe)


def test_the_first_loss_is_that_of_transformers_for_the_same_conversations(ranks, published, chats, tmp_path):
    recipe = recipe_for(published, chats, tmp_path / "run", 1, validation=ValidationConfig())
    ranks(2, train, recipe)
    theirs = AutoModelForCausalLM.from_pretrained(published, attn_implementation="eager")
    tokenizer = AutoTokenizer.from_pretrained(published)
    total, count, batches = 0.0, 0, batches_of(recipe)
    for batch in [next(batches) for _ in range(4)]:
        # Each conversation alone, without packing or mask: what its answer has before it is all that it may see.
        for number in batch.documents.unique().tolist():
            here = batch.documents[0] == number
            ids, labels = batch.tokens[0, here], batch.labels[0, here]
            if (labels != IGNORE).any():
                text = tokenizer.decode(ids)
                assert text.startswith("<|im_start|>user\nHow are ")
                written = tokenizer.decode(labels[labels != IGNORE])
                assert written.count("<|im_end|>") == text.count("<|im_start|>assistant")
                assert "How" not in written
                logits = theirs(ids[None]).logits[0].double()
                total += torch.nn.functional.cross_entropy(logits, labels, reduction="sum").item()
                count += int((labels != IGNORE).sum())
    assert counted(tmp_path / "run") == [count]
    assert losses(tmp_path / "run")[0][0] == pytest.approx(total / count, rel=1e-5)


def test_a_fine_tuned_model_resumes_exactly_and_is_opened_by_transformers(ranks, published, chats, tmp_path):
    straight = recipe_for(published, chats, tmp_path / "straight", dtype="float64", schedule=ScheduleConfig("constant"))
    ranks(1, train, straight)
    # Stopped after two steps, and gone on with on other ranks; the weights to start from are not needed any more.
    ranks(2, train, dataclasses.replace(straight, out=str(tmp_path / "again"), steps=2))
    gone = dataclasses.replace(straight, out=str(tmp_path / "again"), init_from="gone", mesh=Mesh(tp=2))
    ranks(4, train, gone)
    again, expected = losses(tmp_path / "again"), losses(tmp_path / "straight")
    assert len(again) == 4
    for ours, theirs in zip(again, expected, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-9)
    assert counted(tmp_path / "again") == counted(tmp_path / "straight")
    assert expected[-1][0] < expected[0][0]
    with pytest.raises(RankError, match=r"data\.packing was whole and is cut"):
        ranks(1, train, dataclasses.replace(gone, mesh=Mesh(), data=dataclasses.replace(gone.data, packing="cut")))

    folder = latest(tmp_path / "straight" / "checkpoints")
    model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    asked = tokenizer.apply_chat_template(
        [{"role": "user", "content": "You?"}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    assert model(**asked).logits.isfinite().all()
    assert "chat_template.jinja" in os.listdir(folder)


def test_a_checkpoint_of_a_version_without_packing_goes_on(published, chats, tmp_path):
    recipe = recipe_for(published, chats, tmp_path)
    cut = dataclasses.replace(recipe, data=dataclasses.replace(recipe.data, packing="cut"))
    corpus = Corpus.open(recipe.data, SHAPE["vocab_size"])
    facts = {"version": 1, "recipe": json.loads(recipe.to_json()), "data": {"fingerprint": corpus.fingerprint}}
    facts["data"] |= {name: getattr(recipe.data, name) for name in ORDER_FIELDS if name != "packing"}
    check_same_run(tmp_path, facts, cut, corpus)
    with pytest.raises(ValueError, match=r"data\.packing was cut and is whole"):
        check_same_run(tmp_path, facts, recipe, corpus)


@pytest.mark.parametrize(
    ("mesh", "world"),
    [(Mesh(tp=2), 4), (Mesh(dp_shard=1, cp=2), 2), (Mesh(dp_shard=2, pp=2), 4)],
    ids=["tp2-dp2", "cp2", "pp2-dp2"],
)
def test_every_layout_has_the_losses_of_one_process(ranks, published, chats, tmp_path, mesh, world):
    options = {"dtype": "float64", "validation": ValidationConfig(every=2, steps=0)}
    ranks(1, train, recipe_for(published, chats, tmp_path / "one", 2, **options))
    ranks(world, train, recipe_for(published, chats, tmp_path / "many", 2, mesh=mesh, **options))
    expected, found = (list(read_metrics(tmp_path / name / "metrics.jsonl")) for name in ("one", "many"))
    for ours, theirs in zip(found, expected, strict=True):
        for name in ("loss", "grad_norm", "valid_tokens", "validation_loss"):
            assert ours.get(name) == (theirs.get(name) and pytest.approx(theirs[name], rel=1e-9))


def test_the_recipe_shrunk_is_verified_against_one_process(ranks):
    recipe = recipe_of(SCRIPT)
    exact = dataclasses.replace(recipe.parallel, precision="none", compile=False)
    recipe = dataclasses.replace(recipe, dtype="float64", parallel=exact, mesh=Mesh(tp=2))
    small = shrink(dataclasses.replace(recipe, mesh=recipe.mesh.resolve(4)), recipe.mesh.resolve(4))
    assert small.data.packing == "whole"
    assert small.data.document_mask
    ours, reference = ranks(4, record, small, 2)[0], ranks(1, record, reference_of(small), 2)[0]
    assert compare(ours, reference, 1e-9).first == ""
