"""The split of a model into stages: by cost exactly, by hand with errors that help, and what a schedule refuses."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from composable.models.config import DecoderConfig
from composable.models.count import flops_per_token
from composable.parallel.config import Pipeline
from composable.parallel.split import Costs, Stage, costs, describe, owners, parse_split, split_by_cost

LOOPED = ("Interleaved1F1B", "ZBVZeroBubble")


def cuts(layers: int, stages: int):
    for borders in itertools.combinations(range(1, layers), stages - 1):
        edges = [0, *borders, layers]
        yield [Stage(index == 0, range(edges[index], edges[index + 1]), index == stages - 1) for index in range(stages)]


def slowest_stage(split: list[Stage], costs: Costs) -> int:
    return max(costs.of(stage) for stage in split)


def slowest_rank(split: list[Stage], costs: Costs, of: tuple[int, ...]) -> int:
    ranks = dict.fromkeys(of, 0)
    for stage, rank in zip(split, of, strict=True):
        ranks[rank] += costs.of(stage)
    return max(ranks.values())


@st.composite
def problems(draw):
    blocks = draw(st.lists(st.integers(1, 9), min_size=1, max_size=8))
    stages = draw(st.integers(1, len(blocks)))
    return Costs(draw(st.integers(0, 9)), tuple(blocks), draw(st.integers(0, 30))), stages


@settings(max_examples=150, deadline=None)
@given(problems())
def test_the_slowest_stage_is_as_fast_as_any_cut_makes_it_and_the_cut_as_even(problem):
    model, stages = problem
    best = min(
        (
            slowest_stage(cut, model),
            sum(model.of(stage) ** 2 for stage in cut),
            tuple(len(stage.layers) for stage in cut),
            cut,
        )
        for cut in cuts(len(model.blocks), stages)
    )
    assert split_by_cost(model, stages) == best[-1]


@settings(max_examples=100, deadline=None)
@given(
    pp=st.integers(2, 3),
    schedule=st.sampled_from(LOOPED),
    layers=st.integers(6, 10),
    block=st.integers(1, 9),
    ends=st.tuples(st.integers(0, 9), st.integers(0, 40)),
)
def test_with_several_stages_a_rank_and_equal_blocks_the_slowest_rank_is_as_fast_as_can_be_too(
    pp, schedule, layers, block, ends
):
    model, stages = Costs(ends[0], (block,) * layers, ends[1]), 2 * pp
    of = owners(schedule, pp, stages)
    split = split_by_cost(model, stages, of)
    best = min((slowest_stage(cut, model), slowest_rank(cut, model, of)) for cut in cuts(layers, stages))
    assert (slowest_stage(split, model), slowest_rank(split, model, of)) == best
    assert [index for stage in split for index in stage.layers] == list(range(layers))


@settings(max_examples=60, deadline=None)
@given(problems().filter(lambda problem: problem[1] % 2 == 0))
def test_with_several_stages_a_rank_and_unequal_blocks_the_slowest_stage_is_as_fast_as_can_be(problem):
    model, stages = problem
    split = split_by_cost(model, stages, owners("LoopedBFS", stages // 2, stages))
    assert slowest_stage(split, model) == min(slowest_stage(cut, model) for cut in cuts(len(model.blocks), stages))


def test_costs_add_up_to_the_training_flops_of_a_token():
    config = DecoderConfig(vocab_size=100, dim=16, layers=3, ffn=40)
    parts = costs(config, 64)
    small = 2 * 16 + 6 * 100  # the embedding's look-up and the loss, which the count leaves out
    assert parts.embedding + sum(parts.blocks) + parts.head == flops_per_token(config, 64) + small


def test_a_large_head_takes_blocks_off_the_last_stage():
    split = split_by_cost(Costs(0, (10,) * 10, 30), 3)
    assert [str(stage) for stage in split] == ["E t*4", "t*4", "t*2 H"]


def test_equal_cuts_leave_early_stages_fewer_blocks():
    assert [len(stage.layers) for stage in split_by_cost(Costs(0, (10,) * 5, 0), 2)] == [2, 3]


def test_more_stages_than_blocks_are_refused():
    with pytest.raises(ValueError, match=r"4 pipeline stages for 3 blocks.*use at most 3 stages"):
        split_by_cost(Costs(0, (1, 1, 1), 0), 4)


def test_stages_go_round_the_ranks_and_in_v_schedules_back_again():
    assert owners("1F1B", 4, 4) == (0, 1, 2, 3)
    assert owners("LoopedBFS", 2, 6) == (0, 1, 0, 1, 0, 1)
    assert owners("ZBVZeroBubble", 3, 6) == owners("DualPipeV", 3, 6) == (0, 1, 2, 2, 1, 0)


def test_a_split_by_hand_is_read_as_written():
    assert parse_split("E t*3 | t*4 | t*3 H", 10) == [
        Stage(True, range(3), False),
        Stage(False, range(3, 7), False),
        Stage(False, range(7, 10), True),
    ]
    assert parse_split("E t t*2 t|t H", 5, 2) == [Stage(True, range(4), False), Stage(False, range(4, 5), True)]
    assert parse_split("E t*2 H", 2, 1) == [Stage(True, range(2), True)]
    assert [str(stage) for stage in parse_split("E | t*2 | H", 2)] == ["E", "t*2", "H"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("E t*3 | t*4 H", "places 7 blocks, and the model has 10"),
        ("E t*3 | t*4 | t*3 H", "has 3 stages, and there must be 2"),
        ("t*5 | t*5 H", "stage 1, position 0: the first stage starts with E"),
        ("E t*5 | t*5", "stage 2, position 8: the last stage ends with H"),
        ("E t*5 || t*5 H", "stage 2, position 7: the stage is empty"),
        ("E t*5 | t*5 H |", "stage 2, position 12: H, the head, comes last in the last stage"),
        ("E t*5 | E t*5 H", "stage 2, position 8: E, the embedding, comes first in the first stage"),
        ("t E t*4 | t*5 H", "stage 1, position 2: E, the embedding"),
        ("E t*5 | H t*5", "stage 2, position 8: H, the head"),
        ("E t*0 | t*10 H", "stage 1, position 2: 't*0' is none of E, t, t*N"),
        ("E t*5 | 5 H", "stage 2, position 8: '5' is none of"),
        ("", "stage 1, position 0: the stage is empty"),
    ],
)
def test_a_wrong_split_is_refused_with_its_place_and_a_right_one(text, message):
    with pytest.raises(ValueError) as caught:
        parse_split(text, 10, 2)
    assert message in str(caught.value)
    assert str(caught.value).endswith("a split of 10 blocks in 2 stages is 'E t*5 | t*5 H'")


def test_the_table_shows_every_stage_its_rank_and_its_share():
    model, of = Costs(0, (10,) * 8, 20), owners("ZBVZeroBubble", 2, 4)
    table = describe(split_by_cost(model, 4, of), model, of)
    assert table.splitlines() == [
        "stage  rank  parts  share of cost",
        "    0     0  E t*2         20.0%",
        "    1     1  t*2           20.0%",
        "    2     1  t*3           30.0%",
        "    3     0  t H           30.0%",
        "slowest rank: 0, 50.0% of the cost, where an even share is 50.0%",
    ]


@pytest.mark.parametrize(
    ("schedule", "pp", "micro_batches", "message"),
    [
        ("1F1B", 4, 3, "1F1B needs at least 4 micro-batches with mesh.pp=4; the nearest legal number is 4"),
        ("GPipe", 2, 1, "the nearest legal number is 2"),
        ("Interleaved1F1B", 4, 9, "rounds of equal size.*the nearest legal number is 8 or 10"),
        ("InterleavedZeroBubble", 2, 7, "the nearest legal number is 6 or 8"),
        ("ZBVZeroBubble", 2, 1, "the nearest legal number is 2"),
        ("DualPipeV", 2, 3, "DualPipeV needs at least 4 micro-batches with mesh.pp=2; the nearest legal number is 4"),
    ],
)
def test_micro_batches_that_a_schedule_cannot_take_are_refused(schedule, pp, micro_batches, message):
    with pytest.raises(ValueError, match=message):
        Pipeline(schedule).check(pp, micro_batches, 16)


def test_too_few_blocks_for_the_stages_are_refused():
    with pytest.raises(ValueError, match=r"makes 8 stages of 6 blocks.*write mesh.pp=3 or less"):
        Pipeline("ZBVZeroBubble").check(4, 8, 6)


def test_a_split_by_hand_is_checked_against_the_stages():
    Pipeline("1F1B", split="E | t*3 | H").check(3, 12, 3)
    with pytest.raises(ValueError, match="has 3 stages, and there must be 4"):
        Pipeline("ZBVZeroBubble", split="E t | t | t H").check(2, 8, 3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"micro_batches": -1}, "micro_batches=-1"),
        ({"virtual": 0}, "virtual=0"),
        ({"virtual": 3, "schedule": "DualPipeV"}, "each rank holds two stages"),
        ({"virtual": 4, "schedule": "1F1B"}, "each rank holds one stage"),
    ],
)
def test_a_pipeline_that_cannot_be_is_no_value(options, message):
    with pytest.raises(ValueError, match=message):
        Pipeline(**options)


def test_few_micro_batches_draw_a_warning_with_the_bubble_they_cost():
    assert Pipeline("1F1B").check(2, 8, 4) == []
    (warning,) = Pipeline("1F1B").check(4, 4, 4)
    assert "4 micro-batches a pass are fewer than 4 times the 4 ranks" in warning
    assert "up to 43% of a step" in warning  # 3 / 7
    assert "with 16 micro-batches it would be 16%" in warning  # 3 / 19
    assert Pipeline("Interleaved1F1B").bubble(4, 4) == 3 / 11
    assert Pipeline("1F1B").check(1, 1, 4) == []


def test_recomputed_blocks_under_a_split_backward_pass_draw_a_warning():
    (warning,) = Pipeline("ZBVZeroBubble").check(2, 8, 4, whole_blocks=True)
    assert "ZBVZeroBubble has no weight gradients left to fill the bubble" in warning
    assert Pipeline("Interleaved1F1B").check(2, 8, 4, whole_blocks=True) == []
