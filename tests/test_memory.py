"""Which results share memory with what a node reads, and what an all-reduce may write over for that reason."""

import operator

import pytest
import torch
from torch import fx

from fxpasses.inductor import C10D, _reduce_in_place
from fxpasses.memory import shares_memory

aten = torch.ops.aten


def _node(*calls):
    """The last of some calls, each on the result of the one before it."""
    graph = fx.Graph()
    node = graph.placeholder("x")
    for target, *args in calls:
        node = graph.call_function(target, (node, *args))
    graph.output(node)
    return node


@pytest.mark.parametrize(
    ("calls", "shared"),
    [
        ([(aten.neg.default,)], False),
        ([(aten.clone.default,)], False),
        ([(aten.view.default, [-1])], True),
        ([(aten._unsafe_view.default, [-1])], True),
        ([(aten.detach.default,)], True),
        ([(aten.split.Tensor, 2), (operator.getitem, 0)], True),
        ([(aten.max.dim, 0), (operator.getitem, 0)], False),
        ([(torch.neg,)], False),
    ],
)
def test_views_share_memory(calls, shared):
    assert shares_memory(_node(*calls)) is shared


@pytest.mark.parametrize(
    ("made", "written"),
    [
        ([(aten.neg.default,)], True),
        ([(aten.view.default, [-1])], False),
        ([(aten._unsafe_view.default, [-1])], False),
        ([], False),
    ],
)
def test_an_all_reduce_writes_over_what_is_its_own(made, written):
    node = _node(*made, (C10D.all_reduce.default, "sum", "0"))
    _reduce_in_place(node)
    assert (node.target is C10D.all_reduce_.default) is written


def test_an_all_reduce_spares_what_is_read_elsewhere():
    node = _node((aten.neg.default,), (C10D.all_reduce.default, "sum", "0"))
    node.graph.call_function(aten.sin.default, node.args[:1])
    _reduce_in_place(node)
    assert node.target is C10D.all_reduce.default
