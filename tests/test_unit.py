"""A region at compile time: facts, plan, variants of its backward, dump folders."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

from fxpasses import backend, eager, register_pass
from fxpasses.distributed.plans import Form, PlannedCollective, Union
from fxpasses.facts import Facts
from fxpasses.graph import BUFFER_STATE, PENDING_STATE, StateSpec, TrainingGraph
from fxpasses.passes.base import Pass, Report
from fxpasses.passes.participation import STATE_KIND as PARTICIPATION
from fxpasses.unit import Unit
from fxpasses.variants import LEFT, LOCAL, SYNCHRONISE, TOTAL, Variant, pending_of
from tests.graphs import TwoHeads, backward_of, mlp, nodes_with

CPU = torch.device("cpu")


def unit_of(program: Any, *args: torch.Tensor, **options: Any) -> Unit:
    """The unit of the one graph of a program, once its forward is compiled."""
    units: list[Unit] = []

    def compiler(gm, example_inputs):
        gm, inputs, unit = backend.make_unit(gm, example_inputs, options, {})
        units.append(unit)
        return eager.compile_unit(gm, inputs, unit)

    torch.compile(program, backend=compiler, fullgraph=True)(*args)
    (unit,) = units
    return unit


class Simple(nn.Linear):
    """A linear layer whose lines are in this file."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight.t() + self.bias


def simple(**options: Any) -> Unit:
    return unit_of(Simple(3, 2), torch.ones(4, 3), **options)


def bare_form(form: Form) -> Form:
    return dataclasses.replace(form, model_line="")


# Facts


def test_facts_of_a_backward():
    facts = simple().facts
    assert facts.gradients == {"weight": 0, "bias": 2}  # between them stands that of the input
    assert facts.flagged == {0: {0}, 2: {0}}
    assert [bare_form(f) for f in facts.parameters] == [
        Form("weight", (2, 3), "float32", (0, 1)),
        Form("bias", (2,), "float32", (0,)),
    ]
    assert facts.buffers == ()


def test_gradients_say_where_the_model_uses_their_parameter():
    lines = [form.model_line for form in simple().facts.parameters]
    first = Simple.forward.__code__.co_firstlineno
    assert lines == [f"{__file__}:{first + 1}"] * 2


def test_facts_of_two_heads_tell_their_tangents_apart():
    facts = unit_of(TwoHeads(), torch.ones(4, 3)).facts
    needs = {name: facts.flagged[index] for name, index in facts.gradients.items()}
    assert needs == {"a.weight": {0}, "a.bias": {0}, "b.weight": {1}, "b.bias": {1}}


def test_facts_name_the_buffers_that_the_forward_writes():
    facts = unit_of(nn.BatchNorm1d(2), torch.randn(4, 2)).facts
    assert set(facts.buffers) == {
        Form("running_mean", (2,), "float32"),
        Form("running_var", (2,), "float32"),
        Form("num_batches_tracked", (), "int64"),
    }
    assert list(facts.gradients) == ["weight", "bias"]


def test_a_forward_that_records_no_backward_has_no_facts():
    with torch.no_grad():
        unit = simple()
    assert unit.facts == Facts() and not unit.trains
    assert unit.plan((0,)).parameters == () and unit.plan((0,)).collectives == ()


def test_running_statistics_without_a_backward_are_warned_of(fake_world):
    norm = nn.BatchNorm1d(2)
    words = "updates running_mean, running_var and has no backward: each rank keeps its own values"
    with torch.no_grad(), pytest.warns(UserWarning, match=words):
        unit_of(norm, torch.randn(4, 2))


def test_no_warning_where_statistics_stay_or_have_a_backward(fake_world, recwarn):
    unit_of(nn.BatchNorm1d(2), torch.randn(4, 2))
    with torch.no_grad():
        unit_of(nn.BatchNorm1d(2).eval(), torch.randn(4, 2))
    assert not [w for w in recwarn if "no backward" in str(w.message)]


