"""Text made with a cache is the text made without, on one rank and on many; and what `transformers` makes."""

import dataclasses
import json

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from composable.data.loader import DataConfig
from composable.mesh import Mesh
from composable.models.cache import cached
from composable.models.config import DecoderConfig
from composable.models.families import to_hugging_face
from composable.models.generate import Sampling, choose, generate, stream
from composable.moe.config import MoEConfig
from composable.recipe import Recipe
from composable.train import build_model
from tests.models.test_decoder import built

SHAPE = dict(vocab_size=37, dim=16, layers=3, heads=4, kv_heads=2, head_dim=8, ffn=24, init_std=0.3, max_length=64)
MODELS = {
    "plain": DecoderConfig(**SHAPE),
    "tied, normed, biased": DecoderConfig(**SHAPE, tied=True, qk_norm=True, qkv_bias=True),
    "experts": DecoderConfig(**SHAPE, moe=MoEConfig(8, 2, 8, shared_ffn=8, first_dense=1)),
}
GREEDY = Sampling(temperature=0)


def made(model, prompt, count=20, sampling=GREEDY, **options):
    return list(stream(model, prompt, count, sampling, context=64, **options))


@pytest.mark.parametrize("name", MODELS)
def test_a_cache_changes_no_logit_and_no_token(name):
    model = built(MODELS[name]).double()
    tokens = torch.randint(0, 37, (2, 23), generator=torch.Generator().manual_seed(3))
    whole = model(tokens)
    before = [block.self_attn.attend for block in model.blocks]
    with torch.no_grad(), cached(model, 23) as step:
        pieces = [step(part) for part in tokens.split([7, 1, 1, 5, 1, 8], dim=1)]
    torch.testing.assert_close(torch.cat(pieces, 1), whole, rtol=0, atol=1e-12)
    assert [block.self_attn.attend for block in model.blocks] == before
    prompt = tokens[0, :5]
    assert made(model, prompt, cache=True) == made(model, prompt)
    drawn = Sampling(0.9, top_k=9, top_p=0.8)
    assert made(model, prompt, sampling=drawn, cache=True, seed=4) == made(model, prompt, sampling=drawn, seed=4)
    assert made(model, prompt, sampling=drawn, seed=4) != made(model, prompt, sampling=drawn, seed=5)


def on_ranks(config, prompt, tp):
    mesh = Mesh(dp_shard=1, tp=tp, ep=1 if config.moe is None else tp)
    recipe = Recipe("text", config, dtype="float64", mesh=mesh, data=DataConfig(seq_len=8, global_batch=8))
    model = build_model(recipe.resolve(tp)[0], torch.device("cpu")).parts[0]
    return made(model, prompt, cache=True), made(model, prompt)


@pytest.mark.parametrize("name", MODELS)
def test_tensor_ranks_make_the_same_text_with_a_cache(name, ranks):
    config, prompt = MODELS[name], torch.tensor([5, 30, 2])  # of a length that two ranks cannot share
    ((_, alone),) = ranks(1, on_ranks, config, prompt, 1)
    for with_cache, without in ranks(2, on_ranks, config, prompt, 2):
        assert with_cache == without == alone


@pytest.mark.parametrize("name", ["plain", "tied, normed, biased"])
def test_greedy_text_is_that_of_transformers(name, tmp_path):
    config = dataclasses.replace(MODELS[name], qkv_bias=False)
    model = built(config)
    (tmp_path / "config.json").write_text(json.dumps(to_hugging_face(config)))
    save_file(dict(model.named_parameters()), tmp_path / "model.safetensors", {"format": "pt"})
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path)
    prompt = torch.tensor([[1, 17, 4, 4, 9]])
    wanted = theirs.generate(prompt, max_new_tokens=30, do_sample=False, eos_token_id=None, pad_token_id=0)
    assert made(model, prompt[0], 30, cache=True) == wanted[0, 5:].tolist()


def test_a_text_ends_at_its_last_token_and_at_the_end_of_the_context():
    model = built(MODELS["plain"])
    prompt = torch.tensor([3, 1])
    whole = made(model, prompt)
    stop = whole[4]
    assert made(model, prompt, stop=(stop,)) == whole[: whole.index(stop) + 1]
    assert generate(model, prompt, 20, temperature=0, context=64).tolist() == [3, 1, *whole]
    with pytest.raises(ValueError, match="2 tokens and 63 more exceed the context of 64; ask for 62 at most"):
        made(model, prompt, 63, cache=True)
    assert len(made(model, prompt, 70)) == 70  # without a cache the oldest are dropped
    with pytest.raises(ValueError, match="the prompt has no token"):
        made(model, prompt[:0])


def test_draws_are_from_the_likeliest_tokens_with_their_probabilities():
    logits, generator = torch.tensor([0.3, 0.1, 0.4, 0.2]).log(), torch.Generator().manual_seed(1)

    def drawn(**options):
        ids = [int(choose(logits, Sampling(**options), generator)) for _ in range(4000)]
        return torch.bincount(torch.tensor(ids), minlength=4) / 4000

    close = dict(rtol=0, atol=0.03)
    torch.testing.assert_close(drawn(), torch.tensor([0.3, 0.1, 0.4, 0.2]), **close)
    torch.testing.assert_close(drawn(top_k=2), torch.tensor([3 / 7, 0, 4 / 7, 0]), **close)
    torch.testing.assert_close(drawn(top_p=0.75), torch.tensor([3 / 9, 0, 4 / 9, 2 / 9]), **close)
    torch.testing.assert_close(drawn(top_p=0.7), torch.tensor([3 / 7, 0, 4 / 7, 0]), **close)
    torch.testing.assert_close(drawn(temperature=0.5), torch.tensor([0.3, 0.1, 0.4, 0.2]) ** 2 / 0.3, **close)
    assert drawn(temperature=0).tolist() == drawn(top_k=1).tolist() == drawn(top_p=0.01).tolist() == [0, 0, 1, 0]
    for options, words in (({"temperature": -1}, "temperature=-1"), ({"top_k": -1}, "top_k"), ({"top_p": 0}, "top_p")):
        with pytest.raises(ValueError, match=words):
            Sampling(**options)
