"""Everything that waits for other ranks says, when that fails, for whom it waited.

A wait costs nothing but its entry in a list. Only of a wait that lasts does a thread tell the other ranks, and
only when one fails are theirs read. One thread makes all calls of the store, since these can block for good (a
TCPStore whose host is stopped): whoever waits for an answer does so with a limit.
"""

from __future__ import annotations

import atexit
import concurrent.futures
import contextlib
import queue
import re
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any

import torch.distributed as dist

from fxpasses.distributed.group import Group, second_connection
from fxpasses.distributed.roll_call import GRACE_S, Roll, Sign, Signs, account

_TICK_S = 1.0
_LONG_S = 1.0  # from here on the other ranks are told of a wait
_STORE_S = 5.0  # for the store to answer
_LEAVE_S = (
    15.0  # for a call of the store to end as the interpreter goes; names are looked up for 10 s
)
_ABOUT_RANKS = re.compile(r"gloo|nccl|timed? ?out|connection|peer|socket|store", re.IGNORECASE)


class RankLost(RuntimeError):
    """A wait for other ranks failed; says which of them gave no sign of life, and where the others are."""


class waiting:
    """Around work that blocks in collectives or in the store: when it fails, the rank waited for is named.

    A body that fails because of other ranks raises `RankLost`, after some seconds in which the others are asked
    where they are. Any other error, and a `RankLost` from further inside, passes unchanged.

    Args:
        group: the ranks that the work is done with.
        what: a noun phrase for messages, such as "the agreement at backward 17 of forward (train.py:12)".
    """

    __slots__ = ("group", "heard", "since", "what")

    def __init__(self, group: Group, what: str) -> None:
        self.group = group
        self.what = what
        self.heard: Roll | None = None

    def __enter__(self) -> None:
        self.since = time.monotonic()
        if self.group.size > 1:
            _active.append(self)
            if _thread is None or not _thread.is_alive():
                _start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self.group.size == 1:
            return
        _active.remove(self)
        if error is not None and _about_ranks(error):
            cause, *_ = str(error).split("\n")
            raise RankLost(f"{self._account()}; {cause}") from error
        if self.group in _given:
            _ask(_settle, self.group, error is None)

    def sign(self, failed: bool = False, roll: int = 0) -> Sign:
        """This wait as the other ranks are told of it."""
        return Sign(self.what, time.monotonic() - self.since, failed=failed, roll=roll)

    def _account(self) -> str:
        sign = self.sign(failed=True)
        try:
            roll = _ask(_call_roll, self.group, sign).result(GRACE_S + _STORE_S)
        except (RuntimeError, TimeoutError):  # the store is lost, or does not answer
            roll = self.heard
        return account(self.group, self.what, sign.waited_s, roll)


_active: list[waiting] = []  # of all threads, the newest last
_given: dict[Group, Sign] = {}  # this rank's signs that are in a store; the thread's own
_tasks: queue.SimpleQueue[tuple[concurrent.futures.Future[Any], Callable[..., Any], Any] | None]
_tasks = queue.SimpleQueue()
_thread: threading.Thread | None = None
_starting = threading.Lock()


def _about_ranks(error: BaseException) -> bool:
    """Whether other ranks may have caused it: NCCL and stores raise DistErrors, gloo plain RuntimeErrors, as
    failing kernels do.
    """
    return isinstance(error, dist.DistError) or (
        type(error) is RuntimeError and _ABOUT_RANKS.search(str(error)) is not None
    )


def _ask(function: Callable[..., Any], *args: Any) -> concurrent.futures.Future[Any]:
    future: concurrent.futures.Future[Any] = concurrent.futures.Future()
    _tasks.put((future, function, args))
    return future


def _start() -> None:
    global _thread
    with _starting:
        if _thread is None or not _thread.is_alive():  # it is not, after a fork
            _thread = threading.Thread(target=_watch, name="fxpasses-waiting", daemon=True)
            _thread.start()
            atexit.register(_stop, _thread)


def _stop(thread: threading.Thread) -> None:
    """Before the interpreter goes: a thread that returns from the store meanwhile would abort the process."""
    _tasks.put(None)
    thread.join(timeout=_LEAVE_S)


def _watch() -> None:
    while True:
        try:
            task = _tasks.get(timeout=_TICK_S)
        except queue.Empty:
            for group in {*_given, *(wait.group for wait in tuple(_active))}:
                # A store or a group that is gone: the wait itself will fail, and tell.
                with contextlib.suppress(RuntimeError, ValueError):
                    _settle(group)
            continue
        if task is None:
            return
        future, function, args = task
        try:
            future.set_result(function(*args))
        except Exception as error:
            future.set_exception(error)


def _settle(group: Group, went_on: bool = False) -> None:
    """Make the store say of this rank what is so: where it waits for long, that it failed, or nothing."""
    now = time.monotonic()
    long = [w for w in tuple(_active) if w.group == group and now - w.since > _LONG_S]
    given = _given.get(group)
    if long:
        signs = Signs(group, second_connection(_name(group)))
        wait, roll = long[-1], signs.rolls()
        if given is None or (given.what, given.failed, given.roll) != (wait.what, False, roll):
            _given[group] = wait.sign(roll=roll)
            signs.give(_given[group])
        if roll:
            wait.heard = signs.heard()
    elif given is not None and (went_on or not given.failed):
        Signs(group, second_connection(_name(group))).give(None)
        del _given[group]


def _call_roll(group: Group, sign: Sign) -> Roll:
    _given[group] = sign
    return Signs(group, second_connection(_name(group), make=False)).call(sign)


def _name(group: Group) -> str:
    assert group.name is not None
    return group.name
