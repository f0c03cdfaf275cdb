"""Loaders of different lengths: all ranks go on until the last one has seen its last batch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import fxpasses
from fxpasses.distributed.waiting import RankLost
from tests.multirank import run_ranks

LR, MOMENTUM = 0.1, 0.9


def batches_of(rank: int, length: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(2, 3, generator=generator) for _ in range(length)]


def model_and_optimizer() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(3, 1)
    with torch.no_grad():
        model.weight.fill_(0.5)
        model.bias.fill_(0.25)
    return model, torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM)


def trained(rank: int, lengths: list[int], kind: str) -> tuple[list[torch.Tensor], list[float]]:
    model, optimizer = model_and_optimizer()
    compiled = torch.compile(model, backend="hardened_aot_eager")
    batches: Iterable = batches_of(rank, lengths[rank])
    if kind == "generator":
        batches = (batch for batch in batches)
    if kind == "DataLoader":
        dataset = TensorDataset(torch.cat(list(batches)))
        batches = DataLoader(dataset, batch_size=2, num_workers=0)
    weights = []
    for batch, weight in fxpasses.join(batches):
        x = batch[0] if kind == "DataLoader" else batch
        loss = weight * compiled(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        weights.append(weight)
    return [p.detach() for p in model.parameters()], weights


def reference(lengths: list[int]) -> list[torch.Tensor]:
    """One process: at each step the mean, over all ranks, of the gradients of those that have a batch."""
    model, optimizer = model_and_optimizer()
    batches = [batches_of(rank, length) for rank, length in enumerate(lengths)]
    for step in range(max(lengths)):
        losses = [model(mine[step]).square().mean() for mine in batches if step < len(mine)]
        (sum(losses) / len(lengths)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach() for p in model.parameters()]


@pytest.mark.parametrize(
    ("lengths", "kind"),
    [([3, 1], "list"), ([2, 4], "generator"), ([2, 1, 4], "DataLoader"), ([2, 2], "list")],
)
def test_ranks_train_alike_until_all_have_ended(lengths, kind):
    ranks = run_ranks(trained, len(lengths), lengths, kind)
    expected = reference(lengths)
    for length, (parameters, weights) in zip(lengths, ranks, strict=True):
        assert weights == [1.0] * length + [0.0] * (max(lengths) - length)
        for mine, first, wanted in zip(parameters, ranks[0][0], expected, strict=True):
            assert torch.equal(mine, first)
            torch.testing.assert_close(mine, wanted)


def items(rank: int, lengths: list[int], part: list[int]) -> list[tuple[int, float]] | str:
    group = dist.new_group(part)
    if rank not in part:
        return []
    try:
        return list(fxpasses.join(range(10 * rank, 10 * rank + lengths[rank]), group))
    except ValueError as error:
        return str(error)


def test_a_rank_that_ended_gets_its_last_batch_again():
    assert run_ranks(items, 2, [1, 3], [0, 1]) == [
        [(0, 1.0), (0, 0.0), (0, 0.0)],
        [(10, 1.0), (11, 1.0), (12, 1.0)],
    ]


def test_the_ranks_are_those_of_the_group_given():
    assert run_ranks(items, 3, [5, 1, 2], [1, 2])[1:] == [
        [(10, 1.0), (10, 0.0)],
        [(20, 1.0), (21, 1.0)],
    ]


def test_a_rank_without_any_batch_is_an_error_on_all_ranks():
    for message in run_ranks(items, 3, [2, 0, 0], [0, 1, 2]):
        assert "no batch at all on rank(s) 1, 2 of 3" in message


def test_no_batch_on_any_rank_is_no_iteration():
    assert run_ranks(items, 2, [0, 0], [0, 1]) == [[], []]


def failing(rank: int) -> tuple[int, str]:
    def loader() -> Iterator[int]:
        yield 0
        if rank == 1:
            raise KeyError("a file is missing")
        yield 1

    seen = 0
    try:
        for _ in fxpasses.join(loader()):
            seen += 1
    except KeyError as error:
        return seen, str(error)
    except RankLost as error:
        return seen, str(error)
    return seen, ""


def test_an_error_of_a_loader_is_raised_there_and_told_elsewhere():
    (seen, lost), (seen_too, error) = run_ranks(failing, 2, gloo_timeout_s=4)
    assert seen == seen_too == 1
    assert "a file is missing" in error
    assert "in the agreement of join on batch 1 for rank 1, which gave no sign of life" in lost


@pytest.mark.parametrize("loader", [[1, 2], (i for i in (1, 2)), DataLoader([1, 2], None)])
def test_one_process_alone_gets_each_batch_once(loader):
    assert list(fxpasses.join(loader)) == [(1, 1.0), (2, 1.0)]


def test_one_process_alone_may_have_no_batch():
    assert list(fxpasses.join([])) == []


def test_a_wrong_group_is_an_error_at_once():
    with pytest.raises(ValueError, match="torch.distributed is not initialised"):
        fxpasses.join([], process_group="0")
