"""`check_pass`: what it runs, what it says."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import pytest

from fxpasses.passes.base import Pass, Report
from fxpasses.passes.bucketing import Bucketing
from fxpasses.passes.gradient_sync import GradientSync
from fxpasses.testing import OracleFailure, Statement, check_pass, property_test, state
from fxpasses.testing.check import count_of_examples, prerequisites
from fxpasses.testing.statements import statement_of


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


def test_statements(monkeypatch):
    from fxpasses.testing import statements

    monkeypatch.setattr(statements, "_stated", dict(statements._stated))
    assert statement_of(Nothing()) == Statement()
    state("nothing", Statement(idempotent=False))
    assert not statement_of(Nothing()).idempotent

    class Says(Nothing):
        idempotent = True

    assert statement_of(Says()).idempotent
    assert not statement_of(GradientSync()).idempotent
