"""What every operator asks of its tensors."""

from __future__ import annotations

import torch

FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def vector(
    name: str,
    tensor: torch.Tensor | None,
    numel: int,
    dtypes: tuple[torch.dtype, ...] = (torch.float32,),
) -> None:
    """Raise `ValueError` unless it is a contiguous tensor of shape [numel], or None."""
    if tensor is None:
        return
    if tensor.dtype not in dtypes or tensor.shape != (numel,) or not tensor.is_contiguous():
        names = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise ValueError(
            f"{name}: expected a contiguous {names} tensor of shape [{numel}], got {_described(tensor)}"
        )


def rows(name: str, tensor: torch.Tensor, size: int) -> None:
    """Raise `ValueError` unless it is a contiguous uint8 tensor of shape [W, size] with W >= 1."""
    fits = tensor.dim() == 2 and tensor.shape[0] >= 1 and tensor.shape[1] == size
    if tensor.dtype != torch.uint8 or not fits or not tensor.is_contiguous():
        raise ValueError(
            f"{name}: expected a contiguous uint8 tensor of shape [ranks, {size}], got {_described(tensor)}"
        )


def seed(tensor: torch.Tensor | None) -> None:
    """Raise `ValueError` unless it is a tensor of one int64, or None."""
    if tensor is not None and (tensor.dtype != torch.int64 or tensor.numel() != 1):
        raise ValueError(f"seed: expected a tensor of one int64, got {_described(tensor)}")


def _described(tensor: torch.Tensor) -> str:
    contiguous = "" if tensor.is_contiguous() else ", not contiguous"
    return f"{tensor.dtype} of shape {list(tensor.shape)}{contiguous}"
