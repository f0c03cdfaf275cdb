"""Which level each layer takes: by the norms so far, or within an error budget."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fxpasses.compression import parse_rules
from fxpasses.layers import BIAS, EMBEDDING, WEIGHT
from fxpasses.levels import LEVEL, Branch, LevelChoice, Statistics
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
    model = Model("adaptive:threshold=0.5")
    for name, pair in zip("ab", norms, strict=True):
        model.saw(name, *pair)
    assert model.levels() == {"a": level, "b": level}


def test_schemes_are_judged_apart():
    model = Model("a=adaptive;b=adaptive:levels=int8/powersgd")
    model.saw("a", 1.0, 1.0)
    model.saw("b", 2.0, 1.0)
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
