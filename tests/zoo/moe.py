"""Mixture of experts: each token goes to the best two of four; all experts see all tokens, weighted.

Dense dispatch keeps every shape static: a token's weight is zero at the experts that it did not choose.
Exercises: top-k and scatter of its values, batched products over stacked parameters, an auxiliary loss as a
second output. No dropout.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from tests.zoo.entry import Batch, Entry, seeded_generator

VOCAB, LENGTH, EXPERTS, CHOSEN = 40, 8, 4, 2


class Experts(nn.Module):
    """A gated MLP; also returns how unevenly the tokens chose (1 is even)."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, EXPERTS, bias=False)
        self.up = nn.Parameter(torch.randn(EXPERTS, width, hidden) * width**-0.5)
        self.down = nn.Parameter(torch.randn(EXPERTS, hidden, width) * hidden**-0.5)

    def forward(self, x_nw: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits_ne = self.gate(x_nw)
        best_nk, chosen_nk = logits_ne.topk(CHOSEN, dim=-1)
        weights_ne = torch.zeros_like(logits_ne).scatter(-1, chosen_nk, best_nk.softmax(-1))
        hidden_enf = F.gelu(torch.einsum("nw,ewf->enf", x_nw, self.up))
        y_nw = torch.einsum("enf,efw,ne->nw", hidden_enf, self.down, weights_ne)
        share_e = (weights_ne > 0).to(x_nw.dtype).mean(0) / CHOSEN
        return y_nw, EXPERTS * (share_e * logits_ne.softmax(-1).mean(0)).sum()


class MixtureOfExperts(nn.Module):
    """Two residual layers of experts between an embedding and a head; predicts the next token."""

    def __init__(self, width: int = 16, hidden: int = 24, layers: int = 2) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, width)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(layers))
        self.experts = nn.ModuleList(Experts(width, hidden) for _ in range(layers))
        self.head = nn.Linear(width, VOCAB)

    def forward(self, tokens_bt: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x_nw = self.tokens(tokens_bt).flatten(0, 1)
        uneven = x_nw.new_zeros(())
        for norm, experts in zip(self.norms, self.experts, strict=True):
            y_nw, term = experts(norm(x_nw))
            x_nw, uneven = x_nw + y_nw, uneven + term
        return self.head(x_nw), uneven


def batch(seed: int) -> Batch:
    tokens = torch.randint(VOCAB, (4, LENGTH + 1), generator=seeded_generator(seed))
    return Batch((tokens[:, :-1],), (tokens[:, 1:],))


def loss(outputs: tuple[torch.Tensor, torch.Tensor], following_bt: torch.Tensor) -> torch.Tensor:
    logits_nv, uneven = outputs
    return F.cross_entropy(logits_nv, following_bt.flatten()) + 0.01 * uneven


ENTRY = Entry("moe", MixtureOfExperts, batch, loss)
