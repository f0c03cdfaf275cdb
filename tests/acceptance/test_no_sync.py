"""Accumulation over micro-batches: option `accumulate`, `no_sync` and `sync`."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import nn

import fxpasses
from tests.multirank import counted_all_reduces, run_ranks

BACKENDS = ["hardened_aot_eager", "hardened"]
BACKEND = BACKENDS[0]
INPUTS = ((1.0, 3.0), (2.0, 5.0))  # of ranks 0 and 1


def line() -> nn.Linear:
    layer = nn.Linear(1, 1, bias=False)
    nn.init.ones_(layer.weight)
    return layer


def run(compiled, x: float) -> None:
    compiled(torch.full((1, 1), x)).sum().backward()


def by_hand(rank: int, backend: str) -> tuple[list[float], list[int]]:
    model = line()
    compiled = torch.compile(model, backend=backend)
    runtime = fxpasses.runtime(compiled)
    seen, counts = [], []
    for index, x in enumerate(INPUTS[rank]):
        context = runtime.no_sync() if index == 0 else contextlib.nullcontext()
        with counted_all_reduces() as count, context:
            run(compiled, x)
        seen.append(model.weight.grad.item())
        counts += count
    return seen, counts


@pytest.mark.parametrize("backend", BACKENDS)
def test_case_12_only_the_last_micro_batch_synchronises(backend):
    assert run_ranks(by_hand, 2, backend) == [([1.0, 5.5], [0, 1]), ([2.0, 5.5], [0, 1])]


def by_option(rank: int, backend: str, reduce: str) -> tuple[list[list[float]], list[int]]:
    model = nn.Sequential(line(), line())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    options = {"accumulate": 3, "reduce": reduce, "bucket_mb": 1e-6}
    compiled = torch.compile(model, backend=backend, options=options)
    seen, counts = [], []
    for _ in range(2):
        for x in (1.0, 3.0, 6.0):
            with counted_all_reduces() as count:
                run(compiled, x * (rank + 1))
            counts += count
        seen.append([p.grad.item() for p in model.parameters()])
        optimizer.step()
        optimizer.zero_grad()
    return seen, counts


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("reduce", "factor"), [("mean", 1.5), ("sum", 3.0)])
def test_option_accumulate(backend, reduce, factor):
    expected = [[10.0 * factor] * 2] * 2
    assert run_ranks(by_option, 2, backend, reduce) == [(expected, [0, 0, 2] * 2)] * 2


def bytes_sent(rank: int) -> list[tuple[int, int, int]]:
    model = nn.Linear(64, 64)
    compiled = torch.compile(model, backend=BACKEND, options={"accumulate": 2})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    for _ in range(2):
        for _ in range(2):
            compiled(torch.ones(1, 64)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        record = fxpasses.runtime(model).last_step
        found.append((record.backwards, record.collectives, record.bytes))
    return found


def test_a_step_of_two_micro_batches_sends_each_gradient_once():
    assert run_ranks(bytes_sent, 2) == [[(2, 1, 4 * (64 * 64 + 64))] * 2] * 2


def mixed(rank: int, order: str, reduce: str) -> list[float]:
    """`order`: s synchronises, n does not, z zeroes in place, h halves. One input of rank + 1 each."""
    model = line()
    compiled = torch.compile(model, backend=BACKEND, options={"reduce": reduce})
    runtime = fxpasses.runtime(compiled)
    seen = []
    for letter in order:
        if letter in "sn":
            with runtime.no_sync() if letter == "n" else contextlib.nullcontext():
                run(compiled, rank + 1.0)
        elif letter == "z":
            model.zero_grad(set_to_none=False)
        elif letter == "Z":
            model.zero_grad()
        elif letter == "h":
            model.weight.grad.mul_(0.5)
        seen.append(model.weight.grad.item() if model.weight.grad is not None else 0.0)
    return seen


@pytest.mark.parametrize("reduce", ["mean", "sum"])
@pytest.mark.parametrize(
    ("order", "total"),
    [
        ("ss", 2.0),  # what is reduced already is not reduced again
        ("sns", 3.0),
        ("nsns", 4.0),
        ("nnzs", 1.0),
        ("nZs", 1.0),
        ("snzs", 1.0),
        ("nhs", 1.5),
        ("szns", 2.0),
        ("nsznns", 3.0),
    ],
)
def test_any_order_of_modes(order, total, reduce):
    one = {"mean": 1.5, "sum": 3.0}[reduce]
    for seen in run_ranks(mixed, 2, order, reduce):
        assert seen[-1] == total * one


def test_a_local_gradient_is_local_and_what_was_reduced_is_shared_out():
    # mean: 1.5 + own; sum: 3 / 2 + own
    assert run_ranks(mixed, 2, "sns", "mean") == [[1.5, 2.5, 4.5], [1.5, 3.5, 4.5]]
    assert run_ranks(mixed, 2, "sns", "sum") == [[3.0, 2.5, 9.0], [3.0, 3.5, 9.0]]


def steps_too_early(rank: int) -> tuple[str, float]:
    model = line()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    compiled = torch.compile(model, backend=BACKEND, options={"accumulate": 2})
    run(compiled, rank + 1.0)
    with pytest.raises(RuntimeError) as caught:
        optimizer.step()
    with fxpasses.runtime(model).sync():
        run(compiled, rank + 1.0)
    optimizer.step()
    return str(caught.value), model.weight.item()


def test_an_optimizer_does_not_step_on_a_local_gradient():
    for message, weight in run_ranks(steps_too_early, 2):
        assert "parameter 0 of group 0" in message and "accumulated on this rank alone" in message
        assert "sync()" in message
        assert weight == pytest.approx(1 - 0.1 * 3.0)


def short_last_step(rank: int) -> list[float]:
    """5 micro-batches, 2 to a step: the last step comes short."""
    model = line()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    compiled = torch.compile(model, backend=BACKEND, options={"accumulate": 2})
    runtime, found = fxpasses.runtime(model), []
    for index in range(5):
        last = index == 4
        with runtime.sync() if last else contextlib.nullcontext():
            run(compiled, (rank + 1.0) * (index + 1))
        if index % 2 or last:
            found.append(model.weight.grad.item())
            optimizer.step()
            optimizer.zero_grad()
    return found


def test_sync_ends_a_short_step():
    assert run_ranks(short_last_step, 2) == [[4.5, 10.5, 7.5]] * 2


class Broken(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = line(), line()
        self.tied = self.first

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        torch._dynamo.graph_break()
        return self.second(y) + self.tied(x)


def across_a_break(rank: int) -> tuple[list[float], list[int]]:
    model = Broken()
    compiled = torch.compile(model, backend=BACKEND, options={"accumulate": 2})
    counts = []
    for _ in range(2):
        with counted_all_reduces() as count:
            run(compiled, rank + 1.0)
        counts += count
    return [p.grad.item() for p in model.parameters()], counts


def test_micro_batches_count_calls_of_backward_not_graphs():
    assert run_ranks(across_a_break, 2) == [([6.0, 3.0], [0, 2])] * 2


def two_backwards_at_once(rank: int) -> list[float]:
    """Two forwards, then one backward of both: one micro-batch."""
    model = line()
    compiled = torch.compile(model, backend=BACKEND, options={"accumulate": 2})
    found = []
    for _ in range(2):
        (compiled(torch.full((1, 1), rank + 1.0)) + compiled(torch.ones(1, 1))).sum().backward()
        found.append(model.weight.grad.item())
    return found


def test_two_forwards_and_one_backward_are_one_micro_batch():
    assert run_ranks(two_backwards_at_once, 2) == [[2.0, 5.0], [3.0, 5.0]]


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = line(), line()

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.a(x), self.b(x)


def other_outputs(rank: int) -> list[float | None]:
    """The first micro-batch uses both outputs, the synchronising one only the first."""
    model = Heads()
    compiled = torch.compile(model, backend=BACKEND)
    x = torch.full((1, 1), rank + 1.0)
    with fxpasses.runtime(model).no_sync():
        sum(compiled(x)).sum().backward()
    compiled(x)[0].sum().backward()
    return [p.grad.item() for p in model.parameters()]


def test_what_waits_is_reduced_although_the_last_micro_batch_does_not_use_it():
    assert run_ranks(other_outputs, 2) == [[3.0, 1.5]] * 2


class Choice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = line(), line()

    def forward(self, x: torch.Tensor, asked: str) -> torch.Tensor:
        return sum(getattr(self, name)(x) for name in asked)


def absent_but_pending(rank: int) -> list[float | None]:
    """Rank 1 used `b` in a local micro-batch, rank 0 uses it in the synchronising one."""
    model = Choice()
    compiled = torch.compile(model, backend=BACKEND)
    x = torch.full((1, 1), rank + 1.0)
    with fxpasses.runtime(model).no_sync():
        compiled(x, ("a", "ab")[rank]).sum().backward()
    compiled(x, ("ab", "a")[rank]).sum().backward()
    return [p.grad.item() for p in model.parameters()]


def test_what_waits_of_a_parameter_that_only_others_use_is_reduced_with_theirs():
    assert run_ranks(absent_but_pending, 2) == [[3.0, 1.5]] * 2


def not_zeroed(rank: int, asked: tuple[str, ...], reduce: str) -> list[list]:
    """Two steps of two micro-batches without `zero_grad` in between: `.grad` holds the first one's result."""
    model = Choice()
    compiled = torch.compile(model, backend=BACKEND, options={"accumulate": 2, "reduce": reduce})
    found = []
    for names in ("ab", asked[rank]):
        for _ in range(2):
            compiled(torch.full((1, 1), rank + 1.0), names).sum().backward()
        found.append([p.grad.item() for p in model.parameters()])
    return found


