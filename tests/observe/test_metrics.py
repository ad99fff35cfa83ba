import io
import json
import math
import warnings

import pytest
import torch
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from composable.observe.metrics import MetricsWriter, read_metrics, tag


def board(folder):
    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    return events


def scalars(folder, name):
    return [(event.step, event.value) for event in board(folder).Scalars(name)]


def line(step):
    return {"step": step, "loss": 1 / (step + 2), "tokens": 256 * step}


def test_each_step_is_one_line_with_its_floats_in_full(tmp_path):
    writer = MetricsWriter(tmp_path, rank=0)
    for step in (1, 2):
        writer.write(line(step))
        text = (tmp_path / "metrics.jsonl").read_text()
        assert text.endswith("\n")  # a kill loses no line that was written
        assert len(text.splitlines()) == step
    writer.close()
    assert list(read_metrics(tmp_path / "metrics.jsonl")) == [line(1), line(2)]


def test_a_nan_is_written_and_read_as_one(tmp_path):
    writer = MetricsWriter(tmp_path, rank=0)
    writer.write({"step": 1, "loss": math.nan})
    assert math.isnan(json.loads((tmp_path / "metrics.jsonl").read_text())["loss"])


def test_tensorboard_has_the_same_numbers_under_its_tags(tmp_path):
    writer = MetricsWriter(tmp_path, rank=0)
    keys = ["loss", "grad_norm", "lr", "tokens_per_second", "mfu", "step_seconds", "data_wait", "memory_gib"]
    keys += ["tokens", "valid_tokens", "samples"]
    writer.write({"step": 3, **{key: i for i, key in enumerate(keys)}, "moe/entropy": 0.5})
    writer.write({"step": 3, "validation_loss": 5.5})
    tags = {*(f"train/{key}" for key in keys), "moe/entropy", "validation/loss"}
    assert set(board(tmp_path).Tags()["scalars"]) == tags
    assert [scalars(tmp_path, f"train/{key}") for key in keys] == [[(3, i)] for i in range(len(keys))]
    assert scalars(tmp_path, "validation/loss") == [(3, 5.5)]
    assert tag("validation_tokens") == "validation/tokens"


@pytest.mark.parametrize(
    ("counts", "edges", "bars"),
    [
        ([5, 0, 7], (-0.5, 2.5), [5, 0, 7]),
        ([0, 0, 3, 4, 0], (1.5, 3.5), [0, 0, 3, 4, 0]),  # what is drawn ends where the last bar does
        ([0, 0], (-0.5, 0.5), [0, 0]),
    ],
)
def test_a_histogram_has_a_bar_per_number(tmp_path, counts, edges, bars):
    writer = MetricsWriter(tmp_path, rank=0)
    writer.histogram("moe/layer_3/load", torch.tensor(counts), 4)
    [event] = board(tmp_path).Histograms("moe/layer_3/load")
    histogram = event.histogram_value
    assert (event.step, histogram.num) == (4, sum(counts))
    assert (histogram.min, histogram.max) == edges
    assert histogram.bucket == bars
    assert histogram.bucket_limit == [n + 0.5 for n in range(len(counts))]
    assert histogram.sum == sum(n * count for n, count in enumerate(counts))
    assert histogram.sum_squares == sum(n * n * count for n, count in enumerate(counts))


def test_a_picture_has_the_pixels_that_were_given(tmp_path):
    writer = MetricsWriter(tmp_path, rank=0)
    pixels = torch.arange(3 * 2 * 5, dtype=torch.uint8).mul(8).view(3, 2, 5)
    writer.image("moe/load", pixels, 4)
    [event] = board(tmp_path).Images("moe/load")
    assert (event.step, event.height, event.width) == (4, 2, 5)
    shown = torch.tensor(list(Image.open(io.BytesIO(event.encoded_image_string)).tobytes())).view(2, 5, 3)
    assert shown.permute(2, 0, 1).tolist() == pixels.tolist()
    for wrong in (pixels[0], pixels[:2], pixels.float()):
        with pytest.raises(ValueError, match="moe/load"):
            writer.image("moe/load", wrong, 5)


