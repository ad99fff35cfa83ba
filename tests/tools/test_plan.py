"""The planner as a command."""

import json
import shlex
import sys

import pytest
import tyro

from composable.plan.devices import cluster
from composable.plan.layout import Layout
from composable.recipe import command_line, recipe_of
from tests.test_commands import ROOT

DEBUG = ROOT / "recipes" / "dense_debug.py"


@pytest.fixture
def plan(monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(ROOT / "tools"))

    def run(*words):
        import plan as tool

        monkeypatch.setattr(sys, "argv", ["plan.py", str(DEBUG), *map(str, words)])
        with pytest.raises(SystemExit) as ended:
            tool.main()
        out, err = capsys.readouterr()
        return ended.value.code, out.splitlines(), err.splitlines()

    return run


def test_the_best_are_shown_with_why_and_the_options_to_paste(plan, tmp_path):
    code, out, _ = plan("--gpus", 8, "--device", "cpu", "--top", 3, "--json", tmp_path / "p.json")
    assert code == 0
    assert out[0].startswith("dense_debug: 1,648,320 parameters, steps of 32 rows of 256 tokens")
    assert "8 x cpu" in out[1]
    table = next(index for index, line in enumerate(out) if "tokens/s" in line)
    assert [line.split()[0] for line in out[table + 1 : table + 4]] == ["1", "2", "3"]
    assert out.index("why") < out.index("instead of the first")
    options = next(line for line in out if line.startswith("options of the first: "))
    told = command_line(recipe_of(DEBUG), options.partition(": ")[2].split())
    facts = json.loads((tmp_path / "p.json").read_text())["layouts"]
    assert told.resolve(8)[0].options()["mesh"] == facts[0]["layout"]["mesh"]
    seconds = [float(f"{each['time']['total']:.2e}") for each in facts]
    assert seconds == sorted(seconds)
    assert all(rank["total"] < 4 * 2**30 for each in facts for rank in each["memory"])
    assert facts[0]["traffic"]


def test_the_commands_of_the_readme_are_read(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    import plan as tool

    lines = [line for line in (ROOT / "README.md").read_text().splitlines() if line.startswith("python tools/plan.py")]
    assert len(lines) >= 4
    for line in lines:
        options, rest = tyro.cli(tool.Options, args=shlex.split(line)[2:], return_unknown_args=True)
        recipe = command_line(recipe_of(ROOT / options.recipe), rest)
        assert cluster(options.device, options.cluster)
        if options.explain:
            layout = Layout.parse(options.explain, recipe)
            assert layout.put_into(recipe).resolve(options.gpus)


def test_one_layout_is_explained_and_drawn(plan, tmp_path):
    picture = tmp_path / "p.png"
    code, out, _ = plan("--gpus", 8, "--explain", "tp=2,pp=2,data=zero1,recompute=full", "--png", picture)
    assert code == 0
    text = "\n".join(out)
    for part in (
        "dp_shard 2, tp 2, pp 2",
        "memory of pipeline rank",
        "fits",
        "sequence",
        "bubble",
        "--mesh.tp 2 --mesh.pp 2",
    ):
        assert part in text
    assert picture.read_bytes().startswith(b"\x89PNG")
    whole, _, _ = plan("--gpus", 16, "--gpus-per-node", 4, "--explain", "tp=2", "--json", tmp_path / "e.json")
    facts = json.loads((tmp_path / "e.json").read_text())["layouts"][0]
    assert whole == 0
    assert {flow["group"] for flow in facts["traffic"]} >= {"tp", "dp_shard"}
    own, out, _ = plan("--gpus", 8, "--explain", "own")
    assert own == 0
    assert any(line.startswith("dp_shard 8, micro-batch") for line in out)


def test_a_layout_that_does_not_fit_ends_with_1(plan):
    code, out, _ = plan("--gpus", 2, "--explain", "own", "--cluster", "memory=1.63GB", "--data.micro-batch", 16)
    assert code == 1
    assert any("DOES NOT FIT" in line for line in out)


def test_where_nothing_fits_it_ends_with_1_and_says_what_would_help(plan):
    code, out, _ = plan(
        "--gpus", 2, "--device", "cpu", "--cluster", "memory=14MB", "--micro-batch", 1, "--global-batch", 8
    )
    assert code == 1
    assert "nothing fits" in out
    assert out.index("why") < out.index("what would help")
    assert any("devices it fits" in line for line in out), out


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--gpus", 0), "--gpus 0: a number of devices is 1 or more"),
        (("--gpus", 8, "--device", "H300"), "no device 'H300': known are"),
        (("--gpus", 8, "--cluster", "memory=lots"), "'lots' is no number"),
        (("--gpus", 8, "--explain", "tp=3"), "multiple of 3 ranks"),
        (("--gpus", 8, "--explain", "xp=3"), "write name=value"),
    ],
)
def test_what_is_wrong_is_said_in_a_line(plan, words, says):
    code, _, err = plan(*words)
    assert code == 2
    assert len(err) == 1
    assert says in err[0]
