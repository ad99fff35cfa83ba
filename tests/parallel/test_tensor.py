"""Tensor parallelism has the numbers of one process: float64, logits, loss and each gradient."""

import dataclasses
import math
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from composable.mesh import Mesh
from composable.models.config import DecoderConfig
from composable.models.decoder import Decoder
from composable.models.generate import generate
from composable.models.init import decoder_init, materialise
from composable.models.loss import IGNORE
from composable.observe.health import check_replicas, replicas_differ
from composable.parallel.config import Parallel
from composable.parallel.data import shard_data
from composable.parallel.recompute import recompute
from composable.parallel.replicated import is_replicated, replicated, sum_replicated_gradients
from composable.parallel.tensor import check_tensor, tensor_parallel

LLAMA = DecoderConfig(vocab_size=64, dim=16, layers=2, heads=4, kv_heads=4, head_dim=4, ffn=24, init_std=0.2)
KINDS = {
    "llama": LLAMA,
    "tied": dataclasses.replace(LLAMA, tied=True),
    "q/k norm, head_dim not dim / heads": dataclasses.replace(LLAMA, qk_norm=True, head_dim=8, kv_heads=2),
    "all biases": dataclasses.replace(LLAMA, qkv_bias=True, output_bias=True, mlp_bias=True),
    "all biases, one kv head": dataclasses.replace(LLAMA, qkv_bias=True, output_bias=True, mlp_bias=True, kv_heads=1),
    "two kv heads": dataclasses.replace(LLAMA, kv_heads=2, qk_norm=True),
    "three kv heads for six": dataclasses.replace(LLAMA, dim=24, heads=6, kv_heads=3, qkv_bias=True, qk_norm=True),
    "uneven vocabulary": dataclasses.replace(LLAMA, vocab_size=37),
    "a vocabulary that leaves a rank without": dataclasses.replace(LLAMA, vocab_size=5),
    "such a vocabulary, tied": dataclasses.replace(LLAMA, vocab_size=5, tied=True),
}


def full(tensor):
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def error(ours, theirs):
    """max|a - b| / max|b|, absolute where b is zero."""
    assert ours.shape == theirs.shape
    return ((ours - theirs).abs().max() / (theirs.abs().max().item() or 1.0)).item()


def built(config, tp=None, *, dtype=torch.float64, **options):
    """A whole model, or one over the tensor mesh."""
    with torch.device("meta"):
        model = Decoder(config, **options).to(dtype)
    if tp is not None:
        tensor_parallel(model, tp)
    materialise(model, torch.device("cpu"), decoder_init(config), 1234)
    with torch.no_grad():  # biases that do something
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                whole = torch.linspace(-1, 1, parameter.numel(), dtype=dtype)
                if isinstance(parameter, DTensor):
                    parameter.to_local().copy_(whole.chunk(tp.size())[tp.get_local_rank()])
                else:
                    parameter.copy_(whole)
    return model


