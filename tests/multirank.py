"""Run a function on several gloo ranks, each a process of its own, within a time limit."""

from __future__ import annotations

import contextlib
import io
import multiprocessing
import os
import tempfile
import time
import traceback
from collections.abc import Callable, Collection, Iterator
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from fxpasses.distributed.agreement import LABEL

_context = multiprocessing.get_context("forkserver")
# Forked from a server that has compiled already: a rank starts, and compiles, in a fraction of a second.
_context.set_forkserver_preload(["tests.warm"])


def run_ranks(
    program: Callable[..., Any],
    world: int,
    *args: Any,
    timeout_s: float = 120,
    gloo_timeout_s: float = 60,
    lost: Collection[int] = (),
) -> list[Any]:
    """`program(rank, *args)` on each of `world` ranks; returns what each returned, by rank.

    Ranks in `lost` may die; what they return is None then.

    Raises:
        RuntimeError: when a rank raises (with its traceback) or the time is over (naming the ranks).
    """
    with tempfile.TemporaryDirectory() as folder:
        settings = (folder, gloo_timeout_s)
        ranks = [_start(_rank_main, program, rank, world, args, *settings) for rank in range(world)]
        return _finish(ranks, timeout_s, lost)


def run_alone(program: Callable[..., Any], *args: Any, timeout_s: float = 120) -> Any:
    """`program(*args)` in a process of its own, which is no rank of anything; returns what it returned.

    Raises:
        RuntimeError: as `run_ranks` does.
    """
    return _finish([_start(_report, program, args)], timeout_s)[0]


@contextlib.contextmanager
def counted_all_reduces() -> Iterator[list[int]]:
    """A list that holds, afterwards, how many all-reduces gloo carried out in between, apart from the one in
    front of each backward by which the ranks agree.
    """
    found: list[int] = []
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        yield found
    counts = {event.key: event.count for event in profile.key_averages()}
    found.append(counts.get("gloo:all_reduce", 0) - counts.get(LABEL, 0))


def _start(main: Callable[..., None], *args: Any) -> tuple[Any, Connection]:
    receiver, sender = _context.Pipe(duplex=False)
    process = _context.Process(target=main, args=(sender, *args), daemon=True)
    process.start()
    sender.close()
    return process, receiver


def _finish(
    ranks: list[tuple[Any, Connection]], timeout_s: float, lost: Collection[int] = ()
) -> list[Any]:
    try:
        return _collect(ranks, time.monotonic() + timeout_s, lost)
    finally:
        for process, _ in ranks:
            process.kill()
            process.join()


def _collect(
    ranks: list[tuple[Any, Connection]], deadline: float, lost: Collection[int]
) -> list[Any]:
    results: list[Any] = []
    for rank, (process, receiver) in enumerate(ranks):
        if not receiver.poll(max(0.0, deadline - time.monotonic())):
            waiting = [r for r, (_, c) in enumerate(ranks) if r >= rank and not c.poll()]
            raise RuntimeError(f"timed out waiting for rank(s) {waiting}")
        try:
            error, result = torch.load(io.BytesIO(receiver.recv_bytes()), weights_only=False)
        except EOFError:
            process.join(5)
            if rank not in lost:
                code = process.exitcode
                raise RuntimeError(f"rank {rank} died with exit code {code}") from None
            error, result = None, None
        if error:
            raise RuntimeError(f"rank {rank} raised:\n{error}")
        results.append(result)
    return results


def _packed(error: str | None, result: Any) -> bytes:
    """By value: a pipe would send tensors as shared memory that is gone with the rank."""
    buffer = io.BytesIO()
    torch.save((error, result), buffer)
    return buffer.getvalue()


def _rank_main(
    sender: Connection,
    program: Callable[..., Any],
    rank: int,
    world: int,
    args: tuple[Any, ...],
    folder: str,
    gloo_timeout_s: float,
) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), GLOO_SOCKET_IFNAME="lo")
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=Path(folder, "store").as_uri(),
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=gloo_timeout_s),
    )
    # One that is done at once would close its connections while others still make theirs.
    dist.barrier()
    try:
        _report(sender, program, (rank, *args))
    finally:
        dist.destroy_process_group()


def _report(sender: Connection, program: Callable[..., Any], args: tuple[Any, ...]) -> None:
    try:
        sender.send_bytes(_packed(None, program(*args)))
    except BaseException:
        sender.send_bytes(_packed(traceback.format_exc(), None))
