import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: ranks share the machine's cores

import pytest
import torch

from tests.pool import Pool

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def pool():
    pool = Pool()
    yield pool
    pool.close()


@pytest.fixture
def ranks(pool):
    """`ranks(n, function, *args, **kwargs)` runs a module-level function on n ranks and gives the list of results."""
    return pool.run
