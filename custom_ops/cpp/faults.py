"""`custom_ops.faults` in C++."""

from __future__ import annotations

import torch

from custom_ops import native
from custom_ops.faults import NEWS


def strike(x: torch.Tensor, row: torch.Tensor, site: int) -> tuple[torch.Tensor, torch.Tensor]:
    struck, news = x.clone(), row.new_empty(NEWS)
    native.call("strike", struck, row, news, site, x.numel(), x.dtype.itemsize)
    return struck, news
