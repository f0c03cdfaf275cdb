"""`check_pass`: what it runs, what it says."""

from __future__ import annotations

import dataclasses
import itertools
import re
import sys
from typing import ClassVar

import pytest
import torch
from hypothesis import strategies as st

import fxpasses.testing.synthetic
from fxpasses.passes.base import Pass, Report
from fxpasses.passes.bucketing import Bucketing
from fxpasses.passes.gradient_sync import GradientSync
from fxpasses.testing import (
    OracleFailure,
    capture,
    check_pass,
    check_run,
    programs,
    property_test,
)
from fxpasses.testing.check import count_of_examples, prerequisites
from tests.graphs import add_call


@dataclasses.dataclass(frozen=True)
class Nothing(Pass):
    """Leaves every graph as it is."""

    name: ClassVar[str] = "nothing"
    stage: ClassVar[str] = "backward"

    def run(self, graph):
        return Report(changed=False)


class JointNothing(Nothing):
    stage: ClassVar[str] = "joint"


class Hiding(Nothing):
    def run(self, graph):
        graph.set_outputs({g.index: graph.inputs("tangent")[0][0] for g in graph.gradients()})
        return Report(changed=False)


class Needy(Nothing):
    requires: ClassVar[frozenset[str]] = frozenset({"bucket"})


@dataclasses.dataclass(frozen=True)
class Copies(Pass):
    """Copies each gradient."""

    kinds: ClassVar[frozenset[str]] = frozenset({"gradient"})
    name: ClassVar[str] = "copies"
    stage: ClassVar[str] = "backward"

    def run(self, graph):
        found = [(at, node) for at, node, role in graph.outputs() if role.kind in self.kinds]
        made = {
            at: add_call(graph, torch.ops.aten.clone.default, node) for at, node in found if node
        }
        graph.set_outputs(made)
        return Report(changed=bool(made))


class JointCopies(Copies):
    stage: ClassVar[str] = "joint"


class OutputsCopied(JointCopies):
    """What only joint graphs have: outputs of the program."""

    kinds: ClassVar[frozenset[str]] = frozenset({"output"})

    def run(self, graph):
        assert graph.outputs("output")
        return super().run(graph)


@pytest.mark.parametrize("subject", [Copies, Copies(), JointCopies])
def test_a_pass_that_keeps_its_promises_goes_through(subject):
    check_pass(subject, examples=10, programs=2)


@pytest.mark.parametrize("subject", [Nothing, Nothing(), JointNothing])
def test_nothing_is_proved_of_a_pass_that_never_acts(subject):
    with pytest.raises(OracleFailure, match="oracle 'acts'.*all of 10 graphs and 1 programs"):
        check_pass(subject, examples=10, programs=1)


def test_other_graphs():
    check_pass(OutputsCopied, examples=3, programs=0, graphs=programs(max_layers=2))
    graph = capture(torch.nn.Linear(2, 3), torch.randn(4, 2)).backward
    seen = []
    check_pass(Copies, examples=3, programs=0, graphs=st.just(graph), oracles=[seen.append])
    assert {run.before.fingerprint() for run in seen} == {graph.fingerprint()}


def test_a_failure_names_the_oracle_and_shows_the_source():
    with pytest.raises(OracleFailure, match="oracle '.*': pass 'nothing'") as caught:
        check_pass(Hiding, examples=50, programs=0)
    notes = "\n".join(caught.value.__notes__)
    assert "def backward(tangents_0" in notes and "# as data: GradientGraph(" in notes
    assert "seed" in notes and "'world'" in notes


def test_a_failure_says_how_to_see_it_again():
    with pytest.raises(OracleFailure) as caught:
        check_pass(Hiding, examples=50, programs=0)
    (again,) = re.findall("# again: (.*)", "\n".join(caught.value.__notes__))
    with pytest.raises(OracleFailure) as seen:
        eval(again, {**vars(fxpasses.testing.synthetic), "Hiding": Hiding, "check_run": check_run})
    assert str(seen.value) == str(caught.value)


def test_what_a_pass_raises_comes_with_the_graph():
    class Raises(Copies):
        def run(self, graph):
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine") as caught:
        check_pass(Raises, examples=2)
    assert "def backward(tangents_0" in "\n".join(caught.value.__notes__)


def test_a_pass_that_does_something_else_the_next_time():
    state = itertools.count()

    class Flaky(Copies):
        def run(self, graph):
            assert next(state) != 20
            return super().run(graph)

    with pytest.raises(OracleFailure, match="oracle 'repeatable': pass 'copies'"):
        check_pass(Flaky, examples=50, programs=0)


def test_what_a_pass_requires_runs_first():
    assert [p.name for p in prerequisites(GradientSync())] == ["bucketing"]
    with pytest.raises(
        ValueError, match="requires 'bucket', which no known pass provides; did you mean 'buckets'"
    ):
        check_pass(Needy, examples=1)


def test_more_oracles(monkeypatch):
    monkeypatch.delenv("FXPASSES_EXAMPLES", raising=False)
    seen = []
    check_pass(Bucketing(mb=1), examples=5, programs=0, oracles=[seen.append])
    assert len(seen) == 5 and all(run.current == Bucketing(mb=1) for run in seen)


@property_test(Bucketing(mb=1), examples=5, programs=0)
def test_as_a_decorator(run):
    """The function is one more oracle."""
    assert run.current == Bucketing(mb=1)


