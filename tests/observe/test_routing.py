import json
import math

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from composable.observe.metrics import MetricsWriter, read_metrics
from composable.observe.routing import (
    PICTURE_SCALE,
    PICTURE_TAG,
    VIRIDIS,
    LoadWindow,
    RoutingReport,
    RoutingWatch,
    draw,
    entropy,
    heat_map,
    load,
    scalars,
)

EVEN = [2] * 8
COLLAPSED = [0, 8, 0, 0, 0, 8, 0, 0]  # two experts of eight take all, which is all that top-2 allows


def report(chosen, executed=None, layers=None, losses=None, coefficients=None, bias=None, top_k=2):
    chosen = torch.tensor(chosen)
    return RoutingReport(
        layers=tuple(range(len(chosen))) if layers is None else layers,
        top_k=top_k,
        chosen=chosen,
        executed=chosen if executed is None else torch.tensor(executed),
        losses={name: torch.tensor(values) for name, values in (losses or {}).items()},
        coefficients=coefficients or {},
        bias=None if bias is None else torch.tensor(bias),
    )


def warned(window, *rows, layers=(3,), **more):
    """What is said after each report of one layer."""
    out = []
    for row in rows:
        window.add(report([row], layers=layers, **more))
        out.append(window.collapse())
    return out


def test_numbers_of_hand_made_counts():
    values = scalars(
        report(
            [[4, 4, 4, 4], [8, 8, 0, 0]],
            [[4, 4, 4, 4], [6, 6, 0, 0]],
            layers=(3, 7),
            losses={"switch": [1.0, 2.0], "z": [0.5, 0.25]},
            coefficients={"switch": 0.5, "z": 2.0},
            bias=[[0.0, 0.5, -0.25, 0.0], [1.0, 0.0, 0.0, -2.0]],
        )
    )
    even = {"max_load": 1, "entropy": 1, "dropped": 0, "dead": 0, "bias_min": -0.25, "bias_max": 0.5}
    even |= {"switch_loss": 1, "switch_loss_scaled": 0.5, "z_loss": 0.5, "z_loss_scaled": 1}
    skewed = {"max_load": 2, "entropy": 0.5, "dropped": 0.25, "dead": 0.5, "bias_min": -2, "bias_max": 1}
    skewed |= {"switch_loss": 2, "switch_loss_scaled": 1, "z_loss": 0.25, "z_loss_scaled": 0.5}
    total = {"max_load": 2, "entropy": 0.75, "dropped": 0.125, "dead": 0.25, "bias_min": -2, "bias_max": 1}
    total |= {"switch_loss": 1.5, "switch_loss_scaled": 1.5, "z_loss": 0.375, "z_loss_scaled": 1.5}
    assert values == {
        **{f"moe/{name}": value for name, value in total.items()},
        **{f"moe/layer_3/{name}": value for name, value in even.items()},
        **{f"moe/layer_7/{name}": value for name, value in skewed.items()},
    }
    assert all(type(value) is float for value in values.values())


def test_without_losses_and_bias_their_numbers_are_absent():
    assert {key.split("/")[-1] for key in scalars(report([EVEN]))} == {"max_load", "entropy", "dropped", "dead"}


@pytest.mark.parametrize(("experts", "top_k"), [(8, 1), (8, 2), (6, 4), (3, 3)])
def test_the_largest_load_is_experts_over_top_k(experts, top_k):
    counts = [5] * top_k + [0] * (experts - top_k)  # every token goes to the first experts
    assert scalars(report([counts], top_k=top_k))["moe/max_load"] == experts / top_k


def test_large_counts_keep_every_digit():
    most = 2**53 + 1  # no float64
    assert scalars(report([[most, most - 2]], top_k=1))["moe/max_load"] == most * 2 / (2 * most - 2)
    values = scalars(report([[most, 1], [8, 2]], [[most, 1], [7, 2]], top_k=1))
    assert values["moe/layer_1/dropped"] == 1 / 10  # 1 - 9 / 10 is less
    assert values["moe/dropped"] == 1 / (most + 11)


