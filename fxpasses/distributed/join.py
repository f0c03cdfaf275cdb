"""Uneven inputs at the end of an epoch: `join` goes on until the last rank has seen its last batch."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from fxpasses.distributed.group import Group, control_device, is_fake, process_group, resolve
from fxpasses.distributed.waiting import waiting

_Batch = TypeVar("_Batch")
_END: Any = object()


def join(
    loader: Iterable[_Batch], process_group: dist.ProcessGroup | str | None = None
) -> Iterator[tuple[_Batch, float]]:
    """The batches of a loader, each with a weight for its loss, for as long as any rank has one.

        for batch, weight in fxpasses.join(loader):
            loss = weight * loss_fn(model(batch))

    The weight is 1.0 while this rank has data. After that it gets its last batch again, with weight 0.0: so all
    ranks run the same regions and collectives, and every optimizer steps on every rank. A mean over the ranks
    still divides by all of them. Multiply outside of the compiled function, which would else be compiled anew
    for the second weight. The ranks agree with one small all-reduce before each batch; one process alone does
    not communicate.

    Args:
        loader: any iterable; what it raises is passed on.
        process_group: a ProcessGroup or its name, as in the backend's option; None is the default group.

    Raises:
        ValueError: on all ranks, when a rank has no batch at all while others do (naming it); or for a wrong
            group, at once.
        RankLost: when a rank does not come, say because its loader raised (naming it).
    """
    return _joined(loader, resolve(process_group))


def _joined(loader: Iterable[_Batch], group: Group) -> Iterator[tuple[_Batch, float]]:
    batches = iter(loader)
    last, weight = _END, 1.0
    for index in itertools.count():
        batch = next(batches, _END) if weight else _END
        if batch is _END:
            weight = 0.0
        else:
            last = batch
        empty = _ranks_without(group, batch is _END, f"the agreement of join on batch {index}")
        if len(empty) == group.size:
            return
        if index == 0 and empty:
            raise ValueError(
                f"join: no batch at all on rank(s) {', '.join(map(str, empty))} of {group.size}, and so "
                "nothing to repeat there; give each rank at least one"
            )
        yield last, weight


def _ranks_without(group: Group, ended: bool, what: str) -> list[int]:
    """The ranks whose data have ended."""
    if group.size == 1 or is_fake(group):
        return list(range(group.size)) if ended else []
    assert group.name is not None
    with waiting(group, what):
        flags = torch.zeros(group.size, dtype=torch.int32, device=control_device(group.name))
        flags[group.rank] = int(ended)
        dist.all_reduce(flags, group=process_group(group.name))
        return [rank for rank, flag in enumerate(flags.tolist()) if flag]
