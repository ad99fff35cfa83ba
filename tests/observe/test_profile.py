import json

import pytest
import torch

from composable.observe.profile import trace


def run(folder, first, count, steps, start=1):
    with trace(folder, first, count, 0, start=start) as step:
        for number in range(start, steps + 1):
            with torch.profiler.record_function(f"our step {number}"):
                torch.ones(3).sum()
            step()
    files = sorted(folder.glob("profile/*"))
    return {
        file.name: [n for n in range(1, steps + 1) if f'"our step {n}"' in json.dumps(json.loads(file.read_text()))]
        for file in files
    }


@pytest.mark.parametrize(("first", "start"), [(1, 1), (2, 1), (4, 1), (4, 3), (4, 4)])
def test_the_trace_holds_the_chosen_steps_and_no_others(tmp_path, first, start):
    assert run(tmp_path, first, 2, 8, start) == {f"rank0-steps{first}-{first + 1}.json": [first, first + 1]}


def test_a_run_that_ends_early_leaves_what_it_had(tmp_path):
    assert run(tmp_path, 3, 5, 4) == {"rank0-steps3-7.json": [3, 4]}


@pytest.mark.parametrize(("first", "count", "start"), [(1, 0, 1), (2, 1, 3), (9, 1, 1)])
def test_nothing_is_written_for_steps_that_do_not_come(tmp_path, first, count, start):
    assert run(tmp_path, first, count, 4, start) == {}


def test_senseless_steps_are_refused(tmp_path):
    with pytest.raises(ValueError, match="from 1"), trace(tmp_path, 0, 1, 0):
        pass
