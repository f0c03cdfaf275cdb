"""What separately compiled parts of one model have in common, or refuse to have."""

import pytest
import torch
from torch import nn

import fxpasses
from fxpasses.shared import Shared


class Count:
    def __init__(self) -> None:
        self.at = 0

    def load_state_dict(self, state) -> None:
        self.at = state["at"]


def test_the_first_makes_it_and_others_find_it():
    shared = Shared[Count]("option 'count'")
    assert shared.value is None
    first = shared.use("up", Count)
    assert shared.use("up", lambda: pytest.fail("made twice")) is first is shared.value
    with pytest.raises(ValueError, match="option 'count': got 'down', but .* with 'up'"):
        shared.use("down", Count)


@pytest.mark.parametrize("early", [True, False])
def test_a_loaded_state_counts_before_and_after_it_is_made(early):
    shared = Shared[Count]("option 'count'")
    if early:
        shared.load({"at": 7})
    made = shared.use("up", Count)
    if not early:
        shared.load({"at": 7})
    assert made.at == 7


def test_of_two_the_one_that_absorbs_keeps_its_own():
    ours, theirs, empty = (Shared[Count]("option 'count'") for _ in range(3))
    mine, other = ours.use("up", Count), theirs.use("down", Count)
    theirs.load({"at": 3})
    empty.absorb(theirs)
    assert empty.value is other and empty.use("down", Count) is other
    ours.absorb(theirs)
    assert ours.value is mine and ours.use("up", Count) is mine


@pytest.mark.parametrize(
    ("first", "second", "named"),
    [
        ({"loss_scale": 8.0}, {"loss_scale": "dynamic"}, "'loss_scale'"),
        ({"clip_norm": 1.0}, {"clip_norm": 2.0}, "'clip_norm'"),
        ({"guards": "values"}, {"guards": "gradients"}, "'guards'"),
        (
            {"faults": "zero{where=gradient:*,step=9}"},
            {"faults": "zero{where=gradient:*,step=8}"},
            "'faults'",
        ),
    ],
)
def test_parts_of_one_model_that_ask_for_different_things(first, second, named):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    fxpasses.runtime(model)
    parts = [
        torch.compile(part, backend="hardened_aot_eager", options=options)
        for part, options in zip(model, (first, second), strict=True)
    ]
    parts[0](torch.ones(2, 4)).sum().backward()
    with pytest.raises(Exception, match=f"{named}.*another part of this model"):
        parts[1](torch.ones(2, 4)).sum().backward()
