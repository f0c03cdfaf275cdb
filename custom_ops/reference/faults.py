"""An element that is damaged."""

from __future__ import annotations

import torch

from custom_ops.faults import INTEGERS, NEWS


def strike(x: torch.Tensor, row: torch.Tensor, site: int) -> tuple[torch.Tensor, torch.Tensor]:
    """`custom_ops.faults.strike`."""
    struck, news = x.clone(), row.new_zeros(NEWS)
    armed_site, index, keep, flip, _ = row.tolist()
    if armed_site == site and x.numel():
        bits = struck.view(-1).view(INTEGERS[x.dtype.itemsize])
        at = index % x.numel()
        before = bits[at].clone()
        masks = torch.tensor([keep, flip], device=x.device).to(bits.dtype)
        bits[at] = (before & masks[0]) ^ masks[1]
        news.copy_(torch.stack([torch.ones_like(row[0]), row[0] * 0 + at, before, bits[at]]))
    return struck, news
