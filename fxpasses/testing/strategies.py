"""Hypothesis strategies of graphs, worlds and options."""

from __future__ import annotations

import dataclasses
from typing import Any

from hypothesis import strategies as st

from fxpasses.testing.operators import OPERATORS
from fxpasses.testing.program import INPUT_LAYOUTS, KINDS, SMALLEST_BATCH, Layer, Program
from fxpasses.testing.synthetic import LAYOUTS, GradientGraph, Leaf, Step

WORLDS = st.integers(1, 8)
SEEDS = st.integers(0, 2**16)
_SIZES = st.sampled_from((1, 2, 3, 4, 0))
# Twice and more: what should happen often, for buckets of several gradients and layouts that differ.
_DTYPES = st.sampled_from(("float32", "float32", "float32", "bfloat16", "float64", "float16"))
_USUAL_SHAPES = st.sampled_from(((2, 3), (3, 2), (2, 3, 2), (4,), ()))

SHAPES = st.one_of(_USUAL_SHAPES, st.lists(_SIZES, max_size=3).map(tuple))
LEAVES = st.builds(Leaf, SHAPES, _DTYPES, st.sampled_from(LAYOUTS))
_POSITIONS = st.integers(0, 9)
STEPS = st.builds(Step, st.sampled_from(OPERATORS), _POSITIONS, _POSITIONS)
_BUFFERS = st.builds(Leaf, SHAPES, st.sampled_from(("float32", "int64", "float64")))


def gradient_graphs(max_steps: int = 6, max_gradients: int = 5) -> st.SearchStrategy[GradientGraph]:
    """Backward graphs; they shrink towards one tangent that is nobody's gradient."""
    return st.builds(
        GradientGraph,
        tangents=st.lists(LEAVES, min_size=1, max_size=3).map(tuple),
        steps=st.lists(STEPS, max_size=max_steps).map(tuple),
        gradients=st.one_of(
            _gradients(1, max_gradients), _gradients(0, 1), _gradients(2, max_gradients)
        ),
        saved=st.lists(LEAVES, max_size=2).map(tuple),
        input_gradients=st.lists(_POSITIONS, max_size=2).map(tuple),
        buffers=st.lists(_BUFFERS, max_size=4).map(tuple),
    )


def whole_steps(max_steps: int = 6) -> st.SearchStrategy[GradientGraph]:
    """Graphs of functions that call `backward()`: no tangents, and the buffers are written in the graph."""
    graphs = gradient_graphs(max_steps).filter(lambda graph: graph.gradients or graph.buffers)
    return graphs.map(lambda graph: dataclasses.replace(graph, whole_step=True))


def _gradients(least: int, most: int) -> st.SearchStrategy[tuple[int | None, ...]]:
    # Rarely None: a parameter without a gradient is soon told from one with.
    positions = st.sampled_from((*range(10), None))
    return st.lists(positions, min_size=least, max_size=most).map(tuple)


def environments(max_world: int = 8) -> st.SearchStrategy[dict[str, Any]]:
    """What the backend's options and the process group give a pass."""
    return st.fixed_dictionaries(
        {
            "world": st.one_of(st.integers(2, max_world), st.integers(1, max_world))
            if max_world > 1
            else st.just(1),
            "reduce": st.sampled_from(("mean", "sum")),
            "reduce_dtype": st.sampled_from((None, "bf16", "fp16", "fp32")),
            # MiB: everything in one bucket, each gradient in its own, and in between.
            "bucket_mb": st.sampled_from((1.0, 1e-9, 3e-5, 2e-5, 6e-5)),
            "precision": st.sampled_from(("bf16", "fp16", "fp32")),
            "precision_rules": st.sampled_from(("", "aten.exp=infer;m0=deny", "aten.mul=deny")),
            "loss_scale_in_graph": st.sampled_from((256.0, "dynamic", 0.0, 3.0)),
        }
    ).map(lambda found: {**found, "group": "world", "layout": None})


def programs(
    max_layers: int = 4, kinds: tuple[str, ...] = tuple(KINDS)
) -> st.SearchStrategy[Program]:
    """Programs that torch captures in training mode; they shrink towards few small layers."""
    layer = st.builds(Layer, st.sampled_from(kinds), st.integers(1, 3))
    return st.lists(layer, max_size=max_layers).map(tuple).flatmap(_with_inputs)


def _with_inputs(layers: tuple[Layer, ...]) -> st.SearchStrategy[Program]:
    smallest = max([SMALLEST_BATCH.get(layer.kind, 0) for layer in layers], default=0)
    batches = [batch for batch in (2, 3, 1, 0) if batch >= smallest]
    return st.builds(
        _program,
        st.just(layers),
        st.sampled_from(batches),
        st.integers(1, 4),
        st.sampled_from(INPUT_LAYOUTS),
        st.booleans(),
        st.booleans(),
        st.integers(0, 3),
    )


def _program(
    layers: tuple[Layer, ...],
    batch: int,
    width: int,
    layout: str,
    dynamic: bool,
    grad_input: bool,
    seed: int,
) -> Program:
    # Sizes of zero and one are always constants to torch.
    return Program(layers, batch, width, layout, dynamic and batch > 1, grad_input, seed)
