"""What a compiled region can reach: the modules around it, whether or not its graph uses all of them.

Ranks may compile one piece of code to different graphs (a part that is skipped on some ranks), so names come
from the modules, not from what a graph happens to use: they are the same on every rank.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from fxpasses.layers import BIAS, WEIGHT, layer_types

_DEPTH = 2  # of lists in lists; one may even hold itself


@dataclasses.dataclass(frozen=True)
class Scope:
    """The parameters and buffers that a region can reach.

    Attributes:
        code: which code it is, the same text on every rank: `Net.forward (train.py:12)`.
        names: `id(tensor)` → name. A tensor that goes by two names (tied weights) has the first one.
        references: name → parameter or buffer.
        is_module: whether it is one module, whose qualified names these are.
        layers: name of a parameter → what kind of layer it belongs to (`layers.layer_types`).
    """

    code: str
    names: Mapping[int, str]
    references: Mapping[str, weakref.ref[torch.Tensor]]
    is_module: bool
    layers: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Those that are still alive, by name."""
        found = {name: reference() for name, reference in self.references.items()}
        return {name: tensor for name, tensor in found.items() if tensor is not None}


def scope_of(code: str, variables: Mapping[str, Any]) -> Scope:
    """The scope of some code.

    Args:
        code: name of the code.
        variables: what its variables hold. Modules, parameters, and lists, tuples and dicts of these count.
    """
    roots = _outermost(dict(_roots(variables)))
    only = len(roots) == 1 and isinstance(next(iter(roots.values())), nn.Module)
    names: dict[int, str] = {}
    references: dict[str, weakref.ref[torch.Tensor]] = {}
    layers: dict[str, str] = {}
    for label, root in roots.items():
        types = layer_types(root) if isinstance(root, nn.Module) else {}
        for name, tensor in _tensors(root):
            full = name if only else ".".join(filter(None, (label, name)))
            if id(tensor) not in names and _is_plain(tensor):
                names[id(tensor)] = full
                references[full] = weakref.ref(tensor)
                if isinstance(tensor, nn.Parameter):
                    layers[full] = types.get(id(tensor), WEIGHT if tensor.dim() >= 2 else BIAS)
    owner = f"{type(next(iter(roots.values()))).__name__}." if only else ""
    return Scope(owner + code, names, references, only, layers)


def _roots(
    variables: Mapping[str, Any], depth: int = 0
) -> Iterator[tuple[str, nn.Module | nn.Parameter]]:
    for label, value in variables.items():
        if isinstance(value, nn.Module | nn.Parameter):
            yield label, getattr(value, "_orig_mod", value)
        elif depth == _DEPTH:
            continue
        elif isinstance(value, list | tuple):
            yield from _roots({f"{label}.{i}": v for i, v in enumerate(value)}, depth + 1)
        elif isinstance(value, dict) and all(isinstance(key, str) for key in value):
            yield from _roots({f"{label}.{k}": v for k, v in value.items()}, depth + 1)


def _outermost(roots: dict[str, nn.Module | nn.Parameter]) -> dict[str, nn.Module | nn.Parameter]:
    """Without what is part of another root, and each once."""
    parts: set[int] = set()
    for root in roots.values():
        if isinstance(root, nn.Module):
            parts |= {id(m) for m in root.modules() if m is not root}
            parts |= {id(p) for p in root.parameters()}
    kept: dict[int, tuple[str, nn.Module | nn.Parameter]] = {}
    for label, root in roots.items():
        if id(root) not in parts:
            kept.setdefault(id(root), (label, root))
    return dict(kept.values())


def _tensors(root: nn.Module | nn.Parameter) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(root, nn.Parameter):
        yield "", root
        return
    for name, tensor in (*root.named_parameters(), *root.named_buffers()):
        yield name.replace("_orig_mod.", ""), tensor


def _is_plain(tensor: torch.Tensor) -> bool:
    """A dense tensor with values: no sharded, sparse or lazy one."""
    from torch.distributed.tensor import DTensor

    return (
        tensor.layout == torch.strided and not is_lazy(tensor) and not isinstance(tensor, DTensor)
    )
