"""`fxpasses.optimizer`: torch's numbers, all or nothing, masters, checkpoints, signals."""

from __future__ import annotations

import copy
import math
import os
import signal

import pytest
import torch
from torch import nn

import fxpasses
from tests.multirank import run_ranks

BACKEND = "hardened_aot_eager"
MAKERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01),
    "nesterov": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, maximize=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, weight_decay=0.1),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1),
    "amsgrad": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.01), amsgrad=True, foreach=False),
}


def network(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).to(dtype)


def fill_gradients(model: nn.Module, seed: int, value: float | None = None) -> None:
    generator = torch.Generator().manual_seed(seed)
    for p in model.parameters():
        p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)
        if value is not None:
            p.grad.fill_(value)


def values(model: nn.Module) -> list[torch.Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def assert_close(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7)


# Numbers


@pytest.mark.parametrize("kind", MAKERS)
def test_it_trains_as_torch_s(kind):
    ours, theirs = network(), network()
    atomic = fxpasses.optimizer(MAKERS[kind](ours.parameters()))
    plain = MAKERS[kind](theirs.parameters())
    for step in range(5):
        fill_gradients(ours, step)
        fill_gradients(theirs, step)
        atomic.step()
        plain.step()
        assert_close(values(ours), values(theirs))
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert set(atomic.state[p]) == set(plain.state[q])


def test_groups_schedulers_and_parameters_without_gradients():
    ours, theirs = network(), network()
    made = []
    for model in (ours, theirs):
        groups = [{"params": model[0].parameters(), "lr": 0.5}, {"params": model[2].parameters()}]
        made.append(torch.optim.SGD(groups, lr=0.1, momentum=0.9))
    pair = [fxpasses.optimizer(made[0]), made[1]]
    schedulers = [torch.optim.lr_scheduler.StepLR(o, 1, 0.5) for o in pair]
    for step in range(3):
        for model, current, scheduler in zip((ours, theirs), pair, schedulers, strict=True):
            fill_gradients(model, step)
            model[0].bias.grad = None
            current.step()
            scheduler.step()
            current.zero_grad()
            assert all(p.grad is None for p in model.parameters())
    assert_close(values(ours), values(theirs))
    assert [g["lr"] for g in pair[0].param_groups] == [0.0625, 0.0125]


def test_a_closure_is_called_with_gradients_on():
    model = network()
    atomic = fxpasses.optimizer(MAKERS["sgd"](model.parameters()))
    before = values(model)

    def closure() -> torch.Tensor:
        loss = model(torch.ones(2, 4)).sum()
        loss.backward()
        return loss

    assert atomic.step(closure).requires_grad
    assert not torch.equal(values(model)[0], before[0])


def test_dtypes_side_by_side():
    model = nn.ModuleList([network(), network(torch.float64)])
    other = copy.deepcopy(model)
    pair = [
        fxpasses.optimizer(MAKERS["adamw"](model.parameters())),
        MAKERS["adamw"](other.parameters()),
    ]
    for current, each in zip(pair, (model, other), strict=True):
        fill_gradients(each, 0)
        current.step()
    assert_close(values(model), values(other))


# All or nothing


@pytest.mark.parametrize("kind", ["momentum", "adamw"])
def test_an_overflow_changes_nothing_and_the_next_step_is_as_if_it_had_not_been(kind):
    model, other = network(), network()
    options = {"loss_scale": {"init": 4.0, "growth_interval": 2}}
    compiled = torch.compile(model, backend=BACKEND, options=options)
    atomic = fxpasses.optimizer(MAKERS[kind](model.parameters()))
    plain = MAKERS[kind](other.parameters())
    scales, skipped = [], []
    for x in (math.inf, 1.0, math.nan, 1.0, 1.0):
        before = values(model)
        batch = torch.full((2, 4), x)
        compiled(batch).sum().backward()
        atomic.step()
        atomic.zero_grad()
        scales.append(fxpasses.runtime(model).scaler.scale)
        skipped.append(fxpasses.runtime(model).last_step.skipped)
        if skipped[-1]:
            assert all(map(torch.equal, values(model), before))
        else:
            other(batch).sum().backward()
            plain.step()
            plain.zero_grad()
    assert skipped == [True, False, True, False, False]
    assert scales == [2.0, 2.0, 1.0, 1.0, 2.0]
    assert_close(values(model), values(other))
    if kind == "adamw":
        assert {float(s["step"]) for s in atomic.state.values()} == {3.0}


def test_the_host_asks_the_device_for_nothing_in_a_step(monkeypatch):
    """What it would ask on an accelerator it would ask here."""
    model = network()
    compiled = torch.compile(model, backend=BACKEND, options={"loss_scale": "dynamic"})
    atomic = fxpasses.optimizer(MAKERS["adamw"](model.parameters()))
    asked: list[str] = []
    for step in range(3):
        compiled(torch.ones(2, 4)).sum().backward()
        scaler = fxpasses.runtime(model).scaler
        if step:
            # The minimum is looked at without waiting; on the CPU that is a read.
            monkeypatch.setattr(scaler, "check_without_waiting", lambda: None)
            for name in ("item", "tolist", "__bool__", "__float__"):
                monkeypatch.setattr(torch.Tensor, name, lambda self, *_, n=name: asked.append(n))
        atomic.step()
        monkeypatch.undo()
        atomic.zero_grad()
    assert asked == []


def two_optimizers(rank: int) -> list[bool]:
    """An overflow on rank 1, in a part that only the second optimizer has, stops both on both ranks."""
    model = network()
    compiled = torch.compile(model, backend=BACKEND, options={"loss_scale": 8.0})
    pair = [
        fxpasses.optimizer(MAKERS["adamw"](model[0].parameters())),
        fxpasses.optimizer(MAKERS["momentum"](model[2].parameters())),
    ]
    found = []
    for poison in (False, True, False):
        before = values(model)
        x = torch.ones(2, 4) * (math.inf if poison and rank == 1 else 1)
        compiled(x).sum().backward()
        for current in pair:
            current.step()
            current.zero_grad()
        same = [torch.equal(a, b) for a, b in zip(before, values(model), strict=True)]
        assert len(set(same)) == 1
        assert fxpasses.runtime(model).last_step.skipped == same[0]
        found.append(same[0])
    return found


def test_all_ranks_and_optimizers_skip_together():
    assert run_ranks(two_optimizers, 2) == [[False, True, False]] * 2


def test_an_endless_backoff_is_an_error():
    model = nn.Linear(1, 1)
    compiled = torch.compile(model, backend=BACKEND, options={"loss_scale": {"init": 1.0}})
    atomic = fxpasses.optimizer(MAKERS["sgd"](model.parameters()))
    with pytest.raises(fxpasses.LossScaleError, match="below min_scale"):
        for _ in range(160):
            compiled(torch.full((1, 1), math.inf)).sum().backward()
            atomic.step()
            atomic.zero_grad()


def test_ctrl_c_during_an_update_waits_for_its_end(monkeypatch, interruptible):
    model = network()
    atomic = fxpasses.optimizer(
        torch.optim.SGD(
            [{"params": model[0].parameters()}, {"params": model[2].parameters()}], lr=1.0
        )
    )
    fill_gradients(model, 0, value=1.0)
    before, kernel = values(model), torch._fused_sgd_

    def interrupted(*args, **kwargs):
        os.kill(os.getpid(), signal.SIGINT)
        kernel(*args, **kwargs)

    monkeypatch.setattr(torch, "_fused_sgd_", interrupted)
    with pytest.raises(KeyboardInterrupt):
        atomic.step()
    assert_close(values(model), [b - 1 for b in before])


def test_what_fails_does_so_before_anything_is_written():
    model = network()
    atomic = fxpasses.optimizer(MAKERS["sgd"](model.parameters()))
    fill_gradients(model, 0)
    model[2].weight.grad = torch.ones(1, 8).to_sparse()
    before = values(model)
    with pytest.raises(RuntimeError, match="sparse gradient"):
        atomic.step()
    assert all(map(torch.equal, values(model), before))


# Masters


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["momentum", "adamw"])
def test_masters_move_where_low_weights_would_not(kind, dtype):
    model, exact = network(dtype), network(dtype).float()
    atomic = fxpasses.optimizer(MAKERS[kind](model.parameters()), masters=True)
    plain = MAKERS[kind](exact.parameters())
    for step in range(4):
        fill_gradients(model, step)
        for p, q in zip(model.parameters(), exact.parameters(), strict=True):
            p.grad *= 1e-3
            q.grad = p.grad.float()
        atomic.step()
        plain.step()
    masters = [atomic.state[p]["master"] for p in model.parameters()]
    assert_close(masters, values(exact))
    assert all(
        torch.equal(p, m.to(dtype)) for p, m in zip(model.parameters(), masters, strict=True)
    )
    assert {t.dtype for s in atomic.state.values() for t in s.values()} == {torch.float32}


