"""Guards as nodes: they change nothing but their state, which says what is wrong."""

import pytest
import torch

from fxpasses.effects import is_launch
from fxpasses.graph import ALARM
from fxpasses.guards.alarms import places_of_alarms
from fxpasses.passes.agree_alarms import AgreeAlarms
from fxpasses.passes.bucketing import Bucketing
from fxpasses.passes.check_gradients import CheckGradients
from fxpasses.passes.check_payloads import CheckPayloads
from fxpasses.passes.check_products import CheckGradientProducts, CheckProducts
from fxpasses.passes.check_sums import CheckSums
from fxpasses.passes.check_values import CheckValues
from fxpasses.passes.gradient_sync import GradientSync
from fxpasses.passes.inject import Inject
from fxpasses.passes.settle_checks import SettleChecks
from fxpasses.testing import capture
from tests.graphs import (
    WORLD,
    backward_of,
    checked,
    execute,
    mlp,
    nodes_with,
    random_inputs,
    traced,
)


def alarm(graph, inputs=None):
    """How many, and where one is."""
    values = execute(graph, random_inputs(graph) if inputs is None else inputs)
    (at,) = [i for i, _, role in graph.outputs("state") if role.name == f"{ALARM}/"]
    count, number = values[at].tolist()
    return count, places_of_alarms(graph).get(number)


def test_products_of_a_backward():
    graph = backward_of(mlp(4, 5, 6), torch.randn(3, 4))
    products = len(nodes_with(graph, torch.ops.aten.mm.default))
    (done,) = checked(graph, CheckGradientProducts())
    assert done.report.counts == {"checked": products, "unchecked": 0}
    assert alarm(graph) == (0, None)


def test_products_of_a_forward():
    graph = capture(mlp(4, 5, 6), torch.randn(3, 4)).joint
    (done,) = checked(graph, CheckProducts(), stage="joint")
    assert done.report.counts == {"checked": 2, "unchecked": 0}


def test_a_product_that_is_wrong():
    graph = traced(lambda a, b: [a @ b], torch.randn(4, 4), torch.randn(4, 4))
    checked(graph, CheckGradientProducts())
    (product,) = nodes_with(graph, torch.ops.aten.mm.default)
    with graph.graph.inserting_after(product):
        wrong = graph.graph.call_function(torch.ops.aten.add.Tensor, (product, 1.0))
    product.replace_all_uses_with(wrong)
    wrong.args = (product, 1.0)
    graph.recompile()
    count, place = alarm(graph)
    assert count == 1 and place.startswith("product: mm mm")


def test_what_has_no_checksum_is_counted():
    model = torch.nn.Sequential(torch.nn.Conv1d(2, 3, 3), torch.nn.Flatten(), torch.nn.Linear(9, 2))
    graph = capture(model, torch.randn(2, 2, 5)).joint
    (done,) = checked(graph, CheckProducts(), stage="joint")
    assert done.report.counts == {"checked": 1, "unchecked": 1}


@pytest.mark.parametrize(
    "current", [CheckGradientProducts(), CheckSums(), CheckValues(""), AgreeAlarms("world")]
)
def test_nothing_to_do_leaves_the_graph_alone(current):
    graph = traced(lambda x: [x * 2], torch.ones(3))
    before = graph.fingerprint()
    (done,) = checked(graph, current)
    assert not done.report.changed and graph.fingerprint() == before


def test_values():
    graph = traced(lambda x, y: [x * 2, y * 2], torch.ones(3), torch.ones(3))
    checked(graph, CheckValues("values=5.0"))
    fine, large = torch.ones(3), torch.tensor([1.0, -3.0, 1.0])
    zero = torch.zeros(2, dtype=torch.int64)
    assert alarm(graph, [fine, fine, zero]) == (0, None)
    assert alarm(graph, [fine, large, zero]) == (1, "gradient of p1")
    assert alarm(graph, [fine * torch.nan, fine, zero]) == (1, "gradient of p0")
    assert alarm(graph, [fine * torch.inf, large, zero + torch.tensor([3, 0])])[0] == 5


def test_alarms_are_agreed_on(fake_world):
    graph = traced(lambda a, b: [a @ b], torch.randn(4, 4), torch.randn(4, 4))
    done = checked(graph, CheckGradientProducts(), AgreeAlarms(fake_world))
    assert done[-1].report.counts == {"collectives": 1}
    (launch,) = nodes_with(graph, torch.ops._c10d_functional.all_reduce.default)
    assert launch.args[1] == "max" and launch.args[0].meta["val"].shape == (2,)


CHANGED = torch.ops.fxpasses.changed.default


