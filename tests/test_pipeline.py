"""Contracts, building from options, and how passes and observers are run."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from fxpasses.config import Hardening
from fxpasses.passes.base import Pass, Report
from fxpasses.passes.bucketing import Bucketing
from fxpasses.passes.gradient_sync import GradientSync
from fxpasses.passes.participation import Participation
from fxpasses.passes.running_stats import RunningStats
from fxpasses.pipeline import Done, Pipeline, build
from fxpasses.registry import register_pass
from tests.graphs import WORLD, Does, TwoHeads, checked, doubled


def contract(name: str, stage: str = "backward", **sets: Any) -> Pass:
    """A pass of this name and contract that does nothing."""
    attributes = {key: frozenset(value) for key, value in sets.items()}
    namespace = {"name": name, "stage": stage, "__module__": __name__, **attributes}
    cls = dataclasses.dataclass(frozen=True)(type("Contract", (Pass,), namespace))
    cls.run = lambda self, graph: Report(changed=False)
    return cls()


def broken(*passes: Pass) -> str:
    with pytest.raises(ValueError) as caught:
        Pipeline(passes)
    return str(caught.value)


def build_refused(**options: Any) -> str:
    with pytest.raises(ValueError) as caught:
        build(Hardening(**options), "0", WORLD, 0)
    return str(caught.value)


# Contracts


def test_a_missing_requirement_is_named():
    said = broken(GradientSync())
    assert said == (
        "option 'passes': 'gradient_sync' requires buckets, which no earlier pass provides"
    )


def test_a_requirement_must_come_earlier():
    assert "'gradient_sync' requires buckets" in broken(GradientSync(), Bucketing())


def test_a_requirement_is_met_by_any_earlier_pass():
    passes = (
        contract("first", "joint", provides=["a"]),
        contract("second", provides=["b"]),
        contract("third", requires=["a", "b"]),
    )
    assert Pipeline(passes).passes == passes


def test_all_missing_requirements_are_named():
    said = broken(contract("needy", requires=["b", "a"]))
    assert said == "option 'passes': 'needy' requires a, b, which no earlier pass provides"


@pytest.mark.parametrize("turned", [False, True])
def test_a_conflict_is_an_error_in_either_order(turned):
    passes = [contract("hot", conflicts=["cold"]), contract("between"), contract("cold")]
    said = broken(*(reversed(passes) if turned else passes))
    assert said == "option 'passes': 'hot' and 'cold' exclude each other"


def test_a_conflict_with_an_absent_pass_is_none():
    assert Pipeline((contract("hot", conflicts=["cold"]),)).spec == "hot"


def test_a_pass_stands_once():
    assert broken(Bucketing(mb=1), Bucketing(mb=2)) == "option 'passes': 'bucketing' stands twice"


def test_a_joint_pass_cannot_follow_a_backward_pass():
    assert broken(contract("late"), contract("early", "joint")) == (
        "option 'passes': 'early' works on the joint graph and can't follow 'late', "
        "which works on the backward graph"
    )


def test_passes_are_grouped_by_stage():
    joint, backward = contract("early", "joint"), contract("late")
    pipeline = Pipeline((joint, backward))
    assert pipeline.stage("joint") == (joint,)
    assert pipeline.stage("backward") == (backward,)


# What runs in a backward that does not synchronise


def local(name: str, stage: str = "backward", **sets: Any) -> Pass:
    """A pass that runs in every backward."""
    made = contract(name, stage, **sets)
    type(made).local = True
    return made


def ran(local_only: bool | None, *passes: Pass) -> list[str]:
    """The passes that run of the stage `backward`, by name."""
    done = Pipeline(passes).run("backward", doubled((3,)), local=local_only)
    return [d.made_by.name for d in done]


@pytest.mark.parametrize(
    ("local_only", "names"),
    [(None, ["late", "first", "second"]), (True, ["late"]), (False, ["first", "second"])],
)
def test_passes_are_local_only_if_they_say_so(local_only, names):
    passes = (local("early", "joint"), local("late"), contract("first"), contract("second"))
    assert ran(local_only, *passes) == names


def test_observers_see_the_local_passes_alone_as_well():
    late = local("late")
    seen: list[tuple[Any, Pass | None]] = []
    pipeline = Pipeline((late, contract("first"), contract("second")))
    pipeline.run("backward", doubled((3,)), [lambda b, a, _: seen.append((b, a))], local=True)
    assert seen == [(None, late), (Done(late, Report(changed=False)), None)]


def test_of_the_passes_that_reduce_none_is_local():
    pipeline = build(Hardening(), "0", WORLD, 0)
    assert [p.local for p in pipeline.passes] == [False] * 4


def test_a_local_pass_behind_one_that_is_not_is_refused(own_registry):
    register_pass(type(local("needy", requires=["buckets"])))
    said = build_refused(passes="bucketing,needy,gradient_sync")
    assert "'needy' runs in local backwards too and can't follow 'bucketing'" in said


# Binding


def test_binding_fills_in_what_is_left_open():
    pipeline = Pipeline((Participation(group="7"), Bucketing(mb=2)))
    bound = pipeline.bind(layout=("a", "b"), group="0", world=WORLD)
    assert bound.passes == (
        Participation(group="7", layout=("a", "b")),
        Bucketing(mb=2, layout=("a", "b")),
    )
    assert pipeline.passes == (Participation(group="7"), Bucketing(mb=2))


def test_what_was_bound_once_stays():
    pipeline = Pipeline((Bucketing(mb=2),)).bind(layout=("a",))
    assert pipeline.bind(layout=("b",), bucket_mb=9.0) == pipeline


def test_binding_nothing_changes_nothing():
    pipeline = build(Hardening(), "0", WORLD, 0)
    assert pipeline.bind() == pipeline.bind(layout=None) == pipeline


def test_a_layout_is_no_part_of_the_spec():
    """Ranks compare pipelines by it, before they agree on a layout."""
    pipeline = build(Hardening(), "0", WORLD, 0)
    assert pipeline.bind(layout=("a",)).spec == pipeline.spec


# Building from options


def test_several_ranks_get_the_whole_pipeline():
    pipeline = build(Hardening(bucket_mb=3, reduce="sum", reduce_dtype="bf16"), "0", WORLD, 1)
    assert pipeline.passes == (
        Participation(group="0"),
        RunningStats(group="0"),
        Bucketing(mb=3),
        GradientSync(reduce="sum", dtype="bf16", group="0", world=WORLD),
    )


def test_one_rank_gets_no_pass():
    assert build(Hardening(), None, 1, 0).passes == ()


def test_options_in_the_pipeline_string_win_over_the_others():
    text = "bucketing{mb=1},gradient_sync{reduce=sum,dtype=fp16}"
    found = build(Hardening(passes=text, bucket_mb=9, reduce_dtype="bf16"), "0", WORLD, 0).passes
    assert found == (
        Bucketing(mb=1),
        GradientSync(reduce="sum", dtype="fp16", group="0", world=WORLD),
    )


def test_the_spec_of_a_built_pipeline_makes_the_round_trip():
    pipeline = build(Hardening(), "0", WORLD, 0)
    assert (
        pipeline.spec == "participation,running_stats,bucketing{mb=25.0},gradient_sync{reduce=mean}"
    )
    assert build(Hardening(passes=pipeline.spec), "0", WORLD, 0) == pipeline


@pytest.mark.parametrize("text", ["", "bucketing", "participation,bucketing"])
def test_gradients_left_unreduced_over_several_ranks_are_an_error(text):
    assert build_refused(passes=text) == (
        f"option 'passes': {text!r} reduces no gradient, but there are 4 ranks; "
        "add 'participation,running_stats,bucketing,gradient_sync'"
    )


def test_one_rank_may_leave_gradients_as_they_are():
    assert build(Hardening(passes="bucketing"), None, 1, 0).spec == "bucketing{mb=25.0}"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("bucketin,gradient_sync", "unknown pass 'bucketin'; did you mean 'bucketing'?"),
        ("gradient_sync", "'gradient_sync' requires buckets"),
        ("bucketing,bucketing,gradient_sync", "'bucketing' stands twice"),
        ("bucketing{mb=-1},gradient_sync", "expected a positive number"),
    ],
)
def test_a_wrong_pipeline_is_refused_before_anything_runs(text, said):
    assert said in build_refused(passes=text)


def test_a_third_party_pass_takes_its_place(own_registry):
    register_pass(type(contract("third_party")))
    pipeline = build(Hardening(passes="third_party,bucketing,gradient_sync"), "0", WORLD, 0)
    assert [p.name for p in pipeline.passes] == ["third_party", "bucketing", "gradient_sync"]


def test_a_reducing_pipeline_without_a_process_group_reduces_nothing_or_says_so():
    try:
        pipeline = build(Hardening(passes="bucketing,gradient_sync"), None, 1, 0)
    except ValueError as error:
        assert "passes" in str(error)
    else:
        assert pipeline.run("backward", doubled((3,)))


def test_a_pipeline_without_participation_keeps_ranks_alike_or_is_refused(fake_world):
    model, x = TwoHeads(), torch.ones(1, 3)
    options = {"passes": "bucketing,gradient_sync"}
    try:
        first, _ = torch.compile(model, backend="hardened_aot_eager", options=options)(x)
    except ValueError as error:
        assert "participation" in str(error)
    else:
        first.sum().backward()
        assert model.b.weight.grad is not None, "another rank may have used the second head"


# Running


def test_observers_see_what_was_before_and_what_follows():
    first, second = contract("first"), contract("second")
    seen: list[tuple[Done | None, Pass | None]] = []
    graph = doubled((3,))
    Pipeline((first, second)).run("backward", graph, [lambda b, a, _: seen.append((b, a))])
    one, two = (Done(p, Report(changed=False), i) for i, p in enumerate((first, second), 1))
    assert seen == [(None, first), (one, second), (two, None)]


def test_observers_see_each_state_of_the_graph():
    seen: list[int] = []
    Pipeline((Bucketing(mb=1),)).run(
        "backward",
        doubled((3,)),
        [lambda before, after, graph: seen.append(len(graph.graph.nodes))],
    )
    assert seen[0] < seen[1]


def test_observers_are_called_for_an_empty_stage():
    seen: list[Any] = []
    pipeline = Pipeline((contract("late"),))
    assert pipeline.run("joint", doubled((3,)), [lambda *args: seen.append(args[:2])]) == []
    assert seen == [(None, None)]


def test_only_the_passes_of_the_stage_run():
    ran: list[str] = []
    joint = contract("early", "joint")
    pipeline = Pipeline((joint, Does(action=lambda graph: ran.append("late"))))
    done = pipeline.run("joint", doubled((3,)))
    assert [d.made_by for d in done] == [joint] and ran == []


def test_reports_come_back_in_order(fake_world):
    sync = GradientSync(group=fake_world, world=WORLD, reduce="mean")
    done = checked(doubled((3,), (4,)), Bucketing(mb=1), sync)
    assert [d.made_by.name for d in done] == ["bucketing", "gradient_sync"]
    assert done[0].report == Report(True, {"buckets": 1, "gradients": 2})
    assert done[1].report == Report(True, {"collectives": 1, "bytes": 28})


@pytest.mark.parametrize("changed", [False, True])
def test_code_is_made_again_exactly_when_a_pass_acted(changed):
    graph = doubled((3,))
    before = graph.module.code
    chosen = Bucketing(mb=1) if changed else contract("idle")
    Pipeline((chosen,)).run("backward", graph)
    assert (graph.module.code != before) is changed


def test_compression_takes_the_place_of_the_plain_reduction(fake_world):
    pipeline = build(Hardening(compression="int4"), fake_world, 2, 0)
    assert pipeline.spec == (
        "participation,running_stats,bucketing{mb=25.0,scheme=int4},compress{scheme=int4,reduce=mean}"
    )
    assert build(Hardening(compression="int4"), None, 1, 0).passes == ()


def test_compression_that_the_pipeline_lacks_is_an_error(fake_world):
    text = "participation,bucketing,gradient_sync"
    with pytest.raises(ValueError, match="option 'compression': .* put 'compress' in place of"):
        build(Hardening(compression="int4", passes=text), fake_world, 2, 0)
