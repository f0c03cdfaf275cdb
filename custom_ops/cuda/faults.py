"""`custom_ops.faults` in CUDA C++."""

from __future__ import annotations

import torch

from custom_ops.cuda.driver import THREADS, blocks_for, launch
from custom_ops.faults import NEWS


def strike(x: torch.Tensor, row: torch.Tensor, site: int) -> tuple[torch.Tensor, torch.Tensor]:
    struck, news = torch.empty_like(x), row.new_zeros(NEWS)
    if x.numel():
        index = torch.remainder(row[1], x.numel())
        launch(
            "faults.strike",
            blocks_for(x.nbytes, 16 * THREADS),
            *(x, struck, row, index, news, site, x.nbytes),
            constants={"SIZE": x.dtype.itemsize},
        )
    return struck, news
