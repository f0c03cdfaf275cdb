"""Compiled regions one behind the other, and what they refuse."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fxpasses
from tests.feedback import Feedback, RoundWithFeedback
from tests.multirank import run_ranks

BACKEND = "hardened_aot_eager"


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).tanh()


@pytest.mark.parametrize("attempt", range(5))  # it once went by the order of a set
def test_layers_that_share_one_compiled_graph_in_a_chain(attempt):
    torch.manual_seed(attempt)
    layers, plain = [Layer() for _ in range(6)], [Layer() for _ in range(6)]
    for layer, twin in zip(layers, plain, strict=True):
        twin.load_state_dict(layer.state_dict())
        layer.compile(backend=BACKEND, options={"passes": RoundWithFeedback().spec})
    x = torch.randn(2, 4)
    for chain in (layers, plain):
        h = x
        for layer in chain:
            h = layer(h)
        (h * 100).sum().backward()
    for layer, twin in list(zip(layers, plain, strict=True))[-1:]:
        total = layer.linear.weight.grad + Feedback(layer).residual("linear.weight")
        assert torch.allclose(total, twin.linear.weight.grad, rtol=1e-5)
    assert all(len(fxpasses.runtime(m).state_dict()["state"]) == 2 for m in layers)


def chain_on_ranks(rank: int) -> list[torch.Tensor]:
    torch.manual_seed(0)
    layers = [Layer() for _ in range(4)]
    for layer in layers:
        layer.compile(backend=BACKEND)
    optimizer = torch.optim.SGD([p for layer in layers for p in layer.parameters()], lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        h = torch.full((2, 4), rank + 1.0)
        for layer in layers:
            h = layer(h)
        h.sum().backward()
        optimizer.step()  # every layer's gradient counts as reduced
    return [layer.linear.weight.grad for layer in layers]


def test_a_chain_of_compiled_layers_on_two_ranks():
    first, second = run_ranks(chain_on_ranks, 2)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


class WritesItsInput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
        x.add_(self.b(u))
        return self.a(u)


def one_of_output_and_written_input(rank: int) -> list[bool]:
    model = WritesItsInput()
    y = torch.compile(model, backend=BACKEND)(torch.zeros(2, 3), torch.ones(2, 3))
    y.sum().backward()
    return [p.grad is None for p in model.parameters()]


@pytest.mark.parametrize("world", [1, 2])
def test_case_26_a_written_input_that_no_loss_uses(world):
    expected = [False, False, True, True]
    if world == 1:
        assert one_of_output_and_written_input(0) == expected
    else:
        assert run_ranks(one_of_output_and_written_input, 2) == [expected] * 2


class UnusedBehindABreak(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y, z = self.a(x), self.b(x)
        torch._dynamo.graph_break()
        return y * 2, z * 3


def unused_behind_a_break(rank: int) -> list[bool]:
    model = UnusedBehindABreak()
    y, _ = torch.compile(model, backend=BACKEND)(torch.ones(2, 3))
    y.sum().backward()
    return [p.grad is None for p in model.parameters()]


def test_case_26_an_output_unused_behind_a_region_without_parameters():
    assert run_ranks(unused_behind_a_break, 2) == [[False, False, True, True]] * 2


def batched_gradients(rank: int) -> str:
    model = nn.Linear(1, 2)
    y = torch.compile(model, backend=BACKEND)(torch.ones(1, 1))
    try:
        eye = torch.eye(2).reshape(2, 1, 2)
        torch.autograd.grad(y, list(model.parameters()), eye, is_grads_batched=True)
    except RuntimeError as error:
        return str(error)
    return ""


def test_batched_gradients_are_refused():
    assert all("batched gradients" in message for message in run_ranks(batched_gradients, 2))


def own_collective(rank: int) -> tuple[float, int]:
    import torch.distributed._functional_collectives as functional

    model = nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)

    def program(x: torch.Tensor) -> torch.Tensor:
        gathered = functional.all_gather_tensor_autograd(model(x), 0, dist.group.WORLD)
        return gathered.square().sum()

    torch.compile(program, backend=BACKEND)(torch.ones(1, 1)).backward()
    return model.weight.grad.item(), len(fxpasses.runtime(model).plan)


def test_a_program_may_communicate_in_its_own_backward():
    # Each rank's output, 1, reaches both losses with derivative 2; then the mean over the ranks.
    assert run_ranks(own_collective, 2) == [(4.0, 2)] * 2


def group_made_anew(rank: int, folder: str) -> str:
    model = nn.Linear(1, 1)
    compiled = torch.compile(model, backend=BACKEND)
    compiled(torch.ones(1, 1)).sum().backward()
    dist.destroy_process_group()
    init = f"file://{folder}/again"
    dist.init_process_group("gloo", init_method=init, rank=rank, world_size=2)
    dist.barrier()  # no rank is gone before all have met
    try:
        compiled(torch.ones(1, 1)).sum().backward()
    except RuntimeError as error:
        return str(error)
    return ""


def test_a_process_group_made_anew_is_noticed(tmp_path):
    for message in run_ranks(group_made_anew, 2, str(tmp_path)):
        assert "initialised anew" in message


def hook_registered_later(rank: int) -> str:
    model = nn.Sequential(Layer(), Layer())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    compiled = torch.compile(model, backend=BACKEND)
    compiled(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    model[0].linear.register_full_backward_hook(lambda *_: None)  # Dynamo now runs it eagerly
    compiled(torch.ones(1, 4)).sum().backward()
    try:
        optimizer.step()
    except RuntimeError as error:
        return str(error)
    return ""


def test_a_module_that_becomes_eager_stops_the_optimizer():
    assert all("was not reduced" in message for message in run_ranks(hook_registered_later, 2))


def unused_for_a_step(rank: int, set_to_none: bool) -> int:
    """A parameter without a new gradient is no reason to stop."""
    first, second = Layer(), Layer()
    layers = nn.ModuleList([first, second])
    optimizer = torch.optim.SGD(layers.parameters(), lr=0.1)
    first.compile(backend=BACKEND)
    second.compile(backend=BACKEND)
    for step in range(4):
        optimizer.zero_grad(set_to_none=set_to_none)
        h = first(torch.ones(1, 4))
        (second(h) if step % 2 == 0 else h).sum().backward()
        optimizer.step()
        optimizer.step()  # again on the same gradients
    return step


@pytest.mark.parametrize("set_to_none", [True, False])
def test_a_gradient_that_nothing_touched_does_not_stop_the_optimizer(set_to_none):
    assert run_ranks(unused_for_a_step, 2, set_to_none) == [3, 3]


def expanded_buffer(rank: int) -> list[float]:
    model = nn.Linear(1, 1)
    model.register_buffer("twice", torch.full((1,), float(rank)).expand(2))
    model.forward = lambda x: (nn.functional.linear(x, model.weight) * model.twice).sum()
    torch.compile(model, backend=BACKEND)(torch.ones(1, 1)).backward()
    return model.twice.tolist()


def test_an_expanded_buffer_takes_the_value_of_rank_0():
    assert run_ranks(expanded_buffer, 2) == [[0.0, 0.0]] * 2


def test_the_plan_is_that_of_the_newest_compilation(fake_world):
    model = nn.Linear(1, 1)
    compiled = torch.compile(model, backend=BACKEND, dynamic=False)
    for batch in range(1, 5):
        compiled(torch.ones(batch, 1)).sum().backward()
    assert len(fxpasses.runtime(model).plan) == 1
