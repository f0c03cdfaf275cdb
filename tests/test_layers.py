"""What kind of layer a parameter belongs to."""

from __future__ import annotations

from torch import nn

from fxpasses.layers import layer_types


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 4)
        self.norm = nn.LayerNorm(4)
        self.batch = nn.BatchNorm1d(4)
        self.conv = nn.Conv1d(4, 4, 3)
        self.cell = nn.LSTM(4, 4)
        self.head = nn.Linear(4, 5)
        self.head.weight = self.embedding.weight
        self.tied_first = nn.Linear(4, 5)
        self.later = nn.Embedding(5, 4)
        self.later.weight = self.tied_first.weight


def test_kinds():
    model = Model()
    found = layer_types(model)
    kinds = {name: found[id(p)] for name, p in model.named_parameters(remove_duplicate=False)}
    assert kinds == {
        "embedding.weight": "embedding",
        "norm.weight": "normalisation",
        "norm.bias": "bias",
        "batch.weight": "normalisation",
        "batch.bias": "bias",
        "conv.weight": "weight",
        "conv.bias": "bias",
        "cell.weight_ih_l0": "weight",
        "cell.weight_hh_l0": "weight",
        "cell.bias_ih_l0": "bias",
        "cell.bias_hh_l0": "bias",
        "head.weight": "embedding",
        "head.bias": "bias",
        "tied_first.weight": "embedding",
        "tied_first.bias": "bias",
        "later.weight": "embedding",
    }
