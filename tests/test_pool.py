import pytest
import torch
import torch.distributed as dist

from tests.pool import RankError


def total(value):
    tensor = torch.tensor([value * (dist.get_rank() + 1)], dtype=torch.float64)
    dist.all_reduce(tensor)
    return dist.get_world_size(), tensor.item()


def fail_on(rank):
    if dist.get_rank() == rank:
        raise ValueError("broken on purpose")
    dist.barrier()


def test_every_call_has_a_process_group_of_its_own_size(ranks):
    assert ranks(2, total, 1.0) == [(2, 3.0)] * 2
    assert ranks(4, total, 2.0) == [(4, 20.0)] * 4
    assert ranks(1, total, 5.0) == [(1, 5.0)]


def test_an_exception_of_one_rank_is_raised_with_its_message_and_the_pool_goes_on(ranks):
    with pytest.raises(RankError, match="rank 1: ValueError: broken on purpose"):
        ranks(2, fail_on, 1)
    assert ranks(2, total, 1.0) == [(2, 3.0)] * 2
