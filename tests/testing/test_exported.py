"""Graphs from exported programs."""

import pytest
import torch
from torch import nn

from fxpasses import spec
from fxpasses.testing import exported, random_inputs, run_world
from fxpasses.testing.exported import output_kinds


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(2, 3), nn.BatchNorm1d(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.linear(x)).sum()


BUFFERS = ["norm.running_mean", "norm.running_var", "norm.num_batches_tracked"]


def program(train: bool) -> torch.export.ExportedProgram:
    model = Normed().train(train)
    return torch.export.export(model, (torch.randn(4, 2),)).run_decompositions()


def test_case_33_output_specs_keep_their_order():
    done = program(train=True)
    expected = [*(("BUFFER_MUTATION", name) for name in BUFFERS), ("USER_OUTPUT", None)]
    assert output_kinds(done) == expected
    graph = exported(done)
    roles = [(role.kind, role.name) for _, _, role in graph.outputs()]
    assert roles == [*(("mutation", name) for name in BUFFERS), ("output", "3")]
    assert [role.name for _, role in graph.inputs("buffer")] == BUFFERS
    spec.check(graph, "export")


def test_inference_writes_no_buffer():
    graph = exported(program(train=False))
    assert [role.kind for _, _, role in graph.outputs()] == ["output"]
    spec.check(graph, "export")


def test_the_graph_computes_what_the_program_does():
    done = program(train=True)
    graph = exported(done)
    given = {**done.state_dict, "x": torch.randn(4, 2)}
    ((*_, result),) = run_world(graph, [[given[role.name].clone() for _, role in graph.inputs()]])
    torch.testing.assert_close(result, done.module()(given["x"]))


def test_the_program_stays_as_it_was():
    done = program(train=True)
    before = str(done.graph)
    graph = exported(done)
    graph.set_output(3, graph.inputs("input")[0][0])
    assert str(done.graph) == before and len(random_inputs(graph)) == len(graph.inputs())


def test_gradients_of_an_exported_joint_graph():
    from torch.export.experimental import _export_forward_backward

    joint = _export_forward_backward(torch.export.export(Normed(), (torch.randn(4, 2),)))
    names = [g.parameter for g in exported(joint).gradients()]
    assert names == ["linear.weight", "linear.bias", "norm.weight", "norm.bias"]


def test_an_unknown_kind_is_refused():
    done = program(train=True)
    kind = torch.export.graph_signature.OutputKind.TOKEN
    done.graph_signature.output_specs[0].kind = kind
    with pytest.raises(ValueError, match="is a TOKEN"):
        exported(done)
