"""GPT: the decoder of the benchmarks, small, its head tied to the token embedding.

Exercises: tied weights, integer inputs, causal attention, layer norm. No dropout.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from bench.gpt import GPT, GPTConfig
from tests.zoo.entry import Batch, Entry, seeded_generator

SMALL = GPTConfig(vocab=48, block=12, layers=2, heads=2, width=32, tied=True)


def batch(seed: int) -> Batch:
    tokens = torch.randint(SMALL.vocab, (4, SMALL.block + 1), generator=seeded_generator(seed))
    return Batch((tokens[:, :-1],), (tokens[:, 1:],))


def loss(logits_btv: torch.Tensor, following_bt: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits_btv.flatten(0, 1), following_bt.flatten())


ENTRY = Entry("gpt", lambda: GPT(SMALL), batch, loss)
