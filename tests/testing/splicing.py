"""`splice` on graphs that nobody wrote by hand, and what is asked before and behind it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import fx

from fxpasses.graph import Role, TrainingGraph
from fxpasses.rewrite import Provenance, listening, model_line, origin_of, splice, wanted
from fxpasses.spec import check as check_rules
from fxpasses.testing.check import settings
from fxpasses.testing.oracles.base import trace
from fxpasses.testing.oracles.numerics import bitwise
from fxpasses.testing.program import Layer, Program
from fxpasses.testing.strategies import SEEDS, gradient_graphs
from fxpasses.testing.synthetic import GradientGraph, Leaf, Step

FUNCTIONS: dict[str, Callable[..., Any]] = {
    "sum": lambda a, b: a.float().sum() + b.float().sum(),
    "pair": lambda a, b: [a * 2, {"second": b.neg()}],
    "same": lambda a, b: a,
    "difference": lambda a, b: (a.double().sum() - b.double().sum()).reshape(1),
    "one of many": lambda a, b: a.reshape(-1).repeat(4).split([a.numel()] * 4)[1],
    "split": lambda a, b: torch.cat([a.reshape(-1).double(), b.reshape(-1).double()]).split(1),
}


def splices_inline(examples: int) -> None:
    """What is spliced computes what the function computes, stands where it should, and says whose it is."""

    @settings(examples)
    @given(
        gradient_graphs(),
        st.sampled_from(sorted(FUNCTIONS)),
        st.integers(0, 9),
        st.integers(0, 9),
        SEEDS,
    )
    def search(source: GradientGraph, name: str, a: int, b: int, seed: int) -> None:
        graph = source.build()
        nodes = [n for n in graph.graph.nodes if isinstance(n.meta.get("val"), torch.Tensor)]
        first, second = nodes[a % len(nodes)], nodes[b % len(nodes)]
        if seed % 2 and _same_form(first, second):
            # As where a pass copied the value of another node.
            second.meta["val"] = first.meta["val"]
        old = [n.name for n in graph.graph.nodes]
        why = Provenance("test", name, first.name)
        result = splice(
            graph, graph.output_node, FUNCTIONS[name], first, second, name="new", provenance=why
        )
        _inlined_right(graph, old, result, why)
        _computes(graph, FUNCTIONS[name], first, second, result, seed)

    search()


def _same_form(a: fx.Node, b: fx.Node) -> bool:
    x, y = a.meta["val"], b.meta["val"]
    return (x.shape, x.dtype, x.stride()) == (y.shape, y.dtype, y.stride())


def _inlined_right(graph: TrainingGraph, old: list[str], result: Any, why: Provenance) -> None:
    names = [n.name for n in graph.graph.nodes]
    added = names[len(old) - 1 : -1]
    assert names == [*old[:-1], *added, old[-1]], "new nodes stand elsewhere"
    for node in graph.graph.nodes:
        if node.name in added:
            assert node.name.startswith("new_") and node.meta["provenance"] == why
            assert origin_of(node) == why
            assert "val" in node.meta and (
                not isinstance(node.meta["val"], torch.Tensor) or "tensor_meta" in node.meta
            )
            short = str(node.target).split(".")[1] if "aten" in str(node.target) else "getitem"
            assert node.name.startswith(f"new_{short}"), f"{node.name} is a {node.target}"
    leaves = torch.utils._pytree.tree_leaves(result)
    assert all(isinstance(x, fx.Node) and x.graph is graph.graph for x in leaves)
    idle = [n for n in graph.graph.nodes if n.name in added and not n.users and n not in leaves]
    assert not idle, f"{idle} is left and nothing uses it"
    check_rules(graph, "splice")


def _computes(
    graph: TrainingGraph, fn: Any, a: fx.Node, b: fx.Node, result: Any, seed: int
) -> None:
    leaves = torch.utils._pytree.tree_leaves(result)
    for node in (a, b, *leaves):
        graph.add_output(node, Role("output", node.name))
    (row,) = trace([graph], seed).results
    x, y, *found = row[len(row) - len(leaves) - 2 :]
    expected = torch.utils._pytree.tree_leaves(fn(x, y))
    assert all(bitwise(p, q) for p, q in zip(found, expected, strict=True)), (
        "computes something else"
    )


def splice_refuses_tensors() -> None:
    """A tensor that is no argument is refused, by name; the graph's mode stays as strict as it was."""
    graph = GradientGraph((Leaf((2,)),), (Step("double"),), (1,)).build()
    mode, constant = graph.fake_mode, torch.ones(2)
    strict = mode.allow_non_fake_inputs
    node = graph.gradients()[0].node
    try:
        splice(
            graph,
            graph.output_node,
            lambda x: x + constant,
            node,
            name="bad",
            provenance=Provenance("t", "r"),
        )
    except ValueError as error:
        assert "bad" in str(error) and "not an argument" in str(error)
    else:
        raise AssertionError("a tensor that is no argument went through")
    assert mode.allow_non_fake_inputs == strict


