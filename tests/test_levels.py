"""Which level each layer takes: by the norms so far, within an error budget, or by the stage of a warm-up."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fxpasses.compression import parse_rules
from fxpasses.layers import BIAS, EMBEDDING, WEIGHT
from fxpasses.levels import LEVEL, WARMUP, Branch, LevelChoice, Statistics
from fxpasses.passes.measure_norms import STATISTICS
from fxpasses.state import STORE

LAYERS = {"a": WEIGHT, "b": WEIGHT, "a.bias": BIAS, "tokens": EMBEDDING}


class Model:
    """Parameters and their statistics."""

    def __init__(self, option: str, layers: dict[str, str] = LAYERS, size: int = 40) -> None:
        self.choice = LevelChoice(parse_rules(option), layers)
        self.parameters = {
            name: nn.Parameter(torch.zeros((size, size) if kind == WEIGHT else (size,)))
            for name, kind in layers.items()
        }

    def saw(self, name: str, norm: float, average: float, count: int = 1) -> None:
        values = torch.tensor([norm, average, float(count)])
        STORE.put(self.parameters[name], STATISTICS, values)

    def levels(self) -> dict[str, str]:
        return dict(self.choice.choose(self.statistics(), self.parameters.get))

    def statistics(self) -> dict[str, Statistics]:
        return self.choice.statistics(self.parameters.get)


def test_only_weights_that_are_adaptive_have_a_level():
    model = Model("*=adaptive;b=int8")
    assert model.choice and model.levels() == {"a": "int4"} == dict(model.choice.start)
    assert not LevelChoice(parse_rules("int8"), LAYERS)
    assert not LevelChoice(parse_rules("adaptive"), {"a.bias": BIAS})


@pytest.mark.parametrize(
    ("norms", "level"),
    [
        ([(3.0, 3.0), (4.0, 4.0)], "powersgd"),
        ([(3.0, 3.0), (6.0, 4.0)], "powersgd"),  # 6.7 beside 5: less than by half
        ([(3.0, 3.0), (8.0, 4.0)], "int4"),  # 8.5 beside 5
        ([(0.0, 3.0), (2.0, 4.0)], "int4"),  # 2 beside 5
        ([(0.0, 0.0), (0.0, 0.0)], "int4"),
        ([(3.0, 0.15), (4.0, 0.2)], "int4"),  # the first: averages start from zero
    ],
)
def test_the_norm_of_all_together_decides(norms, level):
    model = Model("adaptive:threshold=0.5:flush=0")
    for name, pair in zip("ab", norms, strict=True):
        model.saw(name, *pair)
    assert model.levels() == {"a": level, "b": level}


@pytest.mark.parametrize(
    ("option", "every"), [("adaptive", 3), ("adaptive:flush=2", 2), ("adaptive:flush=0", 0)]
)
def test_every_few_backwards_send_what_was_held_back(option, every):
    model, taken = Model(option), []
    for count in range(1, 20):
        model.saw("a", 3.0, 3.0, count)
        model.saw("b", 4.0, 4.0, count // 2)  # not in all backwards
        taken.append(model.levels())
    flushes = [count % every == every - 1 if every else False for count in range(1, 20)]
    assert taken == [dict.fromkeys("ab", "int4" if f else "powersgd") for f in flushes]


def test_schemes_are_judged_apart():
    model = Model("a=adaptive;b=adaptive:levels=int8/powersgd")
    model.saw("a", 1.0, 1.0)
    model.saw("b", 2.5, 1.0)
    assert model.levels() == {"a": "powersgd", "b": "int8"}


def test_branches_say_what_was_taken_and_why():
    model = Model("adaptive")
    model.saw("a", 1.0, 1.5, 7)
    assert model.choice.branches((("a", "topk"), ("b", "int4")), model.statistics()) == (
        Branch("a", "weight", Statistics(1.0, 1.5, 7), "topk"),
        Branch("b", "weight", Statistics(), "int4"),
        Branch("a.bias", "bias", Statistics(), "none"),
        Branch("tokens", "embedding", Statistics(), "none"),
    )


def test_a_parameter_that_is_gone_keeps_its_place():
    model = Model("adaptive")
    del model.parameters["b"]
    model.saw("a", 1.0, 1.0)
    assert model.levels() == {"a": "powersgd", "b": "powersgd"}


def budgeted(count: int) -> Model:
    model = Model("adaptive:levels=int8/int4/topk:policy=budget:budget=0.05:ratio=0.01")
    model.saw("a", 1.0, 10.0, count)
    model.saw("b", 1.0, 1.0, count)
    return model


def test_what_matters_little_is_sent_coarsely():
    """b has a hundredth of the squared norm, of which top-k loses most; a, by top-k, would lose too much."""
    model = budgeted(16)
    assert model.levels() == {"a": "int4", "b": "topk"}
    assert [int(dict(STORE.of(model.parameters[n]))[LEVEL]) for n in "ab"] == [1, 2]


def test_a_budget_is_decided_on_at_powers_of_two_and_kept_between():
    model = budgeted(15)
    assert model.levels() == {"a": "int8", "b": "int8"}
    model.saw("a", 1.0, 10.0, 16)
    model.saw("b", 1.0, 1.0, 16)
    decided = model.levels()
    model.saw("a", 1.0, 1.0, 17)
    model.saw("b", 1.0, 10.0, 17)
    assert model.levels() == decided == {"a": "int4", "b": "topk"}
    model.saw("b", 1.0, 10.0, 32)
    assert model.levels() == {"a": "topk", "b": "int4"}


def test_what_was_decided_goes_along_with_the_parameter():
    saved, resumed = budgeted(16), budgeted(20)
    saved.levels()
    for name, parameter in saved.parameters.items():
        for kind, tensor in STORE.of(parameter):
            STORE.put(resumed.parameters[name], kind, tensor)
    for name in "ab":
        resumed.saw(name, 1.0, 1.0, 20)
    assert resumed.levels() == {"a": "int4", "b": "topk"}


WARMING = "topk:ratio=0.02:warmup=7"


def stages_of(backwards: int, model: Model) -> list[str]:
    """What all parameters take in each of these backwards, one after another."""
    found = []
    for _ in range(backwards):
        taken = model.levels()
        assert list(taken) == sorted(model.parameters) and len(set(taken.values())) == 1
        found.append(taken["a"])
        model.choice.count(model.parameters)
    return found


def test_the_stages_of_a_warm_up_are_equally_long_and_for_all_kinds_of_layers():
    first, second, last = "topk:ratio=0.25", "topk:ratio=0.0707", "topk:ratio=0.02"
    model = Model(WARMING)
    assert dict(model.choice.start) == dict.fromkeys(model.parameters, first)
    assert stages_of(9, model) == [first] * 4 + [second] * 3 + [last] * 2
    for parameter in model.parameters.values():
        assert int(dict(STORE.of(parameter))[WARMUP]) == 7  # and no further


def test_a_warm_up_shorter_than_its_stages_leaves_some_out():
    assert stages_of(2, Model("topk:ratio=0.001:warmup=1")) == [
        "topk:ratio=0.25",
        "topk:ratio=0.001",
    ]


def test_a_region_is_as_far_in_a_warm_up_as_the_parameter_that_was_sent_most_often():
    model = Model(f"*={WARMING};b=int4")
    for _ in range(4):
        model.choice.count({name: model.parameters[name] for name in ("a", "b")})
    assert model.levels() == dict.fromkeys(("a", "a.bias", "tokens"), "topk:ratio=0.0707")
    assert WARMUP not in dict(STORE.of(model.parameters["b"]))
    assert WARMUP not in dict(STORE.of(model.parameters["tokens"]))


def test_a_warm_up_needs_no_statistics():
    model = Model(WARMING)
    branches = model.choice.branches(model.choice.start, model.statistics())
    assert branches[0] == Branch("a", WEIGHT, Statistics(), "topk:ratio=0.25")
    assert [b.parameter for b in branches] == list(LAYERS)
