"""Windows, sinks, and where norms are, against formulas written out, in float64 with gradients."""

from dataclasses import replace

import pytest
import torch
from transformers.masking_utils import sliding_window_overlay

from composable.models.attention import LOCAL, Banded, attend, document_mask, window_mask
from composable.models.cache import cached
from composable.models.config import DecoderConfig, LatentConfig
from composable.models.count import count_parameters, flops_per_token
from composable.models.decoder import Decoder
from composable.models.init import decoder_init, materialise
from composable.models.rotary import tables
from composable.parallel.recompute import recompute
from composable.verify import error

LENGTH, HEADS = 12, 4
MODEL = DecoderConfig(
    vocab_size=37, dim=16, layers=4, heads=HEADS, kv_heads=2, head_dim=4, ffn=24, max_length=LENGTH, init_std=0.2
)
FORMS = {
    "window": replace(MODEL, window=5),
    "some windows": replace(MODEL, window=3, window_layers=(0, 2)),
    "sinks": replace(MODEL, sinks=True),
    "window, sinks": replace(MODEL, window=4, window_layers=(1, 3), sinks=True),
    "post-norm": replace(MODEL, norm_place="post"),
    "wide qk-norm": replace(MODEL, qk_norm=True, qk_norm_wide=True),
}
DOCUMENTS = torch.tensor([[0] * 5 + [1] * 7, [0] * 1 + [1] * 10 + [2]])


def tensors(dtype=torch.float64):
    """q, k, v, sinks, and the gradient of the output."""
    generator = torch.Generator().manual_seed(3)
    shapes = [(2, HEADS, LENGTH, 8), (2, 2, LENGTH, 8), (2, 2, LENGTH, 8), (HEADS,), (2, HEADS, LENGTH, 8)]
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


def visible(window: int, documents: torch.Tensor | None) -> torch.Tensor:
    """[B or 1, 1, S, S], pair by pair as `transformers` counts a window."""
    inside = sliding_window_overlay(window) if window else lambda *place: True
    rows = range(1 if documents is None else len(documents))
    seen = [[[k <= q and inside(b, 0, q, k) for k in range(LENGTH)] for q in range(LENGTH)] for b in rows]
    mask = torch.tensor(seen)[:, None]
    return mask if documents is None else mask & (documents[:, None, :, None] == documents[:, None, None, :])


def by_formula(q, k, v, mask, sinks):
    """The sink is one more key, whose value is 0."""
    k, v = (x.repeat_interleave(HEADS // x.size(1), 1) for x in (k, v))
    scores = (q @ k.mT * q.size(-1) ** -0.5).masked_fill(~mask, -torch.inf)
    if sinks is not None:
        scores = torch.cat((scores, sinks.view(1, -1, 1, 1).expand(*scores.shape[:-1], 1)), -1)
    return scores.softmax(-1)[..., :LENGTH] @ v


def with_gradients(function, dtype=torch.float64, sinks=True):
    *leaves, grad = tensors(dtype)
    leaves = [x.requires_grad_() for x in leaves]
    out = function(*leaves[:3], leaves[3] if sinks else None)
    out.backward(grad)
    return [out.detach(), *(x.grad for x in leaves[: 4 if sinks else 3])]


@pytest.mark.parametrize("documents", [None, DOCUMENTS], ids=["one document", "documents"])
@pytest.mark.parametrize("sinks", [False, True], ids=["no sinks", "sinks"])
@pytest.mark.parametrize("window", [0, 1, 3, 11, 12, 50])
def test_attention_and_its_gradients_are_those_of_the_formula(window, sinks, documents):
    mask = visible(window, documents)
    expected = with_gradients(lambda q, k, v, s: by_formula(q, k, v, mask, s), sinks=sinks)
    ours = LOCAL.mask(documents)
    for made in (ours, LOCAL.narrow(ours, window, torch.arange(LENGTH))):
        found = with_gradients(lambda q, k, v, s, m=made: attend(q, k, v, m, window=window, sinks=s), sinks=sinks)
        for a, b in zip(found, expected, strict=True):
            assert error(a, b) < 1e-12


def test_a_window_is_a_band_and_a_wide_one_is_no_mask():
    assert window_mask(None, LENGTH, LENGTH, torch.device("cpu")) is None
    assert window_mask(None, 0, LENGTH, torch.device("cpu")) is None
    narrow = window_mask(None, 3, LENGTH, torch.device("cpu"))
    assert isinstance(narrow, Banded)
    assert torch.equal(narrow.mask, visible(3, None))
    assert narrow.mask.sum(-1).flatten().tolist() == [1, 2] + [3] * (LENGTH - 2)
    both = window_mask(document_mask(DOCUMENTS), 3, LENGTH, torch.device("cpu"))
    assert isinstance(both, Banded)
    assert torch.equal(both.mask, visible(3, DOCUMENTS))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_narrower_dtypes_stay_and_are_near(dtype):
    mask = visible(3, None)
    expected = with_gradients(lambda q, k, v, s: by_formula(q, k, v, mask, s))
    found = with_gradients(lambda q, k, v, s: attend(q, k, v, None, window=3, sinks=s), dtype)
    for a, b in zip(found, expected, strict=True):
        assert a.dtype == dtype
        assert error(a.double(), b) < (1e-5 if dtype == torch.float32 else 0.03)


def test_a_sink_that_takes_nothing_changes_nothing_and_one_that_takes_all_leaves_nothing():
    q, k, v, *_ = tensors()
    far = torch.full((HEADS,), 1e4, dtype=torch.float64)
    torch.testing.assert_close(attend(q, k, v, None, sinks=-far), attend(q, k, v, None), rtol=0, atol=1e-14)
    assert attend(q, k, v, None, sinks=far).abs().max() == 0


def built(config: DecoderConfig) -> Decoder:
    with torch.device("meta"):
        model = Decoder(config).to(torch.float64)
    materialise(model, torch.device("cpu"), decoder_init(config), seed=0)
    with torch.no_grad():
        for index, parameter in enumerate(model.parameters()):
            parameter += 0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(index)).double()
    return model


def passed(model: Decoder) -> list[torch.Tensor]:
    """Loss, and every gradient."""
    tokens = torch.randint(0, 37, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    loss = model(tokens, tokens.roll(-1, 1), documents=DOCUMENTS)
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters())]


