"""Gradients that wait in `.grad` to be reduced: what backwards that don't synchronise have left there.

What waits is whatever `.grad` holds when the next synchronising backward takes it, so that zeroing or scaling
it in between does what it says.
"""

from __future__ import annotations

import torch
from torch.utils.weak import WeakTensorKeyDictionary

_pending: WeakTensorKeyDictionary = WeakTensorKeyDictionary()  # parameter → True


def begin(parameter: torch.Tensor, reduce: str, world: int) -> None:
    """Say that a local gradient is about to be added to `.grad`.

    What is in there already was reduced, and will be reduced again with the rest. The mean of equal values
    is that value; for a sum it becomes this rank's share.
    """
    if parameter in _pending:
        return
    if parameter.grad is not None and reduce == "sum":
        parameter.grad.div_(world)
    _pending[parameter] = True


def is_pending(parameter: torch.Tensor) -> bool:
    return len(_pending) > 0 and parameter in _pending and parameter.grad is not None


def take(parameter: torch.Tensor) -> torch.Tensor | None:
    """What waits in `.grad`, which is empty afterwards; None if nothing does."""
    if len(_pending) == 0 or not _pending.pop(parameter, False):
        return None
    gradient, parameter.grad = parameter.grad, None
    return gradient


def claim(parameter: torch.Tensor) -> torch.Tensor | None:
    """What waits in `.grad`, which keeps it; it counts as reduced afterwards. None if nothing does."""
    if len(_pending) == 0 or not _pending.pop(parameter, False):
        return None
    return parameter.grad


def put_back(parameter: torch.Tensor, gradient: torch.Tensor) -> None:
    """Undo `take` or `claim`."""
    parameter.grad = gradient
    _pending[parameter] = True
