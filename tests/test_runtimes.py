"""`runtime(x)`: who owns which parameter, state dicts, steps."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn

from fxpasses.owners import owner_of, owns, runtime
from fxpasses.runtimes import PlannedCollective, Runtime, StepRecord
from fxpasses.state import STORE
from tests.graphs import mlp

NESTED = {"0.weight", "0.bias", "2.weight", "2.bias"}


def collective(name: str = "w", numel: int = 2) -> PlannedCollective:
    return PlannedCollective("all_reduce", "0", "float32", numel, 4 * numel, (name,), "")


def remember(model: nn.Module, value: float) -> None:
    """Give each parameter a residual."""
    for parameter in model.parameters():
        STORE.put(parameter, "residual", torch.full_like(parameter, value))


def values(state_dict: dict[str, Any]) -> dict[str, float]:
    return {key: tensor.flatten()[0].item() for key, tensor in state_dict["state"].items()}


def names(found: Runtime) -> set[str]:
    return {name for _, name in found.root._names.items()}


# Who is asked


class Trainer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model = mlp(3, 2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.model(x)

    def step(self, x: torch.Tensor) -> torch.Tensor:
        return self.model(x).sum()

    @torch.no_grad()
    def evaluate(self, x: torch.Tensor) -> torch.Tensor:
        return self.model(x).sum()


def test_module_compiled_module_and_bound_method_share_one_runtime():
    trainer = Trainer()
    compiled = torch.compile(trainer, backend="eager")
    asked = (compiled, trainer.step, torch.compile(trainer.step, backend="eager"), compiled.step)
    assert {id(runtime(x)) for x in asked} == {id(runtime(trainer))}


def test_a_module_compiled_in_place():
    model = mlp(3, 2)
    before = runtime(model)
    model.compile(backend="eager")
    assert runtime(model) is before


def test_a_function_that_closes_over_a_module():
    model = mlp(3, 2)

    def step(x: torch.Tensor) -> torch.Tensor:
        return model(x).sum()

    found = runtime(step)
    assert found is runtime(model)
    assert runtime(torch.compile(step, backend="eager")) is found


def test_a_function_that_closes_over_parameters_and_modules():
    weight, model = nn.Parameter(torch.ones(1)), nn.Linear(2, 2)
    found = runtime(lambda x: model(x) * weight)
    assert found is runtime(model) is owner_of({"w": weight})
    assert "weight" in names(found)


MODEL = nn.Linear(2, 2)


def test_a_function_that_uses_a_global_module():
    def step(x: torch.Tensor) -> torch.Tensor:
        return MODEL(x)

    assert runtime(torch.compile(step, backend="eager")) is runtime(MODEL)


@pytest.mark.parametrize("x", [3, "model", len, lambda x: x + 1, nn.ReLU(), None])
def test_where_no_parameter_is_reachable_it_says_so(x):
    with pytest.raises(
        ValueError, match=r"no parameter is reachable .* pass the module that holds"
    ):
        runtime(x)


def test_a_decorated_bound_method():
    trainer = Trainer()
    assert runtime(trainer.evaluate) is runtime(trainer)


def test_equal_modules_have_runtimes_of_their_own():
    assert runtime(mlp(3, 2)) is not runtime(mlp(3, 2))


def test_a_submodule_shares_the_runtime_of_its_model():
    model = mlp(3, 2)
    assert runtime(model[0]) is runtime(model)


def test_asking_for_a_submodule_loses_no_state_of_the_model():
    model = mlp(3, 2, 2)
    remember(model, 1.0)
    found = runtime(model)
    runtime(model[0]), runtime(model[2])
    assert len(found.state_dict()["state"]) == 4


def test_asking_through_a_function_keeps_state_dicts_loadable():
    model = mlp(3, 2)
    remember(model, 1.0)
    found = runtime(model)
    saved = found.state_dict()
    runtime(lambda x: model(x))
    found.load_state_dict(saved)
    assert set(found.state_dict()["state"]) == set(saved["state"]) != set()


def test_compiling_a_submodule_changes_no_name():
    model = mlp(3, 2)
    remember(model, 1.0)
    plain = set(runtime(model).state_dict()["state"])
    model[0] = torch.compile(model[0], backend="eager")
    assert set(runtime(model).state_dict()["state"]) == plain


def test_a_runtime_goes_with_its_parameters():
    model = nn.Linear(2, 2)
    gone = weakref.ref(runtime(model))
    del model
    gc.collect()
    assert gone() is None


# State dicts


def test_a_state_dict_names_kind_and_parameter():
    model = mlp(3, 2, 2)
    remember(model, 2.0)
    STORE.put(model[0].weight, "scale", torch.ones(()))
    found = runtime(model).state_dict()
    assert found["version"] == 1
    assert set(found["state"]) == {*(f"residual/{n}" for n in NESTED), "scale/0.weight"}
    assert set(values(found).values()) == {2.0, 1.0}


def test_without_state_the_dict_is_empty():
    assert runtime(mlp(3, 2)).state_dict() == {"version": 1, "state": {}}


def test_the_round_trip_into_a_new_model_before_its_first_forward(tmp_path):
    first, second = mlp(3, 2, 2), mlp(3, 2, 2)
    remember(first, 3.0)
    torch.save(runtime(first).state_dict(), tmp_path / "state.pt")
    runtime(second).load_state_dict(torch.load(tmp_path / "state.pt"))
    assert values(runtime(second).state_dict()) == {f"residual/{n}": 3.0 for n in NESTED}


def test_loaded_state_is_a_copy():
    first, second = mlp(3, 2), mlp(3, 2)
    remember(first, 3.0)
    runtime(second).load_state_dict(runtime(first).state_dict())
    for _, tensor in STORE.of(first[0].weight):
        tensor.zero_()
    assert set(values(runtime(second).state_dict()).values()) == {3.0}


def test_loading_leaves_what_the_dict_does_not_name():
    model = mlp(3, 2)
    remember(model, 1.0)
    state = {"residual/0.bias": torch.full((2,), 5.0)}
    runtime(model).load_state_dict({"version": 1, "state": state})
    found = values(runtime(model).state_dict())
    assert found == {"residual/0.weight": 1.0, "residual/0.bias": 5.0}


def test_an_unknown_parameter_names_the_nearest_and_loads_nothing():
    model = mlp(3, 2)
    state = {"residual/0.weight": torch.ones(2, 3), "residual/0.weights": torch.ones(2, 3)}
    with pytest.raises(ValueError) as caught:
        runtime(model).load_state_dict({"version": 1, "state": state})
    assert str(caught.value) == (
        "state 'residual/0.weights' belongs to no parameter of this model; did you mean '0.weight'?"
    )
    assert runtime(model).state_dict()["state"] == {}


@pytest.mark.parametrize("version", [2, 0, "1", None])
def test_another_version_is_refused(version):
    said = f"state dict has version {version!r}; this fxpasses reads 1"
    with pytest.raises(ValueError, match=said):
        runtime(mlp(3, 2)).load_state_dict({"version": version, "state": {}})


def test_what_is_no_state_dict_is_refused():
    with pytest.raises(ValueError, match="version None"):
        runtime(mlp(3, 2)).load_state_dict({})


def test_tied_parameters_have_one_entry():
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    model[1].weight = model[0].weight
    remember(model, 1.0)
    assert set(runtime(model).state_dict()["state"]) == {"residual/0.weight"}


# Steps


def test_a_step_sums_its_backwards():
    found = Runtime()
    found.record_backward((collective(numel=2), collective(numel=3)))
    found.record_backward((collective(numel=5),))
    assert found.last_step == StepRecord(backwards=2, collectives=3, bytes=40, skipped=False)


def test_the_record_stays_until_the_next_backward():
    found = Runtime()
    assert found.last_step == StepRecord()
    found.record_backward((collective(),))
    found.end_step()
    assert found.last_step.backwards == 1
    found.record_backward(())
    assert found.last_step == StepRecord(backwards=1)


def test_the_record_is_a_copy():
    found = Runtime()
    found.last_step.backwards = 7
    assert found.last_step.backwards == 0


def trained(model: nn.Module) -> Runtime:
    """The runtime of a model whose parameters have gradients, after one backward."""
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    found = runtime(model)
    found.record_backward((collective(),))
    return found


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam])
def test_an_optimizers_step_ends_the_step(kind):
    model = mlp(3, 2)
    found = trained(model)
    kind(model.parameters(), lr=0.1).step()
    found.record_backward((collective(),))
    assert found.last_step.backwards == 1


def test_several_optimizers_of_one_model_end_one_step():
    model = mlp(3, 2)
    found = trained(model)
    optimizers = [torch.optim.SGD([p], lr=0.1) for p in model.parameters()]
    for optimizer in optimizers:
        optimizer.step()
    assert found.last_step.backwards == 1
    for _ in range(2):
        found.record_backward((collective(),))
    assert found.last_step.backwards == 2


def test_one_optimizer_of_several_models_ends_the_step_of_each():
    models = [mlp(3, 2), mlp(3, 2)]
    found = [trained(model) for model in models]
    torch.optim.SGD([{"params": m.parameters()} for m in models], lr=0.1).step()
    for each in found:
        each.record_backward(())
        assert each.last_step == StepRecord(backwards=1)


def test_the_optimizer_of_another_model_ends_nothing():
    model, other = mlp(3, 2), mlp(3, 2)
    found = trained(model)
    trained(other)
    torch.optim.SGD(other.parameters(), lr=0.1).step()
    found.record_backward(())
    assert found.last_step.backwards == 2


def test_parameters_that_no_runtime_owns_are_no_trouble():
    model = mlp(3, 2)
    before = [p.detach().clone() for p in model.parameters()]
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    torch.optim.SGD(model.parameters(), lr=1.0).step()
    assert all(torch.equal(p, b - 1) for p, b in zip(model.parameters(), before, strict=True))


def test_what_is_sent_besides_counts_in_the_step_under_way_and_is_no_backward():
    found = Runtime()
    found.record_backward((collective(numel=2),))
    found.record_collectives((collective(numel=3), collective(numel=5)))
    assert found.last_step == StepRecord(backwards=1, collectives=3, bytes=40)


# Which backwards synchronise


def micro_batches(found: Runtime, accumulate: int, count: int, first: int = 0) -> list[bool]:
    """Whether each of `count` calls of `backward()` synchronises."""
    answers = []
    for backward in range(first, first + count):
        answers.append(found.synchronises(backward, accumulate))
        found.record_backward(())
    return answers


def test_without_accumulation_every_backward_synchronises():
    assert micro_batches(Runtime(), 1, 3) == [True] * 3


@pytest.mark.parametrize("accumulate", [2, 3, 5])
def test_of_each_step_the_last_micro_batch_synchronises(accumulate):
    expected = ([False] * (accumulate - 1) + [True]) * 3
    assert micro_batches(Runtime(), accumulate, 3 * accumulate) == expected


def test_several_graphs_of_one_backward_are_one_micro_batch():
    found = Runtime()
    backwards = [4, 4, 4, 5, 5, 9, 9, 12]
    answers = [found.synchronises(backward, 2) for backward in backwards]
    assert answers == [False] * 3 + [True] * 2 + [False] * 2 + [True]


def test_a_step_that_ended_early_starts_over():
    found = Runtime()
    assert micro_batches(found, 3, 2) == [False] * 2
    found.end_step()
    assert micro_batches(found, 3, 3, first=2) == [False, False, True]


def test_the_step_of_an_optimizer_starts_over():
    model = mlp(3, 2)
    found = trained(model)
    assert micro_batches(found, 3, 1) == [False]
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    assert micro_batches(found, 3, 3, first=1) == [False, False, True]


def test_all_graphs_of_the_first_backward_of_a_step_are_one_micro_batch():
    """The step ends in front of it, and is on record as ended until its first graph has run."""
    found = Runtime()
    micro_batches(found, 2, 1)
    found.end_step()
    assert [found.synchronises(7, 2), found.synchronises(7, 2)] == [False, False]
    found.record_backward(())
    assert [found.synchronises(7, 2), found.synchronises(8, 2)] == [False, True]


def test_inside_no_sync_nothing_synchronises_but_micro_batches_count():
    found = Runtime()
    with found.no_sync():
        assert micro_batches(found, 2, 3) == [False] * 3
    assert micro_batches(found, 2, 2, first=3) == [True, False]


def test_inside_sync_everything_synchronises_and_micro_batches_count():
    found = Runtime()
    with found.sync():
        assert micro_batches(found, 3, 2) == [True] * 2
    assert micro_batches(found, 3, 2, first=2) == [True, False]


def test_the_innermost_context_counts():
    found, answers = Runtime(), []

    def ask() -> None:
        answers.append(found.synchronises(len(answers), 1))

    with found.no_sync():
        ask()
        with found.sync():
            ask()
            with found.no_sync(), found.no_sync():
                ask()
            ask()
        ask()
    ask()
    assert answers == [False, True, False, True, False, True]


def test_an_exception_leaves_every_context():
    found = Runtime()
    with pytest.raises(ZeroDivisionError), found.no_sync(), found.sync(), found.no_sync():
        _ = 1 / 0
    assert found.synchronises(0, 1)


def test_a_context_that_was_made_and_not_entered_changes_nothing():
    found = Runtime()
    found.no_sync(), found.sync()
    assert micro_batches(found, 2, 2) == [False, True]


def test_a_context_is_that_of_one_model():
    first, second = mlp(3, 2), mlp(3, 2)
    with runtime(first).no_sync():
        assert not runtime(first).synchronises(0, 1) and runtime(second).synchronises(0, 1)


def merged() -> tuple[Runtime, Runtime]:
    """Two runtimes that are one; the second was absorbed."""
    first, second = Runtime(), Runtime()
    first.absorb(second)
    return first, second


def test_a_runtime_that_was_absorbed_counts_with_the_whole():
    first, second = merged()
    answers = [(first, second)[i % 2].synchronises(i, 3) for i in range(6)]
    assert answers == [False, False, True] * 2


@pytest.mark.parametrize("asked", [0, 1])
def test_a_context_of_either_of_two_that_became_one_holds_for_the_whole(asked):
    found = merged()
    with found[asked].no_sync():
        assert [each.synchronises(i, 1) for i, each in enumerate(found)] == [False, False]
    assert [each.synchronises(i, 1) for i, each in enumerate(found, 2)] == [True, True]


@pytest.mark.parametrize("asked", [0, 1])
def test_two_that_become_one_inside_a_context_stay_in_it(asked):
    found = first, second = Runtime(), Runtime()
    with found[asked].no_sync():
        first.absorb(second)
        assert [each.synchronises(i, 1) for i, each in enumerate(found)] == [False, False]


@pytest.mark.parametrize("asked", [0, 1])
def test_two_that_become_one_inside_a_context_leave_it_together(asked):
    """The first graph over both runs inside of it."""
    found = first, second = Runtime(), Runtime()
    with found[asked].no_sync():
        first.absorb(second)
    assert [each.synchronises(i, 1) for i, each in enumerate(found)] == [True, True]


# Plans


def test_the_plan_is_that_of_all_graphs_in_order_of_compilation():
    found = Runtime()
    first, second = collective("a"), collective("b")
    found.record_plan(4, (first,))
    found.record_plan(7, (second, second))
    found.record_plan(4, (first,))
    assert found.plan == (first, second, second)


# Owners that become one


def test_a_graph_over_several_runtimes_makes_them_one():
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    runtime(first), runtime(second)
    one = owner_of({"a.weight": first.weight, "b.weight": second.weight})
    assert runtime(first) is runtime(second) is one
    assert owns(one, first.weight) and owns(one, second.bias)
    assert not owns(Runtime(), first.weight)


def test_absorbing_keeps_plans_and_the_step_under_way():
    first, second = Runtime(), Runtime()
    for number, found in enumerate((first, second)):
        found.record_plan(number, (collective(str(number)),))
        found.record_backward((collective(str(number)),))
    first.absorb(second)
    assert {c.parameters for c in first.plan} == {("0",), ("1",)}
    assert first.last_step == StepRecord(backwards=2, collectives=2, bytes=16)


def test_absorbing_leaves_out_a_step_that_has_ended():
    first, second = Runtime(), Runtime()
    for found in (first, second):
        found.record_backward((collective(),))
    second.end_step()
    first.absorb(second)
    assert first.last_step.backwards == 1


def test_a_step_under_way_survives_being_absorbed_by_one_that_has_ended():
    first, second = Runtime(), Runtime()
    first.end_step()
    second.record_backward((collective(),))
    first.absorb(second)
    first.record_backward((collective(),))
    assert first.last_step.backwards == 2


def test_absorbing_keeps_state():
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    for model in (first, second):
        remember(model, 4.0)
        runtime(model)
    both = nn.ModuleDict({"a": first, "b": second})
    assert values(runtime(both).state_dict()) == {
        f"residual/{name}": 4.0 for name in ("a.weight", "a.bias", "b.weight", "b.bias")
    }


def test_a_runtime_that_was_absorbed_still_answers():
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    held = [runtime(first), runtime(second)]
    one = owner_of({"a.weight": first.weight, "b.weight": second.weight})
    one.record_backward((collective(),))
    assert [found.last_step.backwards for found in held] == [1, 1]


def test_names_are_those_of_the_whole():
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    held = [runtime(first), runtime(second)]
    owner_of({"a.weight": first.weight, "b.weight": second.weight})
    runtime(nn.ModuleDict({"a": first, "b": second}))
    whole = {
        "a.weight": first.weight,
        "a.bias": first.bias,
        "b.weight": second.weight,
        "b.bias": second.bias,
    }
    assert [found.names() for found in held] == [whole] * 2


def test_a_graph_names_only_parameters_that_have_no_name_yet():
    model = mlp(3, 2)
    found = runtime(model)
    extra = nn.Parameter(torch.ones(1))
    owner_of({"L.weight": model[0].weight, "extra": extra})
    assert names(found) == {"0.weight", "0.bias", "extra"}


def test_asking_for_the_model_gives_the_names_of_the_model():
    model = mlp(3, 2)
    owner_of({"some.weight": model[0].weight})
    assert names(runtime(model)) == {"0.weight", "0.bias"}
