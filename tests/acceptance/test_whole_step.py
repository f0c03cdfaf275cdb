"""Case 24: forward, backward and gradients in one compiled function (`trace_autograd_ops`)."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fxpasses
from tests.feedback import Feedback, RoundWithFeedback
from tests.multirank import counted_all_reduces, run_ranks

BACKENDS = ["hardened_aot_eager", "hardened"]
BACKEND = BACKENDS[0]
Step = Callable[..., Any]


def compiled(step: Step, backend: str = BACKEND, **options: Any) -> Step:
    """`step` as one graph."""
    torch._dynamo.config.trace_autograd_ops = True
    return torch.compile(step, backend=backend, fullgraph=True, options=options)


class Averages:
    """What the backend does between the last backward and what follows it, by hand."""

    def __init__(self, model: nn.Module, factor: float) -> None:
        self.before = {p: None if p.grad is None else p.grad.clone() for p in model.parameters()}
        self.factor = factor

    def __call__(self) -> None:
        for parameter, before in self.before.items():
            if parameter.grad is not None:
                new = parameter.grad if before is None else parameter.grad - before
                new = new.clone()
                dist.all_reduce(new)
                new.mul_(self.factor)
                parameter.grad = new if before is None else before + new


def gradients(model: nn.Module) -> list[torch.Tensor | None]:
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()]


def close(a: Any, b: Any) -> bool:
    if a is None or b is None:
        return a is b
    return torch.allclose(a, b, rtol=1e-4, atol=1e-6)


class Small(nn.Module):
    """Tied weights, a frozen parameter, a convolution and a normalisation."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(2, 4, 3).to(memory_format=torch.preserve_format)
        self.norm = nn.BatchNorm1d(4)
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4, bias=False)
        self.second.weight = self.first.weight
        self.frozen = nn.Linear(4, 4)
        self.frozen.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(self.conv(x)).relu().mean(-1)
        return self.second(self.frozen(self.first(y)).tanh())


def nothing() -> None:
    pass


def one_backward(model: nn.Module, x: torch.Tensor, average: Callable[[], None]) -> torch.Tensor:
    loss = model(x).square().mean()
    loss.backward()
    average()
    return loss.detach()


def two_backwards(model: nn.Module, x: torch.Tensor, average: Callable[[], None]) -> torch.Tensor:
    total = torch.zeros(())
    for part in x.chunk(2):
        loss = model(part).square().mean()
        loss.backward()
        total += loss.detach()
    average()
    return total


def clipped(model: nn.Module, x: torch.Tensor, average: Callable[[], None]) -> torch.Tensor:
    model(x).square().mean().backward()
    average()
    return nn.utils.clip_grad_norm_(model.parameters(), 1e-2)


def cleared(model: nn.Module, x: torch.Tensor, average: Callable[[], None]) -> torch.Tensor:
    model.zero_grad()
    return one_backward(model, x, average)


def updates(model: nn.Module, x: torch.Tensor, average: Callable[[], None]) -> torch.Tensor:
    """A step of gradient descent by hand."""
    loss = one_backward(model, x, average)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.sub_(parameter.grad, alpha=0.1)
    return loss


def like_eager(rank: int, step: Step, backend: str, options: dict[str, Any], zero: str) -> list:
    torch.manual_seed(0)
    model = Small()
    twin = copy.deepcopy(model)
    factor = 1.0 if options.get("reduce") == "sum" else 1 / dist.get_world_size()
    run, seen, counts = compiled(step, backend, **options), [], []
    torch.manual_seed(rank + 1)
    for _ in range(3):
        x = torch.randn(4, 2, 5)
        average = Averages(twin, factor)
        if zero == "in function":
            average.before = dict.fromkeys(average.before)
        expected = step(twin, x, average)
        with counted_all_reduces() as count:
            found = run(model, x, nothing)
        counts += count
        pairs = zip([found, *gradients(model)], [expected, *gradients(twin)], strict=True)
        seen.append([close(a, b) for a, b in pairs])
        if zero == "outside":
            model.zero_grad()
            twin.zero_grad()
    return [seen, counts]