@pytest.mark.parametrize("reduce", ["mean", "sum"])
@pytest.mark.parametrize("asked", [("a", "a"), ("ab", "a"), ("b", "a")])
def test_what_was_reduced_is_shared_out_on_all_ranks_or_on_none(asked, reduce):
    share = {"mean": 0.5, "sum": 1.0}[reduce]
    first = [2 * 3 * share] * 2
    second = [6 * share + 2 * share * sum(r + 1 for r in (0, 1) if n in asked[r]) for n in "ab"]
    assert run_ranks(not_zeroed, 2, asked, reduce) == [[first, second]] * 2


def left_behind(rank: int, asked: tuple[str, ...], x: tuple[float, ...]) -> tuple[list, list]:
    """Micro-batches of a step use the parts of `asked[rank]` in turn; two steps."""
    model = Choice()
    steps = asked[rank].split()
    compiled = torch.compile(model, backend=BACKEND, options={"accumulate": len(steps)})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    found, counts = [], []
    for _ in range(2):
        for names in steps:
            with counted_all_reduces() as count:
                compiled(torch.full((1, 1), x[rank]), names).sum().backward()
            counts += count
        found.append([None if p.grad is None else p.grad.item() for p in model.parameters()])
        optimizer.step()
        optimizer.zero_grad()
    return found, counts