# Plans


def test_one_process_plans_nothing():
    unit = simple()
    assert unit.plan(()).collectives == () and not unit.synchronises


def test_the_plan_is_what_a_synchronising_backward_sends(fake_world):
    unit = simple()
    plan = unit.plan((2,))
    assert plan.collectives == unit.backward(Variant()).collectives
    (planned,) = plan.collectives
    assert dataclasses.replace(planned, model_line="") == PlannedCollective(
        "all_reduce", fake_world, "float32", 8, 32, planned.parameters, "", "gradient_sync"
    )
    assert sorted(planned.parameters) == ["bias", "weight"]
    line = Simple.forward.__code__.co_firstlineno
    assert plan.instance == (2,) and plan.code == f"Simple.forward (test_unit.py:{line})"
    assert planned.model_line == f"{__file__}:{line + 1}"
    assert plan.passes == unit.pipeline.spec
    assert plan.parameters == unit.facts.parameters and plan.reachable == ()


def test_with_accumulation_the_plan_is_that_of_the_total(fake_world):
    unit = simple(accumulate=2)
    assert unit.primary == Variant(LOCAL)
    assert unit.backward(unit.primary).collectives == ()
    assert unit.plan(()).collectives == unit.backward(Variant(TOTAL)).collectives
    assert [c.numel for c in unit.plan(()).collectives] == [8]


def test_with_and_without_accumulation_ranks_send_alike(fake_world):
    """What differs is what is added on each rank, not what travels."""
    one, several = simple(), simple(accumulate=2)
    wires = [[c.on_the_wire() for c in unit.plan(()).collectives] for unit in (one, several)]
    assert wires[0] == wires[1] != []


def test_one_process_accumulates_by_itself():
    unit = simple(accumulate=2)
    assert unit.primary == Variant() and not unit.synchronises


# Variants


def test_a_variant_is_made_once(fake_world):
    unit = simple()
    for variant in (Variant(), Variant(TOTAL), Variant(LOCAL)):
        assert unit.backward(variant) is unit.backward(dataclasses.replace(variant))
    modules = {id(unit.backward(Variant(mode)).module) for mode in (SYNCHRONISE, TOTAL, LOCAL)}
    assert len(modules) == 3


def test_only_what_runs_first_and_what_the_plan_says_is_made_at_once(fake_world):
    assert list(simple()._backwards) == [Variant()]
    assert list(simple(accumulate=2)._backwards) == [Variant(LOCAL), Variant(TOTAL)]


def test_a_variant_leaves_the_others_as_they_are(fake_world):
    unit = simple()
    plain = unit.backward(Variant())
    before = TrainingGraph(plain.module).fingerprint()
    for variant in (Variant(TOTAL), Variant(LOCAL), union_variant("weight", "bias")):
        unit.backward(variant)
    assert TrainingGraph(plain.module).fingerprint() == before


def union_variant(*names: str, absent: tuple[str, ...] = (), mode: str = SYNCHRONISE) -> Variant:
    """What the ranks agree on about parameters of `Simple(3, 2)` and others of shape 5."""
    shapes = {"weight": (2, 3), "bias": (2,)}
    forms = tuple(Form(name, shapes.get(name, (5,)), "float32") for name in names)
    specs = tuple(pending_of(name, torch.empty(5)) for name in absent)
    return Variant(mode, Union(forms, ()), specs)


