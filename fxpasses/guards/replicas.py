"""Whether parameters and optimizer state, which every rank has for itself, are still the same on all of them.

One digest a tensor, from its bits: two sums modulo 2^64, the second of bits by the column of a matrix that
has 1024, each with an odd factor of its own. Bits that differ in one element always change the first.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
import torch.distributed as dist

from custom_ops.bits import words
from fxpasses.distributed.group import Group, control_device, process_group
from fxpasses.distributed.waiting import waiting
from fxpasses.guards.alarms import FaultDetected

COLUMNS = 1024


def digest(tensor: torch.Tensor) -> torch.Tensor:
    """[2] int64."""
    bits = words(tensor.detach().contiguous()).flatten()
    whole = bits.numel() // COLUMNS * COLUMNS
    columns = bits[:whole].view(-1, COLUMNS).sum(0, dtype=torch.int64)
    columns[: bits.numel() - whole] += bits[whole:]
    factors = 2 * torch.arange(COLUMNS, device=bits.device) + 1
    return torch.stack([columns.sum(), (columns * factors).sum()])


def halves(digests: torch.Tensor) -> torch.Tensor:
    """[n, 2] → [n, 4], of which the negative exists whatever they are."""
    return torch.cat([digests & 0xFFFFFFFF, digests >> 32], 1)


def check_replicas(
    group: Group, optimizer: torch.optim.Optimizer, names: Mapping[str, torch.Tensor]
) -> None:
    """Compare over the ranks what an optimizer holds of these parameters, by one all-reduce.

    Raises:
        FaultDetected: on all ranks, naming the first tensor that differs.
    """
    held = list(_held(optimizer, names))
    if not held or group.size == 1:
        return
    assert group.name is not None
    own = halves(torch.stack([digest(tensor).cpu() for _, tensor in held]))
    both = torch.cat([own, -own], 1).to(control_device(group.name))
    with waiting(group, "the comparison of parameters over the ranks"):
        dist.all_reduce(both, dist.ReduceOp.MAX, process_group(group.name))
    differs = (both[:, :4] != -both[:, 4:]).any(1).tolist()
    wrong = [name for (name, _), differ in zip(held, differs, strict=True) if differ]
    if wrong:
        raise FaultDetected(
            f"option 'guards': {wrong[0]} differs over the ranks"
            + (f", and {len(wrong) - 1} other tensor(s)" if wrong[1:] else "")
            + "; all of them should have the same. Resume from a checkpoint"
        )


def _held(
    optimizer: torch.optim.Optimizer, names: Mapping[str, torch.Tensor]
) -> Iterator[tuple[str, torch.Tensor]]:
    by_id = {id(parameter): name for name, parameter in names.items()}
    for parameter in (p for group in optimizer.param_groups for p in group["params"]):
        name = by_id.get(id(parameter))
        if name is None or not parameter.numel():
            continue
        yield f"parameter {name!r}", parameter
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, torch.Tensor) and value.numel():
                yield f"{key} of {name!r}", value
