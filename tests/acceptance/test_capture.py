"""Cases 26, 28 and 32: what autograd and buffers mean stays as it is in eager mode."""

import pytest
import torch
from torch import nn

import fxpasses
from tests.multirank import counted_all_reduces, run_ranks

BACKENDS = ["hardened", "hardened_aot_eager"]


class TwoOutputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.ones(()))
        self.b = nn.Parameter(torch.ones(()))

    def forward(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.a * 2, self.b * 3


def use_first_output(rank: int, backend: str, both_on_rank: int | None = None) -> tuple:
    model = TwoOutputs()
    y, z = torch.compile(model, backend=backend)()
    (y + z if rank == both_on_rank else y).backward()
    return tuple(None if p.grad is None else p.grad.item() for p in model.parameters())


@pytest.mark.parametrize("backend", BACKENDS)
def test_case_26_unused_output_leaves_none(backend):
    assert use_first_output(0, backend) == (2.0, None)


@pytest.mark.parametrize("backend", BACKENDS)
def test_case_26_on_two_ranks(backend):
    assert run_ranks(use_first_output, 2, backend) == [(2.0, None)] * 2


@pytest.mark.parametrize("backend", BACKENDS)
def test_case_26_output_used_on_one_rank_only(backend):
    assert run_ranks(use_first_output, 2, backend, 1) == [(2.0, 1.5)] * 2


@pytest.mark.parametrize("backend", BACKENDS)
def test_case_28_double_backward_is_refused_by_name(backend):
    x = torch.tensor([0.5, 1.5], requires_grad=True)
    f = torch.compile(lambda x: (x**4).sum(), backend=backend)
    with pytest.raises(RuntimeError, match="double backward"):
        torch.autograd.grad(f(x), x, create_graph=True)


def double_backward_with_a_parameter(rank: int, backend: str) -> tuple[str, int]:
    model = nn.Linear(1, 1)
    loss = (torch.compile(model, backend=backend)(torch.ones(1, 1)) ** 2).sum()
    message = ""
    with counted_all_reduces() as count:
        try:
            loss.backward(create_graph=True)
        except RuntimeError as error:
            message = str(error)
    return message, count[0]


@pytest.mark.parametrize("backend", BACKENDS)
def test_case_28_no_collective_before_the_raise(backend):
    for message, collectives in run_ranks(double_backward_with_a_parameter, 2, backend):
        assert "double backward" in message
        assert collectives == 0


def momentum_none(rank: int, backend: str) -> tuple[float, int]:
    model = nn.BatchNorm1d(1, momentum=None)
    compiled = torch.compile(model, backend=backend)
    for batch in ([[0.0], [2.0]], [[4.0], [6.0]]):
        compiled(torch.tensor(batch)).sum().backward()
    return model.running_mean.item(), model.num_batches_tracked.item()


def default_momentum(rank: int, backend: str, amp: bool) -> tuple[float, float, int, list[str]]:
    model = nn.BatchNorm1d(1)
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    for _ in range(3):
        with torch.autocast("cpu", torch.bfloat16, enabled=amp):
            y = compiled(torch.tensor([[1.0], [3.0]]))
        y.float().sum().backward()
    state = [model.running_mean, model.running_var, *(p.grad for p in model.parameters())]
    assert all(t.dtype == torch.float32 for t in state)
    reduced = [name for c in fxpasses.runtime(model).plan for name in c.parameters]
    mean, variance = model.running_mean.item(), model.running_var.item()
    return round(mean, 3), round(variance, 3), model.num_batches_tracked.item(), sorted(reduced)


@pytest.mark.parametrize("backend", BACKENDS)
def test_case_32_cumulative_batch_norm(backend):
    assert momentum_none(0, backend) == (3.0, 2)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("amp", [False, True])
def test_case_32_buffers_are_not_reduced(backend, world, amp):
    if world == 1:
        assert default_momentum(0, backend, amp) == (0.542, 1.271, 3, [])
    else:
        expected = (0.542, 1.271, 3, ["bias", "weight"])
        assert run_ranks(default_momentum, 2, backend, amp) == [expected] * 2
