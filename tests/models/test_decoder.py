import pytest
import torch
import torch.nn.functional as F

from composable.linear import linear
from composable.models.config import DecoderConfig, RopeConfig
from composable.models.count import count_parameters, flops_per_token
from composable.models.decoder import Decoder
from composable.models.init import decoder_init, initialise, materialise
from composable.models.loss import IGNORE, cross_entropy_sum
from composable.models.rotary import inverse_frequencies, tables
from composable.moe.config import Balance, MoEConfig

SMALL = dict(vocab_size=256, dim=64, layers=2, heads=4, kv_heads=2, head_dim=16, ffn=128)
DENSE = DecoderConfig(**SMALL)
KINDS = {
    "llama": DENSE,
    "tied": DecoderConfig(**SMALL, tied=True),
    "qk_norm": DecoderConfig(**SMALL | {"head_dim": 32}, qk_norm=True),
    "biases": DecoderConfig(**SMALL, qkv_bias=True, output_bias=True, mlp_bias=True),
}

ROUTED = MoEConfig(experts=8, top_k=2, ffn=32)
CORRECTED = MoEConfig(8, 2, 32, score="sigmoid", correction=True, balance=Balance(bias_rate=0.001))
EXPERTS = {
    "routed": DecoderConfig(**SMALL, moe=ROUTED),
    "qk_norm": DecoderConfig(**SMALL, qk_norm=True, moe=ROUTED),
    "tied": DecoderConfig(**SMALL, tied=True, moe=ROUTED),
    "shared": DecoderConfig(**SMALL, moe=MoEConfig(8, 2, 32, shared_ffn=32)),
    "gated": DecoderConfig(**SMALL, moe=MoEConfig(8, 2, 32, shared_ffn=48, shared_gate=True)),
    "router_bias": DecoderConfig(**SMALL, moe=MoEConfig(8, 2, 32, router_bias=True)),
    "dense first": DecoderConfig(**SMALL, moe=MoEConfig(8, 2, 32, first_dense=1)),
    "corrected": DecoderConfig(**SMALL, moe=CORRECTED),
    "all": DecoderConfig(
        **SMALL | {"layers": 3},
        tied=True,
        qkv_bias=True,
        mlp_bias=True,
        moe=MoEConfig(8, 2, 32, shared_ffn=48, shared_gate=True, router_bias=True, first_dense=1),
    ),
}


def built(config, seed=1234, dtype=torch.float32):
    with torch.device("meta"):
        model = Decoder(config).to(dtype)
    materialise(model, torch.device("cpu"), decoder_init(config), seed)
    return model


