"""Hypothesis strategies of graphs, programs, tasks, worlds and options."""

from __future__ import annotations

import dataclasses
from typing import Any

from hypothesis import strategies as st

from fxpasses.schedule.tasks import Task
from fxpasses.testing.arguments import known
from fxpasses.testing.operators import OPERATORS, TAKE_TWO
from fxpasses.testing.program import INPUT_LAYOUTS, KINDS, SMALLEST_BATCH, Layer, Program
from fxpasses.testing.sources import Exported
from fxpasses.testing.synthetic import LAYOUTS, GradientGraph, Leaf, Step

WORLDS = st.integers(1, 8)
SEEDS = st.integers(0, 2**16)
_SIZES = st.sampled_from((1, 2, 3, 4, 0))
# Twice and more: what should happen often, for buckets of several gradients and layouts that differ.
_DTYPES = st.sampled_from(("float32", "float32", "float32", "bfloat16", "float64", "float16"))
_USUAL_SHAPES = st.sampled_from(((2, 3), (3, 2), (2, 3, 2), (4,), ()))

SHAPES = st.one_of(_USUAL_SHAPES, st.lists(_SIZES, max_size=3).map(tuple))
LEAVES = st.builds(Leaf, SHAPES, _DTYPES, st.sampled_from(LAYOUTS))
# Shape and dtype mostly those of the graph's first tangent (None): few operators take two that differ.
_LIKE_THE_FIRST = st.tuples(
    st.one_of(st.none(), st.none(), SHAPES),
    st.one_of(st.none(), st.none(), _DTYPES),
    st.sampled_from(LAYOUTS),
)
# Counted from the latest value backwards: what nobody reads is no part of a graph.
_NEAR = (0, 1, 0, 2, 1, 3, 4, 5, 6, 8)
_BACK = st.sampled_from(_NEAR)
_NONE: st.SearchStrategy[list[int]] = st.just([])
_STEPS = st.builds(Step, st.sampled_from(OPERATORS), _BACK, _BACK)
_BUFFERS = st.builds(Leaf, SHAPES, st.sampled_from(("float32", "int64", "float64")))


def gradient_graphs(max_steps: int = 8, max_gradients: int = 5) -> st.SearchStrategy[GradientGraph]:
    """Backward graphs; they shrink towards one tangent that is the gradient of one parameter.

    Args:
        max_steps: how many operators (`operators.OPERATORS`) stand between tangents and gradients.
        max_gradients: how many parameters there are. Up to three tangents, three saved values, two gradients of
            inputs and four written buffers are drawn beside them.

    Raises:
        ValueError: when one of these is negative.
    """
    return _graphs(max_steps, max_gradients)


def joint_graphs(max_steps: int = 8, max_gradients: int = 5) -> st.SearchStrategy[GradientGraph]:
    """The same with one output of the program or two, which don't depend on tangents; as `gradient_graphs`."""
    return _graphs(
        max_steps, max_gradients, least_saved=1, outputs=st.lists(_BACK, min_size=1, max_size=2)
    )


def _graphs(
    max_steps: int,
    max_gradients: int,
    least_saved: int = 0,
    outputs: st.SearchStrategy[list[int]] = _NONE,
) -> st.SearchStrategy[GradientGraph]:
    for name, most in (("max_steps", max_steps), ("max_gradients", max_gradients)):
        if most < 0:
            raise ValueError(f"graphs: {name}={most}; expected 0 or more")
    several = min(2, max_gradients)
    return st.builds(
        _placed,
        first=LEAVES,
        tangents=st.lists(_LIKE_THE_FIRST, max_size=2),
        saved=st.lists(_LIKE_THE_FIRST, min_size=least_saved, max_size=3),
        steps=st.one_of(
            st.lists(_STEPS, max_size=max_steps),
            st.lists(_STEPS, min_size=min(3, max_steps), max_size=max_steps),
        ),
        gradients=st.one_of(
            _gradients(min(1, max_gradients), max_gradients),
            _gradients(0, min(1, max_gradients)),
            _gradients(several, max_gradients),
        ),
        input_gradients=st.lists(_BACK, max_size=2),
        buffers=st.lists(_BUFFERS, max_size=4).map(tuple),
        outputs=outputs,
    )


