"""What kind of layer a parameter belongs to. It comes from the modules, so it is the same on every rank."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn
from torch.nn.parameter import is_lazy

WEIGHT, BIAS, NORM, EMBEDDING = "weight", "bias", "normalisation", "embedding"


def layer_types(root: nn.Module) -> dict[int, str]:
    """`id(parameter)` → `"weight"`, `"bias"`, `"normalisation"` or `"embedding"`.

    What is tied to an embedding is one. What has fewer than two dimensions is a bias, or part of a norm.
    """
    found: dict[int, str] = {}
    for parameter, kind in _each(root):
        if found.get(id(parameter)) != EMBEDDING:
            found[id(parameter)] = kind
    return found


def _each(root: nn.Module) -> Iterator[tuple[nn.Parameter, str]]:
    for module in root.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if is_lazy(parameter):
                continue
            if isinstance(module, nn.Embedding | nn.EmbeddingBag):
                yield parameter, EMBEDDING
            elif parameter.dim() >= 2:
                yield parameter, WEIGHT
            else:
                yield parameter, BIAS if "bias" in name else NORM
