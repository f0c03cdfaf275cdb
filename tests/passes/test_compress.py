"""Compress: what it sends, what arrives, and that nothing is lost."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fxpasses.effects import is_launch, is_wait
from fxpasses.graph import StateSpec, TrainingGraph
from fxpasses.passes.bucketing import Bucketing
from fxpasses.passes.compress import Compress
from fxpasses.testing.check import check_run
from fxpasses.testing.synthetic import GradientGraph, Leaf, Step
from fxpasses.testing.world import World
from tests.graphs import C10D, backward_of, checked, doubled, mlp, nodes_with

SCHEMES = ("int8", "int4", "topk:ratio=0.25", "fp16", "bf16")
WITH_RESIDUAL = SCHEMES[:3]
LOW_RANK = "powersgd:rank=1"  # of the first parameter of `Training`, two dimensions of 40 and 3
WITH_STATE = (
    *WITH_RESIDUAL,
    *(LOW_RANK, "int4:stochastic=true", "int4:feedback=ef21", "topk:ratio=0.25:momentum=0.9"),
)
HALF = 0.5 * (1 + 2**-14)


def compressed(
    graph: TrainingGraph,
    group: str,
    scheme: str,
    world: int = 2,
    rank: int = 0,
    mb: float = 1,
    **options,
):
    sync = {"group": group, "world": world, "rank": rank, "reduce": "mean", **options}
    done = checked(graph, Bucketing(mb=mb, scheme=scheme), Compress(scheme=scheme, **sync))
    return done[-1].report


@dataclasses.dataclass
class Training:
    """One graph a rank, whose gradients are twice what it is given; state is kept from step to step."""

    group: str
    scheme: str
    world: int
    shapes: tuple[tuple[int, ...], ...] = ((40, 3), (7,), (1,))
    mb: float = 1
    reduce: str = "mean"

    def __post_init__(self) -> None:
        self.graphs = [doubled(*self.shapes) for _ in range(self.world)]
        for rank, graph in enumerate(self.graphs):
            compressed(
                graph, self.group, self.scheme, self.world, rank, self.mb, reduce=self.reduce
            )
        self.residuals = [
            {
                role.name: torch.zeros(node.meta["val"].shape, dtype=node.meta["val"].dtype)
                for node, role in graph.inputs("state")
            }
            for graph in self.graphs
        ]

    def step(self, gradients: list[list[torch.Tensor]]) -> list[torch.Tensor]:
        """The reduced gradients, which are the same on all ranks, from those of each rank."""
        rows = [
            [*(g / 2 for g in own), *residual.values()]
            for own, residual in zip(gradients, self.residuals, strict=True)
        ]
        outputs = World(self.graphs, rows).run()
        count = len(self.shapes)
        for graph, row, residual in zip(self.graphs, outputs, self.residuals, strict=True):
            residual.update({role.name: row[at] for at, _, role in graph.outputs("state")})
        for row in outputs[1:]:
            for one, first in zip(row[:count], outputs[0][:count], strict=True):
                assert torch.equal(one, first) or (one.isnan() == first.isnan()).all()
        return list(outputs[0][:count])

    def random(self, seed: int, scale: float = 1.0) -> list[list[torch.Tensor]]:
        generator = torch.Generator().manual_seed(seed)
        return [
            [scale * torch.randn(s, generator=generator) for s in self.shapes]
            for _ in range(self.world)
        ]

    def residual_sum(self) -> float:
        residuals = (self.state(rank, "residual") for rank in range(self.world))
        return float(sum(r.double().sum() for r in residuals))

    def state(self, rank: int, kind: str) -> torch.Tensor:
        """A rank's states of a kind, one behind the other."""
        found = [v for name, v in self.residuals[rank].items() if name.startswith(f"{kind}/")]
        return torch.cat([torch.zeros(0), *(v.flatten() for v in found)])


def mean(gradients: list[list[torch.Tensor]]) -> list[torch.Tensor]:
    return [torch.stack(column).mean(0) for column in zip(*gradients, strict=True)]


# It acts


def test_with_two_ranks_a_bucket_is_gathered_once(fake_world):
    graph = backward_of(mlp(3, 2), torch.randn(4, 3))
    report = compressed(graph, fake_world, "int4")
    assert report.counts == {"buckets": 1, "compressed": 1, "collectives": 1, "bytes": 16}
    (launch,) = [n for n in graph.walk() if is_launch(n)]
    assert launch.target is C10D.all_gather_into_tensor.default and launch.meta["reduces"]
    payload = launch.args[0].meta["val"]
    # A header, a bf16 scale for each of two groups (one a parameter), 2 and 6 codes of half a byte.
    assert payload.dtype == torch.uint8 and payload.numel() == 8 + 2 * 2 + 1 + 3


