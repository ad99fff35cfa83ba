"""Multi-head latent attention is the paper's formula, written out."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from composable.models.attention import document_mask
from composable.models.cache import cached
from composable.models.config import DecoderConfig, LatentConfig, RopeConfig
from composable.models.count import attention_flops, count_parameters, flops_per_token
from composable.models.decoder import Decoder
from composable.models.init import decoder_init, initialise
from composable.models.latent import NORM_EPS, LatentAttention, score_scale
from composable.models.rotary import inverse_frequencies, tables

LATENT = LatentConfig(q_rank=10, kv_rank=6, nope_dim=5, rope_dim=4, value_dim=3)
YARN = RopeConfig(1e4, "yarn", 8.0, 16, mscale=0.5, mscale_all_dim=0.8)
MODEL = DecoderConfig(
    vocab_size=31, dim=12, layers=2, heads=2, kv_heads=2, head_dim=9, ffn=20, init_std=0.5, latent=LATENT, rope=YARN
)
MODELS = {
    "queries of a latent": MODEL,
    "queries of hidden states": replace(MODEL, latent=replace(LATENT, q_rank=0)),
    "no yarn": replace(MODEL, rope=RopeConfig(500.0)),
    "halves": replace(MODEL, latent=replace(LATENT, interleaved=False)),
    "biased": replace(MODEL, qkv_bias=True, output_bias=True),
}


def built(config: DecoderConfig) -> LatentAttention:
    module = LatentAttention(config).double()
    initialise(module.named_parameters(), decoder_init(config), 3)
    with torch.no_grad():
        for index, parameter in enumerate(module.parameters()):
            parameter += 0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(index)).double()
    return module


def normed(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.pow(2).mean() + NORM_EPS).sqrt() * weight


def turned(x: Tensor, position: int, config: DecoderConfig) -> Tensor:
    """One head's part with positions: each pair is turned by its angle."""
    assert config.latent is not None
    inverse, scale = inverse_frequencies(config.rope, config.latent.rope_dim)
    pairs = x.view(-1, 2) if config.latent.interleaved else x.view(2, -1).T
    turn = [[(position * w).cos(), (position * w).sin()] for w in inverse]
    return scale * torch.cat(
        [torch.stack([a * c - b * s, a * s + b * c]) for (a, b), (c, s) in zip(pairs, turn, strict=True)]
    )


def written_out(module: LatentAttention, config: DecoderConfig, x: Tensor, positions: Tensor, seen: Tensor) -> Tensor:
    """x [S, D] -> [S, D], one pair of tokens and one head at a time."""
    latent, w = config.latent, dict(module.named_parameters())
    assert latent is not None

    def project(name: str, v: Tensor) -> Tensor:
        return w[f"{name}.weight"] @ v + w.get(f"{name}.bias", torch.zeros(()))

    queries, keys, values = [], [], []
    for token, position in zip(x, positions.tolist(), strict=True):
        if latent.q_rank:
            q = project("q_b_proj", normed(project("q_a_proj", token), w["q_a_layernorm.weight"]))
        else:
            q = project("q_proj", token)
        both = project("kv_a_proj_with_mqa", token)
        kv = project("kv_b_proj", normed(both[: latent.kv_rank], w["kv_a_layernorm.weight"]))
        q, kv = q.view(config.heads, -1), kv.view(config.heads, -1)
        n = latent.nope_dim
        shared = turned(both[latent.kv_rank :], position, config)
        queries.append([torch.cat([head[:n], turned(head[n:], position, config)]) for head in q])
        keys.append([torch.cat([head[:n], shared]) for head in kv])
        values.append([head[n:] for head in kv])
    rows = []
    scale = score_scale(config.rope) / math.sqrt(latent.nope_dim + latent.rope_dim)
    for i in range(len(x)):
        heads = []
        for h in range(config.heads):
            visible = [j for j in range(len(x)) if seen[i, j]]
            weights = torch.stack([queries[i][h] @ keys[j][h] * scale for j in visible]).softmax(0)
            heads.append(sum(weight * values[j][h] for weight, j in zip(weights, visible, strict=True)))
        rows.append(project("o_proj", torch.cat(heads)))
    return torch.stack(rows)


