import math
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from composable.moe.balance import at_backward, inject, losses, statistics, update_bias, weighted
from composable.moe.config import Balance, MoEConfig
from composable.moe.router import count, route

ALL = Balance(switch=1.0, kl=1.0, sequence=1.0, z=1.0)


def config_of(balance=ALL, **rest):
    return MoEConfig(4, 2, 8, balance=balance, **rest)


def values_of(logits, config, mask=None, counts=None, group=None, ids=None):
    ids = route(logits.flatten(0, 1), config).ids.view(*logits.shape[:2], -1) if ids is None else ids
    return losses(statistics(logits, ids, config, mask=mask, group=group), config, counts)


def random_logits(b=3, s=8, seed=0):
    return torch.randn(b, s, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_exact_values_when_balanced_and_when_collapsed():
    ids = torch.tensor([[[0, 1], [2, 3]]])
    balanced = values_of(torch.zeros(1, 2, 4).double(), config_of(), ids=ids)
    assert balanced["switch"].item() == pytest.approx(1)
    assert balanced["sequence"].item() == pytest.approx(1)
    assert balanced["kl"].item() == pytest.approx(0, abs=1e-15)
    assert balanced["z"].item() == pytest.approx(math.log(4) ** 2)
    logits = torch.tensor([40.0, 40.0, 0, 0]).expand(1, 2, 4).double()
    collapsed = values_of(logits, config_of())
    assert collapsed["switch"].item() == pytest.approx(2)
    assert collapsed["sequence"].item() == pytest.approx(2)
    assert collapsed["kl"].item() == pytest.approx(math.log(2))


@pytest.mark.parametrize("score", ["softmax", "sigmoid", "topk_softmax"])
def test_each_loss_equals_its_formula(score):
    config, logits = config_of(score=score), random_logits()
    values = values_of(logits, config)
    p = logits.sigmoid() if score == "sigmoid" else logits.softmax(-1)
    p = p / p.sum(-1, keepdim=True)
    chosen = torch.zeros_like(p).scatter(-1, logits.topk(2).indices, 1.0)
    f = chosen.flatten(0, 1).mean(0) / 2
    assert values["switch"].item() == pytest.approx(4 * (f * p.flatten(0, 1).mean(0)).sum().item())
    by_sequence = 4 / 2 * (chosen.mean(1) * p.mean(1)).sum(-1)
    assert values["sequence"].item() == pytest.approx(by_sequence.mean().item())
    assert values["kl"].item() == pytest.approx(sum(x * math.log(4 * x) for x in f.tolist() if x))
    assert values["z"].item() == pytest.approx(logits.logsumexp(-1).square().mean().item())


def test_padding_has_no_part():
    logits = random_logits()
    mask = torch.ones(3, 8, dtype=torch.bool)
    mask[2] = False
    whole = values_of(logits, config_of(), mask)
    for name, value in values_of(logits[:2], config_of()).items():
        assert value.item() == pytest.approx(whole[name].item(), rel=1e-14), name
    nothing = values_of(logits, config_of(), torch.zeros_like(mask))
    assert all(value.item() == 0 for value in nothing.values())


def test_dropped_choices_are_not_counted():
    ids = torch.tensor([[[0, 1], [0, -1]]])
    total = statistics(torch.zeros(1, 2, 4).double(), ids, config_of())
    assert total.counts.tolist() == [[2, 1, 0, 0]]


def test_the_gradient_is_that_of_the_probabilities_with_frequencies_fixed():
    logits, config = random_logits().requires_grad_(), config_of()
    values = values_of(logits, config)
    for name in ("switch", "sequence", "z"):
        (got,) = torch.autograd.grad(values[name], logits, retain_graph=True)
        step, direction = 1e-6, torch.randn(logits.shape, generator=torch.Generator().manual_seed(1)).double()
        ids = route(logits.flatten(0, 1), config).ids.view(3, 8, 2)
        up, down = (values_of(logits.detach() + s * step * direction, config, ids=ids)[name] for s in (1, -1))
        assert ((up - down) / (2 * step)).item() == pytest.approx((got * direction).sum().item(), rel=1e-6), name


@pytest.mark.parametrize("name", ["switch", "kl", "sequence"])
def test_following_the_gradient_balances_a_collapsed_router(name):
    config = config_of(Balance(**{name: 1.0}))
    lean = torch.tensor([2.0, 2.0, 0.0, 0.0]).double().requires_grad_()
    noise = random_logits(4, 32) * 0.3
    for _ in range(300):
        value = values_of(noise + lean, config)[name]
        (g,) = torch.autograd.grad(value, lean)
        assert g.isfinite().all()
        lean = (lean - g.sign() * 0.02).detach().requires_grad_()
    load = count(route((noise + lean).flatten(0, 1), config).ids, 4)
    assert load.max() / load.double().mean() < 1.5


def test_doubling_the_coefficient_doubles_the_gradient_exactly():
    norms = []
    for factor in (1.0, 2.0):
        x = torch.zeros(3, 8, 4, dtype=torch.float64, requires_grad=True)
        logits = random_logits().requires_grad_()
        config = config_of(Balance(switch=0.3 * factor, sequence=0.2 * factor, kl=0.1 * factor, z=0.01 * factor))
        out = inject(x, weighted(values_of(logits, config), config), torch.tensor(0.25))
        (out * 0).sum().backward()  # the loss itself sends nothing
        norms.append(logits.grad)
    assert norms[0].norm() > 0
    assert torch.equal(2 * norms[0], norms[1])


def test_an_injected_loss_is_a_part_of_the_loss():
    def of(whole):
        logits, x = random_logits().requires_grad_(), random_logits(seed=1).requires_grad_()
        aux, scale = weighted(values_of(logits, config_of()), config_of()), torch.tensor(0.3, dtype=torch.float64)
        out = x * logits
        total = out.sum() + aux * scale if whole else inject(out, aux, scale).sum()
        return torch.autograd.grad(total, [logits, x])

    for a, b in zip(of(True), of(False), strict=True):
        assert torch.allclose(a, b, rtol=1e-14, atol=1e-16)


def test_global_frequencies_make_the_loss_of_a_step_the_sum_of_its_micro_batches():
    config = config_of(Balance(switch=1.0, kl=1.0, scope="global"))
    logits = random_logits(4).requires_grad_()
    counts = count(route(logits.flatten(0, 1), config).ids, 4)
    whole = weighted(values_of(logits, config), config)
    parts = sum(weighted(values_of(part, config, counts=counts), config) / 4 for part in logits.split(1))
    assert parts.item() == pytest.approx(whole.item(), rel=1e-14)
    wanted, got = (torch.autograd.grad(x, logits, retain_graph=True)[0] for x in (whole, parts))
    assert torch.allclose(wanted, got, rtol=1e-12, atol=1e-16)


def of_a_shard(mask):
    group, rank, world = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    part = slice(rank * 8 // world, (rank + 1) * 8 // world)
    logits = random_logits()[:, part].requires_grad_()
    values = values_of(logits, config_of(), mask[:, part], group=group)
    weighted(values, config_of()).backward()
    return {name: value.item() for name, value in values.items()}, logits.grad.tolist()


@pytest.mark.parametrize("world", [2, 4])
def test_ranks_that_share_sequences_share_the_statistic(ranks, world):
    mask = torch.rand(3, 8, generator=torch.Generator().manual_seed(1)) < 0.7
    logits = random_logits().requires_grad_()
    values = values_of(logits, config_of(), mask)
    weighted(values, config_of()).backward()
    results = ranks(world, of_a_shard, mask)
    for part, _ in results:
        assert part == pytest.approx({name: value.item() for name, value in values.items()}, rel=1e-13)
    gathered = torch.cat([torch.tensor(g, dtype=torch.float64) for _, g in results], dim=1)
    assert torch.allclose(gathered, logits.grad, rtol=1e-12, atol=1e-16)


def test_a_record_is_given_once_whatever_is_recomputed():
    calls = []

    def layer(x):
        return at_backward(x * 2, lambda: calls.append(1)).sin()

    for recompute in (False, True):
        x = torch.ones(3, requires_grad=True)
        out = checkpoint(layer, x, use_reentrant=False) if recompute else layer(x)
        assert calls == []
        out.sum().backward()
        assert calls == [1]
        calls.clear()
    with torch.no_grad():
        layer(torch.ones(3))
    assert calls == [1]


def test_the_bias_rises_below_the_mean_load_and_falls_above():
    bias = torch.zeros(2, 3)
    update_bias(bias, torch.tensor([[4, 1, 1], [2, 2, 2]]), 0.25)
    assert bias.tolist() == [[-0.25, 0.25, 0.25], [0, 0, 0]]


def test_a_config_names_the_losses_that_are_on():
    assert Balance(switch=0.01, z=0.001).losses == {"switch": 0.01, "z": 0.001}
    assert set(values_of(random_logits(), config_of(replace(ALL, kl=0.0)))) == {"switch", "sequence", "z"}