def _placed(
    first: Leaf,
    tangents: list[tuple[Any, ...]],
    saved: list[tuple[Any, ...]],
    steps: list[Step],
    gradients: list[int | None],
    input_gradients: list[int],
    buffers: tuple[Leaf, ...],
    outputs: list[int],
) -> GradientGraph:
    """A graph of leaves that take after the first, and of positions that were counted backwards."""

    def leaves(drawn: list[tuple[Any, ...]]) -> tuple[Leaf, ...]:
        return tuple(
            Leaf(first.shape if shape is None else shape, dtype or first.dtype, layout)
            for shape, dtype, layout in drawn
        )

    inputs = 1 + len(tangents) + len(saved)
    placed: list[Step] = []
    for i, step in enumerate(steps):
        a, b = ((inputs + i - 1 - back) % (inputs + i) for back in (step.a, step.b))
        placed.append(Step(step.operator, a, b))
    # What nobody has read yet comes first.
    read = {p for step in placed for p in (step.a, *[step.b] * (step.operator in TAKE_TWO))}
    values = sorted(range(inputs + len(placed)), key=lambda p: (p in read, -p))
    return GradientGraph(
        (first, *leaves(tangents)),
        tuple(placed),
        tuple(None if back is None else values[back % len(values)] for back in gradients),
        leaves(saved),
        tuple(values[back % len(values)] for back in input_gradients),
        buffers,
        outputs=tuple(-1 - back for back in outputs),
    )


def whole_steps(max_steps: int = 8) -> st.SearchStrategy[GradientGraph]:
    """Graphs of functions that call `backward()`: no tangents, and the buffers are written in the graph.

    Args:
        max_steps: how many operators there are at most.
    """
    graphs = gradient_graphs(max_steps).filter(lambda graph: graph.gradients or graph.buffers)
    return graphs.map(lambda graph: dataclasses.replace(graph, whole_step=True))


def _gradients(least: int, most: int) -> st.SearchStrategy[list[int | None]]:
    # Rarely None: a parameter without a gradient is soon told from one with.
    positions = st.sampled_from((*_NEAR, None))
    return st.lists(positions, min_size=least, max_size=most)


def environments(max_world: int = 8) -> st.SearchStrategy[dict[str, Any]]:
    """What the backend's options and the process group give a pass, by name.

    Args:
        max_world: of how many ranks at most.
    """
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
    """Programs that torch captures in training mode; they shrink towards one small layer.

    Args:
        max_layers: how many layers a program has at most.
        kinds: of the layers, some of `program.KINDS`.

    Raises:
        ValueError: for a kind that is unknown, or for none, or for less than one layer.
    """
    if max_layers < 1 or isinstance(kinds, str) or not kinds:
        raise ValueError(
            f"programs: max_layers={max_layers}, kinds={kinds!r}; expected 1 or more, and kinds"
        )
    for kind in kinds:
        known("programs: kinds", kind, KINDS)
    layer = st.builds(Layer, st.sampled_from(kinds), st.integers(1, 3))
    return st.lists(layer, min_size=1, max_size=max_layers).map(tuple).flatmap(_with_inputs)


def exported_programs(max_layers: int = 4) -> st.SearchStrategy[Exported]:
    """What `torch.export` makes of such programs, in training mode and in evaluation.

    Args:
        max_layers: how many layers a program has at most.
    """
    return st.builds(Exported, programs(max_layers), st.booleans())


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


@st.composite
def task_graphs(
    draw: st.DrawFn, most: int = 12, least: int = 1, memory: bool = False
) -> list[Task]:
    """Tasks of whole seconds, up to 12, on up to three resources, each behind up to three earlier ones; for
    schedulers (`fxpasses.schedule`).

    Args:
        most, least: how many tasks.
        memory: whether they hold some, up to four bytes each, until the last task behind them has ended.
    """
    resources = draw(st.integers(1, 3))
    tasks: list[Task] = []
    for i in range(draw(st.integers(least, most))):
        after = draw(st.sets(st.integers(0, i - 1), max_size=3)) if i else ()
        tasks.append(
            Task(
                f"t{i}",
                draw(st.integers(0, 12)),
                f"r{draw(st.integers(0, resources - 1))}",
                tuple(sorted(after)),
                draw(st.integers(0, 4)) if memory else 0,
            )
        )
    return tasks