def batch(config, *, rows=2, length=8, ignore="ragged", documents=False, seed=0):
    """Arguments of a decoder."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, config.vocab_size, (rows, length + 1), generator=generator)
    labels = ids[:, 1:].clone()
    if ignore == "ragged":
        labels[torch.rand(labels.shape, generator=generator) < 0.3] = IGNORE
    elif ignore == "all":
        labels[:] = IGNORE
    if not documents:
        return ids[:, :-1], labels, None, None
    inside = (torch.arange(length) >= 3).long()
    return ids[:, :-1], labels, torch.arange(length) - 3 * inside, inside.expand(rows, -1).contiguous()


def results(model, arguments, group=None):
    """Logits, loss and gradients in full, by name."""
    x, labels, positions, documents = arguments
    with torch.no_grad():
        logits = model(x, None, positions, documents)
        without_gradient = model(x, labels, positions, documents)
    loss = model(x, labels, positions, documents)
    assert torch.equal(loss, without_gradient) or (loss - without_gradient).abs() < 1e-12 * loss.abs()
    (loss / 7).backward()
    if group is not None:
        sum_replicated_gradients(replicated(model), group)
    gradients = {name: full(parameter.grad) for name, parameter in model.named_parameters()}
    return {"logits": logits, "loss": loss.detach(), **gradients}


def agree(ours, theirs, tolerance=1e-9):
    assert list(ours) == list(theirs)
    errors = {name: error(ours[name], theirs[name]) for name in theirs}
    worst = max(errors, key=errors.get)
    assert all(math.isfinite(e) for e in errors.values())
    assert errors[worst] <= tolerance, (worst, errors[worst])


def mesh_of_all():
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))


def compare(configs, cases):
    """On every rank: each configuration with each case of (batch options, loss_chunk, recompute)."""
    mesh = mesh_of_all()
    for config in configs:
        if config.heads % mesh.size():
            continue
        for options, chunk, kind in cases:
            one, many = built(config), built(config, mesh)
            many.loss_chunk = chunk
            recompute(many.blocks, kind)
            arguments = batch(config, **options)
            agree(results(many, arguments, mesh.get_group()), results(one, arguments))


PLAIN = [({}, 0, "none"), ({"ignore": "none"}, 5, "none")]


@pytest.mark.parametrize("tp", [2, 4])
def test_every_kind_of_model_has_the_numbers_of_one_process(tp, ranks):
    ranks(tp, compare, list(KINDS.values()), PLAIN)


OPTIONS = {
    "documents": ({"documents": True}, 0, "none"),
    "one row": ({"rows": 1}, 0, "none"),
    "no valid label": ({"ignore": "all"}, 0, "none"),
    "no valid label, in chunks": ({"ignore": "all"}, 3, "none"),
    "a chunk longer than the rows": ({}, 1000, "none"),
    "recomputed": ({}, 0, "full"),
    "recomputed but for products": ({"documents": True}, 4, "selective"),
}


@pytest.mark.parametrize("case", OPTIONS)
def test_an_option_leaves_the_numbers_as_they_are(case, ranks):
    ranks(2, compare, [KINDS["tied"], KINDS["all biases, one kv head"]], [OPTIONS[case]])


@pytest.mark.parametrize("chunk", [1, 5, 16])
@pytest.mark.parametrize("kind", ["llama", "tied"])
def test_a_loss_in_chunks_is_the_loss(kind, chunk):
    whole, chunked = built(KINDS[kind]), built(KINDS[kind])
    chunked.loss_chunk = chunk
    arguments = batch(KINDS[kind])
    agree(results(chunked, arguments), results(whole, arguments), 1e-12)


def test_a_loss_in_chunks_leaves_frozen_parameters_alone():
    for frozen in ("lm_head", "model"):
        model, chunked = built(LLAMA), built(LLAMA)
        chunked.loss_chunk = 5
        for each in (model, chunked):
            getattr(each, frozen).requires_grad_(False)
            each(*batch(LLAMA)).backward()
        for (name, a), (_, b) in zip(chunked.named_parameters(), model.named_parameters(), strict=True):
            assert (a.grad is None) == (b.grad is None), name
            assert a.grad is None or error(a.grad, b.grad) < 1e-12, name


def peak_of(model, arguments):
    """Bytes above the start that a forward and backward pass needed at once."""

    def status(field):
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))

    before = status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts anew
    model(*arguments).backward()
    return status("VmHWM") - before


def peaks(config, chunk):
    model = built(config, mesh_of_all(), dtype=torch.float32)
    arguments = batch(config, rows=1, length=512)
    model(*arguments).backward()  # gradients are there
    whole = peak_of(model, arguments)
    model.loss_chunk = chunk
    return peak_of(model, arguments), whole


@pytest.mark.parametrize("tp", [1, 2])
def test_chunks_halve_the_peak_of_a_vocabulary_of_128k(tp, ranks):
    config = dataclasses.replace(LLAMA, vocab_size=128 * 1024, layers=1)
    for chunked, whole in ranks(tp, peaks, config, 32):
        assert whole > 512 * 128 * 1024 / tp * 4  # float32 logits at least: something was measured
        assert chunked < whole / 2


def zero_head(vocab, chunk):
    model = built(dataclasses.replace(LLAMA, vocab_size=vocab), mesh_of_all(), dtype=torch.float32)
    model.lm_head.weight.to_local().data.zero_()
    model.loss_chunk = chunk
    arguments = batch(model.config, rows=2, length=32)
    logits, loss = model(arguments[0]), model(*arguments)
    assert logits.shape == (2, 32, vocab)
    assert (logits == 0).all()
    return loss.item() / (arguments[1] != IGNORE).sum().item()


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize(("vocab", "expected"), [(256, 5.545177), (253, 5.533389)])
def test_a_zero_head_gives_exactly_the_logarithm_of_the_vocabulary(tp, vocab, expected, ranks):
    for chunk in (0, 7):
        assert ranks(tp, zero_head, vocab, chunk) == [pytest.approx(expected, abs=1e-6)] * tp


def over_data_ranks(config, parallel, chunk):
    """2 x 2: each data rank one row, against one process with both."""
    mesh = Mesh(dp_shard=2, tp=2)
    views = mesh.views("cpu")
    with torch.device("meta"):
        model = Decoder(config).double()
    tensor_parallel(model, views.parameters["tp"])
    model.loss_chunk = chunk
    shard_data(model, model.blocks, mesh, views, parallel)
    materialise(model, torch.device("cpu"), decoder_init(config), 1234)
    x, labels, _, _ = batch(config)
    mine = slice(mesh.data_rank(dist.get_rank()), mesh.data_rank(dist.get_rank()) + 1)
    for _ in range(2):
        (model(x[mine], labels[mine]) / 7).backward()
    group = views.parameters["tp"].get_group()
    sum_replicated_gradients(replicated(model), group)
    with torch.device("meta"):
        one = Decoder(config).double()
    materialise(one, torch.device("cpu"), decoder_init(config), 1234)
    for _ in range(2):
        (one(x, labels) / 7).backward()
    wanted = dict(one.named_parameters())
    assert list(wanted) == [name for name, _ in model.named_parameters()]
    for name, parameter in model.named_parameters():
        agree({name: full(parameter)}, {name: wanted[name].detach()}, 0)
        agree({name: full(parameter.grad)}, {name: wanted[name].grad})
    # the optimizer moves copies alike
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    check_replicas([(name, p) for name, p in model.named_parameters() if is_replicated(p)], group)
    return sorted(name for name, p in model.named_parameters() if is_replicated(p))


@pytest.mark.parametrize("data", ["zero1", "zero3"])
@pytest.mark.parametrize("kind", ["all biases, one kv head", "tied", "uneven vocabulary"])
def test_data_parallelism_over_tensor_parallelism_has_the_numbers_of_one_process(kind, data, ranks):
    names = ranks(4, over_data_ranks, KINDS[kind], Parallel(data=data), 5 if kind == "tied" else 0)[0]
    assert ("model.layers.0.self_attn.k_proj.weight" in names) == (kind == "all biases, one kv head")
    assert "model.norm.weight" in names
    assert "model.embed_tokens.weight" not in names


def weights(config):
    return {name: full(parameter) for name, parameter in built(config, mesh_of_all()).named_parameters()}


@pytest.mark.parametrize("kind", ["three kv heads for six", "such a vocabulary, tied"])
def test_initial_weights_do_not_depend_on_the_degree(kind, ranks):
    alone = ranks(1, weights, KINDS[kind])[0]
    for many in ranks(2, weights, KINDS[kind]):
        agree(many, alone, 0)


def stages(config):
    """Two stages of one block, one after the other on the same ranks, against the whole model."""
    mesh = mesh_of_all()
    one = built(config)
    first = built(config, mesh, layers=range(1), last=False)
    second = built(config, mesh, layers=range(1, 2), first=False)
    arguments = batch(config)
    between = first(arguments[0])
    assert between.shape == (2, 8 // mesh.size(), config.dim)
    loss = second(between, arguments[1])
    (loss / 7).backward()
    for stage in (first, second):
        sum_replicated_gradients(replicated(stage), mesh.get_group())
    wanted = results(one, arguments)
    gradients: dict = {}
    for stage in (first, second):
        for name, parameter in stage.named_parameters():
            if parameter.grad is not None:
                gradients[name] = gradients.get(name, 0) + full(parameter.grad)
    agree(
        {"loss": loss, **dict(sorted(gradients.items()))},
        {"loss": wanted["loss"], **{n: wanted[n] for n in sorted(gradients)}},
    )
    assert set(gradients) == {name for name, _ in one.named_parameters()}


@pytest.mark.parametrize("kind", ["llama", "tied"])
def test_stages_hand_on_their_shard_of_the_sequence(kind, ranks):
    ranks(2, stages, KINDS[kind])


def continued(config, length):
    model, prompt = built(config, mesh_of_all()), torch.arange(length) % config.vocab_size
    many = generate(model, prompt, 5, temperature=0, context=32)
    one = generate(built(config), prompt, 5, temperature=0, context=32)
    logits, wanted = model(prompt[None]), built(config)(prompt[None])
    agree({"logits": logits}, {"logits": wanted})
    return torch.equal(many, one)


def test_sequences_of_any_length_can_be_continued(ranks):
    assert all(ranks(4, continued, KINDS["a vocabulary that leaves a rank without"], 7))


def through_logits(config):
    """A loss of one's own on the whole logits, alike on all ranks."""
    mesh = mesh_of_all()
    one, many = built(config), built(config, mesh)
    x = batch(config)[0]
    for model in (one, many):
        model(x).square().sum().backward()
    sum_replicated_gradients(replicated(many), mesh.get_group())
    wanted = {name: parameter.grad for name, parameter in one.named_parameters()}
    agree({name: full(parameter.grad) for name, parameter in many.named_parameters()}, wanted)


