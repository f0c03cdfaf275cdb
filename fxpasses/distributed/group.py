"""The process group that gradients are reduced over.

What we need of `torch.distributed` internals. Checked on torch 2.11, 2.13 and 2.14.
"""

from __future__ import annotations

import dataclasses
import weakref
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from fxpasses.config import nearest

_connections: weakref.WeakKeyDictionary[dist.ProcessGroup, dist.Store]
_connections = weakref.WeakKeyDictionary()


@dataclasses.dataclass(frozen=True)
class Group:
    """A process group as the compiler sees it.

    Attributes:
        name: registered name, as functional collectives take it; None without `torch.distributed`.
        size: number of ranks.
        rank: this process's rank within the group.
    """

    name: str | None
    size: int
    rank: int


def resolve(option: Any) -> Group:
    """The group that option `process_group` means.

    Args:
        option: a ProcessGroup, its registered name, or None for the default group.

    Raises:
        ValueError: for an unknown name, a group that this process is not in, or a group given although
            `torch.distributed` is not initialised.
    """
    if not is_initialized():
        if option is not None:
            raise ValueError(
                f"option 'process_group': got {option!r}, but torch.distributed is not initialised; "
                "call torch.distributed.init_process_group first"
            )
        return Group(None, 1, 0)
    group = process_group(option) if isinstance(option, str) else option
    if group is None:
        group = dist.distributed_c10d._get_default_group()
    rank = dist.get_rank(group)
    if rank < 0:
        raise ValueError("option 'process_group': this process is not a member of the group given")
    return Group(group.group_name, dist.get_world_size(group), rank)


def global_rank() -> int:
    """This process's rank in the default group; 0 without one."""
    return dist.get_rank() if is_initialized() else 0


def several_ranks() -> bool:
    """Whether this process is one of several."""
    return is_initialized() and dist.get_world_size() > 1


def refuse_wrapper() -> None:
    """Raise `ValueError` inside the forward of a DistributedDataParallel: its hooks would reduce again."""
    if is_initialized():
        from torch.nn.parallel import DistributedDataParallel

        if DistributedDataParallel._get_active_ddp_module() is not None:
            raise ValueError(
                "the model is wrapped in DistributedDataParallel, which reduces gradients a second time; "
                "compile the module itself: torch.compile(model, backend='hardened')"
            )


def is_initialized() -> bool:
    return dist.is_available() and dist.is_initialized()


def store_of(name: str) -> dist.Store:
    """The store that a group's ranks met in."""
    return dist.distributed_c10d._world.pg_map[process_group(name)][1]


def second_connection(name: str, make: bool = True) -> dist.Store:
    """A group's store for a thread that must not queue behind the main thread's waits in it.

    A TCPStore serves one call at a time over its socket, so it is connected to once more. Other stores are
    returned as they are: they wait without holding up others, and a second FileStore would count as one more
    user of its file.

    Args:
        name: the group's.
        make: connect, if this was not done before; otherwise the first connection must do.
    """
    group, store = process_group(name), store_of(name)
    if make and group not in _connections and _is_tcp(store):
        _connections[group] = store.clone()  # type: ignore[attr-defined]
    return _connections.get(group, store)


def _is_tcp(store: dist.Store) -> bool:
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return isinstance(store, dist.TCPStore)


def timeout_of(name: str) -> timedelta:
    """How long a group's collectives wait."""
    return process_group(name)._get_backend(control_device(name)).options._timeout


def is_fake(group: Group) -> bool:
    """Whether the group's collectives do nothing (backend `fake`, for tests of many ranks in one process)."""
    return group.name is not None and dist.get_backend(process_group(group.name)) == "fake"


def control_device(name: str) -> torch.device:
    """Where small tensors that the host reads are to live: the CPU, if the group can send from there."""
    group = process_group(name)
    cpu = torch.device("cpu")
    if cpu in group._device_types:
        return cpu
    return torch.device(dist.distributed_c10d._get_object_coll_device(group))


def process_group(name: str) -> dist.ProcessGroup:
    """The group of a registered name.

    Raises:
        ValueError: when no group has it.
    """
    known = {str(group.group_name): group for group in dist.distributed_c10d._world.pg_map}
    if name not in known:
        raise ValueError(
            f"option 'process_group': no group is named {name!r}{nearest(name, known)}"
        )
    return known[name]