def test_entropy_is_one_if_even_and_zero_if_one_expert_has_all():
    assert [entropy([count] * 8) for count in (1, 3, 12345)] == [1, 1, 1]
    assert all(1 - 1e-15 < entropy([count] * 7) <= 1 for count in (1, 3, 12345))
    assert entropy([0, 9, 0]) == 0
    assert entropy([7]) == 1
    assert entropy([1, 3]) == pytest.approx(-(0.25 * math.log2(0.25) + 0.75 * math.log2(0.75)), rel=1e-15)
    with pytest.raises(ValueError, match="choice"):
        entropy([0, 0])


def test_what_does_not_exist_is_left_out_and_json_has_no_nan(tmp_path):
    values = scalars(
        report(
            [[0, 0], [3, 1]],
            losses={"switch": [math.nan, 1.25], "kl": [math.inf, math.nan]},
            coefficients={"switch": 0.1, "kl": 0.1},
        )
    )
    assert {key for key in values if key.startswith("moe/layer_0/")} == {"moe/layer_0/dead"}
    assert values["moe/max_load"] == values["moe/layer_1/max_load"] == 1.5
    assert values["moe/switch_loss"] == 1.25
    assert "moe/kl_loss" not in values
    assert set(scalars(report([[0, 0]]))) == {"moe/dead", "moe/layer_0/dead"}
    writer = MetricsWriter(tmp_path, rank=0)
    writer.write({"step": 1, **values})
    writer.close()
    text = (tmp_path / "metrics.jsonl").read_text()
    json.loads(text, parse_constant=pytest.fail)  # NaN and Infinity
    assert list(read_metrics(tmp_path / "metrics.jsonl")) == [{"step": 1, **values}]


def test_an_expert_is_dead_only_if_it_got_nothing_over_the_window():
    window = LoadWindow(RoutingWatch(window=2))
    expected = []
    for row in ([4, 0, 0, 4], [0, 8, 0, 0], [0, 8, 0, 0]):
        window.add(report([row]))
        expected.append(scalars(report([row]), window.executed)["moe/dead"])
    assert expected == [0.5, 0.25, 0.75]
    assert window.chosen.tolist() == [[0, 16, 0, 0]]


def test_dead_goes_by_what_was_executed():
    assert scalars(report([[8, 0, 0, 0]], [[4, 4, 0, 0]]))["moe/dead"] == 0.5  # overflow went to the next expert


def test_collapse_names_layer_and_experts_and_what_to_do():
    window = LoadWindow(RoutingWatch(window=4))
    row = [1, 0, 0, 2, 3, 22, 0, 8]
    said = warned(window, *[row] * 4, top_k=1)
    assert said == [
        [
            "layer 3: expert 5 takes 61.1% of all choices (8 experts; even would be 12.5%) in the last report; set "
            "model.moe.balance.switch (0.01, say) or set model.moe.correction with model.moe.balance.bias_rate "
            "(0.001, say)"
        ],
        [],
        [],
        [
            "layer 3: expert 5 takes 61.1% of all choices (8 experts; even would be 12.5%), experts 1, 2, 6 got none "
            "in the last 4 reports; set model.moe.balance.switch (0.01, say) or set model.moe.correction with "
            "model.moe.balance.bias_rate (0.001, say)"
        ],
    ]


def test_the_advice_goes_by_what_is_on():
    more = {"losses": {"kl": [0.0], "z": [0.0]}, "coefficients": {"kl": 0.02, "z": 0.1}, "bias": [[0.0] * 8]}
    [[text]] = warned(LoadWindow(RoutingWatch(window=1)), COLLAPSED, **more)
    assert text.endswith("; raise model.moe.balance.kl (0.02) or raise model.moe.balance.bias_rate")


