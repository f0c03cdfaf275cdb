"""Whether tensors are the same on all ranks."""

from __future__ import annotations

import math
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from fxpasses.distributed.alike import TOLERANCE, differing
from fxpasses.distributed.group import resolve
from fxpasses.distributed.waiting import RankLost
from tests.multirank import run_ranks

Made = Callable[[int], torch.Tensor | None]  # of a rank
BF16, WHAT = torch.bfloat16, "the comparison"


def vector(*values: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype)


def random_numbers(seed: int = 0, numel: int = 1000) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed))


SAME: dict[str, Made] = {
    "equal": lambda rank: vector(1.0, -2.0),
    "equal in half precision": lambda rank: random_numbers().to(BF16),
    "rounded otherwise": lambda rank: random_numbers() * (1 + 1e-6 * rank),
    "summed in another order": lambda rank: random_numbers().sort(descending=bool(rank)).values,
    "in another layout": lambda rank: (
        random_numbers().view(10, 100).t() if rank else (random_numbers())
    ),
    "a sum near zero of large numbers": lambda rank: vector(1e6, -1e6 + 1e-2 * rank),
    "complex": lambda rank: vector(1 + 2j, -3j, dtype=torch.complex64),
    "zero": lambda rank: torch.zeros(3),
    "zero and none": lambda rank: None if rank else torch.zeros(3),
    "none": lambda rank: None,
    "empty": lambda rank: torch.empty(0, 3),
    "empty and none": lambda rank: None if rank else torch.empty(0),
    "a number": lambda rank: torch.tensor(1.5),
    "integers": lambda rank: torch.tensor([2**40, 1]),
    "not a number": lambda rank: vector(math.nan, 1.0 + rank),
    "infinite": lambda rank: vector(math.inf, 1.0 + rank),
    "infinite and not a number": lambda rank: vector((math.inf, math.nan)[rank], 1.0),
}
OTHER: dict[str, Made] = {
    "a value": lambda rank: vector(1.0, 2.0 + rank),
    "one of many": lambda rank: torch.ones(100).index_fill(0, torch.tensor(0), 1.0 + rank),
    "a percent": lambda rank: random_numbers() * (1 + 0.01 * rank),
    "a percent in half precision": lambda rank: torch.full((64,), 100.0 + rank, dtype=BF16),
    "numbers too large to add up in their dtype": lambda rank: torch.full(
        (4,), 6e4 / (1 + rank), dtype=torch.float16
    ),
    "the sign": lambda rank: vector(1.0, 2.0) * (-1) ** rank,
    "magnitudes whose sum is the same": lambda rank: vector(1.0 + rank, -1.0 - rank),
    "small numbers": lambda rank: vector(1e-20, 1e-20) * (1 + rank),
    "zero on one rank": lambda rank: vector(0.0, 1.0 * rank),
    "none on one rank": lambda rank: None if rank else vector(1.0),
    "the imaginary part": lambda rank: torch.tensor([1 + 1j * rank]),
    "real and imaginary part exchanged": lambda rank: torch.tensor([(1 + 3j, 3 + 2j)[rank]]),
    "infinite on one rank": lambda rank: vector(math.inf if rank else 1.0, 1.0),
    "empty on one rank": lambda rank: torch.ones(0 if rank else 2),
}


def each(rank: int, kinds: str) -> dict[str, int | None]:
    """What `differing` finds of each kind, between two tensors that are alike."""
    group, found = resolve(None), {}
    for name, made in globals()[kinds].items():
        found[name] = differing(group, [torch.ones(1), made(rank), torch.ones(2)], WHAT)
    return found


def test_what_counts_as_the_same():
    assert run_ranks(each, 2, "SAME") == [dict.fromkeys(SAME)] * 2


def test_what_counts_as_different_has_its_position():
    assert run_ranks(each, 2, "OTHER") == [dict.fromkeys(OTHER, 1)] * 2


def several(rank: int) -> list[int | None]:
    same, other = torch.ones(2), torch.full((2,), 1.0 + (rank == 1))
    lists = ([other], [same, other, None, other], [None, same], [same, same, other])
    return [differing(resolve(None), tensors, WHAT) for tensors in lists]


def test_of_several_that_differ_the_first_is_named_on_every_rank():
    assert run_ranks(several, 3) == [[0, 1, None, 2]] * 3


def at_the_tolerance(rank: int) -> list[int | None]:
    """A spread a little below and above, of a sum of magnitudes of about one."""
    spreads = (TOLERANCE * 0.99, TOLERANCE * 1.02)
    tensors = [vector(1.0 + rank * spread, dtype=torch.float64) for spread in spreads]
    return [differing(resolve(None), [tensor], WHAT) for tensor in tensors]


def test_the_tolerance_is_relative_to_the_sum_of_magnitudes():
    assert run_ranks(at_the_tolerance, 2) == [[None, 0]] * 2


def cost(rank: int, count: int) -> tuple[int, list]:
    sent = []
    original = dist.all_reduce

    def noted(tensor, *args, **kwargs):
        sent.append((tuple(tensor.shape), tensor.dtype))
        return original(tensor, *args, **kwargs)

    dist.all_reduce = noted
    tensors = [torch.ones(1000)] * count
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        differing(resolve(None), tensors, WHAT)
    carried = sum(e.count for e in profile.key_averages() if e.key.startswith("gloo:"))
    return carried, sent


@pytest.mark.parametrize("count", [1, 50])
def test_it_costs_one_all_reduce_of_four_numbers_a_tensor(count):
    expected = (1, [((count, 4), torch.float64)])
    assert run_ranks(cost, 2, count) == [expected] * 2


def unchanged(rank: int) -> list[float]:
    tensor = vector(1.0, 2.0 + rank)
    differing(resolve(None), [tensor], WHAT)
    return tensor.tolist()


def test_the_tensors_stay_as_they_are():
    assert run_ranks(unchanged, 2) == [[1.0, 2.0], [1.0, 3.0]]


def in_part_of_the_world(rank: int) -> int | str | None:
    part = dist.new_group([0, 2])
    if rank == 1:
        return "not asked"
    return differing(resolve(part), [torch.ones(1), vector(1.0 + rank)], WHAT)


def test_only_the_ranks_of_the_group_are_compared():
    assert run_ranks(in_part_of_the_world, 3) == [1, "not asked", 1]


def does_not_come(rank: int) -> str:
    store = dist.distributed_c10d._get_default_store()
    if rank == 1:
        store.wait(["gave up"], timedelta(seconds=60))
        return ""
    with pytest.raises(RankLost) as caught:
        differing(resolve(None), [torch.ones(1)], "the comparison of gradients")
    store.set("gave up", "")
    return str(caught.value)


def test_a_rank_that_does_not_come_is_named():
    message, _ = run_ranks(does_not_come, 2, gloo_timeout_s=3)
    assert message.startswith("rank 0 waited 3 s in the comparison of gradients for rank 1")
