"""The pass that clips gradients by their global norm."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from fxpasses.config import Hardening
from fxpasses.graph import LIMIT_STATE, NORM_STATE, StateSpec, TrainingGraph
from fxpasses.passes.base import Report
from fxpasses.passes.bucketing import Bucketing
from fxpasses.passes.clip_norm import ClipNorm
from fxpasses.passes.gradient_sync import GradientSync
from fxpasses.passes.overflow import Overflow
from fxpasses.pipeline import Pipeline, build
from tests.graphs import (
    C10D,
    WORLD,
    Does,
    Ranks,
    Zoo,
    add_call,
    backward_of,
    checked,
    doubled,
    execute,
    mlp,
    nodes_with,
    random_inputs,
    traced,
)

MUL = torch.ops.aten.mul.Tensor
CLIP = ClipNorm(max_norm=1.0, world=1)


def synced(graph: TrainingGraph, *passes, mb: float = 1.0, **options) -> list[Report]:
    """Run the passes behind buckets and an all-reduce; their reports."""
    sync = GradientSync(**{"group": "g", "world": WORLD, "reduce": "mean", **options})
    return [done.report for done in checked(graph, Bucketing(mb=mb), sync, *passes)[2:]]


def with_limit(graph: TrainingGraph, tangents: list[torch.Tensor], limit: float) -> list:
    """The inputs of a graph that clips: state follows the tangents."""
    values = {LIMIT_STATE: torch.tensor(limit), NORM_STATE: torch.tensor(0.0)}
    states = [values[role.name.partition("/")[0]] for _, role in graph.inputs("state")]
    return [*tangents, *states]


def expected(
    gradients: list[torch.Tensor], limit: float
) -> tuple[list[torch.Tensor], torch.Tensor]:
    parameters = [nn.Parameter(torch.zeros_like(g)) for g in gradients]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient.clone()
    norm = nn.utils.clip_grad_norm_(parameters, limit)
    return [p.grad for p in parameters], norm


@pytest.mark.parametrize("limit", [0.5, 1.0, 1e6])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.complex64])
def test_the_numbers_are_those_of_clip_grad_norm(dtype, limit):
    graph = doubled((3, 2), (), (5,), dtype=dtype)
    checked(graph, CLIP)
    # torch rounds norm and factor to bf16: not every draw stays within two roundings.
    torch.manual_seed(0)
    tangents = [torch.randn(s, dtype=dtype) for s in ((3, 2), (), (5,))]
    *found, norm = execute(graph, with_limit(graph, tangents, limit))
    wanted, total = expected([2 * t for t in tangents], limit)
    eps = 1e-6 if dtype != torch.bfloat16 else 2**-7
    for ours, theirs in zip(found, wanted, strict=True):
        assert ours.dtype == dtype and torch.allclose(ours, theirs, rtol=eps, atol=0)
    assert norm.dtype == torch.float32
    assert norm.item() == pytest.approx(total.item(), rel=eps)


def test_a_norm_within_the_limit_changes_no_bit():
    graph = doubled((64,))
    checked(graph, CLIP)
    tangent = torch.randn(64)
    found, _ = execute(graph, with_limit(graph, [tangent], 1e3))
    assert torch.equal(found, 2 * tangent)


def test_several_dtypes_have_one_norm():
    graph = traced(lambda a, b: [a * 2, b * 2], torch.ones(4), torch.ones(5, dtype=torch.float64))
    checked(graph, CLIP)
    inputs = [torch.ones(4), torch.ones(5, dtype=torch.float64)]
    first, second, norm = execute(graph, with_limit(graph, inputs, 1.0))
    assert norm.item() == pytest.approx(6.0)
    assert first.tolist() == pytest.approx([1 / 3] * 4) and first.dtype == torch.float32
    assert second.tolist() == pytest.approx([1 / 3] * 5) and second.dtype == torch.float64


def test_a_gradient_of_two_parameters_counts_twice():
    graph = traced(lambda a: [a * 2] * 2, torch.ones(2))
    output = graph.output_node
    output.args = ((output.args[0][0],) * 2,)  # one node at two outputs
    checked(graph, CLIP)
    first, second, norm = execute(graph, with_limit(graph, [torch.ones(2)], 1.0))
    assert norm.item() == pytest.approx(4.0)
    assert first.tolist() == second.tolist() == pytest.approx([0.5, 0.5])


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan, 1e30])
def test_a_norm_that_is_not_finite_leaves_nothing_finite(bad):
    """Finite gradients too (1e30: only their norm overflows), where clip_grad_norm_ would make zeros."""
    graph = doubled((3,), (2,))
    checked(graph, CLIP)
    inputs = with_limit(graph, [torch.tensor([1.0, bad, 2.0]), torch.ones(2)], 1.0)
    first, second, norm = execute(graph, inputs)
    assert not norm.isfinite()
    assert first.isnan().all() and second.isnan().all()


def test_overflow_sees_it():
    graph = doubled((3,), (2,))
    reports = synced(graph, ClipNorm(max_norm=1.0, world=WORLD), Overflow())
    assert reports[1].counts == {"checked": 1}  # one check a bucket, as without clipping
    tangents = [torch.ones(3), torch.ones(2)]
    states = {LIMIT_STATE: 1.0, NORM_STATE: 0.0, "overflow": 0.0}
    names = [role.name.partition("/")[0] for _, role in graph.inputs("state")]
    ranks = [[*tangents, *(torch.tensor(states[n]) for n in names)] for _ in range(WORLD)]
    assert [r[-1].item() for r in Ranks(graph).run_all(ranks)] == [0.0] * WORLD
    ranks[2][0] = torch.tensor([1.0, math.inf, 1.0])
    assert [r[-1].item() for r in Ranks(graph).run_all(ranks)] == [1.0] * WORLD


def test_buckets_are_measured_and_multiplied_as_a_whole():
    graph = backward_of(mlp(4, 5, 6), torch.randn(3, 4))
    before = [g.node.meta["val"] for g in graph.gradients()]
    (report,) = synced(graph, ClipNorm(max_norm=1.0, world=WORLD), mb=1e-4)
    launches = nodes_with(graph, C10D.all_reduce.default)
    assert report == Report(True, {"norms": len(launches), "gradients": 4}) and len(launches) > 1
    made = [n for n in graph.walk() if getattr(n.meta.get("provenance"), "rule", "") == "multiply"]
    multiplied = [n for n in made if n.target is MUL]
    sizes = [n.args[0].meta["val"].numel() for n in launches]
    assert sorted(n.meta["val"].numel() for n in multiplied) == sorted(sizes)
    for old, new in zip(before, graph.gradients(), strict=True):
        assert new.node.meta["val"].stride() == old.stride()


def test_nothing_more_is_sent():
    plain, clipped = (backward_of(mlp(4, 5, 6), torch.randn(3, 4)) for _ in range(2))
    synced(plain, mb=1e-4)
    synced(clipped, ClipNorm(max_norm=1.0, world=WORLD), mb=1e-4)
    payloads = [
        [n.args[0].meta["val"].numel() for n in nodes_with(g, C10D.all_reduce.default)]
        for g in (plain, clipped)
    ]
    assert payloads[0] == payloads[1] != []


@pytest.mark.parametrize("wire", [None, "bf16"])
def test_ranks_clip_alike_by_the_norm_of_what_is_reduced(wire):
    graph = doubled((3, 2), (4,))
    synced(graph, ClipNorm(max_norm=1.0, world=WORLD), dtype=wire)
    tangents = [[torch.randn(3, 2), torch.randn(4)] for _ in range(WORLD)]
    rows = Ranks(graph).run_all([with_limit(graph, t, 1.0) for t in tangents])
    means = [2 * sum(column) / WORLD for column in zip(*tangents, strict=True)]
    wanted, norm = expected(means, 1.0)
    rounding = 1e-6 if wire is None else 0.02
    for first, second, measured in rows:
        assert torch.allclose(first, wanted[0], rtol=rounding, atol=rounding)
        assert torch.allclose(second, wanted[1], rtol=rounding, atol=rounding)
        assert measured.item() == pytest.approx(norm.item(), rel=rounding)
        assert torch.equal(first, rows[0][0]) and torch.equal(second, rows[0][1])


def test_all_kinds_of_gradients():
    graph = backward_of(Zoo(), Zoo.example())
    inputs = random_inputs(graph)
    before = execute(graph, inputs)
    checked(graph, CLIP)
    *after, norm = execute(graph, with_limit(graph, inputs, 0.25))
    used = [g.index for g in graph.gradients()]
    wanted, total = expected([before[i] for i in used if before[i].numel()], 0.25)
    found = [after[i] for i in used if after[i].numel()]
    assert norm.item() == pytest.approx(total.item(), rel=1e-5)
    for ours, theirs in zip(found, wanted, strict=True):
        assert ours.dtype == theirs.dtype and torch.allclose(ours, theirs, rtol=1e-5)


def test_who_else_reads_a_gradient_reads_what_it_was():
    """A pass in between keeps the reduced gradient as state: that is not clipped."""

    def keep(graph: TrainingGraph) -> None:
        (gradient,) = graph.gradients()
        spec = StateSpec("kept", "p0", (2,), torch.float32, torch.device("cpu"))
        graph.add_state(spec)
        graph.write_state(spec.name, add_call(graph, torch.ops.aten.neg.default, gradient.node))

    graph = doubled((2,))
    synced(graph, Does(keep), ClipNorm(max_norm=1.0, world=WORLD))
    kept = graph.inputs("state")[0][1].name
    inputs = [torch.tensor([3.0, 4.0]), *[torch.zeros(2)] * 1]
    states = {LIMIT_STATE: torch.tensor(1.0), NORM_STATE: torch.tensor(0.0), "kept": torch.zeros(2)}
    names = [role.name.partition("/")[0] for _, role in graph.inputs("state")]
    row = Ranks(graph).run_all([[inputs[0], *(states[n] for n in names)]] * WORLD)[0]
    at = {role.name: index for index, _, role in graph.outputs("state")}
    assert row[0].tolist() == pytest.approx([0.6, 0.8])
    assert row[at[kept]].tolist() == [-6.0, -8.0]


def test_a_gradient_that_left_its_bucket_is_measured_for_itself():
    def double(graph: TrainingGraph) -> None:
        first = graph.gradients()[0]
        graph.set_output(first.index, add_call(graph, torch.ops.aten.add.Tensor, *[first.node] * 2))

    graph = doubled((2,), (2,))
    *_, report = synced(graph, Does(double), ClipNorm(max_norm=1.0, world=WORLD))
    assert report.counts == {"norms": 2, "gradients": 2}
    tangents = [torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.5])]
    rows = Ranks(graph).run_all([with_limit(graph, tangents, 1.0)] * WORLD)
    first, second, norm = rows[0]
    assert norm.item() == pytest.approx(5.0)
    assert first.tolist() == pytest.approx([0.8, 0.0])
    assert second.tolist() == pytest.approx([0.0, 0.6])


def test_without_gradients_the_graph_stays_as_it_was():
    graph = traced(lambda a: [a * 2], torch.ones(2))
    graph.output_node.meta["roles"] = tuple(
        type(r)("input_gradient", r.name) for r in graph.output_node.meta["roles"]
    )
    before = graph.fingerprint()
    (done,) = checked(graph, CLIP)
    assert done.report == Report(changed=False) and graph.fingerprint() == before
    assert not graph.inputs("state")


def test_activations_are_left_alone():
    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.w * x

    graph = backward_of(Half(), torch.ones(2, requires_grad=True))
    inputs = random_inputs(graph)
    (at, _, _) = graph.outputs("input_gradient")[0]
    before = execute(graph, inputs)[at]
    checked(graph, CLIP)
    assert torch.equal(execute(graph, with_limit(graph, inputs, 1e-3))[at], before)


def test_gradients_that_nobody_reduced_are_refused():
    with pytest.raises(ValueError, match="'clip_norm' needs reduced gradients; put it behind"):
        checked(doubled((2,)), ClipNorm(max_norm=1.0, world=2))


def test_a_limit_is_needed():
    with pytest.raises(
        ValueError, match=r"write clip_norm\{max_norm=1.0\}, or set option 'clip_norm'"
    ):
        checked(doubled((2,)), ClipNorm(world=1))
    with pytest.raises(ValueError, match="expected a positive number"):
        ClipNorm(max_norm=-1.0)


def passes_of(world: int = 1, **options) -> str:
    group = "g" if world > 1 else None
    return build(Hardening(**options), group, world, 0).spec


def test_its_place_is_behind_the_reduction_and_before_overflow():
    assert passes_of(clip_norm=2) == "clip_norm{max_norm=2}"
    names = [p.split("{")[0] for p in passes_of(2, clip_norm=2, loss_scale="dynamic").split(",")]
    assert names[-3:] == ["gradient_sync", "clip_norm", "overflow"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"watch": {}}, "option 'watch': nothing measures the norm .* set option 'clip_norm'"),
        (
            {"clip_norm": 1.0, "passes": "bucketing"},
            "option 'clip_norm': .* put 'clip_norm' behind 'bucketing'",
        ),
    ],
)
def test_options_that_nothing_would_follow_are_refused(options, words):
    with pytest.raises(ValueError, match=words):
        passes_of(**options)


def test_the_bound_is_stated():
    assert "limit / (norm + 1e-6)" in CLIP.error_bound()
    assert Pipeline((CLIP,)).spec == "clip_norm{max_norm=1.0}"
