"""Cases 12, 13 and 15: what is reduced, how often, and for whom."""

import pytest
import torch
from torch import nn

import fxpasses
from tests.multirank import counted_all_reduces, run_ranks


class Line(nn.Module):
    """`y = w x`, w = 1."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1, 1))

    def forward(self, *xs: torch.Tensor) -> torch.Tensor:
        return sum((x @ self.weight.T).sum() for x in xs)


def two_micro_batches_in_one_backward(rank: int, backend: str) -> tuple[float, int]:
    model = Line()
    inputs = [torch.full((1, 1), float(x)) for x in ((1, 3), (2, 5))[rank]]
    compiled = torch.compile(model, backend=backend)
    compiled(*inputs).backward()
    model.zero_grad()
    with counted_all_reduces() as count:
        compiled(*inputs).backward()
    assert fxpasses.runtime(model).last_step.collectives == 2  # of two backwards
    return model.weight.grad.item(), count[0]


@pytest.mark.parametrize("backend", ["hardened", "hardened_aot_eager"])
def test_case_12_the_total_is_reduced_once(backend):
    assert run_ranks(two_micro_batches_in_one_backward, 2, backend) == [(5.5, 1)] * 2


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(3, 2)
        nn.init.ones_(self.embedding.weight)
        self.head = nn.Linear(2, 3, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, token: torch.Tensor) -> torch.Tensor:
        return self.head(self.embedding(token)).sum()


def tied_weights(rank: int, backend: str) -> tuple[list, int, int]:
    model = Tied()
    with counted_all_reduces() as count:
        torch.compile(model, backend=backend)(torch.tensor([rank])).backward()
    assert count == [1]
    record = fxpasses.runtime(model).last_step
    return model.embedding.weight.grad.tolist(), record.collectives, record.bytes


@pytest.mark.parametrize("backend", ["hardened", "hardened_aot_eager"])
def test_case_15_tied_weights_are_reduced_once(backend):
    gradient = [[2.5, 2.5], [2.5, 2.5], [1.0, 1.0]]
    assert run_ranks(tied_weights, 2, backend) == [(gradient, 1, 6 * 4)] * 2


def sum_over_ranks(rank: int) -> float:
    model = Line()
    options = {"reduce": "sum"}
    torch.compile(model, backend="hardened_aot_eager", options=options)(
        torch.full((1, 1), rank + 1.0)
    ).backward()
    return model.weight.grad.item()


@pytest.mark.parametrize("world", [2, 4])
def test_option_reduce_sum(world):
    assert run_ranks(sum_over_ranks, world) == [sum(range(1, world + 1))] * world


def only_the_subgroup(rank: int) -> float:
    import torch.distributed as dist

    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    model = Line()
    options = {"process_group": groups[rank // 2]}
    torch.compile(model, backend="hardened_aot_eager", options=options)(
        torch.full((1, 1), rank + 1.0)
    ).backward()
    return model.weight.grad.item()


def test_option_process_group():
    assert run_ranks(only_the_subgroup, 4) == [1.5, 1.5, 3.5, 3.5]


def narrow_wire(rank: int, dtype: str) -> tuple[float, str, int]:
    model = Line()
    options = {"reduce_dtype": dtype}
    torch.compile(model, backend="hardened_aot_eager", options=options)(
        torch.full((1, 1), rank + 1.0)
    ).backward()
    planned = fxpasses.runtime(model).plan
    return model.weight.grad.item(), planned[0].dtype, planned[0].bytes


@pytest.mark.parametrize("dtype, name", [("bf16", "bfloat16"), ("fp16", "float16")])
def test_option_reduce_dtype(dtype, name):
    assert run_ranks(narrow_wire, 2, dtype) == [(1.5, name, 2)] * 2
