"""First use: the model is compared over the ranks and takes rank 0's values."""

import time

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fxpasses
from tests.multirank import run_ranks

BACKEND = "hardened_aot_eager"


class Net(nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.frozen = nn.Parameter(torch.randn(width, 3), requires_grad=False)
        self.norm = nn.BatchNorm1d(width)
        self.conv = nn.Conv2d(2, 2, 3).to(memory_format=torch.channels_last)
        self.head = nn.Linear(width, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        image = x[:, :2, None, None].expand(-1, 2, 3, 3)
        return self.head(self.norm(x @ self.frozen.T)).sum() + self.conv(image).sum()


def values(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def different_seeds(rank: int) -> tuple[dict, dict, dict]:
    torch.manual_seed(rank)
    model = Net()
    model.norm.running_mean.fill_(rank)
    before = values(model)
    compiled = torch.compile(model, backend=BACKEND)
    compiled.eval()
    with torch.no_grad():
        compiled(torch.ones(2, 3))
    untouched = values(model)
    compiled.train()
    compiled(torch.ones(2, 3)).backward()
    return before, untouched, values(model)


def test_parameters_and_buffers_take_the_values_of_rank_0():
    ranks = run_ranks(different_seeds, 2)
    for before, untouched, after in ranks:
        for name, start in before.items():
            assert torch.equal(start, untouched[name]), f"{name} changed in eval under no_grad"
            if "running" not in name and "tracked" not in name:
                assert torch.equal(after[name], ranks[0][0][name]), name
    assert torch.equal(ranks[0][2]["norm.running_mean"], ranks[1][2]["norm.running_mean"])


def taken_once(rank: int) -> float:
    model = nn.Linear(1, 1, bias=False)
    compiled = torch.compile(model, backend=BACKEND)
    compiled(torch.ones(2, 1)).sum().backward()
    with torch.no_grad():
        model.weight.fill_(rank)  # from here on the program's own business
    for batch in (3, 4, 5):  # recompiles
        compiled(torch.ones(batch, 1)).sum().backward()
    return model.weight.item()


def test_values_are_taken_once():
    assert run_ranks(taken_once, 2) == [0.0, 1.0]


def different_models(rank: int) -> tuple[str, int]:
    model = Net(width=4 + rank)
    try:
        torch.compile(model, backend=BACKEND)(torch.ones(2, 3)).backward()
    except RuntimeError as error:
        return str(error), fxpasses.runtime(model).last_step.collectives
    return "", -1


def test_a_model_that_differs_is_an_error_on_all_ranks():
    for message, collectives in run_ranks(different_models, 3):
        assert "rank 0 has frozen: float32[4, 3], rank 1 has frozen: float32[5, 3]" in message
        assert collectives == 0


def absent(rank: int, missing: int) -> tuple[str, float]:
    model = nn.Linear(1, 1)
    if rank == missing:
        time.sleep(8)
        return "", 0.0
    if rank == 0:
        time.sleep(1)  # its time to wait ends after that of the others
    started = time.monotonic()
    try:
        torch.compile(model, backend=BACKEND)(torch.ones(1, 1)).sum().backward()
    except RuntimeError as error:
        return str(error), time.monotonic() - started
    return "", 0.0


@pytest.mark.parametrize(("world", "missing"), [(2, 1), (2, 0), (3, 2)])
def test_a_rank_that_does_not_come_is_named_on_all_others(world, missing):
    ranks = run_ranks(absent, world, missing, gloo_timeout_s=3)
    for message, seconds in ranks[:missing] + ranks[missing + 1 :]:
        assert f"waited 3 s for rank {missing}" in message and seconds < 7


def subgroup(rank: int) -> float:
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, float(rank))
    options = {"process_group": groups[rank // 2]}
    torch.compile(model, backend=BACKEND, options=options)(torch.ones(1, 1)).sum().backward()
    return model.weight.item()


def test_each_subgroup_takes_the_values_of_its_own_first_rank():
    assert run_ranks(subgroup, 4) == [0.0, 0.0, 2.0, 2.0]