def test_the_most_loaded_expert_is_named_first():
    [[text]] = warned(LoadWindow(RoutingWatch(window=1)), [0, 6, 1, 0, 0, 9, 0, 0])
    assert "experts 5, 1 take 56.2%, 37.5% of all choices" in text


def test_balanced_experts_draw_no_warning():
    assert warned(LoadWindow(RoutingWatch(window=2)), *[EVEN] * 5) == [[]] * 5
    every = [[6, 6], [6, 6]]  # top_k = experts: all are always chosen
    assert warned(LoadWindow(RoutingWatch(window=2)), *every, top_k=2) == [[]] * 2


@pytest.mark.parametrize(("experts", "top_k", "limit"), [(8, 2, 2.5), (8, 1, 4), (64, 8, 4), (4, 2, 1.5)])
def test_the_limit_can_be_reached_whatever_top_k(experts, top_k, limit):
    tokens = 64 * experts  # limit * tokens * top_k / experts choices of expert 0 are just at the limit
    at = round(limit * tokens * top_k / experts)
    rest = tokens * top_k - at
    others = [rest // (experts - 1) + (i < rest % (experts - 1)) for i in range(experts - 1)]
    assert at < tokens
    assert warned(LoadWindow(RoutingWatch(window=1)), [at, *others], top_k=top_k) == [[]]
    [[text]] = warned(LoadWindow(RoutingWatch(window=1)), [at + 1, others[0] - 1, *others[1:]], top_k=top_k)
    assert text.startswith("layer 3: expert 0 takes")


def test_a_warning_comes_once_until_the_layer_has_recovered():
    window = LoadWindow(RoutingWatch(window=1, dead=1.0))
    hot, between = [0, 16, 0, 0, 3, 16, 3, 2], [1, 9, 3, 3, 3, 14, 3, 4]  # 3.2 and 2.8 times the mean; then again 2
    near = [4, 10, 4, 4, 4, 6, 4, 4]  # 2 times the mean: below the limit of 2.5, not yet halfway back
    said = warned(window, hot, hot, between, near, hot, EVEN, hot)
    assert [len(texts) for texts in said] == [1, 0, 0, 0, 0, 0, 1]


def test_it_is_said_again_when_it_is_twice_as_many_experts():
    window = LoadWindow(RoutingWatch(window=1, max_load=8))
    rows = [[0] * dead + [2] * (16 - dead) for dead in (1, 1, 2, 3, 4, 0, 1)]
    assert [len(texts) for texts in warned(window, *rows, top_k=1)] == [1, 0, 1, 0, 1, 0, 1]


def test_an_overload_is_said_after_a_quarter_of_the_window_and_death_after_all_of_it():
    window = LoadWindow(RoutingWatch(window=8))
    said = warned(window, *[COLLAPSED] * 8)
    assert [i for i, texts in enumerate(said, 1) if texts] == [2, 8]
    assert "got none" not in said[1][0]
    assert "experts 0, 2, 3, 4, 6, 7 got none in the last 8 reports" in said[7][0]


def test_a_share_of_dead_experts_can_be_allowed_and_long_lists_are_cut():
    few, many = [0] * 4 + [2] * 12, [0] * 10 + [5] * 6
    window = LoadWindow(RoutingWatch(window=1, dead=0.25))
    [nothing, [text]] = warned(window, few, many)
    assert nothing == []
    assert "experts 0, 1, 2, 3, 4, 5, 6, 7 and 2 more got none" in text


def test_each_layer_is_judged_by_itself():
    window = LoadWindow(RoutingWatch(window=1))
    window.add(report([EVEN, COLLAPSED, EVEN, [0] * 8], layers=(1, 2, 5, 9)))
    [text] = window.collapse()
    assert text.startswith("layer 2: experts 1, 5 take 50%, 50% of all choices")


def lightness(colour):
    """L* of CIELAB, of an 8-bit sRGB colour."""
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in (v / 255 for v in colour)]
    y = sum(weight * value for weight, value in zip((0.2126, 0.7152, 0.0722), linear, strict=True))
    return 116 * (y ** (1 / 3) if y > (6 / 29) ** 3 else y / (3 * (6 / 29) ** 2) + 4 / 29) - 16


