"""One process as one rank of many, whose collectives do nothing: for graphs that are looked at, not run.

`torch.testing._internal.distributed.fake_pg` is private; checked on torch 2.11, 2.13 and 2.14.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch.distributed as dist

from fxpasses.distributed.group import is_initialized


@contextlib.contextmanager
def fake_world(world: int, rank: int = 0) -> Iterator[None]:
    """Be rank `rank` of `world` meanwhile, in the default process group. One rank needs no group.

    Raises:
        ValueError: for a rank that is not in that world.
        RuntimeError: when this process is in a process group already.
    """
    if not 0 <= rank < world:
        raise ValueError(f"there is no rank {rank} among {world}; expected 0 to {world - 1}")
    if is_initialized():
        raise RuntimeError("torch.distributed is initialised; a fake world needs a process without")
    if world == 1:
        yield
        return
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()
