"""Programs and gradient graphs as data."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys

import pytest
import torch
from hypothesis import find, given

from fxpasses import spec
from fxpasses.testing import GradientGraph, Layer, Leaf, Program, Step, gradient_graphs, programs
from fxpasses.testing.check import settings
from fxpasses.testing.oracles import structure
from fxpasses.testing.program import INPUT_LAYOUTS, KINDS, SMALLEST_BATCH
from fxpasses.testing.synthetic import LAYOUTS
from fxpasses.testing.values import random_inputs


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_every_kind_is_captured_with_a_backward(kind):
    program = Program((Layer(kind, 2), Layer("linear", 1)), batch=3, dynamic=True)
    captured = program.captured()
    for graph in (captured.joint, captured.backward):
        spec.check(graph, "capture")
    assert {"m1.weight", "m1.bias"} <= {g.parameter for g in captured.backward.gradients()}
    assert len(random_inputs(captured.backward)) == len(captured.backward.inputs())


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("kind", ["batch_norm", "dropout", "in_place", "cond"])
def test_programs_are_exported(kind, training):
    graph = Program((Layer(kind, 2),), batch=3, dynamic=True).exported(training)
    spec.check(graph, "export")
    written = [role.name for _, _, role in graph.outputs("mutation")]
    assert bool(written) == (kind == "in_place" or (kind == "batch_norm" and training))
    assert [role.kind for _, _, role in graph.outputs()][len(written) :] == ["output"]
    sizes = [n.meta["val"].shape[0] for n, r in graph.inputs("input")]
    assert all(isinstance(size, torch.SymInt) for size in sizes)


@pytest.mark.parametrize("layout", INPUT_LAYOUTS)
def test_layouts_of_the_input(layout):
    _, (x,) = Program((), batch=3, width=2, layout=layout).build()
    assert x.shape == (3, 2) and x.is_contiguous() == (layout == "contiguous")


def test_a_program_is_the_same_each_time():
    program = Program((Layer("embedding", 2), Layer("dropout")), seed=3)
    (first, inputs), (second, others) = program.build(), program.build()
    assert all(torch.equal(a, b) for a, b in zip(inputs, others, strict=True))
    for (name, a), (_, b) in zip(first.named_parameters(), second.named_parameters(), strict=True):
        assert torch.equal(a, b), name


@pytest.mark.parametrize(
    "source",
    [
        Program((Layer("batch_norm"), Layer("branch", 2), Layer("embedding"))),
        GradientGraph(
            (Leaf((2, 3)), Leaf((), "bfloat16")),
            (Step("product", 0, 0), Step("max", 0), Step("float64", 1)),
            (2, 3, None),
            buffers=(Leaf((2,)),),
        ),
        GradientGraph(
            (Leaf((2,), layout="expanded"),), (Step("unbounded"), Step("bounded")), (1, 2)
        ),
        *(
            GradientGraph((Leaf((2, 0, 3), "float64", layout),), gradients=(0,))
            for layout in LAYOUTS
        ),
    ],
)
def test_source_runs_alone(source, tmp_path):
    script = tmp_path / "program.py"
    script.write_text(source.source())
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "tensor(" in done.stdout


def test_programs_shrink_to_one_layer():
    smallest = Program((Layer("linear", 1),), batch=2, width=1)
    assert find(programs(), lambda p: True, settings=settings(20)) == smallest
    small = find(
        programs(), lambda p: any(x.kind == "gru" for x in p.layers), settings=settings(500)
    )
    assert small.layers == (Layer("gru", 1),)


@settings(50)
@given(programs())
def test_batches_are_large_enough(program):
    assert program.batch >= max([SMALLEST_BATCH.get(x.kind, 0) for x in program.layers], default=0)
    assert not (program.dynamic and program.batch < 2)


@settings(100)
@given(gradient_graphs())
def test_every_list_of_numbers_is_a_graph(source):
    graph = source.build()
    spec.check(graph, "build")
    assert structure(graph) == structure(source.build())
    assert len(graph.outputs("gradient")) == len(source.gradients)
    for (_, _), leaf, real in zip(
        graph.inputs(), source.tangents + source.saved, random_inputs(graph), strict=True
    ):
        assert (tuple(real.shape), real.stride()) == (leaf.shape, leaf.stride())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_of_leaves(layout):
    strides = {
        "contiguous": (12, 4, 1), "transposed": (1, 2, 6), "rotated": (1, 8, 2), "strided": (24, 8, 2),
        "expanded": (0, 4, 1),
    }  # fmt: skip
    assert Leaf((2, 3, 4), layout=layout).stride() == strides[layout]


def test_inputs_depend_on_roles_alone():
    graph = GradientGraph((Leaf((2,)), Leaf((3,)))).build()
    other = GradientGraph((Leaf((2,)), Leaf((3,))), saved=(Leaf((4,)),)).build()
    first, second = random_inputs(graph, 5), random_inputs(other, 5)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=False))
    assert not torch.equal(first[0], random_inputs(graph, 6)[0])


def test_graphs_shrink_to_one_tangent():
    smallest = GradientGraph((Leaf((2, 3)),), gradients=(0,))
    assert find(gradient_graphs(), lambda g: True, settings=settings(20)) == smallest

    def doubles(graph):
        return "mul" in str(graph.build().graph)

    found = find(gradient_graphs(), doubles, settings=settings(500))
    assert len(found.tangents) == 1 and [step.operator for step in found.steps] == ["double"]


@pytest.mark.parametrize(("steps", "gradients"), [(0, 0), (0, 1), (1, 0), (2, 1), (3, 2)])
def test_how_large_graphs_are(steps, gradients):
    @settings(50)
    @given(gradient_graphs(max_steps=steps, max_gradients=gradients))
    def search(graph):
        assert len(graph.steps) <= steps and len(graph.gradients) <= gradients

    search()


def test_nothing_is_drawn_that_nobody_reads():
    @settings(50)
    @given(gradient_graphs())
    def search(source):
        graph = source.build()
        assert not graph.eliminate_dead_code()

    search()
    used = GradientGraph((Leaf((2,)),), (Step("neg"), Step("double")), gradients=(2,)).build()
    assert [str(n.target) for n in used.walk()] == ["aten.mul.Tensor"]


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (
            lambda: Leaf((2,), layout="transpose"),
            "Leaf: layout: 'transpose'; did you mean 'transposed",
        ),
        (
            lambda: Leaf((2,), "fp32"),
            "Leaf: dtype='fp32'; expected one of torch's, such as 'float32'",
        ),
        (lambda: Step("dubble"), "Step: operator: 'dubble'; did you mean 'double'?"),
        (lambda: Layer("linar"), "Layer: kind: 'linar'; did you mean 'linear'?"),
        (
            lambda: Program((), layout="transpose"),
            "Program: layout: 'transpose'; did you mean 'tran",
        ),
        (lambda: GradientGraph((), (Step("neg"),)), "expected a value to begin with"),
        (lambda: GradientGraph((), gradients=(0,)), "expected a value to begin with"),
        (
            lambda: gradient_graphs(max_gradients=-1),
            "graphs: max_gradients=-1; expected 0",
        ),
        (lambda: programs(kinds="linear"), "programs: max_layers=4, kinds='linear'; expected"),
        (lambda: programs(kinds=("linar",)), "programs: kinds: 'linar'; did you mean 'linear'?"),
        (lambda: programs(max_layers=0), "programs: max_layers=0"),
    ],
)
def test_what_makes_no_sense_is_named(make, said):
    with pytest.raises(ValueError, match=re.escape(said)):
        make()


def test_specs_are_plain_data():
    for cls in (Program, Layer, GradientGraph, Leaf, Step):
        assert dataclasses.is_dataclass(cls) and cls.__dataclass_params__.frozen
