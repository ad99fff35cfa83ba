import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from composable._torch import fake_tensor_mode
from composable.optim.clip import clip_by_global_norm
from composable.optim.optimizers import (
    OptimizerConfig,
    build_optimizer,
    initialise_state,
    optimizer_tensors,
    set_learning_rate,
)

KINDS = [OptimizerConfig(lr=0.1), OptimizerConfig("sgd", lr=0.1, momentum=0.9), OptimizerConfig("sgd", lr=0.1)]


class Model(nn.Module):
    """Names unlike ours: what decays must be told by type and shape."""

    def __init__(self):
        super().__init__()
        self.wte = nn.Embedding(7, 4)
        self.mix = nn.Linear(4, 6)
        self.scale = nn.LayerNorm((2, 3))
        self.stack = nn.Parameter(torch.randn(2, 6, 4))
        self.stack_bias = nn.Parameter(torch.randn(2, 6))
        self.out = nn.Linear(4, 7, bias=False)

    def forward(self, tokens):  # [T] -> [T, 7]
        x = self.mix(self.wte(tokens))
        x = self.scale(x.view(-1, 2, 3)).flatten(1)
        x = torch.einsum("ti,eio->to", x, self.stack) + self.stack_bias.sum() / 10
        return self.out(x)


def model(dtype=torch.float64):
    torch.manual_seed(0)
    return Model().to(dtype)


def steps(module, optimizer, count=3):
    for step in range(count):
        tokens = torch.arange(7).roll(step)
        optimizer.zero_grad()
        nn.functional.cross_entropy(module(tokens), tokens).backward()
        optimizer.step()


def names(optimizer):
    return [sorted(group["names"]) for group in optimizer.param_groups]


def full(tensor):
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def test_norms_biases_and_embeddings_do_not_decay_whatever_their_names():
    optimizer = build_optimizer(model(), OptimizerConfig(weight_decay=0.3))
    groups = {group["weight_decay"]: sorted(group["names"]) for group in optimizer.param_groups}
    assert groups == {
        0.3: ["mix.weight", "out.weight", "stack"],
        0.0: ["mix.bias", "scale.bias", "scale.weight", "stack_bias", "wte.weight"],
    }
    for group in optimizer.param_groups:
        found = dict(model().named_parameters())
        assert [found[name].shape for name in group["names"]] == [p.shape for p in group["params"]]


def test_decay_all_puts_everything_in_one_decaying_group():
    optimizer = build_optimizer(model(), OptimizerConfig(decay_all=True))
    assert [(len(group["names"]), group["weight_decay"]) for group in optimizer.param_groups] == [(8, 0.1)]


def test_frozen_parameters_are_left_out_and_tied_ones_stand_once():
    module = model()
    module.mix.weight.requires_grad_(False)
    module.out.weight = module.wte.weight
    assert names(build_optimizer(module, OptimizerConfig())) == [
        ["stack"],
        ["mix.bias", "scale.bias", "scale.weight", "stack_bias", "wte.weight"],
    ]


def test_a_stage_without_anything_that_learns_gets_an_optimizer_that_does_nothing():
    optimizer = build_optimizer(nn.Identity(), OptimizerConfig())
    optimizer.step()
    assert optimizer_tensors(None, optimizer) == {}


def test_parts_of_a_model_keep_their_global_names_and_may_not_share_one():
    first, second = nn.ModuleDict({"0": nn.Linear(2, 2)}), nn.ModuleDict({"3": nn.Linear(2, 2)})
    assert names(build_optimizer([first, second], OptimizerConfig())) == [
        ["0.weight", "3.weight"],
        ["0.bias", "3.bias"],
    ]
    with pytest.raises(ValueError, match=r"0\.weight"):
        build_optimizer([first, nn.ModuleDict({"0": nn.Linear(2, 2)})], OptimizerConfig())


@pytest.mark.parametrize("config", KINDS)
def test_three_steps_are_those_of_torch(config):
    ours, theirs = model(), model()
    optimizer = build_optimizer(ours, config)
    found = dict(theirs.named_parameters())
    groups = [
        {"params": [found[name] for name in group["names"]], "weight_decay": group["weight_decay"]}
        for group in optimizer.param_groups
    ]
    if config.kind == "adamw":
        reference = torch.optim.AdamW(groups, lr=0.1, betas=config.betas, eps=config.eps, foreach=False)
    else:
        reference = torch.optim.SGD(groups, lr=0.1, momentum=config.momentum, foreach=False)
    steps(ours, optimizer)
    steps(theirs, reference)
    for name, parameter in ours.named_parameters():
        torch.testing.assert_close(parameter, found[name], rtol=1e-12, atol=1e-14)


def test_a_step_passes_over_parameters_without_gradient_and_takes_a_closure():
    module = nn.Linear(2, 2)
    optimizer = build_optimizer(module, OptimizerConfig("sgd", lr=1.0, weight_decay=0.0))
    before = module.bias.detach().clone()

    def closure():
        loss = module.weight.sum()
        loss.backward()
        return loss

    loss = optimizer.step(closure)
    assert loss.item() == pytest.approx(module.weight.sum().item() + 4)
    assert torch.equal(module.bias, before)


def test_the_learning_rate_of_a_step_is_the_one_set():
    module = nn.Linear(1, 1)
    optimizer = build_optimizer(module, OptimizerConfig("sgd", lr=1.0, weight_decay=0.0))
    set_learning_rate(optimizer, 0.25)
    nn.init.zeros_(module.weight)
    nn.init.zeros_(module.bias)
    module(torch.ones(1)).sum().backward()
    optimizer.step()
    assert (module.weight.item(), module.bias.item()) == (-0.25, -0.25)