def test_a_loss_of_ones_own_on_whole_logits_counts_once(ranks):
    ranks(4, through_logits, KINDS["a vocabulary that leaves a rank without"])


def in_bfloat16(config):
    mesh = mesh_of_all()
    many, one = built(config, mesh, dtype=torch.bfloat16), built(config)
    for chunk in (0, 6):
        many.zero_grad(), one.zero_grad()
        many.loss_chunk = chunk
        arguments = batch(config)
        loss = many(*arguments)
        assert loss.dtype == torch.float32
        loss.backward()
        one(*arguments).backward()
        sum_replicated_gradients(replicated(many), mesh.get_group())
        gradients = {name: full(parameter.grad).double() for name, parameter in many.named_parameters()}
        agree(
            {"loss": loss, **gradients},
            {"loss": one(*arguments), **{n: p.grad for n, p in one.named_parameters()}},
            0.1,
        )


def test_half_precision_computes_the_loss_wider(ranks):
    ranks(2, in_bfloat16, KINDS["uneven vocabulary"])


def compiled(config, kind):
    mesh = mesh_of_all()
    one, many = built(config), built(config, mesh)
    recompute(many.blocks, kind)
    for block in many.blocks:
        block.forward = torch.compile(block.forward, backend="aot_eager")
    many.loss = torch.compile(many.loss, backend="aot_eager")
    agree(results(many, batch(config), mesh.get_group()), results(one, batch(config)))


