"""`check_pass`: what it runs, what it says."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import pytest
import torch

from fxpasses.passes.base import Pass, Report
from fxpasses.passes.bucketing import Bucketing
from fxpasses.passes.gradient_sync import GradientSync
from fxpasses.testing import OracleFailure, check_pass, property_test
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


@pytest.mark.parametrize("subject", [Nothing, Nothing(), JointNothing])
def test_a_pass_that_does_nothing_goes_through(subject):
    check_pass(subject, examples=10, programs=2)


def test_a_failure_names_the_oracle_and_shows_the_source():
    with pytest.raises(OracleFailure, match="oracle '.*': pass 'nothing'") as caught:
        check_pass(Hiding, examples=50, programs=0)
    notes = "\n".join(caught.value.__notes__)
    assert "def backward(tangents_0" in notes and "# as data: GradientGraph(" in notes
    assert "seed" in notes and "'world'" in notes


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


@property_test(Nothing, examples=5, programs=0)
def test_as_a_decorator(run):
    """The function is one more oracle."""
    assert not run.reports[0].changed


def test_a_decorated_property_can_fail():
    @property_test(Bucketing(mb=1), examples=20, programs=0)
    def never_changes(run):
        assert not run.reports[0].changed

    with pytest.raises(AssertionError):
        never_changes()
    assert never_changes.__name__ == "never_changes"


def test_how_many_examples(monkeypatch):
    monkeypatch.delenv("FXPASSES_EXAMPLES", raising=False)
    assert (count_of_examples(), count_of_examples(7)) == (200, 7)
    monkeypatch.setenv("FXPASSES_EXAMPLES", "12")
    assert count_of_examples(7) == 12
    monkeypatch.setenv("FXPASSES_EXAMPLES", "many")
    with pytest.raises(ValueError, match="FXPASSES_EXAMPLES=many"):
        count_of_examples()


class AlwaysWorks(Nothing):
    def has_work(self, graph):
        return True


def test_what_a_pass_says_of_itself_is_held_against_it():
    with pytest.raises(OracleFailure, match="has_work is True, but the graph is as it was"):
        check_pass(AlwaysWorks, examples=1, programs=0)


class Rounding(Nothing):
    preserves_numerics: ClassVar[bool] = False

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
        return torch.tensor(0.5)


class RoundsAll(RoundsInputs):
    inexact: ClassVar[frozenset[str]] = frozenset({"gradient", "input_gradient"})


def test_a_tolerance_is_for_the_outputs_that_the_pass_names():
    check_pass(RoundsAll, examples=50, programs=0)
    with pytest.raises(OracleFailure, match=r"results_right.*\(gradient 'layer0.weight'\)"):
        check_pass(RoundsInputs, examples=50, programs=0)