def test_from_three_ranks_on_there_are_two_legs(fake_world):
    graph = backward_of(mlp(3, 2), torch.randn(4, 3))
    report = compressed(graph, fake_world, "int8", world=4, rank=1)
    launches = [n for n in graph.walk() if is_launch(n)]
    assert [n.target for n in launches] == [
        C10D.all_to_all_single.default,
        C10D.all_gather_into_tensor.default,
    ]
    assert [n.meta.get("reduces", False) for n in launches] == [False, True]
    sizes = [n.args[0].meta["val"].numel() for n in launches]
    assert sizes[0] == 4 * sizes[1] and report.counts["bytes"] == sum(sizes)


def test_launches_stand_behind_their_buckets_and_waits_at_the_end(fake_world):
    graph = backward_of(mlp(8, 8, 8, 4), torch.randn(4, 8))
    compressed(graph, fake_world, "int8", world=3, mb=1e-6)
    kinds = [
        "launch" if is_launch(n) else "wait" if is_wait(n) else "mm"
        for n in graph.walk()
        if is_launch(n) or is_wait(n) or n.target is torch.ops.aten.mm.default
    ]
    launches = [i for i, kind in enumerate(kinds) if kind == "launch"]
    assert kinds.count("launch") == kinds.count("wait") == 2 * 6
    assert "mm" in kinds[launches[0] :]  # there is something to hide behind
    last = max(i for i, kind in enumerate(kinds) if kind == "mm")
    # The first leg's are awaited in front of a second leg; all of the second at the end.
    assert kinds[last:].count("wait") >= 6


def test_the_residual_is_one_state_for_all_parameters_of_a_bucket(fake_world):
    graph = backward_of(mlp(3, 2), torch.randn(4, 3))
    compressed(graph, fake_world, "topk")
    ((node, role),) = graph.inputs("state")
    assert role.name == "residual/0.bias"
    assert node.meta["state"] == StateSpec(
        "residual",
        "0.bias",
        (8,),
        torch.float32,
        torch.device("cpu"),
        parts=(("0.bias", 2), ("0.weight", 6)),
    )
    assert [r.name for _, _, r in graph.outputs("state")] == ["residual/0.bias"]


def test_parameters_go_by_their_own_scheme(fake_world):
    graph = backward_of(mlp(3, 2, 2), torch.randn(4, 3))
    report = compressed(graph, fake_world, "*=int8;*.bias=none")
    assert report.counts["buckets"] == 2 and report.counts["compressed"] == 1
    assert len(nodes_with(graph, C10D.all_reduce.default)) == 1
    sent = {n.target._opname: n.meta["provenance"].parameters for n in graph.walk() if is_launch(n)}
    assert all(name.endswith("bias") for name in sent["all_reduce"])
    assert all(name.endswith("weight") for name in sent["all_gather_into_tensor"])


# It leaves alone


def test_a_graph_without_gradients_is_left_alone(fake_world):
    graph = backward_of(lambda x: x.sin(), torch.randn(3, requires_grad=True))
    before = graph.fingerprint()
    assert not compressed(graph, fake_world, "int8").changed and graph.fingerprint() == before


def test_complex_gradients_are_refused(fake_world):
    graph = doubled((3,), dtype=torch.complex64)
    with pytest.raises(ValueError, match="option 'compression': 'int8' does not fit"):
        compressed(graph, fake_world, "int8")


def test_complex_gradients_without_a_scheme_keep_their_dtype_on_the_wire(fake_world):
    graph = doubled((3,), dtype=torch.complex64)
    with pytest.raises(ValueError, match="reduce_dtype='bf16' does not fit the complex gradient"):
        compressed(graph, fake_world, "*=none", dtype="bf16")