def test_fp32_parameters_are_their_own_masters():
    model = network()
    atomic = fxpasses.optimizer(MAKERS["adamw"](model.parameters()), masters=True)
    fill_gradients(model, 0)
    atomic.step()
    assert all("master" not in state for state in atomic.state.values())


def test_weights_that_something_else_wrote_are_taken_over():
    model = network(torch.bfloat16)
    atomic = fxpasses.optimizer(MAKERS["sgd"](model.parameters()), masters=True)
    fill_gradients(model, 0)
    atomic.step()
    with torch.no_grad():
        model[0].weight.fill_(3.0)
    kept = atomic.state[model[2].weight]["master"]
    fill_gradients(model, 1, value=1.0)
    atomic.step()
    assert torch.equal(atomic.state[model[0].weight]["master"], torch.full((8, 4), 3.0) - 0.1)
    assert atomic.state[model[2].weight]["master"] is kept


# Checkpoints


@pytest.mark.parametrize("masters", [False, True])
@pytest.mark.parametrize("model_first", [False, True])
def test_a_checkpoint_continues_bitwise(masters, model_first):
    def trained(steps: range, model: nn.Module, atomic) -> None:
        for step in steps:
            fill_gradients(model, step)
            atomic.step()

    def made() -> tuple:
        model = network(torch.bfloat16)
        return model, fxpasses.optimizer(MAKERS["adamw"](model.parameters()), masters=masters)

    model, atomic = made()
    trained(range(3), model, atomic)
    saved = copy.deepcopy((model.state_dict(), atomic.state_dict()))
    trained(range(3, 5), model, atomic)
    again, continued = made()
    for index in (0, 1) if model_first else (1, 0):
        (again, continued)[index].load_state_dict(saved[index])
    trained(range(3, 5), again, continued)
    assert all(map(torch.equal, values(again), values(model)))
    for p, q in zip(model.parameters(), again.parameters(), strict=True):
        for key, value in atomic.state[p].items():
            assert (
                torch.equal(value, continued.state[q][key])
                and value.dtype == continued.state[q][key].dtype
            )


