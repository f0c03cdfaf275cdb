"""The passes that compute regions again, on graphs that nobody wrote by hand; which modules their operators
belong to is drawn.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import torch
from hypothesis import strategies as st
from torch import nn

from fxpasses.effects import is_launch
from fxpasses.faults.models import HITS
from fxpasses.faults.sites import places_of
from fxpasses.faults.spec import parse_faults
from fxpasses.graph import ALARM, FAULT_NEWS, FAULT_TABLE, REPLAYED, Role, TrainingGraph
from fxpasses.guards.loops import LOOP
from fxpasses.guards.regions import checked_modules
from fxpasses.passes.base import Pass
from fxpasses.passes.check_products import CheckGradientProducts, CheckProducts
from fxpasses.passes.check_sums import CheckSums
from fxpasses.passes.inject import Inject, InjectForward
from fxpasses.passes.replay import ReplayBackward, ReplayForward
from fxpasses.precision import calls_of
from fxpasses.rewrite import LOOPED, Provenance, listening
from fxpasses.testing.oracles import Run
from fxpasses.testing.oracles.numerics import bitwise
from fxpasses.testing.synthetic import LAYOUTS, GradientGraph, Leaf, Step
from tests.testing.again import again
from tests.testing.faults import armed

# One that is gone in the second round, and one that stays. Bit 14 is one of the mantissa or above in each dtype
# (where it is no more than rounding, nobody notices).
FAULTS = {
    phase: f"bitflip where={phase} op=mm bit=14;stuck where={phase} op=sum bit=14"
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
    """Each checked region is a loop. Of a fault in one that computes again nothing is left, unless it stays:
    then all is as it is without loops.
    """
    loops = [n for n in run.after.walk() if n.target is LOOP]
    assert run.reports[0].changed == bool(loops)
    assert run.reports[0].counts.get("regions", 0) == len(loops)
    assert not any(is_launch(n) for n in run.after.walk_deep())
    checked = [n for n in run.before.walk() if n.name in _checked(run.before)]
    assert checked_modules(run.after) == {name for n in checked for name, _ in calls_of(n)}
    if loops:
        assert run.reports[0].counts["nodes"] >= 2 * len(checked), "operators and their checks"
    places = places_of(run.after)
    assert places == places_of(run.before), "faults happen where they did"
    if not loops or not places.sites:
        return
    site = places.sites[run.seed % len(places.sites)]
    number = site.faults[run.seed // len(places.sites) % len(site.faults)]
    clean, table = run.traced_after.results[0], armed(run, site, number)

    def everywhere(rank: int, role: Role, value: Any) -> Any:
        return table if role.name == f"{FAULT_TABLE}/" else value

    struck = again(run, run.afters, everywhere)[0]
    states = {r.name: struck[at].tolist() for at, _, r in run.after.outputs("state")}
    assert states[f"{FAULT_NEWS}/"][number][HITS] == 1
    if parse_faults(run.current.faults)[number].model == "stuck":
        same = zip(again(run, [run.before] * run.world, everywhere)[0], struck, strict=False)
        assert all(a is None or bitwise(a, b) for a, b in same), f"{site} is not there again"
        return
    if states[f"{REPLAYED}/"][0] != 1 or site.name not in _checked(run.before):
        return
    assert states[f"{ALARM}/"][0] == 0, "the second round is right"
    for at, _, role in run.after.outputs():
        if role.kind != "state":
            assert bitwise(clean[at], struck[at]), f"{role.name} is not what it is without {site}"


def some_regions_alone() -> None:
    """A region that nobody wants to be computed again is not; each is asked for, by its name."""
    source = GradientGraph(
        tangents=(Leaf((3, 3)),),
        saved=(Leaf((3, 3)),),
        steps=(Step("product", 0, 1), Step("product", 2, 1), Step("product", 3, 1)),
        gradients=(4,),
    )
    for chosen in ("m0", "m1", "m2", "nothing"):
        graph = in_modules(source.build(), (2, 2, 2))  # each transposes one factor
        with listening(_Only(Provenance("replay_backward", LOOPED, chosen))):
            report = REGIONS.run(graph)
        loops = [n.meta["provenance"].source for n in graph.walk() if n.target is LOOP]
        assert loops == [chosen] * report.changed and report.changed == (chosen != "nothing")
        assert checked_modules(graph) == {"m0", "m1", "m2"}, "whatever is computed again"


class _Only:
    """Wants this."""

    def __init__(self, chosen: Provenance) -> None:
        self.chosen = chosen

    def before_splice(self, provenance: Provenance) -> None:
        assert provenance.pass_name == self.chosen.pass_name

    def wants(self, provenance: Provenance) -> bool:
        return provenance == self.chosen


def what_a_backward_computes_anew() -> None:
    """An operator of a forward that stands in a backward is no part of the module's region there."""
    source = GradientGraph(
        tangents=(Leaf((3, 3)),),
        saved=(Leaf((3, 3)),),
        steps=(Step("product", 1, 1), Step("product", 0, 2), Step("sum", 3)),
        gradients=(3, 4),
    )
    graph = in_modules(source.build(), (5,))
    anew, own = (n for n in graph.walk() if n.target is torch.ops.aten.mm.default)
    for node in (*anew.all_input_nodes[:1], anew):
        node.meta["nn_module_stack"] = node.meta.pop("fwd_nn_module_stack")
    REGIONS.run(graph)
    assert any(n is anew for n in graph.walk())
    inner = {n.name for n in graph.walk_deep()} - {n.name for n in graph.walk()}
    assert own.name in inner


SINGLE = (some_regions_alone, what_a_backward_computes_anew)


def _checked(graph: TrainingGraph) -> set[str]:
    origins = [n.meta["provenance"] for n in graph.walk() if "provenance" in n.meta]
    return {origin.source for origin in origins if origin.rule == "checksum"}