@pytest.mark.parametrize("world", [2, 3])
def test_a_complex_gradient_goes_beside_compressed_ones(world):
    """Whether it is finite was asked for by an operator that writes its input."""
    source = GradientGraph((Leaf((40,)), Leaf((3,))), (Step("complex64", 1),), gradients=(0, 2))
    rules = "*=int8;layer1.weight=none"
    environment = {"world": world, "group": "world", "reduce": "mean", "bucket_mb": 1.0}
    run = check_run(Compress(scheme=rules), source, {**environment, "compression": rules})
    assert run.reports[0].counts["buckets"] == 2 and run.reports[0].counts["compressed"] == 1
    before, after = run.traced_before.results, run.traced_after.results
    expected = torch.stack([row[1] for row in before]).mean(0)
    torch.testing.assert_close(after[0][1], expected, rtol=1e-6, atol=1e-6)
    residual = next(at for at, _, role in run.after.outputs("state"))
    assert all(row[residual].any() for row in after)


# Numbers


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_rank_gets_the_mean_within_the_bound(fake_world, scheme, world):
    training = Training(fake_world, scheme, world)
    gradients = training.random(0)
    largest = max(g.abs().max() for row in gradients for g in row)
    bound = {
        "int8": HALF * 2 * largest / 254 * 1.01,
        "int4": HALF * (2 * largest / 14 * 1.01 + 2 * largest / 254 * 1.01),
        "fp16": largest * 2**-10,
        "bf16": largest * 2**-7,
    }.get(scheme, largest)
    bound *= 2 if scheme == "int8" and world > 2 else 1
    for found, exact in zip(training.step(gradients), mean(gradients), strict=True):
        assert (found - exact).abs().max() <= bound


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_sum_is_the_mean_as_often_as_there_are_ranks(fake_world, scheme):
    gradients = Training(fake_world, scheme, 3).random(0)
    total = Training(fake_world, scheme, 3, reduce="sum").step(gradients)
    for found, one in zip(total, Training(fake_world, scheme, 3).step(gradients), strict=True):
        assert torch.equal(found, 3 * one)


@settings(
    max_examples=40,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    scheme=st.sampled_from(
        [
            *(*WITH_RESIDUAL, "int4:second_bits=4", "int8:symmetric=false", "int4:rotate=true"),
            *("int4:stochastic=true", "powersgd:rank=1", "powersgd:rank=3"),
        ]
    ),
    world=st.integers(1, 5),
    sizes=st.lists(
        st.tuples(st.integers(1, 300))
        | st.tuples(st.integers(1, 20), st.integers(1, 20))
        | st.tuples(st.integers(1, 20), st.integers(1, 5), st.integers(1, 5)),
        min_size=1,
        max_size=4,
    ),
    steps=st.integers(1, 4),
    seed=st.integers(0, 1000),
    exponent=st.integers(-20, 20),
    mb=st.sampled_from([1, 1e-6]),
)
def test_what_was_sent_and_what_is_left_are_all_gradients(
    fake_world, scheme, world, sizes, steps, seed, exponent, mb
):
    training = Training(fake_world, scheme, world, tuple(sizes), mb)
    sent = gradients_sum = magnitude = 0.0
    for step in range(steps):
        gradients = training.random(seed + step, 2.0**exponent)
        sent += float(sum(world * g.double().sum() for g in training.step(gradients)))
        gradients_sum += float(sum(g.double().sum() for row in gradients for g in row))
        magnitude += float(sum(g.double().abs().sum() for row in gradients for g in row))
    assert sent + training.residual_sum() == pytest.approx(gradients_sum, abs=1e-5 * magnitude)


@pytest.mark.parametrize("scheme", ["int4", "topk:ratio=0.25", LOW_RANK])
def test_with_feedback_a_constant_gradient_arrives_and_without_it_not(fake_world, scheme):
    def missing(words: str, steps: int) -> float:
        """What has not arrived of the sum over the steps, where it is most."""
        training = Training(fake_world, words, 3)
        gradients = training.random(0)
        rows = [training.step(gradients) for _ in range(steps)]
        sums = [sum(column) for column in zip(*rows, strict=True)]
        return max(
            float((s - steps * m).abs().max()) for s, m in zip(sums, mean(gradients), strict=True)
        )

    assert missing(scheme, 60) < 1.5 * missing(scheme, 20)
    without = f"{scheme}:feedback=false"
    # A subspace turns for a while: it misses more of one element, then of another.
    rel = 0.25 if scheme == LOW_RANK else 1e-3
    assert missing(without, 60) == pytest.approx(3 * missing(without, 20), rel=rel)


