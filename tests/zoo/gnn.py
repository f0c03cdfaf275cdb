"""Graph network: messages along an edge list, summed at the nodes, which a gated cell updates.

Exercises: gather and `index_add` over integer inputs, `scatter_add` of counts, one layer applied in several
rounds (its parameters are used several times).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from tests.zoo.entry import Batch, Entry, seeded_generator

NODES, EDGES, GRAPHS, FEATURES, KINDS = 16, 40, 4, 5, 3


class Gated(nn.Module):
    """A gated recurrent cell, written out: `nn.GRUCell` rounds differently in eager mode and when traced."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.from_input = nn.Linear(width, 3 * width)
        self.from_hidden = nn.Linear(width, 3 * width)

    def forward(self, x_nw: torch.Tensor, hidden_nw: torch.Tensor) -> torch.Tensor:
        x_reset, x_keep, x_new = self.from_input(x_nw).chunk(3, dim=-1)
        h_reset, h_keep, h_new = self.from_hidden(hidden_nw).chunk(3, dim=-1)
        new_nw = torch.tanh(x_new + (x_reset + h_reset).sigmoid() * h_new)
        return new_nw + (x_keep + h_keep).sigmoid() * (hidden_nw - new_nw)


class MessagePassing(nn.Module):
    """Rounds of messages over graphs that lie side by side in one; a value for each graph out."""

    def __init__(self, width: int = 16, rounds: int = 2) -> None:
        super().__init__()
        self.rounds = rounds
        self.embed = nn.Linear(FEATURES, width)
        self.kinds = nn.Embedding(KINDS, width)
        self.message = nn.Sequential(nn.Linear(3 * width, width), nn.ReLU())
        self.update = Gated(width)
        self.readout = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1))

    def forward(
        self,
        features_nf: torch.Tensor,
        edges_2e: torch.Tensor,
        kinds_e: torch.Tensor,
        graph_n: torch.Tensor,
    ) -> torch.Tensor:
        source_e, target_e = edges_2e
        x_nw, kinds_ew = self.embed(features_nf), self.kinds(kinds_e)
        for _ in range(self.rounds):
            ends_ew = torch.cat([x_nw[source_e], x_nw[target_e], kinds_ew], 1)
            received_nw = torch.zeros_like(x_nw).index_add(0, target_e, self.message(ends_ew))
            x_nw = self.update(received_nw, x_nw)
        return self.readout(_mean_by_graph(x_nw, graph_n)).squeeze(1)


def _mean_by_graph(x_nw: torch.Tensor, graph_n: torch.Tensor) -> torch.Tensor:
    sums_gw = x_nw.new_zeros(GRAPHS, x_nw.shape[1]).index_add(0, graph_n, x_nw)
    ones_n = x_nw.new_ones(len(graph_n))
    return sums_gw / x_nw.new_zeros(GRAPHS).scatter_add(0, graph_n, ones_n)[:, None]


def batch(seed: int) -> Batch:
    """Edges stay within a graph."""
    generator = seeded_generator(seed)
    size = NODES // GRAPHS
    features = torch.randn(NODES, FEATURES, generator=generator)
    graph_e = torch.randint(GRAPHS, (EDGES,), generator=generator)
    edges = torch.randint(size, (2, EDGES), generator=generator) + graph_e * size
    kinds = torch.randint(KINDS, (EDGES,), generator=generator)
    graphs = torch.arange(GRAPHS).repeat_interleave(size)
    return Batch((features, edges, kinds, graphs), (torch.randn(GRAPHS, generator=generator),))


ENTRY = Entry("gnn", MessagePassing, batch, F.mse_loss)
