"""`explain_nonfinite` names the node that made the first NaN or infinity."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import nn

import fxpasses
from fxpasses import explain_nonfinite
from tests.multirank import run_ranks

BACKEND = "hardened_aot_eager"
HERE = Path(__file__).name


class Head(nn.Module):
    def __init__(self, function) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4, bias=False)
        self.function = function
        nn.init.eye_(self.linear.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(self.linear(x))


def in_head(function) -> nn.Sequential:
    return nn.Sequential(nn.Identity(), Head(function))


def line_of(text: str) -> str:
    """`file:line` of the one line of this file that ends so."""
    lines = Path(__file__).read_text().splitlines()
    (number,) = (i for i, line in enumerate(lines, 1) if line.endswith(text))
    return f"{HERE}:{number}"


def log(x: torch.Tensor) -> torch.Tensor:
    return x.relu().log()  # of 0


def divided(x: torch.Tensor) -> torch.Tensor:
    return x / x.square().sum().sqrt()  # 0 / 0


def square_root(x: torch.Tensor) -> torch.Tensor:
    return x.square().sum().sqrt()  # finite, its backward is not


def test_all_is_finite():
    assert explain_nonfinite(in_head(torch.tanh), torch.ones(2, 4)) is None


def test_log_of_0():
    found = explain_nonfinite(in_head(log), torch.tensor([[1.0, 2.0, -3.0, 4.0]]))
    assert (found.operator, found.kind, found.phase) == ("aten.log", "inf", "forward")
    assert found.module == "1" and found.model_line.endswith(line_of("# of 0"))
    (read,) = found.inputs
    assert (read.minimum, read.maximum, read.largest) == (0.0, 4.0, 4.0)
    assert (read.dtype, read.shape) == ("float32", (1, 4))
    assert "forward: aten.log made inf in 1 (" in str(found) and "in [0, 4], |x| <= 4" in str(found)


def test_0_by_0_in_the_forward_of_a_norm():
    found = explain_nonfinite(in_head(divided), torch.zeros(1, 4))
    assert (found.operator, found.kind, found.phase) == ("aten.div", "nan", "forward")
    assert found.model_line.endswith(line_of("# 0 / 0"))


def test_0_by_0_in_the_backward_of_a_norm():
    """The loss is finite."""
    found = explain_nonfinite(in_head(square_root), torch.zeros(1, 4))
    assert (found.operator, found.phase) == ("aten.div", "backward")
    assert found.model_line.endswith(line_of("its backward is not"))
    assert found.module == "1"
    assert any(extremes.largest == 0.0 for extremes in found.inputs)


def test_torch_s_norm_has_a_gradient_at_0():
    assert explain_nonfinite(in_head(lambda x: x.norm()), torch.zeros(1, 4)) is None


def test_overflow_in_fp16_only():
    model = in_head(lambda x: x)
    batch = torch.full((1, 4), 300.0)
    model[1].linear.weight.data.fill_(100.0)
    assert explain_nonfinite(model, batch) is None
    found = explain_nonfinite(model, batch, options={"precision": "fp16"})
    assert found.operator in ("aten.mm", "aten.addmm") and found.kind == "inf"
    assert found.module == "1.linear" and HERE in found.model_line
    assert {read.dtype for read in found.inputs} == {"float16"}
    assert sorted(read.largest for read in found.inputs) == [100.0, 300.0]


def test_a_cast_that_overflows_is_named_with_its_pass_and_the_program_s_line():
    model = in_head(lambda x: x)
    found = explain_nonfinite(model, torch.full((1, 4), 1e5), options={"precision": "fp16"})
    assert found.made_by == "cast" and "written by pass 'cast'" in str(found)
    assert found.inputs[0].largest == pytest.approx(1e5)


def test_a_compiled_module_is_explained_with_its_options_and_its_loss_scale():
    model = in_head(lambda x: x)
    options = {"precision": "fp16", "loss_scale": {"init": 2.0**15}}
    compiled = torch.compile(model, backend=BACKEND, options=options)
    batch = torch.ones(1, 4)

    def loss_fn(output: torch.Tensor) -> torch.Tensor:
        return 4 * output.sum()

    loss_fn(compiled(batch)).backward()  # 4 * 2^15 is more than fp16 holds
    assert not model[1].linear.weight.grad.isfinite().any()
    for form in (model, compiled):
        found = explain_nonfinite(form, batch, loss_fn)
        assert found.phase == "backward" and found.kind == "inf"
        assert found.made_by in ("loss_scale", "cast")
    fxpasses.runtime(model).scaler.set(1024.0)
    assert explain_nonfinite(compiled, batch, loss_fn) is None


def test_minus_infinity_in_a_mask_is_meant():
    mask = torch.tensor([[False, True, False, True]])

    def attention(x: torch.Tensor) -> torch.Tensor:
        return x.masked_fill(mask, -math.inf).softmax(-1)

    assert explain_nonfinite(in_head(attention), torch.ones(1, 4)) is None
    found = explain_nonfinite(in_head(lambda x: attention(x).log()), torch.ones(1, 4))
    assert found.operator == "aten.log"


def test_a_row_that_is_masked_as_a_whole():
    def attention(x: torch.Tensor) -> torch.Tensor:
        return x.masked_fill(x > 0, -math.inf).softmax(-1)

    found = explain_nonfinite(in_head(attention), torch.ones(1, 4))
    assert found.operator == "aten._softmax" and found.kind == "nan"
    assert found.inputs[0].minimum == -math.inf


@pytest.mark.parametrize(
    ("what", "value"), [("weight", math.nan), ("weight", math.inf), ("x", math.inf)]
)
def test_what_was_not_finite_to_begin_with(what, value):
    model, batch = in_head(torch.tanh), torch.ones(1, 4)
    if what == "weight":
        with torch.no_grad():
            model[1].linear.weight[0, 0] = value
    else:
        batch[0, 0] = value
        model[1].function = torch.square
    found = explain_nonfinite(model, batch)
    if what == "weight" and value == math.inf:
        assert found is None  # tanh makes it finite again, and its gradient 0
    else:
        assert found.operator == "input" and found.phase == "forward"
        assert found.name == ("1.linear.weight" if what == "weight" else found.inputs[0].name)
        assert "holds" in str(found)


def test_the_loss_is_explained_too():
    found = explain_nonfinite(in_head(torch.relu), torch.zeros(1, 4), lambda y: y.sum().log())
    assert found.operator == "aten.log"


class Noisy(nn.Module):
    """A graph break, running statistics, random numbers, several arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3)

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        y = nn.functional.dropout(self.norm(self.first(x)), 0.5)
        torch._dynamo.graph_break()
        return (self.last(y) * scale).exp()  # overflows


