"""Cases 6, 8, 9 and 10: the loss scale and the steps that it skips."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import fxpasses
from tests.multirank import run_ranks

BACKENDS = ["hardened_aot_eager", "hardened"]
BACKEND = BACKENDS[0]
INF = math.inf


def compiled_of(model: nn.Module, loss_scale, backend: str = BACKEND, **options):
    return torch.compile(model, backend=backend, options={"loss_scale": loss_scale, **options})


def scale_of(model: nn.Module) -> float:
    return fxpasses.runtime(model).scaler.scale


def trace(rank: int, inputs, backend: str, loop: str) -> tuple[list[float], list[bool], bool]:
    """The scale after each step, and whether it was skipped. Only rank 0 gets the given inputs."""
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    compiled = compiled_of(model, {"init": 2.0**16, "growth_interval": 2}, backend)
    scaler = fxpasses.GradScaler("cpu")
    scales, skipped = [], []
    for x in inputs:
        before = [p.detach().clone() for p in model.parameters()]
        loss = compiled(torch.full((2, 4), x if rank == 0 else 1.0)).sum()
        if loop == "plain":
            loss.backward()
            optimizer.step()
        else:
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            assert scaler.get_scale() == scale_of(model)
            assert len(scaler._runtimes) == 1, "what it knows grows with each step"
        optimizer.zero_grad()
        scales.append(scale_of(model))
        skipped.append(fxpasses.runtime(model).last_step.skipped)
        same = [torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True)]
        assert all(same) if skipped[-1] else not any(same)
    return scales, skipped, all(p.isfinite().all().item() for p in model.parameters())


CASE_6 = ([65536.0, 32768.0, 32768.0, 65536.0], [False, True, False, False], True)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("loop", ["plain", "scaler"])
def test_case_6_a_step_that_overflows_is_skipped(backend, loop):
    assert trace(0, [1.0, INF, 1.0, 1.0], backend, loop) == CASE_6


@pytest.mark.parametrize("loop", ["plain", "scaler"])
def test_case_6_all_ranks_skip_what_overflows_on_one(loop):
    assert run_ranks(trace, 2, [1.0, INF, 1.0, 1.0], BACKEND, loop) == [CASE_6] * 2


def test_the_trace_is_that_of_torch_s_scaler():
    inputs = [1.0, 1.0, INF, 1.0, INF, INF, 1.0, 1.0, 1.0, 1.0, math.nan, 1.0]
    ours, _, _ = trace(0, inputs, BACKEND, "plain")
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16, growth_interval=2)
    theirs = []
    for x in inputs:
        scaler.scale(model(torch.full((2, 4), x)).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        theirs.append(scaler.get_scale())
    assert ours == theirs


def test_case_8_an_endless_backoff_is_an_error():
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    compiled = compiled_of(model, {"init": 1.0})
    weight = model.weight.detach().clone()
    with pytest.raises(fxpasses.LossScaleError, match="below min_scale=6.10352e-05") as caught:
        for _ in range(160):
            compiled(torch.full((1, 1), INF)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert "option 'loss_scale'" in str(caught.value)
    assert scale_of(model) == 2.0**-14 and torch.equal(weight, model.weight)


def test_case_8_growth_ends_at_the_maximum():
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    compiled = compiled_of(model, {"init": 2.0**126, "growth_interval": 1})
    for _ in range(3):
        (compiled(torch.ones(1, 1)).sum() * 1e-3).backward()
        optimizer.step()
    assert scale_of(model) == 2.0**127


def test_patience():
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    compiled = compiled_of(model, {"init": 8.0, "patience": 2})
    scales = []
    for x in (INF, 1.0, INF, INF, INF, INF):
        compiled(torch.full((1, 1), x)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        scales.append(scale_of(model))
    assert scales == [8.0, 8.0, 8.0, 4.0, 4.0, 2.0]


@pytest.mark.parametrize("by", ["runtime", "scaler"])
def test_case_9_scale_and_tracker_survive_a_restart(tmp_path, by):
    def steps(model: nn.Module, count: int) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        compiled = compiled_of(model, {"init": 2.0**16, "growth_interval": 4})
        for _ in range(count):
            compiled(torch.ones(1, 1)).sum().backward()
            optimizer.step()

    model = nn.Linear(1, 1)
    steps(model, 3)
    source = fxpasses.runtime(model) if by == "runtime" else fxpasses.GradScaler(model=model)
    torch.save(source.state_dict(), tmp_path / "state.pt")
    torch._dynamo.reset()
    again = nn.Linear(1, 1)
    target = fxpasses.runtime(again) if by == "runtime" else fxpasses.GradScaler(model=again)
    target.load_state_dict(torch.load(tmp_path / "state.pt"))  # before the first forward
    steps(again, 1)
    assert scale_of(again) == 131072.0


class Weights(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.w * x).sum()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("loss_scale", [65536.0, {"init": 65536.0}, {"init": 1000.0}])
def test_case_10_gradients_have_their_own_value(backend, loss_scale):
    model = Weights()
    compiled_of(model, loss_scale, backend)(torch.tensor([3.0, 4.0])).backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    assert norm.item() == pytest.approx(5.0, rel=1e-6)
    assert model.w.grad.tolist() == pytest.approx([0.6, 0.8], rel=1e-6)


@pytest.mark.parametrize("scale", [3.0, 1000.0, 7.7])
def test_a_scale_that_is_no_power_of_two_costs_a_rounding_or_two(scale):
    model = Weights()
    x = torch.tensor([3.3, 4.7])
    compiled_of(model, scale)(x).backward()
    assert torch.allclose(model.w.grad, x, rtol=3e-7, atol=0)


def test_activations_that_leave_the_graph_have_their_own_gradient():
    model = Weights()
    x = torch.tensor([3.0, 4.0], requires_grad=True)
    (compiled_of(model, 4096.0)(x) * 2).backward()
    assert x.grad.tolist() == [2.0, 2.0]


class Broken(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = (nn.Linear(2, 2, bias=False) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        torch._dynamo.graph_break()
        return self.last(y).sum()


def test_across_a_graph_break_there_is_one_scale_and_one_verdict():
    torch.manual_seed(0)
    model = Broken()
    reference = [p.detach().clone().requires_grad_() for p in model.parameters()]
    x = torch.randn(3, 2)
    (x @ reference[0].T @ reference[1].T).sum().backward()
    compiled = compiled_of(model, {"init": 1024.0, "growth_interval": 1})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    compiled(x).backward()
    for ours, theirs in zip(model.parameters(), reference, strict=True):
        assert torch.allclose(ours.grad, theirs.grad, rtol=1e-6)
    optimizer.step()
    assert scale_of(model) == 2048.0


def test_two_optimizers_update_the_scale_once_and_skip_together():
    model = Broken()
    optimizers = [torch.optim.SGD([p], lr=0.1) for p in model.parameters()]
    compiled = compiled_of(model, {"init": 1024.0})
    before = [p.detach().clone() for p in model.parameters()]
    compiled(torch.tensor([[INF, 0.0]])).backward()
    for optimizer in optimizers:
        optimizer.step()
    assert scale_of(model) == 512.0 and fxpasses.runtime(model).last_step.skipped
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


@pytest.mark.parametrize(
    "make",
    [
        lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9, weight_decay=0.1),
        lambda ps: torch.optim.AdamW(ps, lr=0.1),
        lambda ps: torch.optim.Adam(ps, lr=0.1, amsgrad=True),
        lambda ps: torch.optim.Adagrad(ps, lr=0.1),
        lambda ps: torch.optim.RMSprop(ps, lr=0.1),
        lambda ps: torch.optim.Adam(ps, lr=0.1, foreach=True),
    ],
)
def test_a_skipped_step_leaves_any_optimizer_as_it_was(make):
    model = nn.Linear(2, 1)
    optimizer = make(model.parameters())
    compiled = compiled_of(model, "dynamic")
    states = []
    for x in (1.0, INF):
        compiled(torch.full((1, 2), x)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        state = optimizer.state_dict()["state"]
        states.append(
            [{k: torch.as_tensor(v).clone() for k, v in s.items()} for s in state.values()]
        )
        states[-1].append({"weight": model.weight.detach().clone()})
    for before, after in zip(*states, strict=True):
        assert before.keys() == after.keys()
        assert all(torch.equal(before[k], after[k]) for k in before)


def test_without_a_scale_nothing_is_skipped():
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.compile(model, backend=BACKEND)(torch.full((1, 1), INF)).sum().backward()
    optimizer.step()
    assert not model.weight.isfinite().all()
    assert fxpasses.runtime(model).scaler is None


def test_a_change_of_scale_does_not_recompile():
    model = nn.Linear(1, 1)
    compiled = compiled_of(model, {"init": 8.0, "growth_interval": 1})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    torch._dynamo.utils.counters.clear()
    for _ in range(4):
        compiled(torch.ones(1, 1)).sum().backward()
        optimizer.step()
    assert scale_of(model) == 128.0
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def underflows(precision: str, loss_scale) -> float:
    """Gradients of 2^-26 in an fp16 product vanish without a scale."""
    model = nn.Linear(32, 32, bias=False)
    compiled = compiled_of(model, loss_scale, precision=precision)
    (compiled(torch.ones(32, 32)) * 2.0**-26).sum().backward()
    return model.weight.grad[0, 0].item()


def test_small_gradients_survive_in_fp16():
    exact = 32 * 2.0**-26
    assert underflows("fp16", "none") == 0.0
    assert underflows("fp16", "dynamic") == underflows("fp16", 65536.0) == exact
    assert underflows("fp32", "none") == exact


def accumulated(rank: int, inputs: tuple[tuple[float, float], ...]) -> tuple[list, float, bool]:
    model = nn.Linear(1, 1, bias=False)
    compiled = compiled_of(model, {"init": 1024.0}, accumulate=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    seen = []
    for x in inputs[rank]:
        compiled(torch.full((1, 1), x)).sum().backward()
        seen.append(model.weight.grad.item())
    optimizer.step()
    return seen, scale_of(model), fxpasses.runtime(model).last_step.skipped


def test_micro_batches_are_unscaled_each():
    expected = [([1.0, 5.5], 1024.0, False), ([2.0, 5.5], 1024.0, False)]
    assert run_ranks(accumulated, 2, ((1.0, 3.0), (2.0, 5.0))) == expected


def test_an_overflow_in_a_local_micro_batch_is_everyone_s():
    ranks = run_ranks(accumulated, 2, ((1.0, 3.0), (INF, 5.0)))
    assert [r[1:] for r in ranks] == [(512.0, True)] * 2


def test_closures_are_refused():
    model = nn.Linear(1, 1)
    compiled = compiled_of(model, "dynamic")
    optimizer = torch.optim.LBFGS(model.parameters())

    def closure() -> torch.Tensor:
        loss = compiled(torch.ones(1, 1)).sum()
        loss.backward()
        return loss

    closure()
    with pytest.raises(RuntimeError, match="option 'loss_scale': an optimizer with a closure"):
        optimizer.step(closure)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("dinamic", "option 'loss_scale': got 'dinamic'; did you mean 'dynamic'"),
        (0, "option 'loss_scale': got 0; expected a positive number"),
        ({"int": 2}, "unknown key 'int'; did you mean 'init'"),
        ({"patience": 0}, "option 'loss_scale.patience': got 0"),
        ({"growth_factor": 0.5}, "growth_factor=0.5"),
        ({"init": 1e39, "max_scale": 1e39}, "in the range of float32"),
        ({"init": 1.0, "min_scale": 2.0}, "expected them in this order"),
    ],
)
def test_wrong_options(value, words):
    with pytest.raises(ValueError, match=words):
        compiled_of(nn.Linear(1, 1), value)(torch.ones(1, 1))


def test_torch_s_settings_belong_in_the_option():
    with pytest.raises(ValueError, match=r"options=\{'loss_scale': \{'init': 1024\}\}"):
        fxpasses.GradScaler(init_scale=1024)


def test_a_scaler_of_a_model_without_loss_scale_says_so():
    model = nn.Linear(1, 1)
    torch.compile(model, backend=BACKEND)(torch.ones(1, 1)).sum().backward()
    with pytest.raises(RuntimeError, match="compiled with option 'loss_scale'"):
        fxpasses.GradScaler().step(torch.optim.SGD(model.parameters(), lr=0.1))


def test_a_disabled_scaler_does_nothing():
    model = nn.Linear(1, 1)
    scaler = fxpasses.GradScaler(enabled=False)
    loss = model(torch.ones(1, 1)).sum()
    assert scaler.scale(loss) is loss
    loss.backward()
    scaler.step(torch.optim.SGD(model.parameters(), lr=0.1))
    scaler.update()
    assert scaler.get_scale() == 1.0 and scaler.state_dict() == {} and not scaler.is_enabled()