@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_it_is_the_formula_with_its_gradients(name, documents):
    config = MODELS[name]
    module = built(config)
    x = torch.randn(1, 7, config.dim, dtype=torch.float64, requires_grad=True)
    positions, mask = torch.arange(7), None
    seen = torch.ones(7, 7, dtype=torch.bool).tril()
    if documents:
        of = torch.tensor([[0, 0, 0, 1, 1, 1, 1]])
        positions, mask = torch.tensor([0, 1, 2, 0, 1, 2, 3]), document_mask(of)
        seen = mask[0, 0]
    assert config.latent is not None
    out = module(x, *tables(config.rope, config.latent.rope_dim, positions, x.dtype), mask)
    expected = written_out(module, config, x[0], positions, seen)
    torch.testing.assert_close(out[0], expected, rtol=0, atol=1e-12)
    weight = torch.randn_like(out)
    inputs = [x, *module.parameters()]
    mine = torch.autograd.grad((out * weight).sum(), inputs)
    theirs = torch.autograd.grad((expected * weight[0]).sum(), inputs)
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-11)


def test_a_token_after_a_cache_of_keys_and_values_has_the_same_logits():
    model = Decoder(MODEL).double()
    initialise(model.named_parameters(), decoder_init(MODEL), 3)
    tokens = torch.randint(0, 31, (2, 7), generator=torch.Generator().manual_seed(1))
    with torch.no_grad(), cached(model, 7) as step:
        steps = torch.cat([step(tokens[:, :4]), step(tokens[:, 4:5]), step(tokens[:, 5:])], dim=1)
    torch.testing.assert_close(steps, model(tokens), rtol=0, atol=1e-12)


def test_yarn_scales_scores_by_the_square_of_its_magnitude_over_all_dimensions():
    assert score_scale(YARN) == (0.1 * 0.8 * math.log(8) + 1) ** 2
    assert score_scale(replace(YARN, mscale_all_dim=None)) == score_scale(replace(YARN, factor=1.0)) == 1
    assert score_scale(RopeConfig(mscale_all_dim=0.8)) == 1
    assert inverse_frequencies(YARN, 4)[1] == (0.1 * 0.5 * math.log(8) + 1) / (0.1 * 0.8 * math.log(8) + 1)
    for one in (replace(YARN, mscale=None), replace(YARN, mscale_all_dim=None)):
        assert inverse_frequencies(one, 4)[1] == 0.1 * math.log(8) + 1
    assert inverse_frequencies(replace(YARN, attention_factor=1.5), 4)[1] == 1.5


@pytest.mark.parametrize("name", MODELS)
def test_parameters_are_counted(name):
    model = Decoder(MODELS[name])
    assert count_parameters(MODELS[name]).total == sum(parameter.numel() for parameter in model.parameters())


def test_attention_costs_as_much_as_its_scores_and_values_are_wide():
    assert attention_flops(MODEL, 100) == 6 * 2 * (9 + 3) * 100
    matrices = 12 * 10 + 10 * 2 * 9 + 12 * (6 + 4) + 6 * 2 * (5 + 3) + 2 * 3 * 12
    assert flops_per_token(MODEL, 100) == 6 * (2 * (matrices + 3 * 12 * 20) + 31 * 12) + 2 * attention_flops(MODEL, 100)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (dict(head_dim=8), "model.head_dim=8 with model.latent: it is latent.nope_dim .* of a query head: 9"),
        (dict(kv_heads=1), "model.kv_heads=1 with model.latent: it is the number of query heads: .*: 2"),
        (dict(qk_norm=True), "model.qk_norm with model.latent"),
        (dict(mtp=-1), "model.mtp=-1"),
    ],
)
def test_a_shape_that_does_not_fit_the_latents_is_refused(change, words):
    with pytest.raises(ValueError, match=words):
        replace(MODEL, **change)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (dict(kv_rank=0), "model.latent.kv_rank=0: a width is 1 or more"),
        (dict(q_rank=-1), "model.latent.q_rank=-1"),
        (dict(rope_dim=3), "model.latent.rope_dim=3: rotary embedding turns pairs, so it is even: 4"),
        (dict(value_dim=10), "model.latent.value_dim=10: .* nope_dim \\+ rope_dim = 9"),
    ],
)
def test_a_latent_that_cannot_be_is_refused(change, words):
    with pytest.raises(ValueError, match=words):
        replace(LATENT, **change)