def test_a_decorated_property_can_fail():
    @property_test(Bucketing(mb=1), examples=20, programs=0)
    def never_changes(run):
        assert not run.reports[0].changed

    with pytest.raises(AssertionError):
        never_changes()
    assert never_changes.__name__ == "never_changes"


def test_what_draws_examples_says_that_it_needs_hypothesis(monkeypatch):
    monkeypatch.setitem(sys.modules, "hypothesis", None)
    monkeypatch.delitem(sys.modules, "fxpasses.testing.check")
    with pytest.raises(
        ModuleNotFoundError, match="check_pass draws examples: pip install hypothes"
    ):
        _ = fxpasses.testing.check_pass
    assert fxpasses.testing.capture


def test_every_name_is_there():
    assert all(getattr(fxpasses.testing, name) is not None for name in fxpasses.testing.__all__)


def test_how_many_examples(monkeypatch):
    monkeypatch.delenv("FXPASSES_EXAMPLES", raising=False)
    assert (count_of_examples(), count_of_examples(7)) == (200, 7)
    monkeypatch.setenv("FXPASSES_EXAMPLES", "12")
    assert count_of_examples(7) == 12
    for wrong in ("many", "0", "²"):
        monkeypatch.setenv("FXPASSES_EXAMPLES", wrong)
        with pytest.raises(ValueError, match=f"FXPASSES_EXAMPLES={wrong}"):
            count_of_examples()


class AlwaysWorks(Nothing):
    def has_work(self, graph):
        return True


def test_what_a_pass_says_of_itself_is_held_against_it():
    with pytest.raises(OracleFailure, match="has_work is True, but the graph is as it was"):
        check_pass(AlwaysWorks, examples=1, programs=0)


class Rounding(Nothing):
    preserves_numerics: ClassVar[bool] = False

    def error_bound(self):
        return "|out - g| <= 0.5"

    def run(self, graph):
        for index, node, role in graph.outputs():
            if role.kind in ("gradient", "input_gradient") and node is not None:
                graph.set_output(index, add_call(graph, torch.ops.aten.round.default, node))
        return Report(changed=any(node is not None for _, node, _ in graph.outputs()))


def test_a_pass_that_changes_numerics_states_by_how_much():
    with pytest.raises(NotImplementedError, match="'nothing' changes numerics: define `tolerance"):
        check_pass(Rounding, examples=50, programs=0)


class RoundsInputs(Rounding):
    inexact: ClassVar[frozenset[str]] = frozenset({"input_gradient"})

    def tolerance(self, local, out):
        return 0.5


class RoundsAll(RoundsInputs):
    inexact: ClassVar[frozenset[str]] = frozenset({"gradient", "input_gradient"})


def test_a_tolerance_is_for_the_outputs_that_the_pass_names():
    check_pass(RoundsAll, examples=50, programs=0)
    with pytest.raises(OracleFailure, match=r"results_right.*\(gradient 'layer0.weight'\)"):
        check_pass(RoundsInputs, examples=50, programs=0)


@dataclasses.dataclass(frozen=True)
class Choosing(Copies):
    which: int
    name: ClassVar[str] = "choosing"


class Forward(Copies):
    stage: ClassVar[str] = "forward"


class NeedsText(Copies):
    requires: ClassVar[str] = "buckets"


class Unnamed(Pass):
    pass


class Returns(Copies):
    def run(self, graph):
        super().run(graph)


class CountsList(Copies):
    def run(self, graph):
        return dataclasses.replace(super().run(graph), counts=[1])


@pytest.mark.parametrize(
    ("subject", "said"),
    [
        ("bucketing", "'bucketing' is no pass; expected a subclass of `Pass`, or an instance"),
        (None, "None is no pass"),
        (int, "<class 'int'> is no pass"),
        (Unnamed, "pass Unnamed: `name` must be a lower-case identifier"),
        (Forward, "pass 'copies': `stage` must be one of joint, backward"),
        (NeedsText, "pass 'copies': `requires` is 'buckets'; expected a set of names"),
        (Choosing, "pass 'choosing' has options without a default (which); expected an instance"),
        (Returns, "pass 'copies': `run` returned None; expected a `Report(changed=...)`"),
        (CountsList, "counts are [1]; expected numbers by name"),
    ],
)
def test_what_is_no_pass_is_named(subject, said):
    with pytest.raises((ValueError, OracleFailure), match=re.escape(said)):
        check_pass(subject, examples=20, programs=0)


def test_a_decorator_needs_a_pass():
    with pytest.raises(ValueError, match="test_it.* is no pass"):

        @property_test
        def test_it(run):
            pass


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"examples": 0}, "examples=0; expected a whole number, 1 or more"),
        ({"examples": "20"}, "examples='20'; expected a whole number, 1 or more"),
        ({"programs": -1}, "programs=-1; expected a whole number, 0 or more"),
        ({"programs": 0.5}, "programs=0.5; expected a whole number, 0 or more"),
        ({"oracles": print}, "; expected a list of functions that take a `Run`"),
        ({"oracles": ["fakes_true"]}, "; expected a list of functions that take a `Run`"),
        ({"graphs": [1]}, "graphs=[1]; expected a strategy, such as `programs()`"),
        ({"graphs": st.integers(1, 1)}, "graphs: 1 was drawn; expected a `TrainingGraph`, a `Prog"),
    ],
)
def test_arguments_that_make_no_sense_are_named(monkeypatch, given, said):
    monkeypatch.delenv("FXPASSES_EXAMPLES", raising=False)
    with pytest.raises(ValueError, match=re.escape(said)):
        check_pass(Copies, **{"examples": 5, "programs": 0, **given})