def splice_tells_arguments_apart() -> None:
    """Two nodes may share one fake value, and stay two arguments."""
    graph = GradientGraph((Leaf((2,)), Leaf((2,))), gradients=(0,)).build()
    (first, _), (second, _) = graph.inputs()
    second.meta["val"] = first.meta["val"]
    why = Provenance("t", "r")
    node = splice(graph, graph.output_node, torch.sub, first, second, name="n", provenance=why)
    graph.set_output(0, node)
    (result,) = fx.Interpreter(graph.module).run(torch.full((2,), 5.0), torch.full((2,), 2.0))
    assert result.tolist() == [3.0, 3.0]


def splice_takes_numbers() -> None:
    """Numbers among the arguments are constants; sizes that are not known are arguments like tensors."""
    graph = GradientGraph((Leaf((2,)),), gradients=(0,)).build()
    ((tangent, _),) = graph.inputs()
    why = Provenance("t", "r")
    node = splice(
        graph, graph.output_node, lambda n, xs: xs[0] * n, 3, [tangent], name="n", provenance=why
    )
    graph.set_output(0, node)
    assert fx.Interpreter(graph.module).run(torch.ones(2))[0].tolist() == [3.0, 3.0]
    graph = Program((Layer("views"),), batch=3, dynamic=True).captured().backward.copy()
    size = next(n for n, _ in graph.inputs() if isinstance(n.meta["val"], torch.SymInt))
    tangent = next(n for n, role in graph.inputs("tangent"))
    node = splice(
        graph, graph.output_node, lambda x, n: x * n, tangent, size, name="n", provenance=why
    )
    assert size in node.all_input_nodes


def splice_takes_branches() -> None:
    """`torch.cond` becomes a call of graphs that belong to the module, under names of their own."""
    spec = GradientGraph((Leaf((2,)),), (Step("double"),), (1,))
    graph = spec.build()

    def branch(x: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.sum() > 0, lambda x: x * 2, lambda x: x * 3, (x,))

    for _ in range(2):
        node = graph.gradients()[0].node
        new = splice(
            graph, graph.output_node, branch, node, name="b", provenance=Provenance("t", "r")
        )
        graph.set_output(0, new[0] if isinstance(new, tuple | list) else new)
    graph.recompile()
    for sign, expected in ((1.0, 8.0), (-1.0, -18.0)):
        (result,) = fx.Interpreter(graph.module).run(torch.full((2,), sign))
        assert result.tolist() == [expected] * 2
    names = [n.target for n in graph.graph.find_nodes(op="get_attr")]
    assert len(set(names)) == len(names) == 4 and all(hasattr(graph.module, x) for x in names)


class _Told:
    def __init__(self) -> None:
        self.splices: list[Provenance] = []

    def before_splice(self, provenance: Provenance) -> None:
        self.splices.append(provenance)

    def wants(self, provenance: Provenance) -> bool:
        return provenance.rule != "refused"


def listeners_are_told() -> None:
    """Who listens hears of each splice, may refuse what is asked for, and neither any longer than it wants."""
    graph = GradientGraph((Leaf((2,)),), (Step("double"),), (1,)).build()
    node, told = graph.gradients()[0].node, _Told()
    rewrites = [Provenance("t", rule) for rule in ("first", "refused", "last")]

    def write(why: Provenance) -> None:
        splice(graph, graph.output_node, torch.neg, node, name="n", provenance=why)

    write(rewrites[0])
    with listening(told):
        for why in rewrites[1:]:
            write(why)
            assert told.splices[-1] == why
        assert [wanted(why) for why in rewrites] == [True, False, True]
    write(rewrites[0])
    assert told.splices == rewrites[1:] and all(map(wanted, rewrites))


def model_lines() -> None:
    """The last frame of a trace is the line of the model."""
    node = GradientGraph((Leaf((2,)),), (Step("double"),), (1,)).build().gradients()[0].node
    assert model_line(node) == ""
    node.meta["stack_trace"] = (
        'x\n  File "/a/m.py", line 3, in f\n    y()\n  File "/a/n.py", line 12, in forward\n    z\n'
    )
    assert model_line(node) == "/a/n.py:12"


SINGLE = (
    splice_refuses_tensors,
    splice_tells_arguments_apart,
    splice_takes_numbers,
    splice_takes_branches,
    listeners_are_told,
    model_lines,
)