@pytest.mark.parametrize("kind", ["none", "full"])
def test_compiled_blocks_have_the_same_numbers(kind, ranks):
    ranks(2, compiled, dataclasses.replace(KINDS["all biases, one kv head"], layers=1), kind)


def test_a_copy_that_went_astray_is_named(ranks):
    assert ranks(2, astray) == [["b"], ["b"]]


def astray():
    group, rank = dist.group.WORLD, dist.get_rank()
    swapped = torch.tensor([1.0, 2.0] if rank else [2.0, 1.0])
    named = [("a", torch.arange(5.0)), ("b", swapped), ("c", torch.ones(2, 3).bfloat16())]
    with pytest.raises(RuntimeError, match=r"^b: these should be the same on all 2 ranks"):
        check_replicas(named, group)
    assert replicas_differ([("n", torch.tensor([float("nan")]))], group) == []
    assert replicas_differ([("e", torch.empty(0)), ("z", torch.tensor([0.0 if rank else -0.0]))], group) == ["z"]
    return replicas_differ(named, group)


@pytest.mark.parametrize(
    ("changes", "tp", "seq_len", "words"),
    [
        ({"heads": 4}, 3, 6, "model.heads=4 with mesh.tp=3.*nearest mesh.tp is 2"),
        ({"heads": 6, "kv_heads": 6}, 4, 8, "model.heads=6 with mesh.tp=4.*nearest mesh.tp is 3"),
        ({"ffn": 130}, 4, 8, "model.ffn=130 with mesh.tp=4.*nearest multiple is 128"),
        ({}, 2, 33, "data.seq_len=33 with mesh.tp=2.*nearest multiple is 32"),
        ({}, 4, 2, "data.seq_len=2 with mesh.tp=4.*nearest multiple is 4"),
    ],
)
def test_what_ranks_cannot_share_is_refused_before_weights_are_built(changes, tp, seq_len, words):
    with pytest.raises(ValueError, match=words):
        check_tensor(dataclasses.replace(LLAMA, **changes), tp, seq_len)


def refused():
    mesh = mesh_of_all()
    with torch.device("meta"):
        model = Decoder(dataclasses.replace(LLAMA, ffn=25))
    with pytest.raises(ValueError, match=r"model.ffn=25 with mesh.tp=2"):
        tensor_parallel(model, mesh)
    assert not any(isinstance(p, DTensor) for p in model.parameters())
    with pytest.raises(ValueError, match=r"7 tokens is not cut in mesh.tp=2"):
        built(LLAMA, mesh)(*batch(LLAMA, length=7))


def test_a_refusal_leaves_the_model_as_it_was(ranks):
    ranks(2, refused)