def test_state_goes_to_and_from_torch_s_own_optimizer():
    model, other = network(), network()
    plain = MAKERS["adamw"](model.parameters())
    fill_gradients(model, 0)
    plain.step()
    taken = fxpasses.optimizer(plain)  # with its state
    other.load_state_dict(model.state_dict())
    loaded = fxpasses.optimizer(MAKERS["adamw"](other.parameters()))
    loaded.load_state_dict(copy.deepcopy(plain.state_dict()))
    back_model = copy.deepcopy(model)
    back = MAKERS["adamw"](back_model.parameters())
    back.load_state_dict(copy.deepcopy(taken.state_dict()))
    for each, current in ((model, taken), (other, loaded), (back_model, back)):
        fill_gradients(each, 1)
        current.step()
    assert_close(values(model), values(back_model))
    assert all(map(torch.equal, values(model), values(other)))


# Refused


def test_other_optimizers_are_refused():
    with pytest.raises(ValueError, match="got RMSprop; expected SGD, Adam, AdamW"):
        fxpasses.optimizer(torch.optim.RMSprop(network().parameters()))


@pytest.mark.parametrize("setting", ["dampening", "differentiable"])
def test_settings_without_a_fused_kernel_are_refused(setting):
    model = network()
    plain = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, **{setting: 1})
    with pytest.raises(ValueError, match=f"got {setting}=1"):
        fxpasses.optimizer(plain)
