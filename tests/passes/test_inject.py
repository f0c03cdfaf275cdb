"""Faults as nodes: where they stand, what they touch, and that nothing is there that nobody asked for."""

import pytest
import torch
from torch import nn

from fxpasses.faults.models import HITS, row_of
from fxpasses.faults.sites import places_of
from fxpasses.faults.spec import parse_faults
from fxpasses.graph import FAULT_TABLE
from fxpasses.passes.bucketing import Bucketing
from fxpasses.passes.gradient_sync import GradientSync
from fxpasses.passes.inject import Inject, InjectForward, InjectPayload
from fxpasses.spec import SpecError
from fxpasses.testing import capture
from tests.graphs import (
    WORLD,
    Does,
    backward_of,
    checked,
    execute,
    mlp,
    nodes_with,
    random_inputs,
    traced,
)

FLIP = "bitflip bit=30"


def run(graph, table=None):
    """The outputs by role, with what the table arms."""
    inputs = random_inputs(graph)
    roles = [role for _, role in graph.inputs()]
    for at, role in enumerate(roles):
        if role.name == f"{FAULT_TABLE}/" and table is not None:
            inputs[at] = table
    values = execute(graph, inputs)
    return {role: values[at] for at, _, role in graph.outputs()}


def armed(graph, number=0, position=0, faults=FLIP):
    """A table with one fault at one of its sites, and that site."""
    parsed = parse_faults(faults)
    site = [s for s in places_of(graph).sites if number in s.faults][position]
    table = torch.zeros(len(parsed), 5, dtype=torch.int64)
    table[number] = torch.tensor(row_of(parsed[number], site.number, site.dtype, 9))
    return table, site


def gradients(found):
    return {role.name: value for role, value in found.items() if role.kind == "gradient"}


def differing(a, b):
    return {name for name in a if not torch.equal(a[name], b[name])}


def test_a_gradient_is_hit_and_no_other():
    graph = backward_of(mlp(4, 4, 4), torch.randn(2, 4))
    before = gradients(run(graph))
    (done,) = checked(graph, Inject(FLIP + " where=gradient:2.weight"))
    assert done.report.counts == {"sites": 1}
    assert differing(before, gradients(run(graph))) == set()
    table, site = armed(graph)
    assert site.parameters == ("2.weight",) and site.dtype == torch.float32
    after = gradients(run(graph, table))
    assert differing(before, after) == {"2.weight"}
    assert (before["2.weight"] != after["2.weight"]).sum() == 1


def test_what_reads_a_struck_result_reads_it_struck():
    graph = traced(lambda x: [(y := x * 2) + 1, y - 1], torch.ones(3))
    before = gradients(run(graph))
    checked(graph, Inject(FLIP + " where=backward op=mul"))
    table, _ = armed(graph)
    after = gradients(run(graph, table))
    assert differing(before, after) == {"p0", "p1"}


def test_a_gradient_that_others_read_is_hit_where_it_is_delivered():
    graph = traced(lambda x: [y := x * 2, y + 1], torch.ones(3))
    before = gradients(run(graph))
    checked(graph, Inject(FLIP + " where=gradient:p0"))
    table, _ = armed(graph)
    assert differing(before, gradients(run(graph, table))) == {"p0"}


def test_two_faults_at_one_place():
    text = f"{FLIP} where=gradient;sign where=gradient;zero where=backward"
    graph = traced(lambda x: [x * 2], torch.ones(3))
    checked(graph, Inject(text))
    rows = []
    for number in range(3):
        table, _ = armed(graph, number, faults=text)
        rows.append(table[number])
    found = run(graph, torch.stack(rows))
    (news,) = [v for role, v in found.items() if role.name == "fault_news/"]
    assert news[:, HITS].tolist() == [1, 1, 1]


def test_nothing_to_do_leaves_the_graph_alone():
    graph = backward_of(mlp(4, 4), torch.randn(2, 4))
    before = graph.fingerprint()
    for current in (Inject(""), Inject("zero where=forward"), Inject("zero where=gradient:nobody")):
        (done,) = checked(graph, current)
        assert not done.report.changed and graph.fingerprint() == before


def test_the_forward_alone_is_hit_in_the_forward():
    captured = capture(mlp(4, 4, 4), torch.randn(2, 4))
    checked(captured.joint, InjectForward("zero where=forward"), stage="joint")
    sites = places_of(captured.joint).sites
    assert [site.operator for site in sites] == ["addmm", "relu", "addmm", "relu"]
    assert [site.modules[-1] for site in sites] == ["0", "1", "2", "3"]
    assert all(site.model_line for site in sites)


def test_operators_and_modules_select():
    captured = capture(mlp(4, 4, 4), torch.randn(2, 4))
    current = InjectForward("zero where=forward:2 op=addmm")
    (done,) = checked(captured.joint, current, stage="joint")
    assert done.report.counts == {"sites": 1}


