"""DLRM: recommendation from dense features and several tables of categories, and their pairwise products.

Exercises: embedding bags (several indices to a row, dense gradients), an embedding, a lower triangle taken by
index, parameters much larger than what a batch touches.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from tests.zoo.entry import Batch, Entry, seeded_generator

DENSE, BAG, ROWS, USERS = 6, 3, (50, 30), 100


class DLRM(nn.Module):
    """Dense features, users, and one bag of indices for each further table in; a click's logit out."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.bottom = nn.Sequential(
            nn.Linear(DENSE, 16), nn.ReLU(), nn.Linear(16, width), nn.ReLU()
        )
        self.users = nn.Embedding(USERS, width)
        modes = ("sum", "mean")
        self.bags = nn.ModuleList(
            nn.EmbeddingBag(rows, width, mode=mode) for rows, mode in zip(ROWS, modes, strict=True)
        )
        features = 2 + len(ROWS)
        pairs = features * (features - 1) // 2
        self.top = nn.Sequential(nn.Linear(width + pairs, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(
        self, dense_bf: torch.Tensor, users_b: torch.Tensor, *bags_bk: torch.Tensor
    ) -> torch.Tensor:
        bottom_bw = self.bottom(dense_bf)
        pooled = [bag(rows_bk) for bag, rows_bk in zip(self.bags, bags_bk, strict=True)]
        all_bfw = torch.stack([bottom_bw, self.users(users_b), *pooled], 1)
        products_bff = all_bfw @ all_bfw.transpose(1, 2)
        row, column = torch.tril_indices(*products_bff.shape[1:], offset=-1)
        return self.top(torch.cat([bottom_bw, products_bff[:, row, column]], 1)).squeeze(1)


def batch(seed: int) -> Batch:
    generator = seeded_generator(seed)
    dense = torch.randn(8, DENSE, generator=generator)
    users = torch.randint(USERS, (8,), generator=generator)
    bags = [torch.randint(rows, (8, BAG), generator=generator) for rows in ROWS]
    clicks = torch.randint(2, (8,), generator=generator).float()
    return Batch((dense, users, *bags), (clicks,))


ENTRY = Entry("dlrm", DLRM, batch, F.binary_cross_entropy_with_logits)
