"""Real inputs for a graph, from the fake ones."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import torch

from fxpasses.exchange import ROUNDS
from fxpasses.feedback import ESTIMATE, MEAN_ESTIMATE, RESIDUAL, VELOCITY
from fxpasses.graph import SCALE_STATE, Role, TrainingGraph
from fxpasses.powersgd import SUBSPACE
from fxpasses.testing.sizes import AS_TRACED, Sizes, number

# Compression feeds back what earlier steps lost, which no bound for this step's gradients holds of.
FROM_EARLIER_STEPS = (RESIDUAL, VELOCITY, ESTIMATE, MEAN_ESTIMATE, SUBSPACE, ROUNDS)


def random_inputs(graph: TrainingGraph, seed: int = 0, sizes: Sizes = AS_TRACED) -> list[Any]:
    """Real inputs in the layouts of the fake ones.

    Floats are normally distributed, masks drawn, and other integers zero, since they may be positions; a loss
    scale is a power of two; compression has no earlier steps. What an input is given depends on its role alone,
    so two graphs that share inputs get the same values for them.

    Args:
        sizes: numbers for the symbols of sizes that vary; as they were traced if not given.
    """
    return [_value(node.meta["val"], role, seed, sizes) for node, role in graph.inputs()]


def inputs_of_ranks(
    graphs: Sequence[TrainingGraph], seed: int, sizes: Sizes = AS_TRACED
) -> list[list[Any]]:
    """`random_inputs` of graphs, one for each rank: of all ranks other ones."""
    return [random_inputs(graph, seed * 97 + rank, sizes) for rank, graph in enumerate(graphs)]


def _value(fake: Any, role: Role, seed: int, sizes: Sizes) -> Any:
    if not isinstance(fake, torch.Tensor):
        return number(fake, sizes)
    generator = torch.Generator().manual_seed(zlib.crc32(f"{role} {seed}".encode()))
    shape, stride = [[number(x, sizes) for x in xs] for xs in (fake.shape, fake.stride())]
    real = torch.empty_strided(shape, stride, dtype=fake.dtype)
    # An expanded tensor holds fewer elements than it shows: what is drawn goes to its memory.
    kept = [1 if t == 0 and s else s for s, t in zip(shape, stride, strict=True)]
    memory = real.as_strided(kept, stride)
    if role.kind == "state" and role.name.startswith(f"{SCALE_STATE}/"):
        memory.fill_(2.0 ** int(torch.randint(9, (), generator=generator)))
    elif role.kind == "state" and role.name.partition("/")[0] in FROM_EARLIER_STEPS:
        memory.zero_()
    elif fake.dtype.is_floating_point or fake.dtype.is_complex:
        memory.copy_(torch.randn(kept, generator=generator, dtype=torch.float64))
    elif fake.dtype is torch.bool:
        memory.copy_(torch.randint(2, kept, generator=generator))
    else:
        memory.zero_()
    return real
