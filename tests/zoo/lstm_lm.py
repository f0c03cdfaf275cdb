"""LSTM language model: a cell of plain operators, unrolled; the head tied to the embedding.

`nn.LSTM` is what Dynamo leaves to eager mode by default, so the cell is written out. Exercises: a parameter
used in every time step, tied weights, nested outputs of which the loss uses one (the last state is for the
caller), dropout with p = 0.2 whose mask is drawn once for all time steps.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from tests.zoo.entry import Batch, Entry, seeded_generator

VOCAB, LENGTH = 40, 6
State = tuple[torch.Tensor, torch.Tensor]


class Cell(nn.Module):
    """One step: what to forget, what to add, what to show."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.from_input = nn.Linear(width, 4 * width)
        self.from_hidden = nn.Linear(width, 4 * width, bias=False)

    def forward(self, x_bw: torch.Tensor, state: State) -> State:
        hidden_bw, cell_bw = state
        gates = self.from_input(x_bw) + self.from_hidden(hidden_bw)
        add, forget, show, content = gates.chunk(4, dim=-1)
        cell_bw = cell_bw * forget.sigmoid() + add.sigmoid() * content.tanh()
        return show.sigmoid() * cell_bw.tanh(), cell_bw


class LanguageModel(nn.Module):
    """Tokens in; logits of the following tokens and the last state out."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, width)
        self.cell = Cell(width)
        self.head = nn.Linear(width, VOCAB)
        self.head.weight = self.tokens.weight

    def forward(self, tokens_bt: torch.Tensor) -> tuple[torch.Tensor, State]:
        x_btw = self.tokens(tokens_bt)
        mask_bw = F.dropout(torch.ones_like(x_btw[:, 0]), 0.2, self.training)
        state = (torch.zeros_like(mask_bw), torch.zeros_like(mask_bw))
        hidden = []
        for x_bw in x_btw.unbind(1):
            state = self.cell(x_bw * mask_bw, state)
            hidden.append(state[0])
        return self.head(torch.stack(hidden, 1)), state


def batch(seed: int) -> Batch:
    tokens = torch.randint(VOCAB, (4, LENGTH + 1), generator=seeded_generator(seed))
    return Batch((tokens[:, :-1],), (tokens[:, 1:],))


def loss(outputs: tuple[torch.Tensor, State], following_bt: torch.Tensor) -> torch.Tensor:
    logits_btv, _ = outputs
    return F.cross_entropy(logits_btv.flatten(0, 1), following_bt.flatten())


ENTRY = Entry("lstm_lm", LanguageModel, batch, loss)
