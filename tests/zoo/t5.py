"""T5: encoder and decoder, RMS norms, relative position biases that all layers of a stack share.

Exercises: RMSNorm, one embedding used three times (both stacks and the head), a parameter shared by layers,
cross-attention, causal and padding masks. No dropout.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn

from tests.zoo.entry import Batch, Entry, seeded_generator

VOCAB, SOURCE, TARGET = 40, 8, 6
BUCKETS, FARTHEST = 8, 16


def distance_buckets(length: int, two_sided: bool, device: torch.device) -> torch.Tensor:
    """Bucket of each (query, key) pair: near distances by themselves, far ones by their logarithm."""
    places_t = torch.arange(length, device=device)
    ahead_qk = places_t[None, :] - places_t[:, None]
    buckets = BUCKETS // 2 if two_sided else BUCKETS
    side_qk = (ahead_qk > 0).long() * buckets if two_sided else torch.zeros_like(ahead_qk)
    far_qk = ahead_qk.abs() if two_sided else (-ahead_qk).clamp(min=0)
    exact = buckets // 2
    scale = (buckets - exact) / math.log(FARTHEST / exact)
    log_qk = exact + (torch.log(far_qk.clamp(min=1) / exact) * scale).long()
    return side_qk + torch.where(far_qk < exact, far_qk, log_qk.clamp(max=buckets - 1))


class Attention(nn.Module):
    """Unscaled dot products plus a bias; no bias in any projection."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.out = (
            nn.Linear(width, width, bias=False) for _ in range(4)
        )
        nn.init.normal_(self.query.weight, std=width**-0.5 * (width // heads) ** -0.5)

    def forward(
        self, x_btw: torch.Tensor, memory_bsw: torch.Tensor, bias_bhts: torch.Tensor
    ) -> torch.Tensor:
        q, k, v = (
            layer(source).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for layer, source in (
                (self.query, x_btw),
                (self.key, memory_bsw),
                (self.value, memory_bsw),
            )
        )
        weights_bhts = (q @ k.transpose(-2, -1) + bias_bhts).softmax(-1)
        return self.out((weights_bhts @ v).transpose(1, 2).flatten(-2))


class Layer(nn.Module):
    """Self-attention, in a decoder cross-attention, and an MLP, each behind an RMS norm."""

    def __init__(self, width: int, heads: int, crosses: bool) -> None:
        super().__init__()
        self.norm, self.attention = nn.RMSNorm(width), Attention(width, heads)
        self.cross_norm = nn.RMSNorm(width) if crosses else None
        self.cross = Attention(width, heads) if crosses else None
        self.mlp_norm = nn.RMSNorm(width)
        self.up = nn.Linear(width, 2 * width, bias=False)
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(
        self,
        x_btw: torch.Tensor,
        bias_bhtt: torch.Tensor,
        memory: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> torch.Tensor:
        h_btw = self.norm(x_btw)
        x_btw = x_btw + self.attention(h_btw, h_btw, bias_bhtt)
        if self.cross is not None:
            x_btw = x_btw + self.cross(self.cross_norm(x_btw), *memory)
        return x_btw + self.down(F.relu(self.up(self.mlp_norm(x_btw))))


class Stack(nn.Module):
    """The layers of an encoder or a decoder, and the bias that they share."""

    def __init__(self, width: int, heads: int, layers: int, decodes: bool) -> None:
        super().__init__()
        self.decodes = decodes
        self.distances = nn.Embedding(BUCKETS, heads)
        self.layers = nn.ModuleList(Layer(width, heads, decodes) for _ in range(layers))
        self.norm = nn.RMSNorm(width)

    def forward(
        self,
        x_btw: torch.Tensor,
        mask_bhtt: torch.Tensor,
        memory: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> torch.Tensor:
        buckets_tt = distance_buckets(x_btw.shape[1], not self.decodes, x_btw.device)
        bias_bhtt = self.distances(buckets_tt).permute(2, 0, 1) + mask_bhtt
        for layer in self.layers:
            x_btw = layer(x_btw, bias_bhtt, memory)
        return self.norm(x_btw)


class T5(nn.Module):
    """Source tokens and target tokens in, logits of the target out."""

    def __init__(self, width: int = 24, heads: int = 2) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, width)
        self.encoder = Stack(width, heads, layers=2, decodes=False)
        self.decoder = Stack(width, heads, layers=1, decodes=True)
        self.head = nn.Linear(width, VOCAB, bias=False)
        self.head.weight = self.tokens.weight

    def forward(
        self, source_bs: torch.Tensor, target_bt: torch.Tensor, real_bs: torch.Tensor
    ) -> torch.Tensor:
        padding_bhts = torch.zeros(real_bs.shape).masked_fill(~real_bs, -1e9)[:, None, None, :]
        length = target_bt.shape[1]
        future_tt = torch.full((length, length), -1e9).triu(1)
        encoded_bsw = self.encoder(self.tokens(source_bs), padding_bhts)
        y_btw = self.decoder(self.tokens(target_bt), future_tt, (encoded_bsw, padding_bhts))
        return self.head(y_btw * y_btw.shape[-1] ** -0.5)


def batch(seed: int) -> Batch:
    """The target starts with token 0 and is to be continued."""
    generator = seeded_generator(seed)
    source_bs = torch.randint(1, VOCAB, (4, SOURCE), generator=generator)
    lengths_b = torch.randint(SOURCE // 2, SOURCE + 1, (4,), generator=generator)
    real_bs = torch.arange(SOURCE) < lengths_b[:, None]
    wanted_bt = torch.randint(1, VOCAB, (4, TARGET), generator=generator)
    given_bt = F.pad(wanted_bt[:, :-1], (1, 0))
    return Batch((source_bs, given_bt, real_bs), (wanted_bt,))


def loss(logits_btv: torch.Tensor, wanted_bt: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits_btv.flatten(0, 1), wanted_bt.flatten())


ENTRY = Entry("t5", T5, batch, loss)