@pytest.mark.parametrize(
    ("backend", "step", "options", "zero"),
    [
        (BACKEND, one_backward, {}, ""),
        (BACKEND, one_backward, {"reduce": "sum"}, "outside"),
        (BACKEND, two_backwards, {}, ""),
        (BACKEND, clipped, {}, ""),
        (BACKEND, cleared, {}, "in function"),
        (BACKEND, updates, {}, "outside"),
        ("hardened", two_backwards, {}, ""),
        ("hardened", clipped, {}, "outside"),
    ],
)
def test_like_eager_with_an_average(backend, step, options, zero):
    for seen, counts in run_ranks(like_eager, 2, step, backend, options, zero):
        assert all(all(call) for call in seen), seen
        assert counts == [1, 1, 1]


def line(value: float = 1.0) -> nn.Linear:
    layer = nn.Linear(1, 1, bias=False)
    nn.init.constant_(layer.weight, value)
    return layer


def by_option(rank: int, backend: str, reduce: str, clear: str) -> tuple[list, list[int]]:
    """Three micro-batches to a step, each a call."""
    model = nn.Sequential(line(), line())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)

    def step(x: torch.Tensor, first: bool) -> None:
        if clear and first:
            model.zero_grad(set_to_none=clear == "to none")
        model(x).sum().backward()

    run = compiled(step, backend, accumulate=3, reduce=reduce, bucket_mb=1e-6)
    seen, counts = [], []
    for _ in range(2):
        for i, x in enumerate((1.0, 3.0, 6.0)):
            with counted_all_reduces() as count:
                run(torch.full((1, 1), x * (rank + 1)), i == 0)
            counts += count
        seen.append([p.grad.item() for p in model.parameters()])
        optimizer.step()
        if not clear:
            optimizer.zero_grad()
    record = fxpasses.runtime(model).last_step
    assert (record.backwards, record.collectives) == (3, 2)
    return seen, counts


@pytest.mark.parametrize(("reduce", "factor"), [("mean", 1.5), ("sum", 3.0)])
@pytest.mark.parametrize("clear", ["", "to none", "in place"])
def test_option_accumulate_counts_calls(reduce, factor, clear):
    expected = [[10.0 * factor] * 2] * 2
    found = run_ranks(by_option, 2, BACKEND, reduce, clear)
    assert found == [(expected, [0, 0, 2] * 2)] * 2


def test_option_accumulate_through_inductor():
    found = run_ranks(by_option, 2, "hardened", "mean", "")
    assert found == [([[15.0] * 2] * 2, [0, 0, 2] * 2)] * 2


def mixed(rank: int, order: str, reduce: str) -> list[float]:
    """`order`: s synchronises, n does not, z clears in place, Z clears, h halves. Inputs are rank + 1."""
    model = line()

    def step(x: torch.Tensor) -> None:
        model(x).sum().backward()

    run, seen = compiled(step, reduce=reduce), []
    runtime = fxpasses.runtime(model)
    for letter in order:
        if letter in "sn":
            with runtime.no_sync() if letter == "n" else contextlib.nullcontext():
                run(torch.full((1, 1), rank + 1.0))
        elif letter in "zZ":
            model.zero_grad(set_to_none=letter == "Z")
        elif letter == "h":
            model.weight.grad.mul_(0.5)
        seen.append(model.weight.grad.item() if model.weight.grad is not None else 0.0)
    return seen


@pytest.mark.parametrize("reduce", ["mean", "sum"])
@pytest.mark.parametrize(
    ("order", "total"), [("ss", 2.0), ("sns", 3.0), ("nZs", 1.0), ("nhs", 1.5), ("nsznns", 3.0)]
)
def test_any_order_of_modes(order, total, reduce):
    one = {"mean": 1.5, "sum": 3.0}[reduce]
    for seen in run_ranks(mixed, 2, order, reduce):
        assert seen[-1] == total * one


def steps_too_early(rank: int) -> tuple[str, float]:
    model = line()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: torch.Tensor) -> None:
        model(x).sum().backward()

    run = compiled(step, accumulate=2)
    x = torch.full((1, 1), rank + 1.0)
    run(x)
    with pytest.raises(RuntimeError) as caught:
        optimizer.step()
    with fxpasses.runtime(model).sync():
        run(x)
    optimizer.step()
    return str(caught.value), model.weight.item()


def test_an_optimizer_does_not_step_on_a_local_gradient():
    for message, weight in run_ranks(steps_too_early, 2):
        assert "accumulated on this rank alone" in message
        assert weight == pytest.approx(1 - 0.1 * 3.0)


