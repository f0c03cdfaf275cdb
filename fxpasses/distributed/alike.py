"""Whether tensors that should be the same on all ranks are."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from fxpasses.distributed.group import Group, control_device, process_group
from fxpasses.distributed.waiting import waiting

TOLERANCE = (
    1e-3  # of a tensor's sum of magnitudes; what one rank alone computes differs by far more
)


def differing(group: Group, tensors: Sequence[torch.Tensor | None], what: str) -> int | None:
    """The first tensor, by position, that is not the same on all ranks, by two sums over its elements.

    One all-reduce of four float64 a tensor. None and non-finite tensors count as zeros.

    Args:
        tensors: as many on each rank.
        what: noun phrase for the message of a wait that fails.
    """
    assert group.name is not None
    sums_n4 = torch.stack([_sums(tensor) for tensor in tensors]).to(control_device(group.name))
    with waiting(group, what):
        dist.all_reduce(sums_n4, dist.ReduceOp.MAX, process_group(group.name))
    spread_n2 = sums_n4[:, :2] + sums_n4[:, 2:]  # of each sum, largest minus smallest
    far_n = (spread_n2 > TOLERANCE * sums_n4[:, 1:2]).any(1)
    return int(far_n.int().argmax()) if far_n.any() else None


def _sums(tensor: torch.Tensor | None) -> torch.Tensor:
    """(sum, sum of magnitudes) and their negatives: the maximum over the ranks gives the minimum as well."""
    if tensor is None:
        return torch.zeros(4, dtype=torch.float64)
    values = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    sums = torch.stack([values.sum(dtype=torch.float64), values.abs().sum(dtype=torch.float64)])
    sums = sums if sums.isfinite().all() else torch.zeros_like(sums)
    return torch.cat([sums, -sums]).cpu()
