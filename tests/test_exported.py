"""Graphs from exported programs."""

import pytest
import torch
from torch import nn

from fxpasses import spec
from fxpasses.exported import exported, output_kinds, specialisation, updated
from fxpasses.graph import StateSpec
from fxpasses.passes.cast import Cast
from fxpasses.testing import random_inputs, run_world


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


def test_what_passes_made_goes_back_into_the_program():
    done = program(train=True)
    graph = exported(done)
    assert Cast("bf16", "").run(graph).changed
    low = updated(done, graph)
    assert output_kinds(low) == output_kinds(done)
    x = torch.randn(4, 2)
    result, expected = low.module()(x), done.module()(x)
    assert result.dtype == expected.dtype == torch.float32 and not torch.equal(result, expected)
    torch.testing.assert_close(result, expected, rtol=0, atol=0.05)


def test_an_input_named_like_a_builtin_goes_there_and_back():
    done = torch.export.export(nn.Sequential(nn.Linear(2, 3)), (torch.randn(4, 2),))
    graph = exported(done)
    assert Cast("bf16", "").run(graph).changed
    assert updated(done, graph).module()(torch.randn(4, 2)).shape == (4, 3)


def test_state_does_not_go_into_a_program():
    done = program(train=True)
    graph = exported(done)
    graph.add_state(StateSpec("memory", "x", (), torch.float32, torch.device("cpu")))
    with pytest.raises(ValueError, match="added state \\(memory/x\\)"):
        updated(done, graph)


@pytest.mark.parametrize(
    "module", [nn.BatchNorm1d(4), nn.Dropout(0.5), nn.AlphaDropout(0.5), nn.RReLU()]
)
@pytest.mark.parametrize("train", [True, False])
def test_what_a_program_is_specialised_to(module, train):
    done = torch.export.export(module.train(train), (torch.randn(4, 4),)).run_decompositions()
    assert specialisation(done) == ("train" if train else "eval")