# Kinds of feedback, and random rounding


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("scheme", ["int4:feedback=ef21", "topk:ratio=0.25:feedback=ef21"])
def test_estimates_come_near_and_their_mean_is_the_result(fake_world, scheme, world):
    training = Training(fake_world, scheme, world)
    gradients = training.random(0)
    apart = []
    for _ in range(12):
        found = training.step(gradients)
        exact = torch.cat([m.flatten() for m in mean(gradients)])
        result = torch.cat([f.flatten() for f in found])
        apart.append(float((result - exact).abs().max()))
        estimates = torch.stack([training.state(r, "estimate") for r in range(world)])
        for rank in range(world):
            assert torch.equal(training.state(rank, "mean_estimate"), result)
        torch.testing.assert_close(estimates.mean(0), result, rtol=1e-5, atol=1e-6)
    assert apart[-1] < 1e-3 * apart[0]


def test_estimates_of_a_moving_average(fake_world):
    scheme = "topk:ratio=0.5:momentum=0.5:feedback=ef21"
    training = Training(fake_world, scheme, 1, ((4,),))
    (first,) = training.step([[torch.tensor([4.0, -2.0, 1.0, 1.0])]])
    assert first.tolist() == [2.0, -1.0, 0.0, 0.0]  # of half the gradient the larger half
    (second,) = training.step([[torch.tensor([2.0, -1.0, 3.0, 5.5])]])
    # The average is [2, -1, 1.75, 3]: now the others differ from their estimates.
    assert second.tolist() == [2.0, -1.0, 1.75, 3.0]
    assert training.state(0, "velocity").tolist() == second.tolist()
    assert training.state(0, "estimate").tolist() == second.tolist()


def test_momentum_is_kept_where_nothing_was_sent(fake_world):
    training = Training(fake_world, "topk:ratio=0.5:momentum=0.5", 1, ((4,),))
    (first,) = training.step([[torch.tensor([4.0, -3.0, 2.0, 1.0])]])
    assert first.tolist() == [4.0, -3.0, 0.0, 0.0]
    assert training.state(0, "residual").tolist() == [0.0, 0.0, 2.0, 1.0]
    assert training.state(0, "velocity").tolist() == [0.0, 0.0, 2.0, 1.0]
    (second,) = training.step([[torch.tensor([0.5, 0.5, 1.0, 1.0])]])
    # Velocity: half of what it was, and the gradient; sent: that and what had not been sent.
    assert second.tolist() == [0.0, 0.0, 4.0, 2.5]
    assert training.state(0, "residual").tolist() == [0.5, 0.5, 0.0, 0.0]
    assert training.state(0, "velocity").tolist() == [0.5, 0.5, 0.0, 0.0]


def test_random_rounding_differs_by_step_rank_and_bucket_and_is_right_on_average(fake_world):
    gradient = [[torch.full((64,), 0.3), torch.cat([torch.ones(1), torch.full((63,), 0.3)])]] * 2
    shapes = ((64,), (64,))
    scheme = "int4:stochastic=true:feedback=false"
    training = Training(fake_world, scheme, 2, shapes, mb=1e-6)
    steps = [training.step(gradient)[1] for _ in range(50)]
    assert len({tuple(s.tolist()) for s in steps}) == 50
    assert {float(v) for row in training.residuals for v in row.values()} == {50.0}
    total = torch.stack(steps).mean(0)[1:]
    step_size = 1 / 7
    assert (total - 0.3).abs().mean() < 0.5 * step_size / 50**0.5
    # A rank alone rounds to two values; the mean of two that round apart has three.
    assert torch.stack(steps)[:, 1:].unique().numel() == 3
    alike = Training(fake_world, scheme, 2, shapes, mb=1e-6)
    assert torch.equal(alike.step(gradient)[1], steps[0])


# PowerSGD


def test_powersgd_sends_thin_matrices_and_what_is_small_as_it_is(fake_world):
    graph = doubled((40, 30), (7,), (2, 2), (10, 4, 5))
    report = compressed(graph, fake_world, "powersgd:rank=2", world=4)
    launches = [n for n in graph.walk() if is_launch(n)]
    assert [n.target for n in launches] == [C10D.all_reduce.default] * 2
    sizes = [n.args[0].meta["val"].numel() for n in launches]
    assert sizes == [2 * 40 + 2 * 10 + 7 + 4, 2 * 30 + 2 * 20]
    assert report.counts == {
        "buckets": 1,
        "compressed": 1,
        "collectives": 2,
        "bytes": 4 * sum(sizes),
    }
    states = {role.name: tuple(node.meta["val"].shape) for node, role in graph.inputs("state")}
    assert states == {"residual/p0": (1200 + 7 + 4 + 200,), "subspace/p0": (2 * 30 + 2 * 20,)}


