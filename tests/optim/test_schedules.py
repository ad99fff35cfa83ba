import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from composable.optim.schedules import ScheduleConfig, check, learning_rate, scale_learning_rate


def rates(steps, upto=None, **config):
    schedule = ScheduleConfig(**config)
    return [learning_rate(schedule, step, steps, 1.0) for step in range(1, (upto or steps) + 1)]


def test_warmup_4_of_10_linear_has_the_textbook_values_and_stays_at_the_end():
    expected = [0.25, 0.5, 0.75, 1, 0.85, 0.7, 0.55, 0.4, 0.25, 0.1, 0.1, 0.1]
    assert rates(10, 12, kind="linear", warmup=4) == pytest.approx(expected, abs=1e-15)


def test_cosine_is_half_way_down_at_half_time():
    values = rates(12, kind="cosine", warmup=2, min_ratio=0.2)
    assert values[1] == 1.0
    assert values[6] == pytest.approx(0.6, abs=1e-15)  # step 7: 5 of 10
    assert values[4] == pytest.approx(0.2 + 0.8 * 0.5 * (1 + math.cos(0.3 * math.pi)), abs=1e-15)
    assert values[-1] == pytest.approx(0.2, abs=1e-15)


def test_wsd_is_stable_then_falls_linearly_over_its_share():
    values = rates(20, kind="wsd", warmup=4, decay=0.25, min_ratio=0.0)
    assert values[:4] == [0.25, 0.5, 0.75, 1.0]
    assert values[4:15] == [1.0] * 11
    assert values[15:] == pytest.approx([5 / 6, 4 / 6, 3 / 6, 2 / 6, 1 / 6])  # 0 would come at step 21


def test_wsd_with_a_tiny_share_falls_in_one_step_and_with_all_of_it_is_linear():
    assert rates(10, kind="wsd", decay=1e-9) == [1.0] * 9 + [pytest.approx(0.1)]
    assert rates(10, kind="wsd", decay=1.0, warmup=4) == rates(10, kind="linear", warmup=4)


def test_constant_stays_at_the_peak():
    assert rates(5, 7, kind="constant", warmup=2) == [0.5, 1, 1, 1, 1, 1, 1]


@pytest.mark.parametrize("kind", ["constant", "linear", "cosine", "wsd"])
@pytest.mark.parametrize("min_ratio", [0.0, 0.1, 1.0])
def test_every_run_length_has_a_rate_for_every_step(kind, min_ratio):
    lengths = [(4, 10), (0, 10), (10, 10), (12, 10), (4, 4), (1, 1), (0, 1), (4, 40), (0, 2), (1, 2)]
    for (warmup, steps), decay in itertools.product(lengths, [0.05, 0.5, 1.0]):
        values = rates(steps, steps + 2, kind=kind, warmup=warmup, min_ratio=min_ratio, decay=decay)
        assert all(0 < value <= 1 for value in values)
        assert values[steps:] == [values[steps - 1]] * 2
        assert max(values) == (1 if warmup <= steps else steps / warmup)
        if warmup <= steps:
            assert values[max(warmup, 1) - 1] == 1
            assert min(values[max(warmup, 1) - 1 :]) >= min_ratio


@given(
    kind=st.sampled_from(["constant", "linear", "cosine", "wsd"]),
    warmup=st.integers(0, 60),
    steps=st.integers(1, 50),
    step=st.integers(1, 60),
    min_ratio=st.floats(0, 1, allow_subnormal=False),
    decay=st.floats(0, 1, exclude_min=True),
    peak=st.floats(1e-6, 10),
)
def test_the_rate_is_always_above_zero_and_never_above_the_peak(kind, warmup, steps, step, min_ratio, decay, peak):
    value = learning_rate(ScheduleConfig(kind, warmup, min_ratio, decay), step, steps, peak)
    assert 0 < value <= peak
    if step >= warmup and steps >= warmup:
        assert value >= min_ratio * peak


def test_a_warmup_longer_than_the_run_warns_and_ends_below_the_peak():
    schedule = ScheduleConfig(warmup=12)
    (warning,) = check(schedule, 10)
    assert "10/12" in warning
    assert learning_rate(schedule, 10, 10, 1.0) == 10 / 12
    assert check(ScheduleConfig(warmup=10), 10) == []


@pytest.mark.parametrize(
    ("config", "steps", "word"),
    [
        ({"warmup": -1}, 10, "warmup"),
        ({"min_ratio": 1.1}, 10, "min_ratio"),
        ({"min_ratio": math.nan}, 10, "min_ratio"),
        ({"decay": 0.0}, 10, "decay"),
        ({"decay": 1.5}, 10, "decay"),
        ({"kind": "sqrt"}, 10, "wsd"),
        ({}, 0, "steps"),
    ],
)
def test_senseless_schedules_are_refused_by_name(config, steps, word):
    with pytest.raises(ValueError, match=word):
        check(ScheduleConfig(**config), steps)


def test_steps_are_counted_from_one():
    with pytest.raises(ValueError, match="from 1"):
        learning_rate(ScheduleConfig(), 0, 10, 1.0)


def test_scaling_rules_follow_the_ratio_of_batches():
    assert scale_learning_rate(0.1, 64, None, "none") == 0.1
    assert scale_learning_rate(0.1, 64, 16, "linear") == pytest.approx(0.4)
    assert scale_learning_rate(0.1, 64, 16, "sqrt") == pytest.approx(0.2)
    with pytest.raises(ValueError, match="reference_batch"):
        scale_learning_rate(0.1, 64, None, "sqrt")


def test_the_last_step_of_a_very_long_cosine_to_zero_still_learns():
    assert learning_rate(ScheduleConfig(min_ratio=0.0), 10**9, 10**9, 1.0) > 0