def test_sums():
    graph = backward_of(mlp(4, 5, 6), torch.randn(3, 4))
    (done,) = checked(graph, CheckSums())
    assert done.report.counts == {"checked": 2, "unchecked": 0}  # products have their own
    assert alarm(graph) == (0, None)
    total = nodes_with(graph, torch.ops.aten.sum.dim_IntList)[0]
    with graph.graph.inserting_after(total):
        wrong = graph.graph.call_function(torch.ops.aten.add.Tensor, (total, 1.0))
    total.replace_all_uses_with(wrong)
    wrong.args = (total, 1.0)
    graph.recompile()
    count, place = alarm(graph)
    assert count == 1 and place.startswith("sum: sum of 2 sum_1")


def test_gradients_without_a_check_are_counted():
    graph = traced(lambda x: [x.sum(0), x * 2], torch.ones(3, 3))
    (done,) = checked(graph, CheckSums())
    assert done.report.counts == {"checked": 1, "unchecked": 1}


def test_bits_of_gradients():
    graph = backward_of(mlp(4, 5, 6), torch.randn(3, 4))
    checked(graph, CheckGradients(), Inject("bitflip bit=0 where=gradient:0.bias step=none"))
    assert len(nodes_with(graph, CHANGED)) == 4
    struck = [n for n in graph.walk() if "fault" in n.meta]
    (comparison,) = [n for n in nodes_with(graph, CHANGED) if n.args[0] in struck]
    made = nodes_with(graph, torch.ops.aten.view.dtype)
    assert comparison.meta["provenance"].source in {n.args[0].name for n in made}
    assert alarm(graph) == (0, None)


def test_one_gradient_of_two_parameters_and_none_without_elements():
    graph = traced(lambda x, y: [z := x * 2, z, y * 2], torch.ones(3), torch.ones(0))
    (done,) = checked(graph, CheckGradients())
    assert done.report.counts == {"checked": 1} and len(nodes_with(graph, CHANGED)) == 1
    empty = traced(lambda y: [y * 2], torch.ones(0))
    (done,) = checked(empty, CheckGradients())
    assert not done.report.changed


def test_comparisons_stand_where_gradients_have_been_packed(fake_world):
    graph = backward_of(mlp(4, 5, 6), torch.randn(3, 4))
    sync = GradientSync(group=fake_world, world=WORLD, reduce="mean")
    done = checked(graph, CheckGradients(), Bucketing(mb=1e-4), sync, SettleChecks())
    assert done[-1].report.counts == {"settled": 4}
    order = graph.positions()
    launches = nodes_with(graph, torch.ops._c10d_functional.all_reduce.default)
    assert len(launches) > 1
    for comparison in nodes_with(graph, CHANGED):
        (parameter,) = comparison.meta["provenance"].parameters
        (own,) = [n for n in launches if parameter in n.meta["provenance"].parameters]
        between = list(order)[order[own] + 1 : order[comparison]]
        assert order[own] < order[comparison] and {n.target for n in between} <= {CHANGED}
        assert order[comparison.args[1]] < order[own.args[0]]  # the sum was taken first
    before = graph.fingerprint()
    assert not SettleChecks().run(graph).changed and graph.fingerprint() == before


@pytest.mark.parametrize(
    ("order", "world", "counts"),
    [
        ("any", 4, {"sealed": 0, "summed": 1, "compared": 0}),
        ("fixed", 4, {"sealed": 0, "summed": 0, "compared": 2}),
        ("fixed", 2, {"sealed": 0, "summed": 1, "compared": 0}),
    ],
)
def test_each_payload_is_checked_in_its_way(fake_world, order, world, counts):
    graph = backward_of(mlp(4, 5, 6), torch.randn(3, 4))
    sync = GradientSync(group=fake_world, world=world, reduce="mean", order=order)
    checks = CheckPayloads(group=fake_world, world=world)
    done = checked(graph, Bucketing(mb=1), sync, checks)
    assert done[-1].report.counts == counts
    launches = [n for n in graph.walk() if is_launch(n)]
    assert len(launches) == 2 * sum(counts.values())
    sums = [n.meta["val"] for n in launches if n.meta["provenance"].pass_name == "check_payloads"]
    if counts[
        "compared"
    ]:  # to each rank the sum of its piece, from each owner the sum of its shard
        assert [(v.dtype, v.numel()) for v in sums] == [(torch.int64, world)] * 2


def test_what_sends_nothing_has_no_payload_to_check(fake_world):
    graph = backward_of(mlp(4, 5), torch.randn(3, 4))
    before = graph.fingerprint()
    report = CheckPayloads(group=fake_world, world=WORLD).run(graph)
    assert not report.changed and graph.fingerprint() == before


def test_without_comparisons_nothing_settles(fake_world):
    graph = backward_of(mlp(4, 5), torch.randn(3, 4))
    sync = GradientSync(group=fake_world, world=WORLD, reduce="mean")
    done = checked(graph, Bucketing(mb=1), sync, SettleChecks())
    assert not done[-1].report.changed
