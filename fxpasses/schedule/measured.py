"""The schedule that a step really had, from torch's profiler, as the same slices as the predicted one.

slices = record(step)                       on each rank
write_trace(path, {0: slices}, "measured")  beside `predicted(plan.program, plan.schedule)`
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from fxpasses.distributed.agreement import LABEL
from fxpasses.schedule.build import LAUNCH, WAIT
from fxpasses.schedule.order import CODECS, HEAVY
from fxpasses.schedule.tasks import CODEC, COMPUTE, LINK
from fxpasses.schedule.timeline import Slice

_BACKENDS = ("gloo:", "nccl:")
_FUNCTIONAL = "_c10d_functional::"


def record(step: Callable[[], Any]) -> list[Slice]:
    """Run a step under the profiler, which makes it somewhat longer; its slices, in order, from its start on.

    What a compiler has fused has no name of its own: it is the gaps between what has.
    """
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        step()
    return slices_of(profile.events())


def slices_of(events: Iterable[Any]) -> list[Slice]:
    """The slices of a profile's events: heavy operators, codecs, launches, waits, and what was on the wire."""
    every = list(events)
    agreements = [e.time_range for e in every if e.name == LABEL]
    found = []
    for event in every:
        kind = _kind(event.name)
        inside = any(a.start <= event.time_range.start <= a.end for a in agreements)
        if kind is not None and not inside:
            found.append((event.time_range, kind, event.name))
    found.sort(key=lambda row: row[0].start)
    found = _outermost(found)
    if not found:
        return []
    zero = min(e.time_range.start for e in every)
    numbers = _numbers([kind for _, kind, _ in found])
    return [
        Slice(
            kind if kind in (COMPUTE, LINK) else CODEC,
            name,
            (span.start - zero) * 1e-6,
            (span.end - span.start) * 1e-6,
            kind,
            number,
        )
        for (span, kind, name), number in zip(found, numbers, strict=True)
    ]


def _kind(name: str) -> str | None:
    if name.startswith(_BACKENDS):
        return LINK
    if name.startswith(_FUNCTIONAL):
        return WAIT if name == f"{_FUNCTIONAL}wait_tensor" else LAUNCH
    namespace, _, operator = name.partition("::")
    if namespace == CODECS:
        return CODEC
    return COMPUTE if namespace == "aten" and HEAVY.match(operator) else None


def _outermost(rows: Sequence[tuple[Any, str, str]]) -> list[tuple[Any, str, str]]:
    """Without operators that others call; what is on the wire is beside them."""
    kept, end = [], float("-inf")
    for span, kind, name in rows:
        if kind == LINK:
            kept.append((span, kind, name))
        elif span.start >= end:
            kept.append((span, kind, name))
            end = span.end
    return kept


def _numbers(kinds: Sequence[str]) -> list[int | None]:
    """Transfers and their launches by number, in order; the rest has none."""
    counts = {LINK: 0, LAUNCH: 0}
    found: list[int | None] = []
    for kind in kinds:
        found.append(counts.get(kind))
        if kind in counts:
            counts[kind] += 1
    return found
