import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from composable.moe.capacity import limit, room_of
from composable.moe.config import Capacity, MoEConfig
from composable.moe.router import route
from tests.moe.slow import executed


def config_of(experts, k, factor, overflow, **rest):
    return MoEConfig(experts, k, 8, capacity=Capacity(factor, overflow), **rest)


def inputs(tokens, experts, seed, levels):
    """Coarse logits, so that there are ties; an order that is not that of the rows; some padding."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randint(0, levels, (tokens, experts), generator=generator).double() / 2
    index = torch.randperm(tokens, generator=generator) * 3 + 5
    mask = torch.rand(tokens, generator=generator) < 0.8
    return logits, index, mask


@settings(max_examples=150, deadline=None)
@given(
    tokens=st.integers(0, 24),
    experts=st.integers(1, 9),
    overflow=st.sampled_from(["drop_weight", "drop_position", "next"]),
    factor=st.sampled_from([0.3, 0.75, 1.0, 1.5, 4.0]),
    score=st.sampled_from(["softmax", "topk_softmax", "sigmoid"]),
    levels=st.sampled_from([1, 2, 5, 1000]),
    correction=st.booleans(),
    data=st.data(),
)
def test_capacity_equals_a_queue_in_plain_python(tokens, experts, overflow, factor, score, levels, correction, data):
    k = data.draw(st.integers(1, experts))
    config = config_of(experts, k, factor, overflow, score=score, correction=correction)
    logits, index, mask = inputs(tokens, experts, data.draw(st.integers(0, 9)), levels)
    bias = torch.linspace(0.3, -0.3, experts).double() if correction else None
    chosen = route(logits, config, bias)
    routing = limit(chosen, logits, config, index=index, mask=mask, bias=bias)
    wanted = executed(chosen, logits, config, index.tolist(), mask.tolist(), bias)
    assert routing.ids.tolist() == wanted
    flat = [e for row in wanted for e in row if e >= 0]
    assert routing.counts.tolist() == [flat.count(e) for e in range(experts)]
    assert routing.counts.max() <= room_of(factor, mask.sum(), config)
    assert (routing.weights[routing.ids < 0] == 0).all()


@pytest.mark.parametrize("overflow", ["drop_weight", "next"])
def test_equal_tokens_tie_whatever_the_rounding_of_a_layout(overflow):
    config = config_of(4, 1, 1.0, overflow)
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0], dtype=torch.float64).expand(8, 4)
    noise = torch.linspace(-1e-14, 1e-14, 8, dtype=torch.float64)[:, None] * torch.tensor([1.0, 0, 0, 0])
    found = []
    for inputs in (logits + noise, logits - noise):
        found.append(limit(route(inputs, config), inputs, config).ids.flatten().tolist())
    assert found[0] == found[1]
    assert [token for token, expert in enumerate(found[0]) if expert == 0] == [0, 1]


def test_what_fits_is_left_alone():
    logits, index, _ = inputs(16, 4, 0, 1000)
    for overflow in ("drop_weight", "drop_position", "next"):
        config = config_of(4, 2, 2.0, overflow)
        chosen = route(logits, config)
        routing = limit(chosen, logits, config, index=index)
        assert torch.equal(routing.ids, chosen.ids)
        assert torch.equal(routing.weights, chosen.weights)
    config = config_of(4, 2, 0.0, "drop_weight")
    assert limit(chosen, logits, config) is chosen


def test_exact_drops_of_five_tokens_with_room_for_three():
    # All ask expert 0, with weights that fall, rise and tie.
    logits = torch.tensor([[3.0, 0, 0], [5.0, 0, 0], [3.0, 0, 0], [4.0, 0, 0], [3.0, 0, 0]]).double()
    for overflow, ids in (
        ("drop_weight", [0, 0, -1, 0, -1]),
        ("drop_position", [0, 0, 0, -1, -1]),
        ("next", [0, 0, 1, 0, 1]),
    ):
        config = config_of(3, 1, 1.8, overflow, normalise=False)  # ceil(1.8 * 5 / 3) = 3
        routing = limit(route(logits, config), logits, config)
        assert routing.ids.flatten().tolist() == ids, overflow


@pytest.mark.parametrize(("factor", "tokens", "room"), [(1.1, 40, 11), (1.0, 41, 11), (1.25, 2, 1), (1.25, 0, 0)])
def test_the_room_is_rounded_up(factor, tokens, room):
    assert room_of(factor, torch.tensor(tokens), MoEConfig(8, 2)).item() == room


def of_a_shard(overflow):
    import torch.distributed as dist

    config = config_of(5, 2, 0.8, overflow)
    logits, index, mask = inputs(24, 5, 1, 4)
    group, rank = dist.group.WORLD, dist.get_rank()
    part = slice(rank * 24 // dist.get_world_size(), (rank + 1) * 24 // dist.get_world_size())
    with pytest.raises(ValueError, match="index"):
        limit(route(logits[part], config), logits[part], config, group=group)
    routing = limit(route(logits[part], config), logits[part], config, index=index[part], mask=mask[part], group=group)
    return routing.ids.tolist()


@pytest.mark.parametrize("overflow", ["drop_weight", "drop_position", "next"])
def test_shards_of_a_micro_batch_are_limited_together(ranks, overflow):
    config = config_of(5, 2, 0.8, overflow)
    logits, index, mask = inputs(24, 5, 1, 4)
    whole = limit(route(logits, config), logits, config, index=index, mask=mask).ids.tolist()
    assert [row for part in ranks(4, of_a_shard, overflow) for row in part] == whole