def test_embeddings_indices_and_masks_are_no_sites():
    class Tokens(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(5, 4)

        def forward(self, ids):
            return self.table(ids).relu()

    captured = capture(Tokens(), torch.tensor([1, 2]))
    checked(captured.joint, InjectForward("zero where=forward"), stage="joint")
    assert {site.dtype for site in places_of(captured.joint).sites} == {torch.float32}


def test_payloads(fake_world):
    graph = backward_of(mlp(4, 4, 4), torch.randn(2, 4))
    sync = GradientSync(group=fake_world, world=WORLD, reduce="mean")
    done = checked(graph, Bucketing(mb=1e-9), sync, InjectPayload("bitflip where=payload:2.*"))
    assert done[-1].report.counts == {"sites": 2}
    launches = nodes_with(graph, torch.ops._c10d_functional.all_reduce.default)
    struck = ["fault" in launch.args[0].meta for launch in launches]
    assert struck.count(True) == 2 and len(struck) == 4
    assert all("bucket" in launch.args[0].meta for launch in launches)


def test_stale_keeps_what_came_the_time_before(fake_world):
    graph = backward_of(mlp(4, 4), torch.randn(2, 4))
    sync = GradientSync(group=fake_world, world=WORLD, reduce="mean")
    checked(graph, Bucketing(mb=1), sync, InjectPayload("stale where=payload"))
    (stale,) = [node for node, role in graph.inputs("state") if role.name.startswith("stale")]
    assert stale.meta["val"].numel() == 20


def test_case_39_fault_nodes_survive_dead_code_elimination(fake_world):
    graph = traced(lambda x: [x * 2], torch.ones(3))
    checked(graph, Inject(FLIP + " where=gradient"))

    def unused_all_reduce(graph):
        with graph.graph.inserting_before(graph.output_node):
            x = graph.inputs()[0][0]
            launch = graph.graph.call_function(
                torch.ops._c10d_functional.all_reduce.default, (x, "sum", fake_world)
            )
            wait = graph.graph.call_function(
                torch.ops._c10d_functional.wait_tensor.default, (launch,)
            )
            launch.meta["val"] = wait.meta["val"] = x.meta["val"]

    checked(graph, Does(unused_all_reduce))
    original = next(n for n in graph.walk() if n.target is torch.ops.aten.mul.Tensor)
    graph.set_output(0, original)  # nobody reads the fault any more
    state = [(n, r) for _, n, r in graph.outputs() if r.kind != "state"]
    graph.output_node.args = (tuple(n for n, _ in state),)
    graph.output_node.meta["roles"] = tuple(r for _, r in state)
    graph.eliminate_dead_code()
    assert [n for n in graph.walk() if "fault" in n.meta]
    assert len(nodes_with(graph, torch.ops._c10d_functional.all_reduce.default)) == 1


def test_case_39_a_pass_that_drops_a_fault_is_named():
    graph = traced(lambda x: [x * 2], torch.ones(3))
    checked(graph, Inject(FLIP + " where=gradient"))
    (fault,) = [n for n in graph.walk() if "fault" in n.meta]

    def drop(graph):
        fault.replace_all_uses_with(fault.all_input_nodes[0])
        graph.graph.erase_node(fault)

    with pytest.raises(SpecError, match=f"after pass 'does'.*{fault.name!r} was removed"):
        checked(graph, Does(drop))


def test_case_39_a_fault_that_reads_what_comes_later_is_named():
    graph = traced(lambda x: [x * 2], torch.ones(3))
    checked(graph, Inject(FLIP + " where=gradient"))
    (fault,) = [n for n in graph.walk() if "fault" in n.meta]
    source = fault.all_input_nodes[0]
    with pytest.raises(SpecError, match=f"after pass 'does'.*{fault.name!r} uses {source.name!r}"):
        checked(graph, Does(lambda graph: source.prev.append(fault) and None))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("bitflip bit=32 where=gradient", "bit 32 is outside of float32, which has bits 0 to 31"),
        ("zero index=16 where=gradient:0.weight", "index 16 is outside of gradient:0.weight"),
        ("truncate bits=24 where=gradient", "got 24 bits; float32 has 23"),
    ],
)
def test_what_a_site_does_not_have_is_refused(text, message):
    graph = backward_of(mlp(4, 4), torch.randn(2, 4))
    with pytest.raises(ValueError, match="option 'faults'") as caught:
        checked(graph, Inject(text))
    assert message in str(caught.value)


def test_a_pipeline_string_is_read_back():
    from fxpasses.registry import parse_pipeline

    current = Inject("bitflip where=gradient:a.* bit=3 step=4-9;nan where=backward:* op=mm")
    assert parse_pipeline(current.spec) == (current,)
