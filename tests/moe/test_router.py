import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from composable.moe.config import (
    Balance,
    Capacity,
    Exploration,
    MoEConfig,
    deepseek_v3,
    gpt_oss,
    mixtral,
    olmoe,
    qwen3_moe,
)
from composable.moe.noise import Draw, gaussian, gumbel, uniform
from composable.moe.router import choose, explore, jittered, route, weigh

LOGITS = torch.tensor([[2.0, 1.0, 0.0, -1.0]])


@pytest.mark.parametrize(
    ("config", "weights"),
    [
        (mixtral(4, 2, 8), [0.731059, 0.268941]),
        (qwen3_moe(4, 2, 8), [0.731059, 0.268941]),
        (qwen3_moe(4, 2, 8, normalise=False), [0.643914, 0.236883]),
        (olmoe(4, 2, 8), [0.643914, 0.236883]),
        (gpt_oss(4, 2, 8), [0.731059, 0.268941]),
    ],
)
def test_each_family_weighs_by_its_own_rule(config, weights):
    routing = route(LOGITS, config)
    assert routing.ids.tolist() == [[0, 1]]
    assert routing.weights[0].tolist() == pytest.approx(weights, abs=1e-6)
    assert routing.counts.tolist() == [1, 1, 0, 0]


def test_the_correction_bias_chooses_and_does_not_weigh():
    config = deepseek_v3(4, 2, 8, shared_ffn=0, groups=1, groups_kept=1)
    routing = route(LOGITS, config, torch.tensor([0.0, 0.0, 0.0, 1.0]))
    assert routing.ids.tolist() == [[3, 0]]
    assert routing.weights[0].tolist() == pytest.approx([0.584788, 1.915212], abs=1e-6)


def test_experts_are_chosen_within_the_groups_of_the_best_two_scores():
    config = deepseek_v3(8, 2, 8, groups=4, groups_kept=2)
    scores = torch.tensor([[0.9, 0.1, 0.6, 0.6, 0.7, 0.05, 0.5, 0.55]])
    assert choose(scores, config).tolist() == [[2, 3]]


def test_groups_may_be_scored_by_their_best_expert():
    config = MoEConfig(8, 2, 8, groups=4, groups_kept=2, group_score="max")
    scores = torch.tensor([[0.9, 0.1, 0.6, 0.6, 0.7, 0.05, 0.5, 0.55]])
    assert choose(scores, config).tolist() == [[0, 4]]


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 70), st.integers(1, 40), st.data())
def test_ties_go_to_the_lower_expert(experts, tokens, data):
    k = data.draw(st.integers(1, experts))
    scores = torch.randint(0, 3, (tokens, experts), generator=torch.Generator().manual_seed(experts)).double()
    wanted = [sorted(range(experts), key=lambda e: (-row[e], e))[:k] for row in scores.tolist()]
    assert choose(scores, MoEConfig(experts, k, 8)).tolist() == wanted


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_the_router_computes_in_float32_or_wider(dtype):
    weights = route(LOGITS.to(dtype), mixtral(4, 2, 8)).weights
    assert weights.dtype == torch.promote_types(dtype, torch.float32)


def test_dropped_choices_weigh_nothing_and_the_others_all():
    scores = torch.tensor([[0.4, 0.3, 0.2, 0.1]] * 3)
    ids = torch.tensor([[0, 1], [0, -1], [-1, -1]])
    for rule in ("softmax", "sigmoid", "topk_softmax"):
        weights = weigh(scores, ids, MoEConfig(4, 2, 8, score=rule))
        assert weights[:, 0].tolist() == pytest.approx([weights[0, 0].item(), 1.0, 0.0])
        assert weights[1:, 1].tolist() == [0.0, 0.0]


def draw(tokens, step=3, layer=1, seed=7):
    return Draw(seed, step, layer, torch.tensor(tokens))


@pytest.mark.parametrize("variates", [uniform, gaussian, gumbel])
def test_a_token_draws_the_same_numbers_wherever_it_is(variates):
    whole = variates(draw(range(100)), "noise", 5, torch.float64)
    shards = [variates(draw(part), "noise", 5, torch.float64) for part in (range(60, 100), range(60))]
    assert torch.equal(whole, torch.cat(shards[::-1]))
    assert torch.equal(whole, variates(draw(range(100), torch.tensor(3)), "noise", 5, torch.float64))
    others = [draw(range(100), step=4), draw(range(100), layer=2), draw(range(100), seed=8)]
    for other in others:
        assert not torch.isclose(whole, variates(other, "noise", 5, torch.float64)).any()
    assert not torch.isclose(whole, variates(draw(range(100)), "dropout", 5, torch.float64)).any()