def test_a_bucket_of_what_is_small_is_reduced_as_it_is(fake_world):
    graph = doubled((7,), (3, 3))
    report = compressed(graph, fake_world, "powersgd")
    assert report.counts["compressed"] == 0 and not graph.inputs("state")
    assert len(nodes_with(graph, C10D.all_reduce.default)) == 1


@pytest.mark.parametrize("world", [1, 2, 3])
def test_matrices_of_the_rank_arrive_as_they_are(fake_world, world):
    """Of different sizes, from 2^-60 on; and the subspace is good after one step."""
    torch.manual_seed(0)
    shapes = ((40, 30), (7,), (30, 50))
    training = Training(fake_world, "powersgd:rank=2", world, shapes)
    for scale in (1.0, 2.0**-60):
        left = [torch.randn(40, 2), torch.randn(30, 2)]
        right = [torch.randn(2, 30), torch.randn(2, 50)]
        exact = [scale * left[0] @ right[0], scale * torch.randn(7), scale * left[1] @ right[1]]
        training.residuals = [
            {k: torch.zeros_like(v) for k, v in row.items()} for row in training.residuals
        ]
        found = training.step([exact] * world)
        for one, other in zip(found, exact, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4 * scale)


def test_ranks_with_other_subspaces_end_alike(fake_world):
    """A rank that was started anew, say; `step` compares all ranks' results bitwise."""
    training = Training(fake_world, "powersgd:rank=1", 2)
    training.step(training.random(0))
    training.residuals[1] = {k: torch.zeros_like(v) for k, v in training.residuals[1].items()}
    training.step(training.random(1))
    assert torch.equal(training.state(0, "subspace"), training.state(1, "subspace"))


# Gradients that are not finite


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("scheme", dict.fromkeys((*SCHEMES, *WITH_STATE)))
def test_what_is_not_finite_on_one_rank_is_so_on_all_and_leaves_no_trace(
    fake_world, scheme, value, world
):
    training, undisturbed = (Training(fake_world, scheme, world) for _ in range(2))
    for each in (training, undisturbed):
        each.step(each.random(0))
    before = [{k: v.clone() for k, v in row.items()} for row in training.residuals]
    poisoned = training.random(1)
    poisoned[1][0][3, 1] = value
    found = training.step(poisoned)
    if scheme == LOW_RANK:  # what rides along has its own values
        assert not found[0].isfinite().any()
    else:
        assert all(not g.isfinite().any() for g in found)
    for row, old in zip(training.residuals, before, strict=True):
        assert all(torch.equal(row[name], old[name]) for name in old)
    found, expected = (each.step(each.random(2)) for each in (training, undisturbed))
    assert all(map(torch.equal, found, expected))


def test_a_bucket_that_is_not_finite_keeps_the_residuals_of_all(fake_world):
    """The step will be skipped, so what the others sent is not used."""
    training = Training(fake_world, "int4", 2, mb=1e-6)
    training.step(training.random(0))
    before = [{k: v.clone() for k, v in row.items()} for row in training.residuals]
    assert len(before[0]) == 3
    poisoned = training.random(1)
    poisoned[0][2][0] = math.nan
    found = training.step(poisoned)
    assert found[0].isfinite().all() and found[2].isnan().all()
    for row, old in zip(training.residuals, before, strict=True):
        assert all(torch.equal(row[name], old[name]) for name in old)


@pytest.mark.parametrize("scheme", dict.fromkeys((*SCHEMES, *WITH_STATE)))
def test_zeros_arrive_as_zeros(fake_world, scheme):
    training = Training(fake_world, scheme, 3)
    zeros = [[torch.zeros(s) for s in training.shapes] for _ in range(3)]
    assert all((g == 0).all() for g in training.step(zeros))


# The contract


def test_the_contract():
    assert Compress.requires == {"buckets"} and Compress.provides == {"reduced", "compressed"}
    assert not Compress.preserves_numerics and not Compress.local
    assert Compress(scheme="int4", group="7", world=2, rank=1).spec == "compress{scheme=int4}"
    with pytest.raises(ValueError, match="did you mean 'int8'|'int4'"):
        Compress(scheme="int9")