@pytest.mark.parametrize(
    ("variant", "names", "numels"),
    [
        (Variant(), [], [8]),
        (Variant(LOCAL), [], []),
        (Variant(TOTAL), ["pending/weight", "pending/bias"], [8]),
        (union_variant("bias", "weight"), ["participation/"], [2, 8]),
        (
            union_variant("other", "bias", "weight", absent=("other",)),
            ["pending/other", "participation/"],
            [3, 13],
        ),
        (
            union_variant("other", "bias", "weight", absent=("other",), mode=TOTAL),
            ["pending/weight", "pending/bias", "pending/other", "participation/"],
            [3, 13],
        ),
    ],
    ids=["synchronise", "local", "total", "union", "absent", "total of a union"],
)
def test_states_and_payloads_of_each_variant(fake_world, variant, names, numels):
    unit = simple()
    backward = unit.backward(variant)
    assert [spec.name for spec in backward.states] == names
    assert [c.numel for c in backward.collectives] == numels
    launches = [event for event in backward.events if event.kind == "launch"]
    assert len(launches) == len(numels)


def test_what_micro_batches_left_is_sent_without_the_graph(fake_world):
    unit = simple()
    backward = unit.backward(union_variant("other", absent=("other",), mode=LEFT))
    assert [spec.name for spec in backward.states] == ["pending/other", "participation/"]
    assert {c.made_by: c.numel for c in backward.collectives} == {
        "participation": 1,
        "gradient_sync": 5,
    }
    assert len(backward.module.graph.find_nodes(op="placeholder")) == 2
    assert [event.kind for event in backward.events if event.kind == "compute"] == []


def test_state_inputs_stand_behind_the_graphs_own_inputs_and_are_no_outputs(fake_world):
    unit = simple()
    own = len(unit.backward(Variant()).module.graph.find_nodes(op="placeholder"))
    backward = unit.backward(union_variant("other", "bias", "weight", absent=("other",)))
    graph = TrainingGraph(backward.module)
    assert len(graph.inputs()) == own + len(backward.states)
    assert [role.name for _, role in graph.inputs()[own:]] == [s.name for s in backward.states]
    assert graph.outputs("state") == []
    copies = nodes_with(graph, torch.ops.aten.copy_.default)
    assert [copy.args[0] for copy in copies] == [graph.inputs()[-1][0]]


def test_a_union_is_sent_in_its_order(fake_world):
    unit = simple(bucket_mb=1e-6)
    for names in (("bias", "weight"), ("weight", "bias")):
        collectives = unit.backward(union_variant(*names)).collectives
        assert [c.parameters for c in collectives] == [(), *((name,) for name in names)]
        assert [c.numel * 4 for c in collectives] == [c.bytes for c in collectives]


def test_the_buffers_of_a_union_travel_whether_this_rank_writes_them_or_not(fake_world):
    unit = simple()
    specs = tuple(StateSpec(BUFFER_STATE, name, (4,), torch.float32, CPU) for name in "mv")
    forms = tuple(Form(spec.parameter, spec.shape, "float32") for spec in specs)
    weights = tuple(dataclasses.replace(f, model_line="") for f in unit.facts.parameters)
    backward = unit.backward(Variant(SYNCHRONISE, Union(weights, forms), (), specs))
    assert [spec.kind for spec in backward.states] == [PARTICIPATION, BUFFER_STATE, BUFFER_STATE]
    sent = {c.operator: c.numel for c in backward.collectives if c.operator == "broadcast"}
    assert sent == {"broadcast": 8}


def test_what_is_pending_has_the_form_of_its_gradient(fake_world):
    backward = simple().backward(Variant(TOTAL))
    assert backward.states == (
        StateSpec(PENDING_STATE, "weight", (2, 3), torch.float32, CPU),
        StateSpec(PENDING_STATE, "bias", (2,), torch.float32, CPU),
    )


@dataclasses.dataclass(frozen=True)
class Marks(Pass):
    """Notes that it ran."""

    name: ClassVar[str] = "marks"
    stage: ClassVar[str] = "backward"
    local: ClassVar[bool] = True
    seen: ClassVar[list[tuple[str, ...]]] = []

    def run(self, graph: TrainingGraph) -> Report:
        self.seen.append(tuple(role.name for _, role in graph.inputs("state")))
        return Report(changed=False)


