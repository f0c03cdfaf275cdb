"""Oracles of numbers: results, bounds, a second run, orders of passes."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch

from fxpasses.finite import is_inexact
from fxpasses.graph import Role, TrainingGraph
from fxpasses.passes.base import Pass
from fxpasses.pipeline import Pipeline
from fxpasses.testing.oracles.base import OracleFailure, Run, fail, trace
from fxpasses.testing.sizes import refusals


def results_right(run: Run) -> None:
    """Bitwise the results of the graph before, or within the tolerance that the pass states.

    What a pass that provides `reduced` makes of a gradient is compared with the mean or sum over the ranks
    of what their own graphs compute, in double precision.
    """
    before, after = run.traced_before.results, run.traced_after.results
    outputs = [(at, role) for at, _, role in run.before.outputs() if role.kind != "state"]
    reduces = "reduced" in run.current.provides
    exact = run.current.preserves_numerics and not reduces
    for at, role in outputs:
        for rank in range(run.world):
            old, new = before[rank][at], after[rank][at]
            inexact = not exact and role.kind in run.current.inexact
            if inexact and _is_inexact(old) and _is_inexact(new):
                local = torch.stack([row[at] for row in before])
                _within(run, local, new, at, role, rank)
            elif not bitwise(old, new):
                _report(run, "results_right", at, role, rank, old, new)
    if reduces:
        _same_everywhere(run)


def sizes_vary(run: Run) -> None:
    """Where sizes vary, results are right with others than those that were traced, and no others are refused
    than before.
    """
    sizes = run.other_sizes
    if not sizes:
        return
    elsewhere = run.at(sizes)
    for guard in refusals(run.after, sizes):
        fail("sizes_vary", elsewhere, f"what varied is fixed now: {guard}")
    _ = elsewhere.traced_before
    try:
        _ = elsewhere.traced_after
    except RuntimeError as error:
        fail("sizes_vary", elsewhere, f"does not run any longer: {error}")
    results_right(elsewhere)


def _is_inexact(value: Any) -> bool:
    """Whether it holds numbers that may be rounded."""
    return isinstance(value, torch.Tensor) and is_inexact(value)


def _within(
    run: Run, local: torch.Tensor, out: torch.Tensor, at: int, role: Role, rank: int
) -> None:
    wide = _wide(local)
    exact = wide[rank]
    if "reduced" in run.current.provides:
        exact = wide.sum(0)
        exact = exact / run.world if getattr(run.current, "reduce", "mean") == "mean" else exact
    error = (_wide(out) - exact).abs()
    bound = torch.as_tensor(run.current.tolerance(local, out)).expand_as(error)
    # What is not finite on some rank need only not be finite afterwards.
    fine = (error <= bound) | bound.isinf() | ~torch.isfinite(wide).all(0)
    if not fine.all():
        worst = int((~fine).flatten().to(torch.int8).argmax())
        what = f"error {error.flatten()[worst]:g} where {bound.flatten()[worst]:g} is allowed"
        _report(run, "results_right", at, role, rank, exact, out, what)


def _wide(value: torch.Tensor) -> torch.Tensor:
    return value.to(torch.complex128 if value.dtype.is_complex else torch.float64)


def _same_everywhere(run: Run) -> None:
    after = run.traced_after.results
    for gradient in run.after.gradients():
        for rank in range(1, run.world):
            if not bitwise(after[0][gradient.index], after[rank][gradient.index]):
                what = f"is reduced and differs between rank 0 and rank {rank}"
                fail("results_right", run, f"{gradient.parameter!r} {what}", gradient.node)


def bitwise(a: Any, b: Any) -> bool:
    """Whether two results are the same in every bit."""
    if not (isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)):
        return type(a) is type(b) and a == b
    if (a.shape, a.dtype) != (b.shape, b.dtype):
        return False
    dense = (x.clone(memory_format=torch.contiguous_format).reshape(-1) for x in (a, b))
    return torch.equal(*(x.view(torch.uint8) for x in dense))


def _report(
    run: Run, oracle: str, at: int, role: Role, rank: int, old: Any, new: Any, why: str = "differs"
) -> None:
    node = run.after.outputs()[at][1]
    where = f"output {at} ({role.kind} {role.name!r}) on rank {rank} of {run.world}"
    fail(oracle, run, f"{where} {why}:\n  expected {_short(old)}\n  got      {_short(new)}", node)


def _short(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return repr(value)
    form = f"{value.dtype}{list(value.shape)}".removeprefix("torch.")
    return f"{form} {value.flatten()[:8].tolist()}"


def reduced_numerically(run: Run) -> None:
    """Each gradient element travels in exactly one reducing collective: neither twice nor not at all."""
    if "reduced" not in run.current.provides:
        return
    sizes = [g.node.meta["val"].numel() for g in run.before.gradients()]
    sent = [launches[0] for launches in run.traced_after.launches if launches[0].reduces]
    if "compressed" in run.current.provides or any(s.operator != "all_reduce" for s in sent):
        return  # what is encoded, or sent in shards, can't be counted
    carried = sum(launch.payload.numel() for launch in sent)
    if all(isinstance(s, int) for s in sizes) and carried != sum(sizes):
        fail(
            "reduced_numerically",
            run,
            f"{carried} elements are reduced, gradients have {sum(sizes)}",
        )


def idempotent(run: Run) -> None:
    """A second run changes no result, unless the pass says that it is not idempotent."""
    if not run.current.idempotent:
        return
    again = run.again()
    results = again.traced_after.results
    for at, node, role in run.after.outputs():
        for rank, row in enumerate(run.traced_after.results):
            if not bitwise(row[at], results[rank][at]):
                where = f"output {at} ({role.kind} {role.name!r}) on rank {rank}"
                fail(
                    "idempotent", run, f"a second run changes {where}; say idempotent = False", node
                )


def orders_agree(passes: Sequence[Pass], graph: TrainingGraph, world: int, seed: int = 0) -> int:
    """Every order of these passes that their contracts allow gives the same results.

    Returns:
        How many orders there are.
    """
    found: list[tuple[str, dict[Any, Any]]] = []
    for order in itertools.permutations(passes):
        try:
            pipeline = Pipeline(order)
        except ValueError:
            continue
        after = graph.copy()
        pipeline.run(order[0].stage, after)
        rows = trace([after] * world, seed).results
        keys = [(role.kind, role.name) for _, _, role in after.outputs()]
        found.append(
            (
                pipeline.spec,
                {(k, r): row[i] for i, k in enumerate(keys) for r, row in enumerate(rows)},
            )
        )
    (first, expected), *others = found
    for spec, results in others:
        if results.keys() != expected.keys():
            raise OracleFailure(f"oracle 'orders_agree': {spec!r} has other outputs than {first!r}")
        for key, value in results.items():
            if not bitwise(value, expected[key]):
                raise OracleFailure(
                    f"oracle 'orders_agree': {spec!r} and {first!r} differ in {key[0]} on rank {key[1]}: "
                    f"{_short(value)} and {_short(expected[key])}"
                )
    return len(found)
