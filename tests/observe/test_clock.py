import time

import pytest

from composable.observe.clock import StepClock


class Hand:
    """A clock set by hand."""

    def __init__(self):
        self.seconds = 0.0

    def __call__(self):
        return self.seconds


@pytest.fixture
def hand():
    return Hand()


def step(clock, hand, wait, work, tokens):
    clock.start()
    hand.seconds += wait
    clock.data_ready()
    hand.seconds += work
    return clock.stop(tokens)


def test_a_report_averages_the_steps_since_the_last(hand):
    clock = StepClock(hand)
    step(clock, hand, 0, 1, 1)
    clock.report()
    assert step(clock, hand, 1.0, 3.0, 256) == 4.0
    step(clock, hand, 0.0, 2.0, 256)
    times = clock.report()
    assert (times.step_seconds, times.tokens_per_second, times.data_wait) == (3.0, 512 / 6, 1 / 6)
    step(clock, hand, 0.0, 0.5, 100)
    assert clock.report().tokens_per_second == 200


def test_start_up_in_the_first_step_does_not_skew_the_first_report(hand):
    clock = StepClock(hand)
    step(clock, hand, 0, 60, 256)
    for _ in range(4):
        step(clock, hand, 0, 0.5, 256)
    assert clock.report().tokens_per_second == 512


def test_a_report_of_the_first_step_alone_gives_it_as_it_was(hand):
    clock = StepClock(hand)
    step(clock, hand, 0, 2, 256)
    assert clock.report().tokens_per_second == 128


def test_the_time_for_which_saving_held_the_loop_is_in_the_next_report_and_in_no_step(hand):
    clock = StepClock(hand)
    step(clock, hand, 0, 1, 1)
    assert clock.report().save_seconds is None
    clock.saved(0.5)
    clock.saved(0.25)
    hand.seconds += 0.75
    step(clock, hand, 0, 1, 1)
    times = clock.report()
    assert (times.save_seconds, times.step_seconds) == (0.75, 1)
    step(clock, hand, 0, 1, 1)
    assert clock.report().save_seconds is None


def test_validation_and_checkpoints_between_steps_are_in_no_step(hand):
    clock = StepClock(hand)
    for _ in range(3):
        step(clock, hand, 0, 0.5, 256)
        hand.seconds += 100
    assert clock.report().step_seconds == 0.5


@pytest.mark.parametrize("every", [1, 5])
def test_tokens_per_second_are_those_of_the_real_step_time(every):
    clock, seen = StepClock(), []
    for number in range(1, 6):
        clock.start()
        clock.data_ready()
        time.sleep(0.02)
        clock.stop(256)
        if number % every == 0:
            seen.append(clock.report())
    assert len(seen) == 5 // every
    for times in seen:
        assert times.step_seconds >= 0.02
        assert times.tokens_per_second == pytest.approx(256 / times.step_seconds)
        assert times.data_wait < 0.1


def test_marks_out_of_order_are_refused(hand):
    clock = StepClock(hand)
    with pytest.raises(RuntimeError, match="start"):
        clock.stop(1)
    with pytest.raises(RuntimeError, match="no step"):
        clock.report()
    step(clock, hand, 0, 1, 1)
    with pytest.raises(RuntimeError, match="start"):
        clock.data_ready()
