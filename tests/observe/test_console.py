import io
import re

import pytest

from composable.observe import console
from composable.observe.console import Progress


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def clock(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(console.time, "monotonic", lambda: now[0])
    return now


def test_in_a_log_file_a_line_every_few_seconds_and_the_last(clock, capsys):
    progress = Progress(10, 2, enabled=True, note="tiny")
    for step in range(3, 11):
        clock[0] += 2
        progress.update(step, loss=5.5, tokens_per_second=12_345)
    progress.close()
    lines = capsys.readouterr().err.splitlines()
    assert [int(re.search(r"step (\d+)/10", line)[1]) for line in lines] == [3, 6, 9, 10]
    assert lines[0] == "tiny: step 3/10, loss 5.5000, 12.3k tokens/s, 0:00:14 left"
    assert lines[-1].endswith("0:00:00 left")


def test_a_log_file_gets_no_carriage_return(clock, capsys):
    progress = Progress(1, enabled=True)
    progress.update(1, loss=1.0, tokens_per_second=1.0)
    progress.say("saved")
    progress.close()
    seen = capsys.readouterr()
    assert "\r" not in seen.err + seen.out
    assert seen.out == "saved\n"


def test_a_terminal_gets_a_bar_with_loss_speed_and_time_left(monkeypatch, capsys):
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    progress = Progress(10, 2, enabled=True, note="tiny")
    progress.update(4, loss=5.5, tokens_per_second=2e6)
    progress.say("saved")
    progress.close()
    last = terminal.getvalue().split("\r")[-1]
    assert "4/10" in last
    assert "loss 5.5000, 2M tokens/s" in last
    assert re.search(r"<\d\d:\d\d", last)
    assert capsys.readouterr().out == "saved\n"


def test_other_ranks_say_nothing(capsys):
    progress = Progress(10, enabled=False)
    progress.update(10, loss=1.0, tokens_per_second=1.0)
    progress.say("saved")
    progress.close()
    seen = capsys.readouterr()
    assert seen.err + seen.out == ""