def test_a_fresh_optimizer_has_all_state_to_load_into():
    module = model(torch.float32)
    tensors = optimizer_tensors(module, build_optimizer(module, OptimizerConfig()))
    shapes = {name: tuple(p.shape) for name, p in module.named_parameters()}
    expected = {f"{n}.{s}": shape for n, shape in shapes.items() for s in ("exp_avg", "exp_avg_sq")}
    assert {n: tuple(t.shape) for n, t in tensors.items()} == expected | {f"{n}.step": () for n in shapes}
    assert all(t.dtype == torch.float32 and not t.any() and not t.requires_grad for t in tensors.values())


@pytest.mark.parametrize("config", KINDS)
def test_state_written_into_a_fresh_optimizer_continues_the_run_bit_for_bit(config):
    straight, resumed = model(), model()
    optimizer = build_optimizer(straight, config)
    steps(straight, optimizer, 2)
    resumed.load_state_dict(straight.state_dict())
    again = build_optimizer(resumed, config)
    saved = optimizer_tensors(None, optimizer)
    for name, tensor in optimizer_tensors(resumed, again).items():
        tensor.copy_(saved[name])
    steps(straight, optimizer, 2)
    steps(resumed, again, 2)
    for a, b in zip(straight.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(a, b)
    assert bool(saved) == (config.kind == "adamw" or config.momentum > 0)


def test_torchs_own_optimizers_are_named_by_the_model():
    module = nn.Linear(2, 3)
    optimizer = torch.optim.AdamW(module.parameters())
    with pytest.raises(ValueError, match="build_optimizer"):
        optimizer_tensors(None, optimizer)
    assert "bias.exp_avg_sq" in optimizer_tensors(module, optimizer)
    module(torch.ones(2)).sum().backward()
    optimizer.step()
    assert optimizer_tensors(module, optimizer)["weight.step"].item() == 1
    with pytest.raises(TypeError, match="Adagrad"):
        initialise_state(torch.optim.Adagrad(module.parameters()))


def test_the_meta_device_has_optimizers_too():
    with torch.device("meta"):
        module = nn.Linear(2, 2)
    optimizer = build_optimizer(module, OptimizerConfig())
    module.weight.grad = torch.zeros_like(module.weight)
    assert optimizer_tensors(module, optimizer)["weight.exp_avg"].device.type == "meta"


@pytest.mark.parametrize("config", KINDS)
def test_a_clipped_step_runs_on_fake_tensors(config):
    with fake_tensor_mode():
        module = nn.Linear(3, 2)
        optimizer = build_optimizer(module, config)
        module(torch.ones(3)).sum().backward()
        norm = clip_by_global_norm(module.parameters(), 1.0)
        optimizer.step()
    assert norm.shape == ()
    assert all(tensor.shape in ((2, 3), (2,), ()) for tensor in optimizer_tensors(module, optimizer).values())


@pytest.mark.parametrize("values", [{"kind": "lion"}, {"max_norm": -1.0}, {"scale": "sqrt"}])
def test_senseless_numbers_are_refused(values):
    with pytest.raises(ValueError, match="optimizer"):
        OptimizerConfig(**values)


def _sharded_steps(config):
    """One FSDP group, one weight on a mesh of its own, the rest plain: three steps of one model."""
    mesh, other = init_device_mesh("cpu", (2,)), init_device_mesh("cpu", (1, 2))
    reference, module = model(), model()
    steps(reference, build_optimizer(reference, config))
    fully_shard(module.mix, mesh=mesh)
    module.mix.set_force_sum_reduction_for_comms(True)
    module.mix.set_gradient_divide_factor(2.0)
    module.out.weight = nn.Parameter(distribute_tensor(module.out.weight.detach(), other, [Replicate(), Shard(0)]))
    optimizer = build_optimizer(module, config)
    tokens = torch.arange(7)
    for step in range(3):
        optimizer.zero_grad()
        assert all(p.grad is None for p in module.parameters())
        x = module.mix(module.wte(tokens.roll(step)))
        x = module.scale(x.view(-1, 2, 3)).flatten(1)
        x = torch.einsum("ti,eio->to", x, module.stack) + module.stack_bias.sum() / 10
        logits = x @ module.out.weight.full_tensor().T
        nn.functional.cross_entropy(logits, tokens.roll(step)).backward()
        grad = module.out.weight.grad
        module.out.weight.grad = grad.redistribute(placements=module.out.weight.placements)
        optimizer.step()
    state = optimizer_tensors(module, optimizer)
    laid_out = all(
        isinstance(tensor, DTensor) == (name.startswith(("mix.", "out.")) and not name.endswith(".step"))
        for name, tensor in state.items()
    )
    worst = max(
        (full(a) - b).abs().max().item() for a, b in zip(module.parameters(), reference.parameters(), strict=True)
    )
    return laid_out, worst


@pytest.mark.parametrize("config", KINDS)
def test_plain_parameters_and_dtensors_of_two_meshes_step_as_on_one_process(ranks, config):
    for laid_out, worst in ranks(2, _sharded_steps, config):
        assert laid_out
        assert worst <= 1e-9


def _partial_step():
    mesh = init_device_mesh("cpu", (2,))
    module = nn.Linear(2, 2, bias=False)
    module.weight = nn.Parameter(distribute_tensor(module.weight.detach(), mesh, [Replicate()]))
    module.weight.grad = DTensor.from_local(torch.ones(2, 2), mesh, [Partial()])
    with pytest.raises(ValueError, match="redistribute"):
        build_optimizer(module, OptimizerConfig()).step()


def test_a_partial_gradient_is_never_applied(ranks):
    ranks(2, _partial_step)