@pytest.mark.parametrize("scale", [1.0, 1e4])
def test_nothing_changes(scale):
    model, x = Noisy(), torch.randn(4, 3)
    model.last.weight.grad = torch.ones(3, 3)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    objects = [id(t) for t in (*model.parameters(), *model.buffers())]
    grads = [p.grad for p in model.parameters()]
    state = torch.get_rng_state()
    found = explain_nonfinite(model, {"x": x, "scale": scale})
    assert (found is None) == (scale == 1.0)
    assert torch.equal(state, torch.get_rng_state())
    assert objects == [id(t) for t in (*model.parameters(), *model.buffers())]
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert all(a is b for a, b in zip(grads, (p.grad for p in model.parameters()), strict=True))
    assert torch.equal(model.last.weight.grad, torch.ones(3, 3))


def test_behind_a_graph_break_and_as_often_as_one_likes():
    model, x = Noisy(), torch.randn(4, 3)
    for _ in range(10):  # more than Dynamo's limit of recompilations
        found = explain_nonfinite(model, (x, 1e4))
        assert found.operator == "aten.exp"
        assert found.model_line.endswith(line_of("# overflows"))
    compiled = torch.compile(model, backend=BACKEND)
    compiled(x).sum().backward()  # is not in its way


def test_a_step_under_way_is_not_disturbed():
    model, x = in_head(torch.tanh), torch.ones(1, 4)
    compiled = torch.compile(model, backend=BACKEND, options={"clip_norm": 1.0})
    loss = compiled(x).sum()
    record = fxpasses.runtime(model).last_step
    assert explain_nonfinite(compiled, x) is None
    assert fxpasses.runtime(model).last_step == record
    loss.backward()
    assert fxpasses.runtime(model).last_step.backwards == 1


def alone(rank: int) -> str:
    """Only rank 0 asks: it would wait for ever if it communicated."""
    model = in_head(log)
    compiled = torch.compile(model, backend=BACKEND)
    x = torch.ones(1, 4)
    compiled(x).sum().backward()
    return str(explain_nonfinite(compiled, -x).operator) if rank == 0 else ""


def test_it_does_not_communicate():
    assert run_ranks(alone, 2, timeout_s=60) == ["aten.log", ""]


def test_a_module_of_torch_has_a_name_but_no_line():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].weight.data.fill_(3e38)
    found = explain_nonfinite(model, torch.full((1, 2), 1e3))
    assert (found.operator, found.module, found.model_line) == ("aten.addmm", "1", "")


def test_other_things_are_refused():
    with pytest.raises(ValueError, match="expected a module"):
        explain_nonfinite(torch.tanh, torch.ones(1))


def test_code_that_is_not_compiled_is_said_to_be():
    @torch._dynamo.disable
    def outside(x: torch.Tensor) -> torch.Tensor:
        return x * math.inf

    found = explain_nonfinite(in_head(outside), torch.ones(1, 4))
    assert str(found) == "forward: code that is not compiled made inf"
