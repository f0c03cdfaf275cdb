"""BERT: a post-norm encoder with a padding mask, trained on masked tokens and on sentence pairs.

Exercises: a boolean mask as input, three embeddings, two outputs that use different parameters, a tied output
projection with a bias of its own, dropout with p = 0.1.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from tests.zoo.entry import Batch, Entry, seeded_generator

VOCAB, LENGTH, MASK, IGNORED = 40, 10, 1, -100


class Layer(nn.Module):
    """Attention that sees no padding, and an MLP, each in front of a norm."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.value = nn.Linear(width, width), nn.Linear(width, width)
        # A bias of the keys would cancel in the softmax: rounding would be all of its gradient.
        self.key = nn.Linear(width, width, bias=False)
        self.out = nn.Linear(width, width)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.dropout = nn.Dropout(dropout)

    def attend(self, x_btw: torch.Tensor, real_bt: torch.Tensor) -> torch.Tensor:
        """Self-attention over the tokens that are real."""
        q_bhtd, k_bhtd, v_bhtd = (
            layer(x_btw).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        scores = q_bhtd @ k_bhtd.transpose(-2, -1) / q_bhtd.shape[-1] ** 0.5
        scores = scores.masked_fill(~real_bt[:, None, None, :], float("-inf"))
        y_bhtd = self.dropout(scores.softmax(-1)) @ v_bhtd
        return self.out(y_bhtd.transpose(1, 2).flatten(-2))

    def forward(self, x_btw: torch.Tensor, real_bt: torch.Tensor) -> torch.Tensor:
        x_btw = self.norm1(x_btw + self.dropout(self.attend(x_btw, real_bt)))
        return self.norm2(x_btw + self.dropout(self.down(F.gelu(self.up(x_btw)))))


class Bert(nn.Module):
    """Returns logits of the tokens, and of whether the second segment follows the first."""

    def __init__(self, width: int = 24, heads: int = 2, layers: int = 1) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, width, padding_idx=0)
        nn.init.normal_(self.tokens.weight, std=0.02)
        self.positions = nn.Embedding(LENGTH, width)
        self.segments = nn.Embedding(2, width)
        self.norm = nn.LayerNorm(width)
        self.dropout = nn.Dropout(0.1)
        self.layers = nn.ModuleList(Layer(width, heads, 0.1) for _ in range(layers))
        self.transform = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.LayerNorm(width))
        self.decoder = nn.Linear(width, VOCAB)
        self.decoder.weight = self.tokens.weight
        self.pooler = nn.Linear(width, width)
        self.follows = nn.Linear(width, 2)

    def forward(
        self, tokens_bt: torch.Tensor, segments_bt: torch.Tensor, real_bt: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        positions_t = torch.arange(LENGTH, device=tokens_bt.device)
        embedded = self.tokens(tokens_bt) + self.segments(segments_bt)
        x_btw = self.dropout(self.norm(embedded + self.positions(positions_t)))
        for layer in self.layers:
            x_btw = layer(x_btw, real_bt)
        first_bw = torch.tanh(self.pooler(x_btw[:, 0]))
        return self.decoder(self.transform(x_btw)), self.follows(first_bw)


def batch(seed: int) -> Batch:
    """Sentence pairs of different lengths; one token in three is hidden and asked for."""
    generator = seeded_generator(seed)
    tokens_bt = torch.randint(2, VOCAB, (4, LENGTH), generator=generator)
    lengths_b = torch.randint(LENGTH // 2, LENGTH + 1, (4,), generator=generator)
    places_t = torch.arange(LENGTH)
    real_bt = places_t < lengths_b[:, None]
    hidden_bt = (places_t % 3 == 1) & real_bt
    follows_b = torch.randint(2, (4,), generator=generator)
    seen_bt = tokens_bt.masked_fill(hidden_bt, MASK).masked_fill(~real_bt, 0)
    segments_bt = (places_t >= LENGTH // 2).long().expand(4, -1)
    asked_bt = tokens_bt.masked_fill(~hidden_bt, IGNORED)
    return Batch((seen_bt, segments_bt, real_bt), (asked_bt, follows_b))


def loss(
    outputs: tuple[torch.Tensor, torch.Tensor], asked_bt: torch.Tensor, follows_b: torch.Tensor
) -> torch.Tensor:
    logits_btv, pair_b2 = outputs
    words = F.cross_entropy(logits_btv.flatten(0, 1), asked_bt.flatten(), ignore_index=IGNORED)
    return words + F.cross_entropy(pair_b2, follows_b)


ENTRY = Entry("bert", Bert, batch, loss)
