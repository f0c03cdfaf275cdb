"""Case 13: parameters that take part on some ranks only."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fxpasses
from tests.multirank import run_ranks

BACKENDS = ["hardened_aot_eager", "hardened"]


def line(value: float = 1.0) -> nn.Linear:
    layer = nn.Linear(1, 1, bias=False)
    nn.init.constant_(layer.weight, value)
    return layer


class Parts(nn.Module):
    """`a(x)`, `b(x)`, …: the sum of those that are asked for."""

    def __init__(self, names: str = "ab") -> None:
        super().__init__()
        self.parts = nn.ModuleDict({name: line() for name in names})

    def forward(self, x: torch.Tensor, asked: str) -> torch.Tensor:
        return sum(self.parts[name](x) for name in asked)


def gradients(model: Parts) -> list[float | None]:
    return [None if p.grad is None else p.grad.item() for p in model.parameters()]


def used_by_rank(rank: int, backend: str, asked: list[str], x: list[float]) -> list[list]:
    model = Parts("".join(sorted(set("".join(asked)) | {"a"})))
    compiled = torch.compile(model, backend=backend)
    found = []
    for _ in range(2):
        compiled(torch.full((1, 1), x[rank]), asked[rank]).sum().backward()
        found.append(gradients(model))
        model.zero_grad()
    return found


@pytest.mark.parametrize("backend", BACKENDS)
def test_case_13_used_on_rank_0_only(backend):
    expected = [[4.0, 2.0]] * 2
    assert run_ranks(used_by_rank, 2, backend, ["ab", "a"], [4.0, 4.0]) == [expected] * 2


@pytest.mark.parametrize(
    ("asked", "x", "expected"),
    [
        (["a", "ab"], [4.0, 4.0], [4.0, 2.0]),  # the absent rank is the first
        (["a", "b"], [4.0, 4.0], [2.0, 2.0]),  # nothing in common
        (["ba", "ab"], [1.0, 2.0], [1.5, 1.5]),  # the same in another order
        (["abc", "cb", "c"], [3.0, 3.0, 6.0], [1.0, 2.0, 4.0]),
        (["c", "a", "bc", "a"], [4.0] * 4, [2.0, 1.0, 2.0]),
    ],
)
def test_other_parameters_on_each_rank(asked, x, expected):
    world = len(asked)
    assert run_ranks(used_by_rank, world, BACKENDS[0], asked, x) == [[expected] * 2] * world


def in_turns(rank: int) -> list[list]:
    """Which rank uses what changes from step to step, and at times they agree."""
    model = Parts("ab")
    compiled = torch.compile(model, backend=BACKENDS[0])
    found = []
    for asked in (("a", "ab"), ("ab", "ab"), ("ab", "b"), ("a", "a"), ("b", "a"), ("a", "ab")):
        compiled(torch.full((1, 1), 2.0 * (rank + 1)), asked[rank]).sum().backward()
        found.append(gradients(model))
        model.zero_grad()
    return found


def test_what_is_used_changes_from_step_to_step():
    expected = [[3.0, 2.0], [3.0, 3.0], [1.0, 3.0], [3.0, None], [2.0, 1.0], [3.0, 2.0]]
    assert run_ranks(in_turns, 2) == [expected] * 2


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = line(), line()

    def forward(self, x: torch.Tensor, both: bool) -> tuple[torch.Tensor, ...]:
        return (self.a(x), self.b(x)) if both else (self.a(x),)


def unused_on_all_ranks(rank: int) -> list[float | None]:
    model = TwoHeads()
    y, *_ = torch.compile(model, backend=BACKENDS[0])(torch.full((1, 1), rank + 1.0), rank == 0)
    y.sum().backward()
    return gradients(model)


def test_what_no_loss_uses_stays_none_although_graphs_differ():
    assert run_ranks(unused_on_all_ranks, 2) == [[1.5, None]] * 2


def with_hooks(rank: int) -> tuple[list[float], list[float | None]]:
    model, seen = Parts("ab"), []
    model.parts["b"].weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.item()))
    compiled = torch.compile(model, backend=BACKENDS[0])
    compiled(torch.full((1, 1), 4.0), ("ab", "a")[rank]).sum().backward()
    return seen, gradients(model)


def test_hooks_of_a_parameter_that_the_graph_lacks_run():
    assert run_ranks(with_hooks, 2) == [([2.0], [4.0, 2.0])] * 2


class Norms(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.BatchNorm1d(1), nn.BatchNorm1d(1)

    def forward(self, x: torch.Tensor, both: bool) -> torch.Tensor:
        return self.a(x) + self.b(x) if both else self.a(x)


def running_means(rank: int, both: tuple[bool, bool]) -> list[float]:
    model = Norms()
    compiled = torch.compile(model, backend=BACKENDS[0])
    compiled(torch.full((2, 1), 10.0 * (rank + 1)), both[rank]).sum().backward()
    return [model.a.running_mean.item(), model.b.running_mean.item()]


def test_running_statistics_are_rank_0s_where_graphs_differ():
    assert run_ranks(running_means, 2, (True, False)) == [[1.0, 1.0]] * 2
    assert run_ranks(running_means, 2, (False, True)) == [[1.0, 0.0]] * 2


def steps_alike(rank: int) -> tuple[list[float | None], tuple]:
    """An optimizer with momentum steps on parameters that this rank did not use."""
    model = Parts("ab")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    compiled = torch.compile(model, backend=BACKENDS[0])
    for step in range(4):
        compiled(torch.ones(1, 1), "ab" if step % 2 == rank else "a").sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    plan = fxpasses.runtime(model).plan
    return [p.item() for p in model.parameters()], tuple(c.numel for c in plan if c.parameters)


def test_training_stays_alike():
    first, second = run_ranks(steps_alike, 2)
    assert first == second


def not_reachable(rank: int) -> str:
    a, b = line(), line()
    programs = [lambda x: (a(x) + b(x)).sum(), lambda x: a(x).sum()]
    try:
        torch.compile(programs[rank], backend=BACKENDS[0])(torch.ones(1, 1)).backward()
    except RuntimeError as error:
        return str(error)
    return ""


def test_ranks_with_different_programs_are_told_so_at_first_use():
    for message in run_ranks(not_reachable, 2):
        assert "the model differs over the ranks: rank 0 has" in message
        assert "rank 1 has" in message


def other_program_later(rank: int) -> str:
    """The same model, then other code on rank 1."""
    model = Parts("ab")

    def first(x: torch.Tensor) -> torch.Tensor:
        return model(x, "ab")

    def second(x: torch.Tensor) -> torch.Tensor:
        return model(x, "b").square()

    torch.compile(first, backend=BACKENDS[0])(torch.ones(1, 1)).sum().backward()
    program = torch.compile((first, second)[rank], backend=BACKENDS[0])
    try:
        program(torch.ones(1, 1)).sum().backward()
    except RuntimeError as error:
        return str(error)
    return ""


def test_other_code_is_an_error_on_all_ranks_that_names_the_first_difference():
    for message in run_ranks(other_program_later, 2):
        assert "the code is Parts.first (test_union.py:" in message
        assert "Parts.second (test_union.py:" in message
        assert "first differing collective, number 0: all_reduce of 2 float32" in message
        assert message.count("test_union.py:29") == 2  # where both use the parameters


def other_options(rank: int) -> str:
    model = nn.Sequential(line(), line())
    options = {"bucket_mb": (1, 1e-6)[rank]}
    compiled = torch.compile(model, backend=BACKENDS[0], options=options)
    try:
        compiled(torch.ones(1, 1)).sum().backward()
    except RuntimeError as error:
        return str(error)
    return ""


def test_other_options_are_an_error_on_all_ranks():
    for message in run_ranks(other_options, 2):
        assert "the pipeline is" in message and "bucketing{mb=1e-06}" in message
        assert "first differing collective" in message


def frozen_on_one_rank(rank: int) -> str:
    model = Parts("ab")
    compiled = torch.compile(model, backend=BACKENDS[0])
    compiled(torch.ones(1, 1), "ab").sum().backward()
    model.parts["b"].weight.requires_grad_(rank == 0)
    try:
        compiled(torch.ones(1, 1), "ab").sum().backward()
    except RuntimeError as error:
        return str(error)
    return ""


@pytest.mark.skipif(torch.__version__ < (2, 12), reason="torch 2.11 does not notice the freezing")
def test_a_parameter_that_is_frozen_on_one_rank_only_is_an_error_on_all():
    for message in run_ranks(frozen_on_one_rank, 2):
        assert "rank 0 is about to send 'parts.b.weight'" in message
        assert "does not take part on rank 1" in message


def small_buckets(rank: int) -> list[float | None]:
    """Buckets that hold only absent parameters on one rank stand where they do on the others."""
    model = Parts("ab")
    compiled = torch.compile(model, backend=BACKENDS[0], options={"bucket_mb": 1e-6})
    compiled(torch.full((1, 1), 4.0), ("ab", "b")[rank]).sum().backward()
    return gradients(model)


def test_a_bucket_of_absent_parameters_alone():
    assert run_ranks(small_buckets, 2) == [[2.0, 4.0]] * 2


def with_a_collective_of_its_own(rank: int) -> list[float | None]:
    """An all-reduce of the model's own in the backward, between the gradients of `b` and `a`."""
    import torch.distributed as dist
    from torch.distributed import _functional_collectives as functional

    model = Parts("ab")

    def program(x: torch.Tensor, asked: str) -> torch.Tensor:
        h = model.parts["a"](x) if "a" in asked else x
        h = functional.all_gather_tensor_autograd(h, 0, dist.group.WORLD).sum(0, keepdim=True)
        return model.parts["b"](h)

    compiled = torch.compile(program, backend=BACKENDS[0])
    x = torch.full((1, 1), 4.0, requires_grad=True)
    compiled(x, ("ab", "b")[rank]).sum().backward()
    return gradients(model)


def test_the_models_own_collectives_stand_as_on_the_other_ranks():
    # b sees 4 + 4; a's product reaches both losses, with derivative 4 each, on rank 0 alone
    assert run_ranks(with_a_collective_of_its_own, 2) == [[4.0, 8.0]] * 2


def frozen_after_a_union(rank: int) -> str:
    model = Parts("ab")
    compiled = torch.compile(model, backend=BACKENDS[0])
    x = torch.ones(1, 1)
    compiled(x, ("ab", "a")[rank]).sum().backward()
    model.parts["b"].weight.requires_grad_(rank == 0)  # on rank 1 no graph notices
    try:
        compiled(x, ("ab", "a")[rank]).sum().backward()
    except RuntimeError as error:
        return str(error)
    return ""


def test_what_can_take_part_is_looked_at_again():
    for message in run_ranks(frozen_after_a_union, 2):
        assert "'parts.b.weight'" in message and "does not take part on rank 1" in message