@pytest.mark.parametrize(
    "asked",
    [
        ("b a", "b a"),
        ("ab a b a", "b b a a"),
        ("b a", "a a"),  # left on one rank only
        ("b a", "a b"),  # in the last micro-batch of the other
    ],
)
def test_what_earlier_micro_batches_left_is_reduced_with_the_last(asked):
    expected = [[sum((r + 1.0) * asked[r].count(n) for r in (0, 1)) / 2 for n in "ab"]] * 2
    for found, counts in run_ranks(left_behind, 2, asked, (1.0, 2.0)):
        assert found == expected
        last = len(asked[0].split()) - 1
        assert counts[:last] == [0] * last


def local_statistics(rank: int) -> list[float]:
    model = nn.BatchNorm1d(1)
    compiled = torch.compile(model, backend=BACKEND)
    x, found = torch.full((2, 1), 10.0 * (rank + 1)), []
    for context in (fxpasses.runtime(model).no_sync(), contextlib.nullcontext()):
        with context:
            compiled(x).sum().backward()
        found.append(model.running_mean.item())
    return found


def test_running_statistics_travel_with_synchronising_backwards_only():
    assert run_ranks(local_statistics, 2) == [
        [pytest.approx(1.0), pytest.approx(1.9)],
        [pytest.approx(2.0), pytest.approx(1.9)],
    ]


def fails_in_between(rank: int) -> float:
    """A backward that fails leaves what waited where it was."""
    model = line()
    compiled = torch.compile(model, backend=BACKEND)
    with fxpasses.runtime(model).no_sync():
        run(compiled, rank + 1.0)
    y = compiled(torch.full((1, 1), rank + 1.0))
    y.register_hook(lambda grad: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        y.sum().backward()
    assert model.weight.grad.item() == rank + 1.0
    run(compiled, rank + 1.0)
    return model.weight.grad.item()


def test_nothing_is_lost_when_a_backward_fails():
    assert run_ranks(fails_in_between, 2) == [3.0] * 2


def test_with_one_process_there_is_nothing_to_synchronise():
    model = line()
    compiled = torch.compile(model, backend=BACKEND, options={"accumulate": 2})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for x in (1.0, 2.0, 3.0):
        run(compiled, x)
    optimizer.step()
    with fxpasses.runtime(model).no_sync():
        run(compiled, 4.0)
    assert model.weight.grad.item() == 10.0
    optimizer.step()
