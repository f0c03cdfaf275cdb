"""The passes that compute regions again, on graphs that nobody wrote by hand; which modules their operators
belong to is drawn.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

from hypothesis import strategies as st
from torch import nn

from fxpasses.effects import is_launch
from fxpasses.faults.models import HITS
from fxpasses.faults.sites import places_of
from fxpasses.graph import ALARM, FAULT_NEWS, FAULT_TABLE, REPLAYED, Role, TrainingGraph
from fxpasses.guards.loops import LOOP
from fxpasses.passes.base import Pass
from fxpasses.passes.check_products import CheckGradientProducts, CheckProducts
from fxpasses.passes.check_sums import CheckSums
from fxpasses.passes.inject import Inject, InjectForward
from fxpasses.passes.replay import ReplayBackward, ReplayForward
from fxpasses.testing.oracles import Run
from fxpasses.testing.oracles.numerics import bitwise
from fxpasses.testing.synthetic import LAYOUTS, GradientGraph, Leaf, Step
from tests.testing.again import again
from tests.testing.faults import armed

# Bit 14 is one of the mantissa or above in each dtype; where it is no more than rounding, nobody notices.
FAULTS = {
    phase: ";".join(f"bitflip where={phase} op={operator} bit=14" for operator in ("mm", "sum"))
    for phase in ("forward", "backward")
}
_GUARDS = "products on=recompute region=m*"
REGIONS = ReplayBackward(guards=_GUARDS, faults=FAULTS["backward"])
FORWARD_REGIONS = ReplayForward(guards=_GUARDS, faults=FAULTS["forward"])


@dataclasses.dataclass(frozen=True)
class Modular:
    """A drawn graph in which so many operators, in order, belong to each module; checked, with faults."""

    graph: GradientGraph
    sizes: tuple[int, ...]

    def build(self) -> TrainingGraph:
        return in_modules(self.graph.build(), self.sizes, forward=bool(self.graph.outputs))

    def source(self) -> str:
        return f"{self.graph.source()}\n# operators of m0, m1, …: {self.sizes}"


def in_modules(
    graph: TrainingGraph, sizes: tuple[int, ...], forward: bool = False
) -> TrainingGraph:
    """A graph whose operators belong to modules, so many to each; checked, with faults."""
    stack = "nn_module_stack" if forward else "fwd_nn_module_stack"
    numbers = itertools.chain.from_iterable([number] * size for number, size in enumerate(sizes))
    for node, number in zip(graph.walk(), numbers, strict=False):
        node.meta[stack] = {f"m{number}": (f"L['self'].m{number}", nn.Module)}
    passes: tuple[Pass, ...] = (CheckGradientProducts(), CheckSums(), Inject(FAULTS["backward"]))
    if forward:
        passes = (CheckProducts(), InjectForward(FAULTS["forward"]))
    for current in passes:
        current.run(graph)
    graph.recompile()
    return graph


def modular_graphs(forward: bool = False) -> st.SearchStrategy[Modular]:
    """Each begins with a product, and one that is a gradient (of a forward: an output); where all is drawn few
    have any.
    """
    positions = st.integers(0, 9)
    operators = (
        "product",
        "sum",
        "add",
        "relu",
        "halves",
        "transpose",
        "flatten",
        "max",
        "float32",
    )
    return st.builds(
        _modular,
        st.sampled_from(("float32", "bfloat16", "float64")),
        st.sampled_from(LAYOUTS),
        st.lists(st.builds(Step, st.sampled_from(operators), positions, positions), max_size=5),
        st.lists(positions, max_size=3),
        st.lists(st.integers(2, 8), min_size=1, max_size=4).map(tuple),
        st.just(forward),
    )


def _modular(
    dtype: str,
    layout: str,
    steps: list[Step],
    results: list[int],
    sizes: tuple[int, ...],
    forward: bool,
) -> Modular:
    first, second = Leaf((3, 3), dtype, layout), Leaf((3, 3), dtype)
    graph = GradientGraph(
        tangents=() if forward else (first,),
        saved=(first, second) if forward else (second,),
        steps=(Step("product", 0, 1), Step("sum", 2), *steps),
        gradients=() if forward else (2, 3, *results),
        outputs=(2, 3, *results) if forward else (),
    )
    return Modular(graph, sizes)


def replayed_as_promised(run: Run) -> None:
    """Each checked region is a loop. Of a fault that one computes again for nothing is left."""
    loops = [n for n in run.after.walk() if n.target is LOOP]
    assert run.reports[0].changed == bool(loops)
    assert run.reports[0].counts.get("regions", 0) == len(loops)
    assert not any(is_launch(n) for n in run.after.walk_deep())
    places = places_of(run.after)
    assert places == places_of(run.before), "faults happen where they did"
    if not loops or not places.sites:
        return
    site = places.sites[run.seed % len(places.sites)]
    (number,) = site.faults
    clean, table = run.traced_after.results[0], armed(run, site, number)

    def everywhere(rank: int, role: Role, value: Any) -> Any:
        return table if role.name == f"{FAULT_TABLE}/" else value

    struck = again(run, run.afters, everywhere)[0]
    states = {r.name: struck[at].tolist() for at, _, r in run.after.outputs("state")}
    assert states[f"{FAULT_NEWS}/"][number][HITS] == 1
    if states[f"{REPLAYED}/"][0] != 1 or site.name not in _checked(run.before):
        return
    assert states[f"{ALARM}/"][0] == 0, "the second round is right"
    for at, _, role in run.after.outputs():
        if role.kind != "state":
            assert bitwise(clean[at], struck[at]), f"{role.name} is not what it is without {site}"


def _checked(graph: TrainingGraph) -> set[str]:
    origins = [n.meta["provenance"] for n in graph.walk() if "provenance" in n.meta]
    return {origin.source for origin in origins if origin.rule == "checksum"}
