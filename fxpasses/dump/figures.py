"""What can be counted of a graph."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import fx

from fxpasses.dump.dot import kind_of
from fxpasses.effects import is_launch
from fxpasses.graph import TrainingGraph
from fxpasses.sizes import example


@dataclasses.dataclass(frozen=True)
class Figures:
    """Counts and bytes of a graph, as one rank runs it.

    Attributes:
        nodes: operator calls.
        casts: changes of dtype.
        collectives: launches.
        wire_bytes: payloads that these launches are given.
        codec_bytes: what operators that compress and decompress read and write.
    """

    nodes: int
    casts: int
    collectives: int
    wire_bytes: int
    codec_bytes: int


def figures_of(graph: TrainingGraph) -> Figures:
    calls = list(graph.walk())
    launches = [node for node in calls if is_launch(node)]
    kinds = [kind_of(node) for node in calls]
    codecs = [node for node, kind in zip(calls, kinds, strict=True) if kind == "codec"]
    return Figures(
        nodes=len(calls),
        casts=kinds.count("cast"),
        collectives=len(launches),
        wire_bytes=sum(_bytes(node.all_input_nodes[:1]) for node in launches),
        codec_bytes=sum(_bytes([node, *node.all_input_nodes]) for node in codecs),
    )


def _bytes(nodes: Iterable[fx.Node]) -> int:
    return sum(_size(node.meta.get("val")) for node in nodes)


def _size(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return math.prod(map(example, value.shape)) * value.element_size()
    return sum(map(_size, value)) if isinstance(value, list | tuple) else 0
