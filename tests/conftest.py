import functools
import hashlib
import os
import subprocess
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: ranks share the machine's cores

import pytest
import torch

from composable.recipe import Recipe
from composable.verify import Numbers, record, reference_of
from tests.pool import Pool

torch.set_num_threads(1)

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="session")
def pool():
    pool = Pool()
    yield pool
    pool.close()


@pytest.fixture
def ranks(pool):
    """`ranks(n, function, *args, **kwargs)` runs a module-level function on n ranks and gives the list of results."""
    return pool.run


@pytest.fixture(scope="module")
def reference(pool):
    """`reference(recipe)` gives the numbers of two of its steps on one process; kept, as many layouts have the same."""

    @functools.lru_cache
    def run(recipe: Recipe) -> Numbers:
        return pool.run(1, record, recipe, 2, 3)[0]

    return lambda recipe: run(reference_of(recipe))


def passed_before() -> Path:
    """Where a long run keeps what has passed: a file for each state of the tree, so that a change starts anew."""
    state = b""
    for command in (
        ["git", "rev-parse", "HEAD"],
        ["git", "diff", "HEAD"],
        ["git", "ls-files", "-o", "--exclude-standard"],
    ):
        state += subprocess.run(command, cwd=ROOT, capture_output=True).stdout
    return ROOT / ".pytest_cache" / f"passed-{hashlib.sha256(state).hexdigest()[:16]}"


def pytest_addoption(parser) -> None:
    parser.addoption("--resume", action="store_true", help="leave out what passed before on the same state of the tree")


def pytest_collection_modifyitems(config, items) -> None:
    """SHARD=i/n keeps the i-th of n parts (1/n to n/n); --resume leaves out what has passed."""
    if shard := os.environ.get("SHARD"):
        index, parts = map(int, shard.split("/"))
        if not 1 <= index <= parts:
            raise pytest.UsageError(f"SHARD={shard}: write i/n with 1 <= i <= n")
        items[:] = items[index - 1 :: parts]
    if config.getoption("--resume"):
        config.passed = passed_before()
        done = set(config.passed.read_text().splitlines()) if config.passed.exists() else set()
        items[:] = [item for item in items if item.nodeid not in done]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if hasattr(item.config, "passed") and (report.failed or (call.when == "call" and report.passed)):
        # A long run may be stopped before pytest tells of its failures: they are written down as they come.
        path = item.config.passed if report.passed else item.config.passed.with_suffix(".failures")
        path.parent.mkdir(exist_ok=True)
        with path.open("a") as file:
            file.write(item.nodeid + "\n" + (f"{report.longrepr}\n\n" if report.failed else ""))
    return report