class Parts(nn.Module):
    """The sum of those parts that are asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = line(), line()

    def forward(self, x: torch.Tensor, asked: str) -> torch.Tensor:
        return sum(getattr(self, name)(x) for name in asked)


def used_on_one_rank(rank: int, backend: str, accumulate: int) -> list[list]:
    model = Parts()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)

    def step(x: torch.Tensor, asked: str) -> None:
        model(x, asked).sum().backward()

    run, found = compiled(step, backend, accumulate=accumulate), []
    for asked in (("ab", "a"), ("a", "ab"), ("ab", "ab"), ("b", "a")):
        for _ in range(accumulate):
            run(torch.full((1, 1), 4.0 / accumulate), asked[rank])
        found.append([None if p.grad is None else p.grad.item() for p in model.parameters()])
        optimizer.step()
        optimizer.zero_grad()
    return found


@pytest.mark.parametrize(("backend", "accumulate"), [(BACKEND, 1), (BACKEND, 2), ("hardened", 1)])
def test_parameters_that_take_part_on_one_rank_only(backend, accumulate):
    expected = [[4.0, 2.0], [4.0, 2.0], [4.0, 4.0], [2.0, 2.0]]
    assert run_ranks(used_on_one_rank, 2, backend, accumulate) == [expected] * 2


def left_over(rank: int, how: str) -> list[float] | str:
    """The first micro-batch uses `b`, the synchronising one does not."""
    model = Parts()

    def step(x: torch.Tensor, asked: str) -> None:
        model(x, asked).sum().backward()
        if how == "clips":
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)

    def unused(x: torch.Tensor, asked: str) -> torch.Tensor:
        parts = {name: getattr(model, name)(x) for name in "ab"}
        sum(parts[name] for name in asked).sum().backward()
        return parts["b"].detach()

    run = compiled(unused if how == "computes" else step, accumulate=2)
    try:
        for asked in ("ab", "a"):
            run(torch.full((1, 1), rank + 1.0), asked)
    except RuntimeError as error:
        return str(error)
    return [p.grad.item() for p in model.parameters()]


@pytest.mark.parametrize("how", ["does not use", "computes"])
def test_what_earlier_micro_batches_left_is_reduced_with_the_last(how):
    assert run_ranks(left_over, 2, how) == [[3.0, 1.5]] * 2


def test_what_is_left_over_is_an_error_where_gradients_are_clipped():
    for message in run_ranks(left_over, 2, "clips"):
        assert "'b.weight' of float32[1, 1] was left by an earlier micro-batch" in message
        assert "clip_grad.py:" in message


def refused_on_one_rank(rank: int, how: str) -> str:
    model = Parts()

    def step(x: torch.Tensor, asked: str) -> None:
        if how == "clears":
            model.zero_grad()
        model(x, asked).sum().backward()
        if how == "clips":
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)

    def unused(x: torch.Tensor, asked: str) -> torch.Tensor:
        parts = {name: getattr(model, name)(x) for name in "ab"}
        sum(parts[name] for name in asked).sum().backward()
        return parts["b"].detach()

    run = compiled(unused if how == "computes" else step)
    try:
        run(torch.ones(1, 1), "ab")
        run(torch.ones(1, 1), ("ab", "a")[rank])
    except RuntimeError as error:
        return str(error)
    return f"{[p.grad.item() for p in model.parameters()]}"


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("clips", "works on all gradients behind its backward"),
        ("clears", "sets its .grad"),
        pytest.param(
            "computes",
            "sets its .grad",
            marks=pytest.mark.skipif(
                torch.__version__ < (2, 12), reason="torch 2.11 leaves such a .grad alone"
            ),
        ),
    ],
)
def test_a_gradient_of_other_ranks_that_would_be_lost_is_an_error_on_all(how, message):
    for found in run_ranks(refused_on_one_rank, 2, how):
        assert message in found and "'b.weight'" in found and "on rank 1" in found


class Norms(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.BatchNorm1d(1), nn.BatchNorm1d(1)

    def forward(self, x: torch.Tensor, both: bool) -> torch.Tensor:
        return self.a(x) + self.b(x) if both else self.a(x)


def running_means(rank: int, backend: str, both: tuple[bool, bool], calls: int) -> list:
    model = Norms()

    def step(x: torch.Tensor, both: bool) -> None:
        for part in x.chunk(2):
            model(part, both).sum().backward()

    run = compiled(step, backend)
    for _ in range(calls):
        run(torch.full((4, 1), 10.0 * (rank + 1)), both[rank])
    batches = [int(m.num_batches_tracked) for m in (model.a, model.b)]
    return [round(model.a.running_mean.item(), 4), round(model.b.running_mean.item(), 4), *batches]


@pytest.mark.parametrize("backend", BACKENDS)
def test_running_statistics_are_rank_0s(backend):
    assert run_ranks(running_means, 2, backend, (True, True), 2) == [[3.439, 3.439, 4, 4]] * 2


def test_running_statistics_are_rank_0s_where_graphs_differ():
    first, second = run_ranks(running_means, 2, BACKEND, (True, False), 1)
    assert first[:2] == second[:2] == [1.9, 1.9]
    first, second = run_ranks(running_means, 2, BACKEND, (False, True), 1)
    assert first[:2] == second[:2] == [1.9, 0.0]


def with_feedback(rank: int, backend: str, passes: str) -> list[float]:
    """Third-party state: what rounding lost stays for the next call."""
    model = line()

    def step(x: torch.Tensor) -> torch.Tensor:
        model.zero_grad()
        model(x).sum().backward()
        return model.weight.grad.clone()

    run, found = compiled(step, backend, passes=passes), []
    for _ in range(3):
        found.append(run(torch.full((1, 1), rank + 0.4)).item())
    return [*found, round(Feedback(model).residual("weight").item(), 4)]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_pass_of_a_third_party_keeps_its_state(backend):
    # 0.4, 0.8, 1.2 → 0, 1, 0 and 1.4, 1.8, 1.2 → 1, 2, 1
    passes = f"{RoundWithFeedback().spec},bucketing,gradient_sync"
    assert run_ranks(with_feedback, 2, backend, passes) == [[0.5, 1.5, 0.5, 0.2]] * 2


def test_a_pass_of_a_third_party_in_one_process():
    assert with_feedback(0, BACKEND, RoundWithFeedback().spec) == [0.0, 1.0, 0.0, 0.2]


def optimizer_in_between(rank: int) -> list[float]:
    """Without `fullgraph` an optimizer's step is a graph break, behind the whole step."""
    torch._dynamo.config.trace_autograd_ops = True
    model = line()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: torch.Tensor) -> None:
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    run, found = torch.compile(step, backend=BACKEND), []
    for _ in range(2):
        run(torch.full((1, 1), rank + 1.0))
        found.append(round(model.weight.item(), 4))
    return found


