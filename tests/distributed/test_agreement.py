"""Ranks agree on what they are about to send, and what that costs."""

from __future__ import annotations

import gc
import hashlib
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from fxpasses.distributed import agreement
from fxpasses.distributed.agreement import LABEL, agree, halves
from fxpasses.distributed.group import resolve
from fxpasses.distributed.plans import Form, Plan, PlanMismatch, Union
from tests.multirank import run_ranks

AGREED = {"gloo:all_reduce": 1, LABEL: 1}


def plan(names: str, code: str = "Net.forward (net.py:12)") -> Plan:
    """A gradient for each letter; all of `abc` can be reached."""
    forms = {name: Form(name, (index + 1,), "float32") for index, name in enumerate("abc")}
    reachable = tuple(forms.values())
    return Plan(code, (0,), "", (), tuple(forms[n] for n in names), reachable=reachable)


def union(names: str) -> Union:
    return Union(plan(names).parameters, ())


def agreed(mine: Plan, asked: list[Plan] | None = None, group: object = None) -> Union | None:
    """Agree with the other ranks; `asked` notes each time that the plan was asked for."""

    def whole() -> Plan:
        if asked is not None:
            asked.append(mine)
        return mine

    return agree(resolve(group), halves(mine.digest()), whole)


def counted(work: Callable[[], object]) -> tuple[object, dict[str, int]]:
    """What the work returns, and the collectives that gloo carried out meanwhile."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        result = work()
    keys = {event.key: event.count for event in profile.key_averages()}
    return result, {k: n for k, n in keys.items() if k.startswith("gloo:") or k == LABEL}


# Digests


@given(st.binary(min_size=16, max_size=32))
def test_a_digest_becomes_two_integers_that_fit_with_their_sign(digest):
    first, second = halves(digest)
    assert 0 <= first < 2**62 and 0 <= second < 2**62
    assert torch.tensor([first, -second]).tolist() == [first, -second]


def test_the_largest_digest_fits():
    assert halves(b"\xff" * 32) == (2**62 - 1, 2**62 - 1)
    assert halves(b"\x00" * 32) == (0, 0)


def test_the_two_integers_are_the_head_of_the_digest():
    assert halves(bytes(range(16))) == (0x0001020304050607 >> 2, 0x08090A0B0C0D0E0F >> 2)


def test_digests_of_different_plans_have_different_halves():
    digests = [hashlib.sha256(bytes([i])).digest() for i in range(100)]
    pairs = [halves(digest) for digest in digests]
    for part in zip(*pairs, strict=True):
        assert len(set(part)) == 100


# Ranks


def alike(rank: int) -> list:
    asked: list[Plan] = []
    return [counted(lambda: agreed(plan("ab"), asked)), agreed(plan("a"), asked), asked]


@pytest.mark.parametrize("world", [2, 3])
def test_ranks_that_send_the_same_agree_with_one_all_reduce(world):
    assert run_ranks(alike, world) == [[(None, AGREED), None, []]] * world


def payload_of_the_agreement(rank: int) -> list[tuple[list[int], torch.dtype]]:
    sizes = []
    original = dist.all_reduce

    def noted(tensor, *args, **kwargs):
        sizes.append((list(tensor.shape), tensor.dtype))
        return original(tensor, *args, **kwargs)

    dist.all_reduce = noted
    for names in ("a", "abc"[: 2 + rank]):
        agreed(plan(names))
    return sizes


def test_the_agreement_is_four_integers_whatever_the_plan():
    assert run_ranks(payload_of_the_agreement, 2) == [[([4], torch.int64)] * 2] * 2


def disagree(rank: int, cases: list[tuple[str, ...]]) -> list[tuple[Union | None, int]]:
    found = []
    for names in cases:
        asked: list[Plan] = []
        found.append((agreed(plan(names[rank]), asked), len(asked)))
    return found


TOGETHER = {
    2: {("ab", "a"): "ab", ("a", "ab"): "ab", ("ba", "ab"): "ba", ("c", "a"): "ca", ("", "b"): "b"},
    3: {("a", "cb", "b"): "acb", ("a", "a", "ab"): "ab", ("c", "b", "a"): "cba"},
}


@pytest.mark.parametrize("world", TOGETHER)
def test_ranks_that_differ_all_have_the_same_union(world):
    expected = [(union(together), 1) for together in TOGETHER[world].values()]
    assert run_ranks(disagree, world, list(TOGETHER[world])) == [expected] * world


def differ_in_one_half(rank: int) -> list[Union | None]:
    digests = ((5 + rank, 7), (5, 7 + rank))
    return [agree(resolve(None), digest, lambda: plan("ab"[: rank + 1])) for digest in digests]


def test_either_half_of_a_digest_tells():
    assert run_ranks(differ_in_one_half, 2) == [[union("ab")] * 2] * 2


def opposite_halves(rank: int) -> Union | None:
    """The largest of each half is the same as the largest of the other rank's."""
    return agree(resolve(None), ((1, 2), (2, 1))[rank], lambda: plan("ab"[: rank + 1]))