def test_of_a_local_backward_only_the_local_passes_run(fake_world, own_registry, monkeypatch):
    register_pass(Marks)
    monkeypatch.setattr(Marks, "seen", [])
    unit = simple(passes="marks,bucketing,gradient_sync")
    assert unit.synchronises and Marks.seen == [()]
    assert unit.backward(Variant(LOCAL)).collectives == ()
    assert len(unit.backward(Variant(TOTAL)).collectives) == 1
    assert Marks.seen == [(), (), ()]  # what is pending went through it when it was made


def test_of_what_micro_batches_left_no_local_pass_runs(fake_world, own_registry, monkeypatch):
    """It went through them when it was made."""
    register_pass(Marks)
    monkeypatch.setattr(Marks, "seen", [])
    unit = simple(passes="marks,bucketing,gradient_sync")
    left = unit.backward(union_variant("other", absent=("other",), mode=LEFT))
    assert [c.numel for c in left.collectives] == [5] and Marks.seen == [()]


def test_with_local_passes_only_there_is_nothing_to_synchronise(own_registry, monkeypatch):
    register_pass(Marks)
    monkeypatch.setattr(Marks, "seen", [])
    unit = simple(passes="marks", accumulate=3)
    assert not unit.synchronises and unit.primary == Variant() and Marks.seen == [()]


# Dumps


def folders(path: Path) -> list[str]:
    """Names of the folders of rank 0, without the number of the unit."""
    found = sorted((path / "rank0").iterdir())
    assert len({folder.name.partition(".")[0] for folder in found}) == 1
    return [folder.name.partition(".")[2] for folder in found]


def test_each_variant_has_a_folder_of_its_own(fake_world, tmp_path):
    unit = simple(dump=str(tmp_path))
    assert folders(tmp_path) == ["backward", "joint"]
    for variant in (
        Variant(TOTAL),
        Variant(LOCAL),
        union_variant("weight", "bias"),
        union_variant("bias", "weight"),
        union_variant("bias", "weight", mode=TOTAL),
        union_variant("other", absent=("other",), mode=LEFT),
    ):
        unit.backward(variant)
        unit.backward(variant)
    assert folders(tmp_path) == [
        "backward",
        "backward-left-union3",
        "backward-local",
        "backward-synchronise-union0",
        "backward-synchronise-union1",
        "backward-total",
        "backward-total-union2",
        "joint",
    ]


def test_with_accumulation_the_local_variant_has_the_plain_name(fake_world, tmp_path):
    unit = simple(dump=str(tmp_path), accumulate=2)
    assert folders(tmp_path) == ["backward", "backward-total", "joint"]
    unit.backward(Variant())
    assert folders(tmp_path) == ["backward", "backward-synchronise", "backward-total", "joint"]


def test_a_dump_shows_the_variant_before_and_after_its_passes(fake_world, tmp_path):
    unit = simple(dump=str(tmp_path))
    unit.backward(Variant(TOTAL))
    (folder,) = (tmp_path / "rank0").glob("*.backward-total")
    first, *_, last = sorted(folder.glob("*.py"))
    assert first.name == "00-input.py" and last.name == "04-gradient_sync.py"
    assert "state pending/weight" in first.read_text()
    assert "all_reduce" not in first.read_text() and "all_reduce" in last.read_text()


def test_a_backward_like_that_of_a_capture():
    """What `capture` shows to tests of passes is what the backend runs them on."""
    unit = simple()
    graph = backward_of(Simple(3, 2), torch.ones(4, 3))
    base = TrainingGraph(unit.backward(Variant()).module)
    assert [str(n.target) for n in base.walk()] == [str(n.target) for n in graph.walk()]
    assert base.output_node.meta["roles"] == graph.output_node.meta["roles"]


def test_units_have_numbers_of_their_own_and_code_its_region():
    model = mlp(3, 2)
    first, second = unit_of(model, torch.ones(4, 3)), unit_of(model, torch.ones(4, 3))
    assert first.id < second.id and first.scope.code == second.scope.code
    assert first.input_roles == second.input_roles
