"""Regions of graphs, and the loops that they become."""

from __future__ import annotations

import operator
import re

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from torch import nn

from fxpasses.graph import REPLAYED, TrainingGraph, copied
from fxpasses.guards.loops import LOOP
from fxpasses.guards.regions import regions_of
from fxpasses.passes.check_products import CheckGradientProducts, CheckProducts
from fxpasses.passes.replay import ReplayBackward, ReplayForward
from fxpasses.testing import capture, programs
from fxpasses.testing.synthetic import GradientGraph, Leaf, Step
from tests.graphs import checked, execute, mlp, nodes_with, random_inputs
from tests.testing.regions import REGIONS, in_modules

GUARDS = "products on=recompute region={}"


def regions(graph, pattern):
    found = regions_of(graph, pattern, ReplayForward().among(graph))
    return {region.name: region for region in found}


def names(region):
    return [node.target._opname for node in region.nodes if node.target is not operator.getitem]


def test_the_outermost_module_that_matches():
    model = nn.Sequential(mlp(4, 4, 4), mlp(4, 4))
    joint = capture(model, torch.randn(3, 4)).joint
    assert set(regions(joint, "*")) == {"0", "1"}
    assert set(regions(joint, "0.*")) == {"0.0", "0.1", "0.2", "0.3"}
    assert regions(joint, "nothing") == {}


def test_forward_and_backward_of_a_module():
    captured = capture(mlp(4, 5, 6), torch.randn(3, 4))
    forward = regions_of(captured.joint, "2", ReplayForward().among(captured.joint))
    assert [names(region) for region in forward] == [["t", "addmm"]]
    backward = regions_of(captured.backward, "2", ReplayBackward().among(captured.backward))
    (found,) = map(names, backward)
    assert found.count("mm") == 2 and found.count("sum") == 1
    assert "threshold_backward" not in found


def test_what_stands_between_two_operators_belongs_to_a_region():
    class Around(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            return self.a(self.b(self.a(x)))

    joint = capture(Around(), torch.randn(3, 4)).joint
    found = {name: names(region) for name, region in regions(joint, "a").items()}
    assert found == {"a": ["t", "addmm"], "a (call 2)": ["addmm"]}  # one transposed weight for both


def replayed(graph, current, stage, pattern):
    checks = CheckProducts() if stage == "joint" else CheckGradientProducts()
    checked(graph, checks, stage=stage)
    inputs = random_inputs(graph)
    before = execute(graph, inputs)
    (done,) = checked(graph, current(guards=GUARDS.format(pattern)), stage=stage)
    more = [torch.zeros_like(x) for x in random_inputs(graph)[len(inputs) :]]
    return done.report, before, execute(graph, [*inputs, *more])


@pytest.mark.parametrize(
    ("current", "stage"), [(ReplayForward, "joint"), (ReplayBackward, "backward")]
)
def test_results_are_the_same(current, stage):
    captured = capture(mlp(4, 5, 6, 3), torch.randn(3, 4))
    graph = captured.joint if stage == "joint" else captured.backward
    report, before, after = replayed(graph, current, stage, "[24]")
    assert report.changed and report.counts["regions"] == 2
    assert len(nodes_with(graph, LOOP)) == 2
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=False) if a is not None)
    (at,) = [i for i, _, role in graph.outputs("state") if role.name == f"{REPLAYED}/"]
    assert after[at].tolist() == [0, 0]


def test_products_are_in_the_loops_alone():
    graph = capture(mlp(4, 5, 6), torch.randn(3, 4)).backward
    products = len(nodes_with(graph, torch.ops.aten.mm.default))
    replayed(graph, ReplayBackward, "backward", "*")
    assert not nodes_with(graph, torch.ops.aten.mm.default)
    inner = [n for n in graph.walk_deep() if n.target is torch.ops.aten.mm.default]
    assert len(inner) == products


@pytest.mark.parametrize("pattern", ["1", "nothing"])
def test_without_a_check_there_is_nothing_to_do(pattern):
    graph = capture(mlp(4, 5, 6), torch.randn(3, 4)).backward
    checked(graph, CheckGradientProducts())
    before = graph.fingerprint()
    (done,) = checked(graph, ReplayBackward(guards=GUARDS.format(pattern)))
    assert not done.report.changed and graph.fingerprint() == before


def test_a_result_of_which_only_views_are_read():
    class Views(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(4, 6)

        def forward(self, x):
            y = self.inner(x)
            return y.view(2, -1).sin() + y.t().reshape(2, -1)

    graph = capture(Views(), torch.randn(4, 4)).joint
    _, before, after = replayed(graph, ReplayForward, "joint", "inner")
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=False) if a is not None)


