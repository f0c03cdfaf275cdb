"""Before its first training forward a model is compared over the ranks, and takes rank 0's values.

The comparison goes through the process group's store: rank 0 collects a table of names, dtypes and shapes from
every rank and publishes a verdict, so that all ranks raise together and a rank that does not come is named.
Only then are values broadcast.
"""

from __future__ import annotations

import itertools
import time
import weakref
from collections.abc import Iterator, Mapping
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.utils.weak import WeakTensorKeyDictionary

from fxpasses.distributed.group import Group, is_fake, process_group, store_of, timeout_of
from fxpasses.distributed.waiting import RankLost, waiting

_AGREED = "agreed"
_VERDICT_GRACE = timedelta(seconds=10)  # for rank 0 to compare, and to say so
_ONE_LOOK = timedelta(seconds=1)  # at what may be there already, when the time is over

# By the group itself, not its name: one that is made anew has the old one's.
_Numbers = weakref.WeakKeyDictionary[dist.ProcessGroup, int]
_alike: WeakTensorKeyDictionary = WeakTensorKeyDictionary()  # tensor → _Numbers, of its first use
_uses: weakref.WeakKeyDictionary[dist.ProcessGroup, Iterator[str]] = weakref.WeakKeyDictionary()


def make_alike(
    group: Group, named: Mapping[str, torch.Tensor], code: str = "the model"
) -> tuple[int, ...]:
    """Compare tensors over the ranks of a group, then overwrite them, in place, by rank 0's: each once.

    All ranks must call this in the same order. Nothing is done on the `fake` backend.

    Args:
        named: parameters and buffers that one compiled region can reach, by name.
        code: that region, for messages.

    Returns:
        The numbers of the first uses of these tensors, the same on all ranks.

    Raises:
        RuntimeError: on all ranks, when names, dtypes or shapes differ (naming the first difference), or when
            a rank does not come within the group's timeout (naming it).
    """
    assert group.name is not None
    pg = process_group(group.name)
    if is_fake(group):
        return ()
    new = {k: t for k, t in named.items() if pg not in _alike.get(t, ())}
    if new:
        if pg not in _uses:
            _uses[pg] = _places(group)
        _make_alike(group, new, next(_uses[pg]), code)
    return tuple(sorted({_alike[t][pg] for t in named.values()}))


def _places(group: Group) -> Iterator[str]:
    """Prefixes of keys in the group's store, one a use. Groups that were made over the same store one after
    the other have different ones: each rank counts them there.
    """
    assert group.name is not None
    made = store_of(group.name).add(f"fxpasses/made/{group.rank}", 1)
    return (f"fxpasses/{made}/{number}" for number in itertools.count())


def _make_alike(group: Group, named: Mapping[str, torch.Tensor], place: str, code: str) -> None:
    assert group.name is not None
    pg, number = process_group(group.name), int(place.rpartition("/")[2])
    store = dist.PrefixStore(place, store_of(group.name))
    _compare(group, store, "\n".join(f"{name}: {_form(t)}" for name, t in named.items()), code)
    for name, tensor in named.items():
        with waiting(group, f"the broadcast of {name}"):
            _broadcast(group.name, tensor.detach())
        _alike.setdefault(tensor, _Numbers())[pg] = number


def _form(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def _compare(group: Group, store: dist.Store, table: str, code: str) -> None:
    assert group.name is not None
    timeout = timeout_of(group.name)
    with waiting(group, "the comparison of the model over the ranks"):
        if group.rank != 0:
            store.set(f"table/{group.rank}", table)
            # Rank 0 may come late, and then waits for others: its verdict has a time limit of its own.
            _get(store, "table/0", timeout, "rank 0 to compare the model over the ranks")
            verdict = _get(store, "verdict", timeout + _VERDICT_GRACE, "the verdict of rank 0")
        else:
            store.set("table/0", table)
            verdict = _verdict(group, store, table, timeout, code)
            store.set("verdict", verdict)
    if verdict != _AGREED:
        raise RuntimeError(verdict)


def _verdict(group: Group, store: dist.Store, table: str, timeout: timedelta, code: str) -> str:
    started = time.monotonic()
    for rank in range(1, group.size):
        spent = timedelta(seconds=time.monotonic() - started)
        try:
            other = _get(
                store, f"table/{rank}", timeout, f"rank {rank} to start training {code}", spent
            )
        except RankLost as error:
            return f"rank 0 {error}"
        if other != table:
            return _difference(rank, other.splitlines(), table.splitlines())
    return _AGREED


def _difference(rank: int, theirs: list[str], ours: list[str]) -> str:
    for here, there in itertools.zip_longest(ours, theirs, fillvalue="nothing"):
        if here != there:
            return f"the model differs over the ranks: rank 0 has {here}, rank {rank} has {there}"
    raise AssertionError("the tables differ in some line")


def _get(
    store: dist.Store, key: str, timeout: timedelta, what: str, spent: timedelta = timedelta()
) -> str:
    try:
        store.wait([key], max(timeout - spent, _ONE_LOOK))
    except dist.DistNetworkError:  # not late, but gone: `waiting` says who hosts the store
        raise
    except RuntimeError as error:  # each kind of store has its own
        waited = f"waited {timeout.total_seconds():.0f} s for {what}"
        raise RankLost(f"{waited} ({str(error).splitlines()[0]})") from error
    return store.get(key).decode()


def _broadcast(group_name: str, tensor: torch.Tensor) -> None:
    # One element of each dimension that only repeats it (an expanded buffer).
    tensor = tensor[tuple(slice(0, 1 if s == 0 else None) for s in tensor.stride())]
    # A channels-last tensor is dense, but not what a collective calls contiguous.
    dense = tensor if tensor.is_contiguous() else tensor.contiguous()
    dist.broadcast(dense, group=process_group(group_name), group_src=0)
    if dense is not tensor:
        tensor.copy_(dense)
