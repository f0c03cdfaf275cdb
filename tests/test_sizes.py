"""Sizes that are no numbers while a graph is compiled."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

import fxpasses
from fxpasses.schedule.machine import Machine
from fxpasses.schedule.plan import plan_step
from fxpasses.sizes import (
    SOME,
    depends_on_data,
    example,
    has_elements,
    has_one_element,
    may_have_elements,
)
from fxpasses.trace import trace


@pytest.fixture
def chosen():
    """[n, 3] int64, where only data decide on n, and the tensor that was chosen from, [s, 3] for s = 5."""
    mode = FakeTensorMode(shape_env=ShapeEnv(allow_dynamic_output_shape_ops=True))
    whole = mode.from_tensor(torch.ones(5, 3), static_shapes=False)
    with mode:
        return torch.nonzero(whole), whole


def test_examples(chosen):
    rows, whole = chosen
    assert [example(x) for x in (4, 2.5, True, None, "a")] == [4, 2.5, True, None, "a"]
    assert example(whole.shape[0]) == 5 and example(rows.shape[0]) == SOME
    mixed = rows.shape[0] * whole.shape[0] + 1
    assert example(mixed) == 5 * SOME + 1 and type(example(mixed)) is int


def test_what_only_data_decide(chosen):
    rows, whole = chosen
    assert depends_on_data(rows.shape[0]) and depends_on_data(rows.shape[0] + whole.shape[0])
    assert not depends_on_data(whole.shape[0]) and not depends_on_data(7)


def test_whether_there_are_elements(chosen):
    rows, whole = chosen
    assert may_have_elements(rows) and not has_elements(rows) and not has_one_element(rows)
    for x, count in ((torch.ones(2), 2), (torch.ones(1, 1), 1), (torch.ones(0, 4), 0)):
        assert has_elements(x) == may_have_elements(x) == (count > 0)
        assert has_one_element(x) == (count == 1)
    env = whole.fake_mode.shape_env
    before = len(env.guards)
    assert may_have_elements(whole) and len(env.guards) == before


class Chosen(nn.Module):
    """A layer for the rows that data choose."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 2)

    def forward(self, x):
        y = self.first(x)
        rows = torch.nonzero(x[:, 0] > 0).squeeze(1)
        return self.second(y[rows].relu()).sum() + y.mean()


OPTIONS = (
    {},
    {"precision": "bf16", "loss_scale": 1024.0},
    {"guards": "all"},
    {"guards": "products,on=recompute"},
    {"faults": "bitflip{bit=3,where=forward,step=7};bitflip{bit=3,where=backward,step=7}"},
    {"clip_norm": 1e6},
)


@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: "-".join(o) or "none")
def test_rows_that_data_choose(options, tmp_path):
    """One graph, whatever their number, none of them too; results are those of eager mode."""
    torch._dynamo.reset()
    model = Chosen()
    compiled = torch.compile(
        model, backend="hardened_aot_eager", options={**options, "dump": tmp_path}, fullgraph=True
    )
    tolerance = 0.05 if "precision" in options else 1e-5
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        for chosen in (3, 1, 0, 4):
            x = torch.randn(4, 4)
            x[:, 0] = x[:, 0].abs() * torch.where(torch.arange(4) < chosen, 1, -1)
            found, expected = (
                torch.autograd.grad(f(x), list(model.parameters())) for f in (compiled, model)
            )
            for a, b in zip(found, expected, strict=True):
                torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)
    assert len(list(tmp_path.glob("rank0/*.joint"))) == 1


def test_products_of_chosen_rows_are_checked():
    torch._dynamo.reset()
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        graphs = trace(Chosen(), (torch.ones(4, 4),), {"guards": "products"})
    (done,) = (d for g in graphs for d in g.done if d.made_by.name == "check_products")
    assert done.report.counts == {"checked": 2, "unchecked": 0}


@pytest.mark.parametrize("schedule", ["fixed", "auto"])
def test_a_step_with_chosen_rows_is_planned(schedule):
    torch._dynamo.reset()
    options = {"schedule": schedule, "compression": "int8"}
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        graphs = trace(Chosen(), (torch.ones(4, 4),), options, world=2)
    plan = plan_step(graphs, Machine(), 2)
    assert plan.step_s > 0 and all(isinstance(x, int) for x in plan.memory.values())


def test_sites_of_faults_have_elements():
    torch._dynamo.reset()
    model = Chosen()
    options = {"faults": "zero{where=forward,step=none}"}
    compiled = torch.compile(model, backend="hardened_aot_eager", options=options)
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        compiled(torch.ones(4, 4)).backward()
    sites = fxpasses.runtime(model).faults.sites
    assert {site.modules for site in sites if site.operator == "addmm"} == {("first",)}
