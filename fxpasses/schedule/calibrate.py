"""Measure the rates of a machine, for `fxpasses plan --calibrate`; never while a program is compiled.

one rank alone     products, copies, codecs
under torchrun     the same on all ranks at once, since they may share cores; a link from two sizes of
                   message, and how much slower the host computes while it sends
"""

from __future__ import annotations

import dataclasses
import os
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from fxpasses.codecs import codec_of
from fxpasses.compression import Scheme
from fxpasses.distributed.group import is_initialized
from fxpasses.schedule.machine import Machine
from fxpasses.schedule.plan import plan_step
from fxpasses.trace import trace

_REPEATS = 5
_WIDTH, _ROWS = 512, 512  # of the product that is timed
_COPIED = 2**24  # elements
_CODED = 2**22  # elements: as a bucket, more than a cache
_SMALL, _LARGE = 2**10, 2**23  # elements of a message


def calibrated(program: Callable[..., Any] | None, args: Sequence[Any]) -> Machine | None:
    """Measure; None on ranks other than 0, whose measurements are part of rank 0's.

    Args:
        program: whose forward and backward the rates of computing are to explain; None takes a product and a
            copy for all.
        args: its example inputs.
    """
    # Traced first, as for one rank.
    graphs = None if program is None else trace(program, args)
    joined = "RANK" in os.environ and int(os.environ.get("WORLD_SIZE", "1")) > 1
    if joined and not is_initialized():
        dist.init_process_group("gloo")
    try:
        machine = measured_rates()
        if program is not None and graphs is not None:
            predicted_s = plan_step(graphs, machine, 1).step_s
            machine = scaled(machine, predicted_s / _step_seconds(program, args))
        return machine if not joined or dist.get_rank() == 0 else None
    finally:
        if joined:
            dist.destroy_process_group()


def measured_rates() -> Machine:
    """Rates of this process, or of the slowest rank of the default process group, which all have to call it."""
    rates = {**_compute_rates(), **_codec_rates()}
    if is_initialized():
        rates = _slowest(rates | _link_rates())
    return Machine.parse(rates)


def scaled(machine: Machine, factor: float) -> Machine:
    """All rates of computing, so that what they predict takes `1 / factor` of the time."""
    return dataclasses.replace(
        machine,
        flops=machine.flops * factor,
        flops_16=machine.flops_16 * factor,
        memory=machine.memory * factor,
        operator_s=machine.operator_s / factor,
    )


def _timed(run: Callable[[], Any]) -> float:
    """Seconds, the median of some runs, after one that is not counted; with all ranks at once."""
    return _timed_in_turn([run])[0]


def _timed_in_turn(runs: Sequence[Callable[[], Any]]) -> list[float]:
    """The same of several, one after the other in each round: none has all of its runs in a slow moment, or
    all that take memory that is new to the process.
    """
    times: list[list[float]] = [[] for _ in runs]
    for index in range(_REPEATS + 1):
        for run, own in zip(runs, times, strict=True):
            if is_initialized():
                dist.barrier()
            started = time.perf_counter()
            run()
            own.append(time.perf_counter() - started)
            if index == 0:
                own.clear()
    return [statistics.median(own) for own in times]


def _compute_rates() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, dtype in (("flops", torch.float32), ("flops_16", torch.bfloat16)):
        a = torch.randn(_ROWS, _WIDTH).to(dtype)
        b = torch.randn(_WIDTH, _WIDTH).to(dtype)
        found[name] = 2 * _ROWS * _WIDTH * _WIDTH / _timed(partial(torch.mm, a, b))
    source, target = torch.randn(_COPIED), torch.empty(_COPIED)
    found["memory"] = 2 * 4 * _COPIED / _timed(lambda: target.copy_(source))
    small = torch.zeros(1)
    found["operator_s"] = _timed(lambda: [small.add_(1) for _ in range(1000)]) / 1000
    return found


def _step_seconds(program: Callable[..., Any], args: Sequence[Any]) -> float:
    """Of the program's forward and backward, by Inductor."""
    compiled = torch.compile(program)

    def step() -> None:
        result = compiled(*args)
        (result if result.dim() == 0 else result.sum()).backward()

    for _ in range(2):
        step()
    return _timed(step)


def _codec_rates() -> dict[str, Any]:
    flat, residual = torch.randn(_CODED), torch.zeros(_CODED)
    schemes = list(Machine().encode_s)
    encodes, decodes = [], []
    for scheme in schemes:
        codec = codec_of(Scheme(scheme), [_CODED], "", 2, 0)
        old = residual if Scheme(scheme).has_residual else None
        payload, _ = codec.encode(flat, old, None)
        encodes.append(partial(codec.encode, flat, old, None))
        decodes.append(partial(codec.decode, torch.cat([payload, payload])))
    encode_s = [seconds / _CODED for seconds in _timed_in_turn(encodes)]
    payloads = [1 if scheme == "topk" else 2 for scheme in schemes]  # how elements are counted
    decode_s = [s / _CODED / n for s, n in zip(_timed_in_turn(decodes), payloads, strict=True)]
    return {
        "encode_s": dict(zip(schemes, encode_s, strict=True)),
        "decode_s": dict(zip(schemes, decode_s, strict=True)),
    }


def _link_rates() -> dict[str, Any]:
    """From all-reduces: 2 (W-1)/W times their bytes, in 2 (W-1) messages."""
    world = dist.get_world_size()
    share, messages = 2 * (world - 1) / world, 2 * (world - 1)
    small, large = torch.zeros(_SMALL), torch.zeros(_LARGE)
    small_s, large_s = (_timed(partial(dist.all_reduce, x)) for x in (small, large))
    sent = share * 4 * (_LARGE - _SMALL)
    a, b = torch.randn(_ROWS, _WIDTH), torch.randn(_WIDTH, _WIDTH)
    products = max(1, int(0.8 * large_s / _timed(lambda: a @ b)))

    def compute() -> None:
        for _ in range(products):
            a @ b

    undisturbed = _timed(compute)
    launched: list[float] = []

    def both() -> None:
        started = time.perf_counter()
        flying = dist.all_reduce(large, async_op=True)
        launched.append(time.perf_counter() - started)
        compute()
        computed.append(time.perf_counter() - started)
        assert flying is not None
        flying.wait()

    computed: list[float] = []
    _timed(both)
    lost = max(0.0, statistics.median(computed) - undisturbed)
    return {
        "bandwidth": sent / max(large_s - small_s, 1e-9),
        "latency": small_s / messages,
        "collective_s": statistics.median(launched),
        "host_s": lost / (share * 4 * _LARGE),
    }


def _slowest(rates: dict[str, Any]) -> dict[str, Any]:
    """What the slowest rank measured: the others wait for it."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, rates)
    found: dict[str, Any] = {}
    for key, value in rates.items():
        if isinstance(value, dict):
            found[key] = {k: max(other[key][k] for other in everyone) for k in value}
        else:
            pick = max if key.endswith(("_s", "latency")) else min
            found[key] = pick(other[key] for other in everyone)
    return found