def test_an_optimizer_may_step_behind_a_graph_break():
    assert run_ranks(optimizer_in_between, 2) == [[0.85, 0.7]] * 2


def two_players(rank: int) -> list[float]:
    """Each loss has a backward of its own, and is clipped before the other one's."""
    a, b = line(), line(2.0)

    def step(x: torch.Tensor) -> None:
        a.zero_grad()
        b.zero_grad()
        a(b(x).detach()).sum().backward()
        nn.utils.clip_grad_value_(a.parameters(), 2.5)
        b(x).sum().backward()
        b.weight.grad.mul_(2)

    compiled(step)(torch.full((1, 1), rank + 1.0))
    return [p.weight.grad.item() for p in (a, b)]


def test_two_losses_that_are_worked_on_by_themselves():
    assert run_ranks(two_players, 2) == [[2.5, 3.0]] * 2  # 2.5 of (2 + 4) / 2; twice (1 + 2) / 2


def gradients_of_inputs(rank: int) -> list[float]:
    """They stay this rank's own, also on the way to a gradient of parameters."""
    model = line()

    def step(x: torch.Tensor) -> torch.Tensor:
        (slope,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
        slope.square().sum().backward()
        return slope.detach()

    x = torch.full((1, 1), rank + 1.0, requires_grad=True)
    slope = compiled(step)(x)
    # d/dx (w x)² = 2 w² x; its square's derivatives are 16 w³ x² by w and 8 w⁴ x by x
    return [slope.item(), model.weight.grad.item(), x.grad.item()]


def test_gradients_of_inputs_are_local():
    assert run_ranks(gradients_of_inputs, 2) == [[2.0, 40.0, 8.0], [4.0, 40.0, 16.0]]


def other_outputs(rank: int) -> list[float]:
    """Written inputs, views of each other and what is no tensor go through."""
    model = line()
    kept = torch.zeros(2)

    def step(x: torch.Tensor) -> tuple:
        pair = torch.stack([x, x * 2])
        model(x).sum().backward()
        kept.add_(model.weight.grad.view(()))
        x.add_(1)
        return pair[0], pair[1], pair, 7, kept, model.weight.grad

    run = compiled(step)
    for _ in range(2):
        x = torch.full((1, 1), rank + 1.0)
        first, second, _, seven, same, gradient = run(x)
    assert same is kept and gradient is model.weight.grad
    return [first.item(), second.item(), seven, *kept.tolist(), gradient.item(), x.item()]


def test_other_outputs_and_written_inputs():
    assert run_ranks(other_outputs, 2) == [
        [1.0, 2.0, 7, 4.5, 4.5, 3.0, 2.0],
        [2.0, 4.0, 7, 4.5, 4.5, 3.0, 3.0],
    ]


def shared_gradient(rank: int, backend: str) -> list[float]:
    """Without a reduction too, each parameter's `.grad` is its own tensor."""
    model = nn.ParameterList([torch.ones(2), torch.ones(2)])

    def step(x: torch.Tensor) -> None:
        ((model[0] + model[1]) * x).sum().backward()

    run = compiled(step, backend)
    with fxpasses.runtime(model).no_sync():
        run(torch.full((2,), rank + 1.0))
    model[0].grad.mul_(2)
    seen = [p.grad[0].item() for p in model]
    run(torch.full((2,), rank + 1.0))
    return seen + [p.grad[0].item() for p in model]


@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients_are_tensors_of_their_own(backend):
    expected = [[2.0, 1.0, 4.5, 3.0], [4.0, 2.0, 4.5, 3.0]]
    assert run_ranks(shared_gradient, 2, backend) == expected


def refused(rank: int, name: str) -> str:
    model = line()
    x = torch.full((1, 1), rank + 1.0)

    def takes_the_gradient(x: torch.Tensor) -> torch.Tensor:
        return torch.autograd.grad(model(x).sum(), model.weight)[0]

    def differentiates_again(x: torch.Tensor) -> None:
        model(x).square().sum().backward(create_graph=True)

    def changes_in_between(x: torch.Tensor) -> None:
        model(x).sum().backward()
        model.weight.grad.mul_(0.5)
        model(x).sum().backward()

    def returns_a_loss(x: torch.Tensor) -> torch.Tensor:
        model(x).sum().backward()
        return model(x).sum()

    try:
        compiled(locals()[name])(x)
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("takes_the_gradient", "calls torch.autograd.grad()"),
        ("differentiates_again", "create_graph=True"),
        ("changes_in_between", "changes .grad of 'weight' between two backward() calls"),
        ("returns_a_loss", "returns a tensor that requires grad"),
    ],
)
def test_what_is_refused(name, message):
    assert all(message in found for found in run_ranks(refused, 2, name))


