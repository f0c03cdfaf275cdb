"""A wait that fails names the ranks that were lost, on every rank that is left."""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fxpasses.distributed import waiting as waits
from fxpasses.distributed.group import Group, resolve, store_of
from fxpasses.distributed.waiting import RankLost, waiting

PLACE = "the sum of losses"
ranks = pytest.mark.ranks


def summed(group: Group, what: str = PLACE) -> None:
    with waiting(group, what):
        dist.all_reduce(torch.ones(1))


def received(group: Group, source: int) -> None:
    with waiting(group, f"the message from {source}"):
        dist.recv(torch.ones(1), src=source)


def message_of(work: Callable[..., Any], *args: Any) -> str:
    """Of the `RankLost` that the work raises."""
    try:
        work(*args)
    except RankLost as error:
        assert isinstance(error.__cause__, RuntimeError)
        return str(error)
    return "nothing was raised"


def meeting() -> dist.Store:
    """Where ranks of the world tell each other how far they are."""
    return dist.PrefixStore("test", store_of(str(resolve(None).name)))


def wait_for(*keys: str) -> None:
    meeting().wait(list(keys), timedelta(seconds=60))


def signs(group: Group) -> list[bytes]:
    """What is in the store of each rank, of those that ever gave a sign."""
    assert group.name is not None
    store = dist.PrefixStore("fxpasses/waiting", store_of(group.name))
    ranks = [str(rank) for rank in range(group.size)]
    return [store.get(rank) for rank in ranks if store.check([rank])]


def move_to_tcp_store(rank: int, world: int) -> None:
    """The default group anew, with a store that lives in rank 0."""
    store: dist.TCPStore
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, world, is_master=True, wait_for_workers=False)
        meeting().set("port", str(store.port))
    else:
        port = int(meeting().get("port"))
        store = dist.TCPStore("127.0.0.1", port, world, is_master=False)
    timeout = timedelta(seconds=30)
    dist.barrier()  # the group must not go while another rank still connects to it
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timeout)


def loses_one(rank: int, lost: int, how: str, tcp: bool = False) -> str:
    world = dist.get_world_size()
    if tcp:
        move_to_tcp_store(rank, world)
    group = resolve(None)
    summed(group)
    if rank != lost:
        message = message_of(summed, group)
        if how != "dies":
            meeting().set(f"gave up/{rank}", "")
        return message
    if how == "dies":
        os._exit(3)
    if how == "raises":
        with contextlib.suppress(ZeroDivisionError), waiting(group, PLACE):
            _ = 1 / 0
    wait_for(*(f"gave up/{rank}" for rank in range(world) if rank != lost))
    return message_of(summed, group)


def losing(how: str, world: int) -> pytest.MarkDecorator:
    lost = world - 1
    timeout_s = 30 if how == "dies" else 4
    return ranks(loses_one, world, lost, how, gloo_timeout_s=timeout_s, lost=[lost])


@pytest.mark.parametrize(
    ("how", "world"),
    [
        pytest.param(how, world, marks=losing(how, world))
        for how in ("sleeps", "dies", "raises")
        for world in (2, 3)
    ],
)
def test_each_rank_that_is_left_names_the_lost_one(how, world, found):
    lost = world - 1
    for rank in range(lost):
        assert f"rank {rank} waited " in found[rank]
        assert f" s in {PLACE} for rank {lost}, which gave no sign of life" in found[rank]
        other = rf"rank {1 - rank} (failed there too after \d s|waits there too)"
        assert (re.search(other, found[rank]) is not None) == (world == 3)
    if how != "dies":  # it learns, when it comes, that it was given up
        assert f"after 4 s, for want of rank {lost}" in found[lost]
        assert "no rank is silent" in found[lost]


@ranks(loses_one, 3, 0, "dies", True, lost=[0])
def test_the_end_of_the_store_is_said(found):
    for message in found[1:]:
        assert "the store that the ranks met in does not answer" in message
        assert "the process that hosts it (rank 0 of the world" in message


@ranks(loses_one, 3, 2, "dies", True, lost=[2])
def test_a_lost_rank_is_named_over_a_store_that_another_rank_hosts(found):
    assert all("for rank 2, which gave no sign of life" in message for message in found[:2])


def cascade(rank: int, tcp: bool) -> str:
    if tcp:
        move_to_tcp_store(rank, 3)
    group = resolve(None)
    summed(group)
    if rank == 1:
        time.sleep(2)
        os._exit(3)
    message = message_of(received, group, (rank + 1) % 3)
    if rank == 0 and tcp:
        os._exit(3)
    return message


@ranks(cascade, 3, False, gloo_timeout_s=30, lost=[1])
def test_a_rank_that_loses_a_survivor_names_the_one_lost_first(found):
    assert "in the message from 1 for rank 1, which gave no sign of life" in found[0]
    assert "rank 2 waits in the message from 0" in found[0]
    assert "in the message from 0 for rank 1, which gave no sign of life" in found[2]
    assert "rank 0 failed in the message from 1 after 2 s, for want of rank 1" in found[2]


@ranks(cascade, 3, True, lost=[0, 1])
def test_it_does_even_if_the_store_went_with_that_survivor(found):
    message = found[2]
    assert "in the message from 0 for rank 1, which gave no sign of life" in message
    assert "rank 0 failed in the message from 1 after 2 s" in message
    assert "the store is lost since" in message


def different_places(rank: int) -> str:
    group = resolve(None)
    return message_of(received, group, 1 - rank)


