"""Graphs for `cast`, in which much runs low, and what the program says stands among it."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from fxpasses.passes.cast import Cast
from fxpasses.rewrite import Provenance, listening, model_line
from fxpasses.testing.capture import capture
from fxpasses.testing.check import settings
from fxpasses.testing.operators import OPERATORS, RARE
from fxpasses.testing.oracles.base import run_pass
from fxpasses.testing.oracles.kept import no_dead_code
from fxpasses.testing.oracles.rules import fakes_true as laid_out_as_said
from fxpasses.testing.program import Layer, Program
from fxpasses.testing.synthetic import GradientGraph, Leaf, Step
from tests.testing.casts import (
    LOW,
    MEMORY,
    STATISTICS,
    casts_as_promised,
    name,
    said,
    some_casts_as_promised,
)


def low_graphs() -> st.SearchStrategy[GradientGraph]:
    """Graphs in which much runs low: products of small squares, mostly in fp32, and what stands around them."""
    square = Leaf((2, 2))
    odd = st.builds(
        Leaf,
        st.sampled_from(((2, 2), (2,), ())),
        st.sampled_from(("float32", "bfloat16", "float16", "float64")),
    )
    same_shape = ("add", "mul", "where", "mask", "scaled", "relu", "large", "exp", "transpose")
    others = (
        "rest",
        "cat",
        "halves",
        "max",
        "sum",
        "expand",
        "bfloat16",
        "float64",
        "neg",
        "flatten",
    )
    others += tuple(operator for operator in RARE if operator != "complex64")
    operators = st.sampled_from((*("product",) * 16, *same_shape * 2, *others))
    latest = st.sampled_from((-1, -1, -1, -2, -3))
    positions = st.sampled_from((-1, -2, -3, -4, 2, 3, 2, 3, 1, 0))
    steps = st.builds(Step, operators, latest, positions)
    return st.builds(
        GradientGraph,
        tangents=st.just((square,)),
        steps=st.lists(steps, min_size=4, max_size=14).map(tuple),
        gradients=st.lists(positions, max_size=3).map(lambda found: (-1, *found)),
        saved=st.tuples(odd, st.just(square), st.just(square)),
        input_gradients=st.lists(positions, max_size=1).map(tuple),
    )


def attention_keeps_statistics() -> None:
    """Attention runs low, forward and backward; its log-sum-exp stays fp32."""
    layer = nn.Linear(8, 8)

    def program(x: torch.Tensor) -> torch.Tensor:
        q = layer(x).view(2, 5, 2, 4).transpose(1, 2)
        return F.scaled_dot_product_attention(q, q, q, is_causal=True).square().sum()

    run = run_pass([Cast("bf16", "")], capture(program, torch.randn(2, 5, 8)).joint)
    casts_as_promised(run)
    assert {name(n) for n in run.after.walk()} > set(STATISTICS), "no attention was seen"


def what_the_program_says_stays() -> None:
    """Under `autocast(enabled=False)`, and elementwise code behind a `.float()`."""
    layer = nn.Linear(3, 3)

    def program(x: torch.Tensor) -> torch.Tensor:
        y = layer(x)
        with torch.autocast("cpu", enabled=False):
            z = layer(y).relu()
        return layer((layer(z).float() * 2).relu()).sum()

    run = run_pass([Cast("bf16", "")], capture(program, torch.randn(2, 3)).joint)
    casts_as_promised(run)
    assert {said(n) for n in run.after.walk()} >= {
        "keep",
        "explicit",
    }


def sizes_that_vary() -> None:
    """Sizes that are not known are inputs like tensors, and no values."""
    layers = (Layer("linear", 2), Layer("views"), Layer("linear", 2), Layer("attention", 2))
    run = run_pass([Cast("bf16", "")], Program(layers, batch=3, dynamic=True).captured().joint)
    casts_as_promised(run)
    assert any(isinstance(n.meta.get("val"), torch.SymInt) for n in run.before.graph.nodes)


def marked_operators(examples: int) -> None:
    """What has an effect stays, whatever the rules say, and what the program pins."""
    marks = st.dictionaries(
        st.integers(0, 13), st.sampled_from(("effect", "keep", "explicit")), max_size=4
    )
    rules = st.sampled_from(
        ("", "aten.exp=allow", "aten.permute=allow", "aten.exp=infer;aten.mul=deny")
    )

    @settings(examples)
    @given(low_graphs(), marks, rules, st.sampled_from(sorted(LOW)))
    def search(source: GradientGraph, marks: dict[int, str], rules: str, low: str) -> None:
        graph = source.build()
        for at, node in enumerate(graph.walk()):
            mark = marks.get(at)
            if mark == "effect":
                node.meta["effect"] = mark
            elif mark is not None:
                node.meta["custom"] = {"precision": mark}
        casts_as_promised(run_pass([Cast(low, rules)], graph))

    search()


class _Some:
    """Lets a pass do what it asks for, but for some of it; what is drawn goes with where it is drawn."""

    def __init__(self, refused: set[int]) -> None:
        self._refused = refused
        self.answers: dict[Provenance, bool] = {}

    def before_splice(self, provenance: Provenance) -> None:
        """It has asked for everything before."""

    def wants(self, provenance: Provenance) -> bool:
        assert provenance not in self.answers, f"{provenance} is asked for twice"
        is_drawn = provenance.source.startswith(("bernoulli", *MEMORY))
        self.answers[provenance] = is_drawn or len(self.answers) not in self._refused
        return self.answers[provenance]


def some_of_it(examples: int) -> None:
    """Each operator that would be lowered is asked for by name, and lowered if it is wanted (as for `bisect`);
    parts of a value go with it; whatever is lowered, casts stand around it.
    """
    refused = st.sets(st.integers(0, 20), max_size=6)
    between = st.builds(Step, st.sampled_from(("half", "dropout", "relu")), st.just(-1))
    steps = st.lists(between, min_size=1, max_size=4).map(
        lambda found: [_PRODUCT, *(each for step in found for each in (step, _PRODUCT))]
    )
    square = (Leaf((2, 2)),)
    chains = st.builds(
        GradientGraph, st.just(()), steps.map(tuple), st.just((-1, -2)), st.just(square)
    )

    @settings(examples)
    @given(st.one_of(low_graphs(), chains), refused, st.sampled_from(sorted(LOW)))
    def search(source: GradientGraph, refused: set[int], low: str) -> None:
        listener = _Some(refused)
        with listening(listener):
            run = run_pass([Cast(low, "")], source.build())
        casts = some_casts_as_promised(run)
        lowered = {node for node in map(casts.origin, casts.lowered) if name(node) != "getitem"}
        asked = {Provenance("cast", "lower", n.name, model_line(n)) for n in lowered}
        assert {why for why, wanted in listener.answers.items() if wanted} == asked

    search()


_PRODUCT = Step("product", -1, -1)
_SAVED = (Leaf((2,)), Leaf((2, 2)), Leaf((2, 2)))
# What stands behind an operator.
_FOLLOW = (
    (_PRODUCT,),
    (Step("exp", -1),),
    (Step("exp", -1), Step("product", -2, -2)),
    (Step("rest", -1), Step("exp", -1), Step("transpose", -3), Step("exp", -1)),
    (Step("rest", -1), Step("exp", -1)),
    (Step("add", -1, 1), _PRODUCT),
)
_BINARY = ("mask", "where", "cat", "add", "mul", "product", "dropped", "kept")
_PARTS = ("half", "halves", "max", "norm", "pool", "dropout")


def what_stands_around_products() -> None:
    """Each operator between a product and another, or exponentials, or both."""
    for operator in (*OPERATORS, *RARE):
        for steps, other in itertools.product(
            _FOLLOW, (-1, -2, 1) if operator in _BINARY else (0,)
        ):
            between = (_PRODUCT, Step(operator, -1, other), *steps)
            gradients = tuple(range(-len(steps), 0))
            spec = GradientGraph((), between, gradients, saved=_SAVED)
            for current in (Cast("bf16", ""), Cast("fp16", "aten.exp=infer;aten.relu=deny")):
                run = run_pass([current], spec.build())
                casts_as_promised(run)
                no_dead_code(run)


def parts_go_with_the_whole() -> None:
    """Whatever is said of one of several values: it has the dtype that the operator gives it."""
    for operator, mark in itertools.product(_PARTS, ("keep", "explicit", "effect")):
        steps = (_PRODUCT, Step(operator, -1), _PRODUCT)
        graph = GradientGraph((), steps, (-1,), saved=_SAVED).build()
        parts = [node for node in graph.walk() if name(node) == "getitem"]
        for node in parts:
            node.meta |= {"effect": mark} if mark == "effect" else {"custom": {"precision": mark}}
        assert parts
        casts_as_promised(run_pass([Cast("bf16", "")], graph))


def what_leads_to_nothing_low_stays() -> None:
    """An operator between a low value and a concatenation, which stays since the value is read in fp32."""
    steps = (_PRODUCT, Step("neg", -1), Step("neg", -2), Step("cat", -1, -3), Step("exp", -3))
    spec = GradientGraph((), steps, (-1, -2), saved=_SAVED)
    casts_as_promised(run_pass([Cast("bf16", "")], spec.build()))


def pinned_views_are_laid_out_anew() -> None:
    """What is cast behind an expansion is dense, and so are the views of it that stay."""
    for behind in ((), (Step("exp", -1),)):
        steps = (_PRODUCT, Step("expand", -1), Step("transpose", -1), *behind)
        graph = GradientGraph((), steps, (-1,), saved=_SAVED).build()
        pinned = [node for node in graph.walk() if name(node) == "permute"][-1]
        pinned.meta["custom"] = {"precision": "keep"}
        run = run_pass([Cast("bf16", "")], graph)
        casts_as_promised(run)
        laid_out_as_said(run)


def streams(examples: int) -> None:
    """What commutes with rounding, read by a product and sums or comparisons, of what was low and was not; once
    or two of it; and one of the operators around it is marked.
    """
    norm, exp, transpose = (Step(kind, -1) for kind in ("norm", "exp", "transpose"))
    made = st.sampled_from(
        ((_PRODUCT, norm), (_PRODUCT, norm, transpose), (norm,), (exp,), (_PRODUCT, exp))
    )
    operators = st.sampled_from(("relu", "neg"))
    readers = st.sampled_from((("where",), ("add",), ("mul", "where"), ("mask",), ()))
    marked = st.sampled_from(("", "batch_norm", "add", "where"))
    marks = st.sampled_from(("keep", "explicit"))

    @settings(2 * examples)
    @given(made, operators, st.booleans(), readers, marked, marks, st.sampled_from(sorted(LOW)))
    def search(
        made: tuple[Step, ...],
        operator: str,
        two: bool,
        readers: tuple[str, ...],
        marked: str,
        mark: str,
        low: str,
    ) -> None:
        behind: tuple[Step, ...] = (Step(operator, -1), Step("product", -1, 0))
        if two:
            behind = (Step(operator, -1), Step("relu", -2), Step("product", -1, -2))
        behind += tuple(Step(reader, -2 - i, -3 - i) for i, reader in enumerate(readers))
        ends = tuple(range(-1 - len(readers), 0))
        graph = GradientGraph((), (*made, *behind), ends, saved=(Leaf((2, 2)),) * 2).build()
        for node in graph.walk():
            if marked and marked in name(node):
                node.meta["custom"] = {"precision": mark}
        casts_as_promised(run_pass([Cast(low, "")], graph))

    search()


SINGLE: tuple[Callable[[], None], ...] = (
    attention_keeps_statistics,
    what_the_program_says_stays,
    sizes_that_vary,
    what_stands_around_products,
    parts_go_with_the_whole,
    pinned_views_are_laid_out_anew,
    what_leads_to_nothing_low_stays,
)
