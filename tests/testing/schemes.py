"""Parameters of one graph that are sent in ways of their own, or as they are; with overlap and without."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from torch import fx

from fxpasses.effects import is_launch, is_wait
from fxpasses.passes.compress import Compress
from fxpasses.passes.gradient_sync import GradientSync
from fxpasses.testing.check import check_run, run_over, settings
from fxpasses.testing.oracles import ORACLES, Run
from fxpasses.testing.oracles.numerics import bitwise
from fxpasses.testing.strategies import SEEDS, environments
from fxpasses.testing.synthetic import GradientGraph, parameter_name
from tests.testing.compression import (
    counted_as_sent,
    legs_in_order,
    matrix_graphs,
    not_poisoned,
    real_graphs,
    sent_in_order,
)

_IN_TWO_LEGS = ("int4", "bf16")
_SCHEMES = ("none", "none", *_IN_TWO_LEGS, "topk:ratio=0.3", "powersgd:rank=1")


def schemes_side_by_side(examples: int) -> None:
    """What has no scheme arrives as if nobody compressed; no bucket waits for another's second leg, and where
    waits stand changes no bit.
    """
    schemes = st.lists(st.sampled_from(_SCHEMES), min_size=6, max_size=6)
    graphs = st.one_of(real_graphs(), matrix_graphs())

    @settings(examples)
    @given(graphs, environments(4), schemes, st.sampled_from(("any", "fixed")), SEEDS)
    def search(
        source: GradientGraph,
        environment: dict[str, Any],
        schemes: list[str],
        order: str,
        seed: int,
    ) -> None:
        scheme_of = {parameter_name(i): scheme for i, scheme in enumerate(schemes)}
        rules = ";".join(f"{name}={scheme}" for name, scheme in scheme_of.items())
        environment = {**environment, "compression": rules, "reduce_order": order}
        late, at_once = (
            check_run(Compress(overlap=x), source, environment, seed, (*ORACLES, not_poisoned))
            for x in (True, False)
        )
        as_it_is = run_over(GradientSync(), source.build(), environment, seed)
        legs_in_order(late)
        for run in (late, at_once):
            sent_in_order(run, _legs(run, scheme_of))
        _awaited_at_once(at_once)
        _counted(late, scheme_of)
        rows = (run.traced_after.results for run in (late, at_once, as_it_is))
        for one, other, whole in zip(*rows, strict=True):
            assert all(bitwise(a, b) for a, b in zip(one, other, strict=True))
            for gradient in late.before.gradients():
                if scheme_of[gradient.parameter] == "none":
                    assert bitwise(one[gradient.index], whole[gradient.index]), gradient.parameter

    search()


def _buckets(run: Run) -> list[tuple[str, ...]]:
    return [n.meta["bucket"].parameters for n in run.before.walk() if "bucket" in n.meta]


def _of(launch: fx.Node) -> tuple[str, ...]:
    return launch.meta["provenance"].parameters


def _legs(run: Run, scheme_of: dict[str, str]) -> dict[tuple[str, ...], int]:
    """By bucket, in how many legs it is sent: in two from three ranks on."""
    found = [_of(n) for n in run.after.walk() if is_launch(n)]
    in_order = run.current.order == "fixed"  # type: ignore[attr-defined]
    legs = {}
    for bucket in _buckets(run):
        scheme = scheme_of[bucket[0]]
        has_two = run.world > 2 and (scheme in _IN_TWO_LEGS or (scheme == "none" and in_order))
        if scheme.startswith("powersgd"):  # as it is, where no factors are smaller
            has_two = found.count(bucket) == 2
        legs[bucket] = 2 if has_two else 1
    return legs


def _awaited_at_once(run: Run) -> None:
    for launch in (n for n in run.after.walk() if is_launch(n)):
        assert is_wait(launch.next) and launch.next.args[0] is launch, (
            f"{launch.name} is awaited late"
        )


def _counted(run: Run, scheme_of: dict[str, str]) -> None:
    counted_as_sent(run)
    own = [n for n in run.after.walk() if "provenance" in n.meta]
    encoded = {_of(n) for n in own if n.meta["provenance"].rule == "encode"}
    assert run.reports[0].counts.get("compressed", 0) == len(encoded)
    for bucket in _buckets(run):
        (scheme,) = {scheme_of[name] for name in bucket}
        assert bucket in encoded or scheme in ("none", "powersgd:rank=1")
        assert bucket not in encoded or scheme != "none"