def test_only_rank_zero_leaves_a_trace(tmp_path):
    writer = MetricsWriter(tmp_path / "run", rank=1)
    writer.write(line(1))
    writer.histogram("moe/load", torch.ones(2, dtype=torch.int64), 1)
    writer.image("moe/load", torch.zeros(3, 2, 2, dtype=torch.uint8), 1)
    writer.text("recipe", "text")
    writer.hparams({"lr": 1.0}, [])
    writer.close()
    assert not (tmp_path / "run").exists()


def test_after_a_resume_each_step_is_logged_once(tmp_path):
    first = MetricsWriter(tmp_path, rank=0)
    for step in range(1, 6):
        first.write(line(step))
        first.write({"step": step, "validation_loss": 1.0})
    first.close()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "lo')  # killed in the middle of a line
    [events] = (tmp_path / "tensorboard").iterdir()
    # As of an earlier second: TensorBoard reads files by name, which in one second is in order only up to nine writers.
    events.rename(events.with_name("events.out.tfevents.1000000000.host.1.0"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        second = MetricsWriter(tmp_path, rank=0, resume_step=3)
    for step in range(4, 8):
        second.write({**line(step), "loss": 9.0})
    second.close()
    lines = list(read_metrics(tmp_path / "metrics.jsonl"))
    assert [v["step"] for v in lines if "loss" in v] == [1, 2, 3, 4, 5, 6, 7]
    assert [v["step"] for v in lines if "validation_loss" in v] == [1, 2, 3]
    assert lines[0] == line(1)
    assert [(s, round(v, 4)) for s, v in scalars(tmp_path, "train/loss")] == [
        *((s, round(1 / (s + 2), 4)) for s in (1, 2, 3)),
        *((s, 9.0) for s in (4, 5, 6, 7)),
    ]
    assert [s for s, _ in scalars(tmp_path, "validation/loss")] == [1, 2, 3]


def test_a_resume_at_the_last_line_rewrites_nothing(tmp_path):
    MetricsWriter(tmp_path, rank=0).write(line(1))
    path = tmp_path / "metrics.jsonl"
    before = path.stat().st_ino, path.read_bytes()
    MetricsWriter(tmp_path, rank=0, resume_step=1).close()
    assert (path.stat().st_ino, path.read_bytes()) == before


def test_a_broken_line_in_the_middle_is_left_out_with_a_warning(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"st\n{"step": 2}\n')
    with pytest.warns(UserWarning, match="line 2"):
        assert list(read_metrics(path)) == [{"step": 1}, {"step": 2}]


def test_a_line_needs_its_step_and_numbers(tmp_path):
    writer = MetricsWriter(tmp_path, rank=0)
    with pytest.raises(ValueError, match="step"):
        writer.write({"loss": 1.0})
    with pytest.raises(TypeError, match="loss"):
        writer.write({"step": 1, "loss": "low"})
    assert (tmp_path / "metrics.jsonl").read_text() == ""


def test_the_recipe_and_its_numbers_are_in_tensorboard(tmp_path):
    writer = MetricsWriter(tmp_path, rank=0)
    writer.text("recipe", "steps: 3")
    writer.hparams({"optimizer": {"lr": 0.5, "betas": (0.9, 0.95)}, "seed": 7}, ["validation/loss"])
    writer.close()
    tags = board(tmp_path).Tags()
    assert tags["tensors"] == ["recipe/text_summary"]
    assert len(list((tmp_path / "tensorboard").iterdir())) == 1
    assert not [p for p in (tmp_path / "tensorboard").iterdir() if p.is_dir()]
    data = board(tmp_path).summary_metadata["_hparams_/session_start_info"].plugin_data.content
    assert all(word in data for word in (b"optimizer.lr", b"optimizer.betas", b"(0.9, 0.95)", b"seed"))
