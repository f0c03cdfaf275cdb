"""Start the demo's ranks, watch them and stop them, however a run is left."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import signal
import socket
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import ProcessContext, start_processes

from bench.training import RANKS, SEED, Wrap, train

START_TIMEOUT_S = 120
COLLECTIVE_TIMEOUT_S = 300  # one rank may wait for the other's compilation
STALL_TIMEOUT_S = 360  # beyond a rank's own timeouts, whose messages say more
STOP_TIMEOUT_S = 10


class RankFailed(Exception):
    """Argument: for each failed rank its traceback, or how else it ended."""


def run_rank(rank: int, wrap: Wrap, steps: int, seed: int, port: int, reports: Connection) -> None:
    """Body of one rank's process. Only rank 0 reports."""
    # A group of its own: Ctrl-C reaches the parent alone, which then ends this process together
    # with any compiler that it has started.
    os.setpgid(0, 0)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    torch.set_num_threads(1)
    _compile_in_this_process()
    meet(rank, port)
    try:
        train(wrap, steps, reports.send if rank == 0 else lambda _: None, seed)
    except RuntimeError as error:
        if "timed out" not in str(error).lower():
            raise
        others = ", ".join(str(other) for other in range(RANKS) if other != rank)
        raise TimeoutError(
            f"rank {rank} waited {COLLECTIVE_TIMEOUT_S} s in a collective for rank {others}"
        ) from error
    dist.destroy_process_group()


def _compile_in_this_process() -> None:
    """No pool of compiler processes: each rank has one core."""
    import torch._inductor.config

    torch._inductor.config.compile_threads = 1


def meet(rank: int, port: int) -> None:
    """Make the default process group once every rank is there."""
    loopback = next(name for _, name in socket.if_nameindex() if name.startswith("lo"))
    os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
    start_timeout = timedelta(seconds=START_TIMEOUT_S)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=start_timeout)
    store.set(f"rank {rank}", "here")
    for other in range(RANKS):
        try:
            store.wait([f"rank {other}"], start_timeout)
        except dist.DistStoreError as error:
            raise TimeoutError(
                f"rank {rank} waited {START_TIMEOUT_S} s for rank {other} to start"
            ) from error
    timeout = timedelta(seconds=COLLECTIVE_TIMEOUT_S)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS, timeout=timeout)


def run_ranks(wrap: Wrap, steps: int, on_report: Callable[[Any], None], seed: int = SEED) -> None:
    """Run all ranks to their end; however this is left, none of them lives on.

    Raises:
        RankFailed: a rank failed; the others have been stopped.
        TimeoutError: nothing was heard of rank 0 for too long.
    """
    # Port 0, a free one of the system's choice: picking one first would leave time to lose it.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    reports, sender = multiprocessing.get_context("spawn").Pipe(duplex=False)
    try:
        with _interrupts_ignored():
            # Ranks inherit this until they are set up: no tracebacks from half-done imports.
            ranks = start_processes(
                run_rank,
                (wrap, steps, seed, store.port, sender),
                RANKS,
                join=False,
                start_method="spawn",
            )
        sender.close()
        _watch(ranks, reports, on_report)
    finally:
        with _interrupts_ignored():
            _stop_ranks()
        reports.close()


def _watch(ranks: ProcessContext, reports: Connection, on_report: Callable[[Any], None]) -> None:
    heard = time.monotonic()
    with contextlib.suppress(EOFError):  # the end of the pipe: every rank has ended
        while True:
            if reports.poll(0.2):
                on_report(reports.recv())
                heard = time.monotonic()
            _check(ranks)
            if time.monotonic() - heard > STALL_TIMEOUT_S:
                raise TimeoutError(f"waited {STALL_TIMEOUT_S} s for a report of rank 0")
    for rank, process in enumerate(ranks.processes):
        process.join(STOP_TIMEOUT_S)
        if process.is_alive():
            raise TimeoutError(f"waited {STOP_TIMEOUT_S} s for rank {rank} to exit")
    _check(ranks)


def _check(ranks: ProcessContext) -> None:
    failed = [rank for rank, process in enumerate(ranks.processes) if process.exitcode]
    if failed:
        last_words = {rank: _last_words(ranks, rank) for rank in failed}
        # Not left to ProcessContext.join: it would leave the compilers of the others running.
        _stop_ranks()
        raise RankFailed(last_words)


def _last_words(ranks: ProcessContext, rank: int) -> str:
    exitcode, error_file = ranks.processes[rank].exitcode, Path(ranks.error_files[rank])
    if error_file.exists():
        return pickle.loads(error_file.read_bytes()).strip()
    if exitcode < 0:
        return f"ended by {signal.Signals(-exitcode).name}"
    return f"exit status {exitcode}"


def _stop_ranks() -> None:
    for sign in (signal.SIGTERM, signal.SIGKILL):
        alive = multiprocessing.active_children()
        for process in alive:
            _signal_group(process.pid, sign)
        for process in alive:
            process.join(STOP_TIMEOUT_S)


def _signal_group(pid: int | None, sign: signal.Signals) -> None:
    assert pid is not None
    with contextlib.suppress(ProcessLookupError):
        try:
            os.killpg(pid, sign)
        except ProcessLookupError:  # it has not got as far as making its group
            os.kill(pid, sign)


@contextlib.contextmanager
def _interrupts_ignored() -> Iterator[None]:
    previous = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
