"""A rank that dies, stalls or raises: the others end with an error that names it, within the timeout."""

from __future__ import annotations

import os
import time

import pytest
import torch
from torch import nn

from tests.multirank import run_ranks

BACKEND = "hardened_aot_eager"
TIMEOUT_S = 3
AWAY_S = TIMEOUT_S + 5  # longer than the others wait and ask


def _do(what: str) -> None:
    if what == "dies":
        os._exit(3)
    if what == "stalls":
        time.sleep(AWAY_S)
    if what == "raises":
        raise ValueError("of its own")


def failing_backend(gm, example_inputs):
    raise ValueError("of its own")


def train(rank: int, lost: int, where: str, what: str) -> tuple[str, float]:
    """One good step, then rank `lost` fails; what the others get to hear, and after how long."""
    first, second = (torch.compile(nn.Linear(4, 4), backend=BACKEND) for _ in range(2))
    second(first(torch.ones(1, 4))).sum().backward()
    started = time.monotonic()
    fails = where if rank == lost else ""
    try:
        if fails == "compile":
            torch.compile(nn.Linear(4, 4), backend=failing_backend)(torch.ones(1, 4))
        if fails == "forward":
            _do(what)
        hidden = first(torch.ones(1, 4))
        if fails == "backward":
            hidden.register_hook(lambda grad: _do(what))
        second(hidden).sum().backward()
    except Exception as error:
        if rank == lost:
            time.sleep(AWAY_S)  # it caught its own error, and goes on with something else
        return str(error), time.monotonic() - started
    return "", time.monotonic() - started


CASES = [
    (2, "forward", "dies"),
    (2, "forward", "stalls"),
    (2, "forward", "raises"),
    (2, "compile", "raises"),
    (2, "backward", "dies"),
    (2, "backward", "stalls"),
    (2, "backward", "raises"),
    (4, "forward", "stalls"),
    (4, "backward", "dies"),
]


def ranks(world: int, where: str, what: str) -> pytest.MarkDecorator:
    lost = world - 1
    limits = {"gloo_timeout_s": TIMEOUT_S, "lost": (lost,)}
    return pytest.mark.ranks(train, world, lost, where, what, **limits)


@pytest.mark.parametrize(
    ("world", "where", "what"), [pytest.param(*case, marks=ranks(*case)) for case in CASES]
)
def test_the_others_name_the_rank_that_is_lost(world, where, what, found):
    lost = world - 1
    for message, seconds in found[:lost]:
        assert f"for rank {lost}, which gave no sign of life" in message
        assert "in the agreement before the backward of Linear." in message
        assert seconds < TIMEOUT_S + 10  # the group's timeout, and time to ask who is there


def broken_kernel(rank: int) -> str:
    model = nn.Linear(4, 4)
    compiled = torch.compile(model, backend=BACKEND)
    y = compiled(torch.ones(1, 4))
    try:
        y.backward(torch.ones(1, 4, dtype=torch.float64))
    except RuntimeError as error:
        return str(error)
    return ""


def test_an_error_of_the_rank_itself_is_not_blamed_on_others():
    for message in run_ranks(broken_kernel, 2):
        assert "sign of life" not in message
