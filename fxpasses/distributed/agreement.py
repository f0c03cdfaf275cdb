"""In front of each synchronising backward the ranks agree on what they are about to send.

One all-reduce of a few integers, the same size whatever the plan, so that ranks with different plans learn of
it together, before the first payload. Then, and only then, whole plans are exchanged, each of them once.
Nothing goes through the store. Where the group has a backend for CPU tensors it carries these, so that no
device is waited for.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch
import torch.distributed as dist

from fxpasses.distributed.group import Group, control_device, process_group
from fxpasses.distributed.plans import Plan, Union, reconcile

LABEL = "fxpasses::agreement"  # in a profile

# What each rank of a group has told of its plans, by rank and digest; on all of its ranks the same.
_plans: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[tuple[int, ...], Plan]]
_plans = weakref.WeakKeyDictionary()


def agree(group: Group, digest: tuple[int, int], plan: Callable[[], Plan]) -> Union | None:
    """None when all ranks are about to send the same; else what all of them send instead.

    Args:
        digest: two integers below 2**62 that stand for this rank's plan.
        plan: asked for where the ranks differ.

    Raises:
        PlanMismatch: on all ranks.
    """
    assert group.name is not None
    pg, device = process_group(group.name), control_device(group.name)
    with torch.profiler.record_function(LABEL):
        seen = torch.tensor([*digest, *(-d for d in digest)], device=device)
        dist.all_reduce(seen, dist.ReduceOp.MAX, pg)
        first, second, low_first, low_second = seen.tolist()
    if (first, second) == (-low_first, -low_second):
        return None
    whole = plan()
    mine = torch.tensor(halves(whole.digest(whole=True)), device=device)
    digests = [torch.empty_like(mine) for _ in range(group.size)]
    dist.all_gather(digests, mine, pg)
    known = _plans.setdefault(pg, {})
    keys = [(rank, *digest.tolist()) for rank, digest in enumerate(digests)]
    if not known.keys() >= set(keys):
        plans: list[Plan] = [whole] * group.size
        dist.all_gather_object(plans, whole, pg)
        known.update(zip(keys, plans, strict=True))
    return reconcile([known[key] for key in keys])


def halves(digest: bytes) -> tuple[int, int]:
    """The two integers that stand for a digest."""
    first, second = (int.from_bytes(digest[i : i + 8]) for i in (0, 8))
    return first >> 2, second >> 2