def test_a_result_depends_on_what_it_is_computed_from():
    """Which gradients take part is decided by the tangents that each depends on."""
    from fxpasses.graph import tangents_reaching
    from fxpasses.passes.participation import flagged_outputs

    class Heads(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.ModuleDict({"a": nn.Linear(3, 2), "b": nn.Linear(3, 2)})
            self.both = Both(self.inner)

        def forward(self, x):
            return self.both(x)

    class Both(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, x):
            return self.inner["a"](x), self.inner["b"](x)

    graph = capture(Heads(), torch.randn(4, 3)).backward
    before = flagged_outputs(graph, tangents_reaching(graph))
    replayed(graph, ReplayBackward, "backward", "both")
    assert len(nodes_with(graph, LOOP)) == 1
    assert flagged_outputs(graph, tangents_reaching(graph)) == before


def test_a_fault_on_what_nobody_reads_stays_in_the_loop():
    source = GradientGraph(
        tangents=(Leaf((3, 3)),),
        saved=(Leaf((3, 3)),),
        steps=(Step("product", 0, 1), Step("sum", 2), Step("neg", 3)),
        gradients=(2,),
        input_gradients=(4,),
    )
    graph = source.build()
    graph.output_node.args = ((graph.gradients()[0].node, None),)
    in_modules(graph, (4,))
    REGIONS.run(graph)
    faults = [n for n in graph.walk_deep() if "effect" in n.meta]
    assert len(faults) == 2
    graph.eliminate_dead_code()
    assert [n for n in graph.walk_deep() if "effect" in n.meta] == faults


class Drawn(nn.Module):
    def __init__(self, draw):
        super().__init__()
        self.inner, self.draw = nn.Linear(4, 4), draw

    def forward(self, x):
        return self.draw(self.inner(x))


class Outer(nn.Module):
    def __init__(self, draw):
        super().__init__()
        self.drawn = Drawn(draw)

    def forward(self, x):
        return self.drawn(x)


def test_random_numbers_that_depend_on_results_are_refused():
    graph = capture(Outer(lambda y: y * torch.bernoulli(y.sigmoid())), torch.randn(3, 4)).joint
    with pytest.raises(ValueError, match=r"region: 'drawn' can't be computed again: bernoulli"):
        replayed(graph, ReplayForward, "joint", "drawn")


@pytest.mark.parametrize(
    "draw",
    [
        lambda y: y + torch.rand_like(y),
        lambda y: torch.dropout(y, 0.5, True),
        lambda y: torch.native_dropout(y, 0.25, True)[0],
        lambda y: y * torch.native_dropout(y, 1.0, True)[1],
    ],
    ids=["rand_like", "dropout", "native_dropout", "mask"],
)
def test_random_numbers_are_drawn_in_front(draw):
    graph = capture(Outer(draw), torch.randn(3, 4)).joint
    inputs = random_inputs(graph)
    torch.manual_seed(3)
    before = execute(graph, inputs)
    checked(graph, CheckProducts(), ReplayForward(guards=GUARDS.format("drawn")), stage="joint")
    more = [torch.zeros_like(x) for x in random_inputs(graph)[len(inputs) :]]
    torch.manual_seed(3)
    after = execute(graph, [*inputs, *more])
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=False) if a is not None)
    (loop,) = nodes_with(graph, LOOP)
    body = graph.module.get_submodule(loop.args[1].target)
    operators = [str(n.target) for n in body.graph.nodes if n.op == "call_function"]
    assert not [name for name in operators if "rand" in name or "bernoulli" in name]


def test_sizes_that_are_not_known():
    options = {"guards": "products,on=recompute,region=0"}
    model = mlp(4, 5)
    compiled = torch.compile(model, backend="hardened_aot_eager", options=options, dynamic=True)
    with pytest.raises(ValueError, match="whose size is not known at compile time"):
        compiled(torch.randn(3, 4))


REFUSALS = r"can't be computed again|whose size is not known|another region makes"


@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
@given(programs(max_layers=2).filter(lambda program: not program.dynamic))
def test_any_program_computes_the_same(program):
    """Or says what can't be repeated in it."""
    for stage, check, current in (
        ("joint", CheckProducts(), ReplayForward),
        ("backward", CheckGradientProducts(), ReplayBackward),
    ):
        graph = TrainingGraph(copied(getattr(program.captured(), stage).module))
        checked(graph, check, stage=stage)
        inputs = random_inputs(graph)
        torch.manual_seed(0)
        before = execute(graph, inputs)
        try:
            checked(graph, current(guards=GUARDS.format("m*")), stage=stage)
        except ValueError as error:
            assert re.search(REFUSALS, str(error)), error
            continue
        more = [torch.zeros_like(x) for x in random_inputs(graph)[len(inputs) :]]
        torch.manual_seed(0)
        after = execute(graph, [*inputs, *more])
        for a, b in zip(before, after, strict=False):
            assert a is None or torch.equal(torch.nan_to_num(a), torch.nan_to_num(b))


def test_control_flow_is_refused():
    def branch(y):
        return torch.cond(y.sum() > 0, lambda y: y * 2, lambda y: y * 3, (y,))

    graph = capture(Outer(branch), torch.randn(3, 4)).joint
    with pytest.raises(ValueError, match=r"'drawn' can't be computed again alone: it holds.* cond"):
        regions(graph, "drawn")


def test_what_does_more_than_compute_is_refused():
    graph = capture(Outer(torch.sin), torch.randn(3, 4)).joint
    (sine,) = nodes_with(graph, torch.ops.aten.sin.default)
    sine.target = torch.ops._c10d_functional.all_reduce.default
    sine.args = (*sine.args, "sum", "0")
    with pytest.raises(ValueError, match="it holds all_reduce, which does more than compute"):
        regions(graph, "drawn")


def test_attention_without_dropout_is_no_random_number():
    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(4, 4)

        def forward(self, x):
            y = self.inner(x)[None, None]
            return nn.functional.scaled_dot_product_attention(y, y, y)

    model = nn.Sequential(Attention(), nn.Linear(4, 4))
    for stage, current in (("joint", ReplayForward), ("backward", ReplayBackward)):
        graph = getattr(capture(model, torch.randn(3, 4)), stage)
        report, before, after = replayed(graph, current, stage, "0")
        assert report.counts["regions"] == 1
        assert all(torch.equal(a, b) for a, b in zip(before, after, strict=False) if a is not None)
