"""Real inputs for a graph, from the fake ones."""

from __future__ import annotations

from typing import Any

import torch

from fxpasses.graph import TrainingGraph


def random_inputs(graph: TrainingGraph, seed: int = 0) -> list[Any]:
    """Real inputs in the layouts of the fake ones.

    Floats are normally distributed, masks drawn, and other integers zero, since they may be positions.
    A size that is not known takes the value that it had when the graph was traced.
    """
    generator = torch.Generator().manual_seed(seed)
    return [random_like(node.meta["val"], generator) for node, _ in graph.inputs()]


def random_like(value: Any, generator: torch.Generator) -> Any:
    """A real tensor, or number, in the place of a fake one."""
    if not isinstance(value, torch.Tensor):
        return _hint(value)
    shape, stride = [[_hint(x) for x in xs] for xs in (value.shape, value.stride())]
    real = torch.empty_strided(shape, stride, dtype=value.dtype)
    # An expanded tensor holds fewer elements than it shows: what is drawn goes to its memory.
    memory = real.as_strided([1 if t == 0 else s for s, t in zip(shape, stride, strict=True)], stride)
    if value.dtype.is_floating_point or value.dtype.is_complex:
        memory.copy_(torch.randn(memory.shape, generator=generator, dtype=torch.float64))
    elif value.dtype is torch.bool:
        memory.copy_(torch.randint(2, memory.shape, generator=generator))
    else:
        memory.zero_()
    return real


def _hint(size: Any) -> Any:
    return size.node.hint if isinstance(size, torch.SymInt | torch.SymFloat | torch.SymBool) else size