def with_loss_scale(rank: int) -> str:
    model = line()

    def step(x: torch.Tensor) -> None:
        model(x).sum().backward()

    try:
        compiled(step, loss_scale=8.0)(torch.ones(1, 1))
    except ValueError as error:
        return str(error)
    return ""


def test_a_loss_that_the_function_itself_differentiates_is_not_scaled():
    assert all("option 'loss_scale'" in message for message in run_ranks(with_loss_scale, 2))


def low_precision(rank: int) -> tuple[list[bool], list[torch.dtype]]:
    """The joint stage works on forward and backward; what follows stays in fp32."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 2))
    twin = copy.deepcopy(model)
    x = torch.randn(4, 4) + rank
    norms = [
        compiled(clipped, precision="bf16")(model, x, nothing),
        clipped(twin, x, Averages(twin, 0.5)),
    ]
    pairs = zip([*gradients(model), norms[0]], [*gradients(twin), norms[1]], strict=True)
    return [
        torch.allclose(a, b, rtol=0.1, atol=1e-3) and not torch.equal(a, b) for a, b in pairs
    ], [p.grad.dtype for p in model.parameters()]


def test_option_precision():
    for near, dtypes in run_ranks(low_precision, 2):
        assert all(near) and set(dtypes) == {torch.float32}


def untouched(backend: str) -> list[torch.Tensor]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, x = Small(), torch.randn(4, 2, 5)
    run = compiled(two_backwards, backend)
    losses = [run(model, x, nothing) for _ in range(2)]
    return [*losses, *gradients(model)[:-2], *model.buffers()]


def test_one_process_gets_what_inductor_makes():
    for a, b in zip(untouched("hardened"), untouched("inductor"), strict=True):
        assert torch.equal(a, b)
