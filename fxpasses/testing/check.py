"""`check_pass`: hold a pass to all that has to hold of every pass, on graphs that nobody wrote by hand."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import hypothesis
from hypothesis import strategies as st

from fxpasses.config import nearest
from fxpasses.graph import TrainingGraph
from fxpasses.passes.base import Pass
from fxpasses.registry import passes as known_passes
from fxpasses.testing import strategies
from fxpasses.testing.arguments import instance, listed, whole
from fxpasses.testing.oracles import ORACLES, Oracle, OracleFailure, Run, run_pass
from fxpasses.testing.program import forget_captured
from fxpasses.testing.sources import source_of
from fxpasses.testing.strategies import SEEDS, environments, gradient_graphs, joint_graphs
from fxpasses.testing.synthetic import GradientGraph

EXAMPLES_VARIABLE = "FXPASSES_EXAMPLES"
DEFAULT_EXAMPLES = 200
# A program is captured in a second or so, a gradient graph made in milliseconds.
EXAMPLES_TO_A_PROGRAM = 25
# Explanations would run everything once more.
PHASES = [phase for phase in hypothesis.Phase if phase is not hypothesis.Phase.explain]


def check_pass(
    subject: type[Pass] | Pass,
    *,
    examples: int | None = None,
    programs: int | None = None,
    oracles: Iterable[Oracle] = (),
    graphs: st.SearchStrategy[Any] | None = None,
) -> None:
    """Prove a pass on drawn graphs and programs, by what it says of itself; call it from a test.

        def test_clipping():
            check_pass(ClipGradients(limit=0.5))

    Args:
        subject: a pass, or its class where every option has a default. Options that come from the backend
            or the process group are drawn where they are None.
        examples: how many graphs; the environment variable `FXPASSES_EXAMPLES` overrides it. 200 if not given.
        programs: how many captured programs, each of which takes a second or more; one for each 25 graphs if
            not given. The first ones drawn are the simplest. For a pass of the stage `joint`, as many exported
            ones too.
        oracles: what else has to hold of a run of this pass.
        graphs: another strategy of graphs, in place of `gradient_graphs()` or, for a pass of the stage `joint`,
            `joint_graphs()`: such as `programs()`, of which the graph of the pass's stage is taken,
            `st.just(graph)` with a `TrainingGraph` of your own (`capture`, `exported`), or anything with
            `build()` and `source()`.

    Raises:
        OracleFailure: names oracle, pass and node; the smallest graph that was found to show it is printed as
            source. Also for a pass that left every graph alone, of which nothing is proved, and for one that
            does something else when it runs again over the same graph.
        ValueError: for an argument that makes no sense, a contract that is malformed (as `register_pass` has
            it), or when no known pass provides what this one requires.
        Exception: whatever the pass raises, with the same notes.
    """
    current = instance(subject)
    oracles = listed(oracles)
    wanted = whole("examples", count_of_examples(examples), least=1)
    count = max(wanted // EXAMPLES_TO_A_PROGRAM, 1) if programs is None else programs
    whole("programs", count, least=0)
    if not isinstance(graphs, st.SearchStrategy | None):
        raise ValueError(
            f"check_pass: graphs={graphs!r}; expected a strategy, such as `programs()`"
        )
    every = (*ORACLES, *oracles)
    is_joint = current.stage == "joint"
    if graphs is None:
        graphs = joint_graphs() if is_joint else gradient_graphs()
    searches = [(graphs, wanted), (strategies.programs(), count)]
    searches += [(strategies.exported_programs(), count)] if is_joint else []
    acted = [_search(current, found, number, every) for found, number in searches if number]
    if not any(acted):
        raise OracleFailure(
            f"oracle 'acts': pass {current.spec!r}: left all of {wanted} graphs and {count} programs as they "
            "were, so nothing is proved; give `graphs`, a strategy of graphs in which it has work, or more "
            "examples"
        )


def property_test(
    subject: type[Pass] | Pass, **options: Any
) -> Callable[[Callable[..., Any]], Any]:
    """As a decorator: the function below is one more oracle, and becomes a test.

        @property_test(ClipGradients(limit=0.5))
        def test_clipping(run):
            assert "all_reduce" not in str(run.after.graph)

    Args:
        subject, options: as `check_pass` takes them.
    """
    current = instance(subject)

    def decorate(oracle: Callable[[Run], None]) -> Callable[[], None]:
        def test() -> None:
            check_pass(current, oracles=(oracle,), **options)

        test.__name__, test.__doc__ = oracle.__name__, oracle.__doc__
        test.__module__, test.__qualname__ = oracle.__module__, oracle.__qualname__
        return test

    return decorate


def count_of_examples(default: int | None = None) -> int:
    """How many examples to try: the environment's wish, the caller's, or 200."""
    wish = os.environ.get(EXAMPLES_VARIABLE)
    if wish is not None:
        if not wish.isdecimal() or int(wish) < 1:
            raise ValueError(f"{EXAMPLES_VARIABLE}={wish}: expected a whole number, 1 or more")
        return int(wish)
    return DEFAULT_EXAMPLES if default is None else default


def settings(examples: int, **others: Any) -> hypothesis.settings:
    """The same examples on every run, with no limit of time: the first use of an operator is slow."""
    return hypothesis.settings(
        max_examples=examples,
        derandomize=True,
        database=None,
        deadline=None,
        report_multiple_bugs=False,
        suppress_health_check=list(hypothesis.HealthCheck),
        phases=PHASES,
        **others,
    )


def _search(
    current: Pass, sources: st.SearchStrategy[Any], examples: int, oracles: Sequence[Oracle]
) -> bool:
    """Whether the pass acted on some of the graphs."""
    acted = False

    @settings(examples)
    @hypothesis.given(sources, environments(), SEEDS)
    def search(source: Any, environment: dict[str, Any], seed: int) -> None:
        nonlocal acted
        acted |= check_run(current, source, environment, seed, oracles).reports[0].changed

    try:
        search()
    except hypothesis.errors.Flaky as error:
        raise OracleFailure(
            f"oracle 'repeatable': pass {current.spec!r}: failed, and did not when it ran again over the same "
            "graph"
        ) from error
    return acted


def check_run(
    current: Pass,
    source: Any,
    environment: Mapping[str, Any],
    seed: int = 0,
    oracles: Iterable[Oracle] = ORACLES,
) -> Run:
    """Run a pass over one graph in one environment, and hold it to oracles: what a failure of `check_pass` says
    to do to see it again.

    Args:
        source: a `GradientGraph`, a `Program`, a `TrainingGraph`, or what has `build()` and `source()`.
        environment: by name, what fields of passes that come from the environment are given; with `world`.
        seed: of the inputs.

    Raises:
        OracleFailure: as `check_pass` does.
    """
    made = source_of(source, current.stage)
    try:
        run = run_over(current, made.build(), environment, seed)
        for oracle in oracles:
            oracle(run)
    except Exception as error:
        # What a pass did to what is known of sizes stays with a program's graph.
        forget_captured()
        where = f"pass {current.spec!r} with {dict(environment)}, seed {seed}"
        again = f"check_run({current!r}, {source!r}, {dict(environment)}, {seed})"
        error.add_note(f"{where}, over\n\n{made.source()}\n\n# again: {again}")
        raise
    return run


def run_over(
    current: Pass, graph: TrainingGraph, environment: Mapping[str, Any], seed: int = 0
) -> Run:
    """Run a pass on every rank, behind the passes that provide what it requires."""
    provided: frozenset[str] = frozenset()
    for earlier in prerequisites(current):
        graph = graph.copy()
        earlier.bind({**environment, "rank": 0}).run(graph)
        provided |= earlier.provides
    ranks = range(environment["world"])
    bound = [current.bind({**environment, "rank": rank}) for rank in ranks]
    return run_pass(bound, graph, provided, seed)


def prerequisites(current: Pass) -> list[Pass]:
    """The passes to run first, so that what a pass requires is there.

    Raises:
        ValueError: when no known pass provides it.
    """
    found: list[Pass] = []
    for wanted in sorted(current.requires):
        if any(wanted in earlier.provides for earlier in found):
            continue
        known = known_passes()
        provider = next((cls for cls in known.values() if wanted in cls.provides), None)
        if provider is None:
            offered = sorted(set().union(*(cls.provides for cls in known.values())))
            raise ValueError(
                f"pass {current.name!r} requires {wanted!r}, which no known pass provides"
                f"{nearest(wanted, offered)}"
            )
        found += [p for p in (*prerequisites(provider()), provider()) if p not in found]
    return found


__all__ = [
    "GradientGraph",
    "check_pass",
    "check_run",
    "count_of_examples",
    "property_test",
    "settings",
]
