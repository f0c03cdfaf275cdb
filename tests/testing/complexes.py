"""Complex gradients among real ones: no scheme compresses them, and every pass works beside them or on them."""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st

from fxpasses.finite import is_finite
from fxpasses.passes.compress import Compress
from fxpasses.testing.check import check_run, settings
from fxpasses.testing.oracles import ORACLES
from fxpasses.testing.strategies import SEEDS, environments
from fxpasses.testing.synthetic import GradientGraph, Leaf, Step, parameter_name
from tests.testing.compression import not_poisoned
from tests.testing.properties import OWN

_SHAPES = st.sampled_from(((8, 8), (4,), (3, 2), (), (0, 2)))


def complex_gradients(examples: int) -> None:
    """Whatever a pass does, it does beside them too."""
    names = [name for name, (current, _) in OWN.items() if current.stage == "backward"]

    @settings(examples)
    @given(_graphs(), environments(4), SEEDS, st.sampled_from(names))
    def search(source: GradientGraph, environment: dict[str, Any], seed: int, name: str) -> None:
        current, oracles = OWN[name]
        environment = {**environment, "reduce_dtype": None}  # they travel in their own
        if isinstance(current, Compress):
            rules = _rules(source, current.scheme or "")
            current, oracles = dataclasses.replace(current, scheme=rules), (not_poisoned,)
            environment["compression"] = rules
        check_run(current, source, environment, seed, (*ORACLES, *oracles))

    search()


def each_part_counts() -> None:
    """A number is finite if both of its parts are."""
    parts = (0.0, -1.5, torch.inf, -torch.inf, torch.nan)
    for real, imaginary in itertools.product(parts, parts):
        expected = math.isfinite(real) and math.isfinite(imaginary)
        assert is_finite(torch.tensor(complex(real, imaginary))).item() == expected


SINGLE = (each_part_counts,)


def _graphs() -> st.SearchStrategy[GradientGraph]:
    """Gradients of one tangent or more, some of them as complex numbers."""
    leaves = st.lists(st.tuples(_SHAPES, st.booleans()), min_size=1, max_size=4)
    return leaves.map(_graph)


def _graph(leaves: list[tuple[tuple[int, ...], bool]]) -> GradientGraph:
    steps = tuple(
        Step("complex64" if is_complex else "neg", i) for i, (_, is_complex) in enumerate(leaves)
    )
    first = len(leaves)
    return GradientGraph(
        tuple(Leaf(shape) for shape, _ in leaves),
        steps,
        gradients=tuple(range(first, first + len(steps))),
    )


def _rules(source: GradientGraph, scheme: str) -> str:
    own = [
        f"{parameter_name(i)}=none"
        for i, step in enumerate(source.steps)
        if step.operator == "complex64"
    ]
    return ";".join([f"*={scheme}", *own])
