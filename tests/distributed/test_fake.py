"""A world that is only pretended."""

import pytest
import torch.distributed as dist

from fxpasses.distributed.fake import fake_world
from fxpasses.distributed.group import is_initialized, resolve


def test_one_of_many():
    for rank in range(3):
        with fake_world(3, rank):
            assert (dist.get_rank(), dist.get_world_size()) == (rank, 3)
            assert resolve(None).name == "0"  # the same each time: it stands in graphs
        assert not is_initialized()


def test_one_rank_needs_no_group():
    with fake_world(1):
        assert not is_initialized()


def test_it_ends_with_an_error_too():
    with pytest.raises(KeyError), fake_world(2):
        raise KeyError
    assert not is_initialized()


@pytest.mark.parametrize(("world", "rank"), [(2, 2), (2, -1), (0, 0)])
def test_a_rank_outside_of_the_world(world, rank):
    with pytest.raises(ValueError, match=f"no rank {rank}"), fake_world(world, rank):
        pass


def test_a_real_group_is_left_alone(fake_world: str):
    from fxpasses.distributed import fake

    with pytest.raises(RuntimeError, match="initialised"), fake.fake_world(2):
        pass
    assert is_initialized()