def test_equal_steps_of_the_load_look_equal():
    loads = torch.linspace(0, PICTURE_SCALE, 41)[None]
    pixels = heat_map(loads)[:, 0, ::12]  # cells of 512 // 41 = 12
    seen = torch.tensor([lightness(colour) for colour in pixels.T.tolist()])
    assert len(seen) == 41
    assert (seen.diff() > 0).all()
    line = torch.linspace(seen[0].item(), seen[-1].item(), 41)
    assert (seen - line).abs().max() < 2.5  # of 76: viridis is linear in lightness


def test_the_picture_has_a_square_per_expert_on_a_fixed_scale():
    loads = load(torch.tensor([[4, 0, 0, 4], [2, 2, 2, 2], [0, 0, 0, 0]]))
    assert loads.tolist() == [[2, 0, 0, 2], [1, 1, 1, 1], [0, 0, 0, 0]]
    pixels = heat_map(loads)
    assert pixels.dtype == torch.uint8
    assert pixels.shape == (3, 3 * 32, 4 * 32)
    cells = pixels.view(3, 3, 32, 4, 32).permute(1, 3, 2, 4, 0)
    assert (cells == cells[:, :, :1, :1]).all()  # each is of one colour
    half = torch.tensor(VIRIDIS[5])
    assert (cells[0, 0] == half).all()
    assert (cells[0, 1] == torch.tensor(VIRIDIS[0])).all()
    assert (cells[1, 0] == cells[1, 3]).all()
    assert (heat_map(torch.tensor([[4.0, 100.0]])) == torch.tensor(VIRIDIS[-1])[:, None, None]).all()
    assert heat_map(torch.ones(60, 256)).shape == (3, 60 * 8, 256 * 8)


def test_tensorboard_has_a_histogram_per_layer_and_the_picture(tmp_path):
    writer = MetricsWriter(tmp_path, rank=0)
    counts = torch.tensor([[0, 3, 1, 0], [1, 1, 1, 1]])
    draw(writer, counts, (3, 7), step=5)
    writer.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert events.Tags()["histograms"] == ["moe/layer_3/load", "moe/layer_7/load"]
    [picture] = events.Images(PICTURE_TAG)
    assert (picture.step, picture.width, picture.height) == (5, 128, 64)


def test_pictures_are_drawn_now_and_then():
    window = LoadWindow(RoutingWatch(pictures=3))
    due = []
    for step in range(1, 8):
        window.add(report([EVEN]))
        due += [step] if window.picture_due else []
    assert due == [1, 3, 6]


@pytest.mark.parametrize(
    ("wrong", "match"),
    [
        ({"window": 0}, "window=0"),
        ({"pictures": 0}, "pictures=0"),
        ({"max_load": 1.0}, "max_load=1.0"),
        ({"dead": 1.5}, "dead=1.5"),
        ({"dead": -0.1}, "dead=-0.1"),
    ],
)
def test_a_watch_that_makes_no_sense_is_refused(wrong, match):
    with pytest.raises(ValueError, match=match):
        RoutingWatch(**wrong)


@pytest.mark.parametrize(
    ("wrong", "match"),
    [
        ({"executed": [[1, 1, 1]]}, "executed"),
        ({"layers": (1, 2)}, "chosen"),
        ({"bias": [[0.0]]}, "bias"),
        ({"losses": {"switch": [1.0]}}, "coefficients"),
        ({"losses": {"switch": [1.0, 2.0]}, "coefficients": {"switch": 1.0}}, "switch"),
    ],
)
def test_a_report_whose_parts_do_not_fit_is_refused(wrong, match):
    with pytest.raises(ValueError, match=match):
        report([[1, 1]], **wrong)