@ranks(different_places, 2, gloo_timeout_s=4)
def test_ranks_that_wait_at_different_places_say_where(found):
    for rank, message in enumerate(found):
        assert f"rank {rank} waited 4 s in the message from {1 - rank}, and no rank is silent" in (
            message
        )
        assert f"rank {1 - rank} failed in the message from {rank} after 4 s" in message


def dies_while_waiting(rank: int) -> str:
    group = resolve(None)
    if rank == 1:
        with waiting(group, "a long wait"):
            time.sleep(2.5)
            os._exit(3)
    return message_of(received, group, 1)


@ranks(dies_while_waiting, 2, gloo_timeout_s=20, lost=[1])
def test_a_sign_of_a_rank_that_died_since_does_not_count(found):
    assert "for rank 1, which gave no sign of life (rank 1 last waited in a long wait)" in found[0]


def comes_late(rank: int) -> str:
    group = resolve(None)
    summed(group)
    if rank == 1:
        time.sleep(5)
    return message_of(summed, group)


@ranks(comes_late, 2, gloo_timeout_s=4)
def test_a_rank_that_comes_just_after_the_others_gave_up_is_named(found):
    assert f"rank 0 waited 4 s in {PLACE} for rank 1, which came too late" in found[0]


def goes_on(rank: int) -> list[list[bytes]]:
    group = resolve(None)
    seen = []
    for pause_s in (0.3, 2.5):
        if rank == 1:
            time.sleep(pause_s)
            seen.append(signs(group))
        summed(group)
        time.sleep(0.5)
        seen.append(signs(group))
        dist.barrier()
    return seen


@ranks(goes_on, 2)
def test_a_wait_is_told_only_while_it_lasts_and_only_if_it_is_long(found):
    in_short, after_short, in_long, after_long = found[1]
    assert in_short == after_short == []
    assert len(in_long) == 1 and PLACE.encode() in in_long[0]
    assert after_long == [b"null"]


def recovers(rank: int) -> tuple[str, list[bytes], list[bytes]]:
    group = resolve(None)

    def fails() -> None:
        with waiting(group, PLACE):
            raise RuntimeError("a connection of this rank alone")

    message = message_of(fails) if rank == 0 else ""
    failed = signs(group)
    summed(group)
    time.sleep(0.5)
    return message, failed, signs(group)


@ranks(recovers, 2)
def test_a_failure_is_taken_back_by_the_next_wait_that_succeeds(found):
    message, failed, after = found[0]
    assert message.endswith("; a connection of this rank alone")
    assert b'"failed": true' in failed[0]
    assert after == [b"null"] * len(after)


def nested(rank: int) -> tuple[str, list[bytes]]:
    group = resolve(None)
    if rank == 1:
        time.sleep(3)
        seen = signs(group)
        wait_for("gave up")
        return "", seen

    def work() -> None:
        with waiting(group, "the outer wait"):
            summed(group)

    message = message_of(work)
    meeting().set("gave up", "")
    return message, []


@ranks(nested, 2, gloo_timeout_s=4)
def test_of_nested_waits_the_inner_one_counts(found):
    (message, _), (_, seen) = found
    assert f"rank 0 waited 4 s in {PLACE} for rank 1" in message and "outer" not in message
    assert len(seen) == 1 and PLACE.encode() in seen[0]


def in_part_of_the_world(rank: int) -> str:
    part = dist.new_group([1, 2], timeout=timedelta(seconds=4))
    if rank != 1:
        wait_for("gave up")
        return ""
    group = resolve(part)

    def work() -> None:
        with waiting(group, PLACE):
            dist.all_reduce(torch.ones(1), group=part)

    message = message_of(work)
    meeting().set("gave up", "")
    return message


@ranks(in_part_of_the_world, 3)
def test_in_a_part_of_the_world_ranks_have_both_their_numbers(found):
    message = found[1]
    assert message.startswith("rank 0 (global rank 1) waited 4 s in the sum of losses for ")
    assert "for rank 1 (global rank 2), which gave no sign of life" in message


def test_errors_that_other_ranks_do_not_cause_pass_unchanged():
    alone, several = Group(None, 1, 0), Group("unused", 2, 0)
    with pytest.raises(RuntimeError, match="^as it is$"), waiting(alone, PLACE):
        raise RuntimeError("as it is")
    kernel = RuntimeError("mat1 and mat2 shapes cannot be multiplied")
    for error in (kernel, ValueError(), NotImplementedError(), RankLost("x"), KeyboardInterrupt()):
        with pytest.raises(type(error)) as caught, waiting(several, PLACE):
            raise error
        assert caught.value is error


def test_a_wait_costs_little():
    group = Group("unused", 2, 0)

    def microseconds() -> float:
        started = time.perf_counter()
        for _ in range(1000):
            with waiting(group, PLACE):
                pass
        return (time.perf_counter() - started) * 1000

    assert min(microseconds() for _ in range(10)) < 5


def test_the_interpreter_goes_after_the_call_of_a_store_that_takes_long():
    """A connection through slow look-ups of names, say. The thread would abort the process that went first."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    waits._start()
    thread = waits._thread
    assert thread is not None
    asked = waits._ask(store.wait, ["a key that nobody sets"], timedelta(seconds=2))
    waits._stop(thread)
    assert isinstance(asked.exception(timeout=0), dist.DistStoreError)
    assert not thread.is_alive()