def tokens(rows=2, length=32, vocab=256, seed=7):
    return torch.randint(0, vocab, (rows, length), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("config", KINDS.values(), ids=KINDS)
def test_parameter_count_is_that_of_the_built_model(config):
    model = Decoder(config)
    count = count_parameters(config)
    assert count.total == count.active == sum(p.numel() for p in model.parameters())
    assert count.without_embedding == count.total - config.vocab_size * config.dim


@pytest.mark.parametrize("config", EXPERTS.values(), ids=EXPERTS)
def test_parameter_count_with_experts_is_that_of_the_built_model(config):
    model, count = Decoder(config), count_parameters(config)
    assert count.total == sum(p.numel() for p in model.parameters())
    assert count.without_embedding == count.total - config.vocab_size * config.dim
    stacks = sum(p.numel() for name, p in model.named_parameters() if ".mlp.experts." in name)
    assert stacks == len(config.expert_layers) * 8 * 3 * 64 * 32
    assert count.total - count.active == stacks * 6 // 8  # a token leaves out 6 of 8


def test_parameter_counts_of_published_shapes_with_experts():
    assert count_parameters(EXPERTS["qk_norm"]).total == 157056
    mixtral = DecoderConfig(
        vocab_size=32000,
        dim=4096,
        layers=32,
        heads=32,
        kv_heads=8,
        head_dim=128,
        ffn=14336,
        moe=MoEConfig(8, 2, 14336),
    )
    assert count_parameters(mixtral).total == 46_702_792_704
    assert count_parameters(mixtral).active == 12_879_925_248


def test_parameter_counts_of_published_shapes():
    assert count_parameters(DENSE).total == 106816
    assert count_parameters(DecoderConfig(**SMALL | {"layers": 4})).total == 180800
    assert count_parameters(KINDS["tied"]).total == 90432
    llama = dict(vocab_size=128256, dim=2048, layers=16, heads=32, kv_heads=8, head_dim=64, ffn=8192, tied=True)
    assert count_parameters(DecoderConfig(**llama)).total == 1_235_814_400
    llama = dict(vocab_size=128256, dim=4096, layers=32, heads=32, kv_heads=8, head_dim=128, ffn=14336)
    assert count_parameters(DecoderConfig(**llama)).total == 8_030_261_248


def test_flops_count_active_matrices_and_whole_attention():
    # 2 layers x (12288 attention + 24576 SwiGLU) + 16384 head = 90112 elements; attention 12 * 2 * 4 * 16 * 128
    assert flops_per_token(DENSE, 128) == 6 * 90112 + 196608
    assert flops_per_token(KINDS["tied"], 128) == flops_per_token(DENSE, 128)


def test_flops_of_experts_count_those_that_a_token_goes_to():
    # 2 layers x (12288 attention + 2 experts x 6144 + 512 router) + 16384 head = 66560; attention as above
    assert flops_per_token(EXPERTS["routed"], 128) == 595968 == 6 * 66560 + 196608
    for same in ("tied", "qk_norm", "router_bias", "corrected"):
        assert flops_per_token(EXPERTS[same], 128) == 595968
    assert flops_per_token(EXPERTS["shared"], 128) == 595968 + 6 * 2 * 6144
    assert flops_per_token(EXPERTS["gated"], 128) == 595968 + 6 * 2 * (9216 + 64)
    assert flops_per_token(EXPERTS["dense first"], 128) == 595968 + 6 * (24576 - 2 * 6144 - 512)


@pytest.mark.parametrize("config", KINDS.values(), ids=KINDS)
def test_a_model_built_on_meta_holds_only_what_its_seed_gives_it(config):
    big = torch.full((1 << 20,), 1e30)  # freed memory that an uninitialised tensor would show
    del big
    model = built(config)
    again = built(config)
    assert not list(model.named_buffers())
    for (name, a), (_, b) in zip(model.named_parameters(), again.named_parameters(), strict=True):
        assert a.device.type == "cpu", name
        assert torch.equal(a, b), name
        if name.endswith("norm.weight"):
            assert (a == 1).all(), name
        elif name.endswith("bias"):
            assert (a == 0).all(), name
        else:
            rule = decoder_init(config)(name)
            assert abs(a.std().item() / rule.std - 1) < 0.05, name
            assert abs(a.mean().item()) < 4 * rule.std / a.numel() ** 0.5, name
            assert a.abs().max() <= 6 * rule.std, name


def test_initial_weights_depend_on_seed_and_name_and_are_normal():
    rule = decoder_init(DENSE)
    one, two, other = (torch.empty(200, 500) for _ in range(3))
    initialise([("model.embed_tokens.weight", one)], rule, 1)
    initialise([("model.embed_tokens.weight", two)], rule, 2)
    initialise([("lm_head.weight", other)], rule, 1)
    assert (one == two).float().mean() < 1e-3
    assert (one == other).float().mean() < 1e-3
    z = one.flatten().double() / 0.02
    normal = torch.distributions.Normal(0.0, 1.0)
    for quantile in (0.01, 0.1, 0.5, 0.9, 0.99):
        share = (z < normal.icdf(torch.tensor(quantile, dtype=torch.float64))).double().mean().item()
        assert abs(share - quantile) < 0.004
    assert abs((one[:, :-1] * one[:, 1:]).mean().item()) < 1e-5  # neighbours do not correlate


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_tables_keep_their_precision_whatever_the_parameters_dtype(dtype):
    positions = torch.tensor([127, 511, 2047, 8191])
    cos, sin = tables(RopeConfig(theta=1e4), 128, positions, dtype)
    assert cos.dtype == torch.promote_types(dtype, torch.float32)
    exact = positions.double()[:, None] * 1e4 ** (-torch.arange(0, 128, 2, dtype=torch.float64) / 128)
    assert (cos[:, 0].double() - exact.cos()).abs().max() <= 1e-6
    assert (sin[:, 0].double() - exact.sin()).abs().max() <= 1e-6


def test_casting_the_model_leaves_the_frequencies_alone():
    model = built(DENSE).to(torch.bfloat16)
    assert not list(model.buffers())
    frequencies, _ = inverse_frequencies(DENSE.rope, 16)
    assert frequencies.dtype == torch.float64


@pytest.mark.parametrize("scaling", ["linear", "llama3", "yarn"])
def test_stretched_frequencies_equal_those_of_transformers(scaling):
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope = RopeConfig(theta=5e5, scaling=scaling, factor=8.0, original_length=4096)
    parameters = {"rope_type": scaling, "rope_theta": 5e5, "factor": 8.0}
    if scaling != "linear":
        parameters["original_max_position_embeddings"] = 4096
    if scaling == "llama3":
        parameters |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    theirs = LlamaConfig(
        hidden_size=512, num_attention_heads=4, head_dim=128, rope_parameters=parameters, max_position_embeddings=32768
    )
    expected, factor = ROPE_INIT_FUNCTIONS[scaling](theirs, "cpu")
    frequencies, scale = inverse_frequencies(rope, 128)
    torch.testing.assert_close(frequencies.float(), expected, rtol=1e-5, atol=0)
    assert scale == pytest.approx(factor)


def test_a_zero_head_gives_exactly_the_logarithm_of_the_vocabulary():
    model = built(DENSE)
    model.lm_head.weight.data.zero_()
    ids = tokens()
    loss = model(ids, ids) / ids.numel()
    assert loss.item() == pytest.approx(5.545177, abs=1e-5)


def test_loss_is_a_sum_over_valid_labels_and_zero_when_there_are_none():
    logits = torch.randn(1, 8, 5, dtype=torch.float64)
    labels = torch.tensor([[1, 2, IGNORE, 4, 0, IGNORE, 3, 3]])
    expected = -sum(logits[0, i].log_softmax(0)[labels[0, i]] for i in range(8) if labels[0, i] != IGNORE)
    assert cross_entropy_sum(logits, labels).item() == pytest.approx(expected.item(), rel=1e-12)
    assert cross_entropy_sum(logits, torch.full_like(labels, IGNORE)).item() == 0.0
    assert cross_entropy_sum(logits.bfloat16(), labels).dtype == torch.float32


def test_documents_in_one_row_do_not_see_each_other():
    model = built(DENSE, dtype=torch.float64)
    row = tokens(1, 32)
    documents = torch.tensor([[0] * 12 + [1] * 20])
    positions = torch.cat((torch.arange(12), torch.arange(20)))[None]
    logits = model(row, None, positions, documents)
    first, second = row.clone(), row.clone()
    first[:, :12] += 1
    second[:, 12:] += 1
    assert torch.equal(model(first % 256, None, positions, documents)[:, 12:], logits[:, 12:])
    assert torch.equal(model(second % 256, None, positions, documents)[:, :12], logits[:, :12])
    torch.testing.assert_close(model(row[:, 12:]), logits[:, 12:], rtol=0, atol=1e-12)


def test_stages_in_sequence_are_the_whole_model():
    config = KINDS["biases"]
    whole = built(config, dtype=torch.float64)
    parts = []
    for layers, first, last in ((range(1), True, False), (range(1, 2), False, True)):
        with torch.device("meta"):
            part = Decoder(config, layers=layers, first=first, last=last).to(torch.float64)
        materialise(part, torch.device("cpu"), decoder_init(config), 1234)
        parts.append(part)
    names = [name for part in parts for name, _ in part.named_parameters()]
    assert sorted(names) == sorted(name for name, _ in whole.named_parameters())
    ids = tokens()
    torch.testing.assert_close(parts[1](parts[0](ids)), whole(ids), rtol=0, atol=0)


@pytest.mark.parametrize("bias", [True, False])
def test_linear_has_the_value_and_gradients_of_torch(bias):
    generator = torch.Generator().manual_seed(0)
    x, w, b = (torch.randn(*s, generator=generator) for s in ((2, 7, 33), (13, 33), (13,)))
    g = torch.randn(2, 7, 13, generator=generator)
    inputs = (x, w, b) if bias else (x, w)

    def run(function):
        leaves = [t.clone().requires_grad_() for t in inputs]
        out = function(*leaves)
        out.backward(g)
        return [out, *(leaf.grad for leaf in leaves)]

    for ours, theirs in zip(run(linear), run(F.linear), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (dict(kv_heads=3), "kv_heads=3.*must divide 4.*nearest is"),
        (dict(head_dim=15), "head_dim=15.*even: 16"),
        (dict(layers=0), "layers=0.*1 or more"),
    ],
)
def test_impossible_shapes_are_refused(wrong, words):
    with pytest.raises(ValueError, match=words):
        DecoderConfig(**SMALL | wrong)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_weight_without_rows_gives_empty_results_and_gradients(dtype):
    """A tensor rank may have none of a vocabulary."""
    x, weight = (
        torch.randn(2, 3, 8, dtype=dtype, requires_grad=True),
        torch.empty(0, 8, dtype=dtype, requires_grad=True),
    )
    out = linear(x, weight)
    assert out.shape == (2, 3, 0)
    out.sum().backward()
    assert torch.equal(x.grad, torch.zeros_like(x))
    assert weight.grad.shape == (0, 8)