def test_noise_has_its_distribution():
    many = draw(range(40000))
    u, n, g = (f(many, "noise", 4, torch.float64) for f in (uniform, gaussian, gumbel))
    assert u.min() > 0
    assert u.max() < 1
    assert u.mean().item() == pytest.approx(0.5, abs=0.005)
    assert n.mean().item() == pytest.approx(0, abs=0.01)
    assert n.std().item() == pytest.approx(1, abs=0.01)
    assert g.mean().item() == pytest.approx(0.5772, abs=0.015)
    assert g.std().item() == pytest.approx(1.2825, abs=0.02)
    assert torch.corrcoef(n.T).fill_diagonal_(0).abs().max() < 0.02


def test_gumbel_noise_samples_experts_by_their_probability():
    config = MoEConfig(4, 1, 8, exploration=Exploration(noise="gumbel"))
    many = draw(range(40000))
    noisy = explore(LOGITS.expand(40000, 4), config, many)
    share = route(noisy, config).counts / 40000
    assert share.tolist() == pytest.approx(LOGITS.softmax(-1)[0].tolist(), abs=0.01)


def test_the_temperature_anneals_and_ends():
    config = MoEConfig(4, 1, 8, exploration=Exploration(temperature=3.0, temperature_steps=10))
    for step, temperature in ((0, 3.0), (5, 2.0), (10, 1.0), (1000, 1.0)):
        out = explore(LOGITS, config, draw([0], step=step))
        assert torch.allclose(out, LOGITS / temperature)
    assert explore(LOGITS, config, None) is LOGITS


@pytest.mark.parametrize("score", ["softmax", "topk_softmax", "sigmoid"])
def test_hidden_experts_get_no_token_and_enough_stay(score):
    config = MoEConfig(8, 3, 8, score=score, correction=True, exploration=Exploration(expert_dropout=0.8))
    logits = explore(torch.zeros(2000, 8), config, draw(range(2000)))
    hidden = logits.isinf()
    assert (~hidden).sum(1).min() == 3
    assert hidden.double().mean().item() == pytest.approx(5 / 8, abs=0.06)
    routing = route(logits, config, torch.arange(8.0))
    assert not hidden.gather(1, routing.ids).any()
    assert torch.allclose(routing.weights.sum(1), torch.ones(2000))


def test_jitter_stays_near_one_and_off_without_a_draw():
    config = MoEConfig(4, 1, 8, exploration=Exploration(jitter=0.1))
    x = torch.ones(500, 6)
    out = jittered(x, config, draw(range(500)))
    assert 0.9 <= out.min() < 0.91
    assert 1.09 < out.max() <= 1.1
    assert jittered(x, config, None) is x


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: MoEConfig(8, 9), "at most 8"),
        (lambda: MoEConfig(8, 0), "moe.top_k=0"),
        (lambda: MoEConfig(8, 2, groups=3), "nearest is 2"),
        (lambda: MoEConfig(8, 2, groups=4, groups_kept=5), "keep at most"),
        (lambda: MoEConfig(8, 3, groups=4, groups_kept=1), "at most 2"),
        (lambda: MoEConfig(8, 2, shared_gate=True), "moe.shared_ffn"),
        (lambda: MoEConfig(8, 2, scale=0), "positive"),
        (lambda: MoEConfig(8, 2, balance=Balance(bias_rate=0.1)), "set moe.correction"),
        (lambda: MoEConfig(8, 2, dispatcher="ring"), "write one of all_to_all"),
        (lambda: MoEConfig(8, 2, groups=2, exploration=Exploration(expert_dropout=0.1)), "moe.groups 1"),
        (lambda: Balance(switch=-1), "moe.balance.switch"),
        (lambda: Capacity(-1), "dropless"),
        (lambda: Capacity(overflow="next"), "without a capacity: experts take every token"),
        (lambda: Exploration(jitter=1), "below 1"),
        (lambda: Exploration(temperature=0), "positive"),
        (lambda: Exploration(temperature=2.0), "temperature_steps=0: it would never be used"),
        (lambda: route(torch.zeros(3, 5), MoEConfig(4, 2)), "moe.experts=4"),
    ],
)
def test_what_cannot_be_is_refused_with_the_rule(make, words):
    with pytest.raises(ValueError, match=words):
        make()
