import importlib

import pytest

from tests.test_commands import ROOT


@pytest.fixture
def run_tool(monkeypatch, capsys):
    """`run_tool(name)` gives a call of that tool: its exit status, the lines that it printed, and those of errors."""
    monkeypatch.syspath_prepend(str(ROOT / "tools"))

    def named(name):
        tool = importlib.import_module(name)

        def run(*arguments):
            capsys.readouterr()
            status = tool.main([*map(str, arguments), "--memory", "64GB"])
            out, err = capsys.readouterr()
            return status, out.splitlines(), err.splitlines()

        return run

    return named
