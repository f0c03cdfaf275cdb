"""Forms of tensors, and collectives as they are planned; facts of whole units are in `test_unit.py`."""

import pytest
import torch

from fxpasses.distributed.plans import Form, PlannedCollective
from fxpasses.facts import form_of, planned_collectives
from fxpasses.graph import TrainingGraph
from tests.graphs import C10D


@pytest.mark.parametrize(
    ("tensor", "form"),
    [
        (torch.ones(2, 3), Form("w", (2, 3), "float32", (0, 1))),
        (torch.ones(2, 3).t(), Form("w", (3, 2), "float32", (1, 0))),
        (torch.ones((), dtype=torch.bfloat16), Form("w", (), "bfloat16", ())),
        (
            torch.ones(2, 3, 4, 4).to(memory_format=torch.channels_last),
            Form("w", (2, 3, 4, 4), "float32", (0, 2, 3, 1)),
        ),
    ],
)
def test_a_form_has_shape_dtype_and_order_in_memory(tensor, form):
    assert form_of("w", tensor) == form


def test_collectives_of_the_program_are_planned_with_their_line(fake_world):
    def program(x: torch.Tensor) -> torch.Tensor:
        return C10D.wait_tensor(C10D.all_reduce(x * 2, "sum", fake_world))

    gm = torch.fx.symbolic_trace(program)
    graph = TrainingGraph(gm)
    (node,) = graph.graph.find_nodes(op="call_function", target=C10D.all_reduce)
    node.target = C10D.all_reduce.default
    node.args[0].meta["val"] = torch.empty(5, dtype=torch.float64)
    node.meta["stack_trace"] = '  File "net.py", line 7, in forward\n    y = all_reduce(x)'
    assert planned_collectives(graph) == (
        PlannedCollective("all_reduce", fake_world, "float64", 5, 40, (), "net.py:7", "program"),
    )
