"""What waits in `.grad` to be reduced."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn

from fxpasses.accumulation import _pending, begin, is_pending, put_back, take

WORLD = 4


def parameter(gradient: list[float] | None = None) -> nn.Parameter:
    made = nn.Parameter(torch.zeros(2))
    if gradient is not None:
        made.grad = torch.tensor(gradient)
    return made


def begun(gradient: list[float] | None = None, reduce: str = "mean") -> nn.Parameter:
    """A parameter whose gradient accumulates from now on."""
    made = parameter(gradient)
    begin(made, reduce, WORLD)
    return made


def gradient_of(p: nn.Parameter) -> list[float] | None:
    return None if p.grad is None else p.grad.tolist()


# begin


@pytest.mark.parametrize(("reduce", "share"), [("mean", [8.0, -4.0]), ("sum", [2.0, -1.0])])
def test_a_reduced_gradient_becomes_this_ranks_share(reduce, share):
    """`WORLD` of them reduce to what was there."""
    assert gradient_of(begun([8.0, -4.0], reduce)) == share


@pytest.mark.parametrize("reduce", ["mean", "sum"])
def test_a_gradient_is_shared_out_once(reduce):
    p = begun([8.0, 8.0], reduce)
    p.grad += 1.0
    before = gradient_of(p)
    begin(p, reduce, WORLD)
    assert gradient_of(p) == before


def test_the_share_is_made_in_place():
    """Who holds `.grad` (an optimizer's closure, a view of a bucket) goes on holding it."""
    p = parameter([8.0, 8.0])
    held = p.grad
    begin(p, "sum", WORLD)
    assert p.grad is held and held.tolist() == [2.0, 2.0]


@pytest.mark.parametrize("reduce", ["mean", "sum"])
def test_what_is_accumulated_from_nothing_is_not_divided(reduce):
    p = begun(None, reduce)
    p.grad = torch.tensor([3.0, 5.0])
    begin(p, reduce, WORLD)
    assert gradient_of(p) == [3.0, 5.0] and is_pending(p)


def test_after_a_take_the_next_gradient_is_shared_out_anew():
    p = begun([8.0, 8.0], "sum")
    take(p)
    p.grad = torch.tensor([4.0, 8.0])
    begin(p, "sum", WORLD)
    assert gradient_of(p) == [1.0, 2.0]


# is_pending


def test_nothing_waits_before_a_local_gradient():
    assert not is_pending(parameter()) and not is_pending(parameter([1.0, 1.0]))


def test_nothing_waits_of_another_parameter():
    p = begun([1.0, 1.0])
    assert is_pending(p) and not is_pending(parameter([1.0, 1.0]))


def test_nothing_waits_where_grad_is_none():
    p = begun([1.0, 1.0])
    p.grad = None
    assert not is_pending(p)


def test_a_gradient_that_was_zeroed_in_place_still_waits():
    """It is not known to be zero without a look at its values."""
    p = begun([1.0, 1.0])
    p.grad.zero_()
    assert is_pending(p) and take(p).tolist() == [0.0, 0.0]


def test_what_comes_after_none_waits_again():
    p = begun([1.0, 1.0])
    p.grad = None
    begin(p, "sum", WORLD)
    p.grad = torch.tensor([3.0, 3.0])
    assert is_pending(p) and take(p).tolist() == [3.0, 3.0]


# take and put_back


def test_taking_empties_grad_and_ends_the_waiting():
    p = begun([1.0, 2.0])
    held = p.grad
    assert take(p) is held
    assert p.grad is None and not is_pending(p)
    p.grad = torch.ones(2)
    assert not is_pending(p)


def test_what_does_not_wait_is_not_taken():
    p = parameter([1.0, 2.0])
    assert take(p) is None
    assert gradient_of(p) == [1.0, 2.0]


def test_what_was_taken_is_not_taken_again():
    p = begun([1.0, 2.0])
    take(p)
    p.grad = torch.tensor([3.0, 3.0])
    assert take(p) is None and gradient_of(p) == [3.0, 3.0]


def test_taking_where_grad_is_none_takes_nothing_and_ends_the_waiting():
    """The gradient that comes next is reduced: it must not be taken for a local one."""
    p = begun([1.0, 2.0])
    p.grad = None
    assert take(p) is None
    p.grad = torch.tensor([3.0, 3.0])
    assert not is_pending(p) and take(p) is None


def test_taking_includes_what_was_done_to_grad_meanwhile():
    p = begun([2.0, 4.0])
    p.grad.mul_(0.5)
    assert take(p).tolist() == [1.0, 2.0]


def test_put_back_undoes_take():
    p = begun([1.0, 2.0], "sum")
    held = p.grad
    put_back(p, take(p))
    assert p.grad is held and is_pending(p)
    begin(p, "sum", WORLD)
    assert take(p).tolist() == [0.25, 0.5]


# Lifetimes


def test_an_entry_goes_with_its_parameter():
    gc.collect()
    before = len(_pending)
    p = begun([1.0, 2.0])
    assert len(_pending) == before + 1
    gone = weakref.ref(p)
    del p
    gc.collect()
    assert gone() is None and len(_pending) == before


def test_equal_parameters_wait_each_for_itself():
    first, second = begun([1.0, 1.0]), begun([2.0, 2.0])
    assert take(first).tolist() == [1.0, 1.0]
    assert not is_pending(first) and is_pending(second)