def test_digests_with_their_halves_exchanged_differ():
    assert run_ranks(opposite_halves, 2) == [union("ab")] * 2


def mismatches(rank: int) -> tuple[list[str], Union | None, int]:
    messages, asked = [], []
    for _ in range(2):
        with pytest.raises(PlanMismatch) as caught:
            agreed(plan("a", code=f"code of rank {min(rank, 1)}"), asked)
        messages.append(str(caught.value))
    return messages, agreed(plan("a")), len(asked)


def test_a_mismatch_is_raised_on_all_ranks_with_one_message_and_they_go_on():
    found = run_ranks(mismatches, 3)
    assert found == [found[0]] * 3
    (first, second), afterwards, asked = found[0]
    assert "the code is code of rank 0 on rank 0 and code of rank 1 on rank 1" in first
    assert first == second and afterwards is None and asked == 2


def again(rank: int) -> list:
    asked: list[Plan] = []

    def both(names: tuple[str, str]) -> tuple[object, dict[str, int]]:
        return counted(lambda: agreed(plan(names[rank]), asked))

    turns = [("ab", "a"), ("ab", "a"), ("a", "a"), ("a", "ab"), ("ab", "a")]
    return [*map(both, turns), len(asked)]


def test_plans_are_exchanged_once_for_each_way_to_differ():
    for first, second, alike, other, third, asked in run_ranks(again, 2):
        known = {**AGREED, "gloo:all_gather": 1}
        exchanged = {**AGREED, "gloo:all_gather": 3}  # the digests, then sizes and texts
        assert first == (union("ab"), exchanged)
        assert second == third == (union("ab"), known)
        assert alike == (None, AGREED)
        assert other == (union("ab"), exchanged)
        assert asked == 4  # whatever could take part may have changed


def known_plans(rank: int) -> list:
    turns = [("ab", "a"), ("b", "ab"), ("b", "a"), ("ab", "a")]
    return [counted(lambda names=names: agreed(plan(names[rank]))) for names in turns]


def test_other_ways_to_differ_need_no_exchange_of_plans_that_are_known():
    for found in run_ranks(known_plans, 2):
        unions, counts = zip(*found, strict=True)
        assert unions == (union("ab"), union("ba"), union("ba"), union("ab"))
        assert [count["gloo:all_gather"] for count in counts] == [3, 3, 1, 1]


def after_its_end(rank: int) -> list[int]:
    agreed(plan("ab"[: rank + 1]))
    groups = [len(agreement._plans)]
    dist.barrier()
    dist.destroy_process_group()
    gc.collect()
    return [*groups, len(agreement._plans)]


def test_what_a_group_knows_goes_with_it():
    """A group that is made anew may have its address, on some ranks."""
    assert run_ranks(after_its_end, 2) == [[1, 0]] * 2


def in_part_of_the_world(rank: int) -> Union | str | None:
    part = dist.new_group([0, 2])
    if rank == 1:
        return "not asked"
    return agreed(plan("ab" if rank else "b"), group=part)


def test_only_the_ranks_of_the_group_agree():
    found = run_ranks(in_part_of_the_world, 3)
    assert found == [union("ba"), "not asked", union("ba")]


def without_the_store(rank: int) -> list[Union | None]:
    group = dist.group.WORLD
    known = dist.distributed_c10d._world.pg_map
    backend, store = known[group]
    known[group] = (backend, object())
    found = [agreed(plan(names[rank])) for names in (("ab", "ab"), ("b", "a"))]
    known[group] = (backend, store)
    return found


def test_nothing_goes_through_the_store():
    assert run_ranks(without_the_store, 2) == [[None, union("ba")]] * 2