@pytest.mark.parametrize("name", FORMS)
def test_the_count_is_that_of_the_built_model(name):
    model = Decoder(FORMS[name])
    assert count_parameters(FORMS[name]).total == sum(p.numel() for p in model.parameters())


def test_work_of_attention_ends_at_the_window():
    whole, half = (flops_per_token(config, 100) for config in (MODEL, replace(MODEL, window=10, window_layers=(0, 1))))
    assert whole - half == 2 * 12 * HEADS * 4 * 90
    assert flops_per_token(replace(MODEL, window=100), 100) == whole


@pytest.mark.parametrize("kept", ["full", "selective"])
@pytest.mark.parametrize("name", FORMS)
def test_recomputation_changes_no_bit(name, kept):
    plain, again = built(FORMS[name]), built(FORMS[name])
    recompute(again.blocks, kept)
    for a, b in zip(passed(plain), passed(again), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("name", FORMS)
def test_a_cache_of_keys_and_values_changes_no_logit(name):
    model = built(FORMS[name])
    tokens = torch.randint(0, 37, (2, LENGTH), generator=torch.Generator().manual_seed(3))
    with torch.no_grad(), cached(model, LENGTH) as step:
        pieces = [step(part) for part in tokens.split([4, 1, 1, 5, 1], dim=1)]
    torch.testing.assert_close(torch.cat(pieces, 1), model(tokens), rtol=0, atol=1e-12)


def test_compiled_blocks_compute_the_same():
    plain, compiled = built(FORMS["window, sinks"]), built(FORMS["window, sinks"])
    for block in compiled.blocks:
        block.forward = torch.compile(block.forward, backend="aot_eager")
    for a, b in zip(passed(plain), passed(compiled), strict=True):
        assert error(b, a) < 1e-12


def test_only_layers_with_a_window_are_narrowed():
    config = replace(MODEL, window=2, window_layers=(1,), layers=2)
    assert [config.window_of(layer) for layer in range(2)] == [0, 2]
    assert [block.self_attn.window for block in Decoder(config).blocks] == [0, 2]
    tokens = torch.randint(0, 37, (1, LENGTH), generator=torch.Generator().manual_seed(2))
    model = built(replace(config, window_layers=()))
    changed = tokens.clone()
    changed[:, 0] = (changed[:, 0] + 1) % 37
    moved = (model(tokens) != model(changed)).any(-1)[0]
    assert moved.tolist() == [True] * 3 + [False] * (LENGTH - 3)  # two layers look back one token each


def test_post_norm_is_after_attention_and_feed_forward():
    block = built(FORMS["post-norm"]).blocks[0]
    assert [name for name, _ in block.named_children()] == [
        "self_attn",
        "post_attention_layernorm",
        "mlp",
        "post_feedforward_layernorm",
    ]
    x = torch.randn(1, 3, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    cos, sin = tables(MODEL.rope, MODEL.rotary_dim, torch.arange(3), torch.float64)
    between = x + block.post_attention_layernorm(block.self_attn(x, cos, sin, None))
    expected = between + block.post_feedforward_layernorm(block.mlp(between))
    assert torch.equal(block(x, cos, sin, None), expected)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"qk_norm_wide": True}, "there is no norm to widen"),
        ({"norm_place": "middle"}, "write pre or post"),
        ({"window": -1}, r"0 \(no window\)"),
        ({"window_layers": (0,)}, "say how wide"),
        ({"window": 4, "window_layers": (0, 4)}, "indices of the 4 layers"),
        ({"window": 4, "window_layers": (2, 1)}, "each once and in order"),
        (
            {"window": 4, "latent": LatentConfig(0, 8, 2, 2, 4), "kv_heads": HEADS},
            "are of grouped-query attention",
        ),
    ],
)
def test_forms_that_cannot_be_are_refused(fields, words):
    with pytest.raises(ValueError, match=words):
        replace(MODEL, **fields)
