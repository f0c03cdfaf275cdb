"""Compression with real ranks: cases 12, 13, 15, 16, 17, 19, 20, 23 and 30 with it on."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn

import fxpasses
from custom_ops.layout import TopKLayout
from fxpasses.distributed.plans import PlanMismatch
from fxpasses.unit import Unit
from tests.multirank import run_ranks

EAGER = "hardened_aot_eager"
ALL = "topk:ratio=1.0"  # a bucket of so few elements would else send one
SCHEMES = ["int8", "int4", ALL, "fp16", "bf16"]
LOW_RANK = {"scheme": "powersgd", "rank": 1}
# Of a single value, which is its group's largest: an int code of 127 or 7 times a bf16 scale, or 16 bits.
RTOL = {"int8": 0.01, "int4": 0.02, ALL: 0.004, "fp16": 1e-3, "bf16": 0.008}


def compiled_of(model: nn.Module, compression, backend: str = EAGER, **options):
    options = {"compression": compression, **options}
    return torch.compile(model, backend=backend, options=options)


def line() -> nn.Linear:
    model = nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)
    return model


def one_gradient(rank: int, compression, value: float, backend: str = EAGER) -> float:
    model = line()
    compiled_of(model, compression, backend)(torch.full((1, 1), value)).sum().backward()
    return model.weight.grad.item()


@pytest.mark.parametrize("backend", [EAGER, "hardened"])
@pytest.mark.parametrize("scheme", ["fp16", "bf16"])
def test_cases_16_and_17_large_and_small_gradients_in_16_bits(scheme, backend):
    exact = 40000.0 if scheme == "fp16" else float(torch.tensor(40000.0).bfloat16())
    assert run_ranks(one_gradient, 4, scheme, 40000.0, backend) == [exact] * 4
    assert run_ranks(one_gradient, 4, scheme, 2.0**-24, backend) == [2.0**-24] * 4


def accumulated(rank: int, scheme: str) -> float:
    model = line()
    compiled = compiled_of(model, scheme, accumulate=2)
    for value in ((1.0, 3.0), (2.0, 5.0))[rank]:
        compiled(torch.full((1, 1), value)).sum().backward()
    assert fxpasses.runtime(model).last_step.collectives == 1
    return model.weight.grad.item()


@pytest.mark.parametrize("scheme", SCHEMES)
def test_case_12_micro_batches_are_compressed_once_together(scheme):
    (first, second) = run_ranks(accumulated, 2, scheme)
    assert first == second == pytest.approx(5.5, rel=RTOL[scheme])


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = line(), line()

    def forward(self, x: torch.Tensor, both: bool) -> torch.Tensor:
        return self.a(x) + (self.b(x) if both else 0)


def branches(rank: int, scheme: str, where: str) -> list[float | None]:
    model = Branches()
    compiled = compiled_of(model, scheme)
    x = torch.full((1, 1), 4.0 if where == "rank 0" else rank + 1.0)
    compiled(x, where == "rank 0" and rank == 0).sum().backward()
    return [None if p.grad is None else p.grad.item() for p in model.parameters()]


@pytest.mark.parametrize("scheme", SCHEMES)
def test_case_13_parameters_of_some_ranks_or_none(scheme):
    for found in run_ranks(branches, 2, scheme, "rank 0"):
        assert found == pytest.approx([4.0, 2.0], rel=RTOL[scheme])
    for a, b in run_ranks(branches, 2, scheme, "nowhere"):
        assert a == pytest.approx(1.5, rel=RTOL[scheme]) and b is None


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(3, 2)
        self.head = nn.Linear(2, 3, bias=False)
        self.head.weight = self.embedding.weight
        nn.init.ones_(self.embedding.weight)

    def forward(self, token: torch.Tensor) -> torch.Tensor:
        return self.head(self.embedding(token)).sum()


def tied(rank: int, scheme) -> tuple[list[list[float]], int]:
    model = Tied()
    compiled_of(model, scheme)(torch.tensor([rank])).backward()
    runtime = fxpasses.runtime(model)
    return model.embedding.weight.grad.tolist(), runtime.last_step.collectives


@pytest.mark.parametrize("scheme", [s for s in SCHEMES if s != ALL])
def test_case_15_tied_weights_are_sent_once(scheme):
    for gradient, collectives in run_ranks(tied, 2, scheme):
        expected = torch.tensor([[2.5, 2.5], [2.5, 2.5], [1.0, 1.0]])
        bound = 0.3 if scheme == "int4" else 0.04  # half a step of a group whose largest is 4
        assert (torch.tensor(gradient) - expected).abs().max() <= bound and collectives == 1


def poisoned(rank: int, scheme, backend: str) -> list[list[float]]:
    """Case 19: all-zero gradients; then inf on rank 0; then [1, 2]."""
    model = nn.Linear(2, 1, bias=False)
    compiled = compiled_of(model, scheme, backend, loss_scale=4.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    runtime, found = fxpasses.runtime(model), []
    for values in ([0.0, 0.0], [math.inf if rank == 0 else 1.0, 1.0], [1.0, 2.0]):
        optimizer.zero_grad()
        compiled(torch.tensor([values])).sum().backward()
        gradient = model.weight.grad[0].tolist()
        residual = runtime.state_dict()["state"]["residual/weight"].tolist()
        optimizer.step()
        found.append([*gradient, *residual, float(runtime.last_step.skipped)])
    return found


@pytest.mark.parametrize("backend", [EAGER, "hardened"])
@pytest.mark.parametrize("scheme", ["int8", ALL, "int4"])
def test_case_19_a_gradient_that_is_not_finite_leaves_no_trace(scheme, backend):
    for zero, skipped, normal in run_ranks(poisoned, 2, scheme, backend):
        assert zero == [0.0] * 5
        assert not any(map(math.isfinite, skipped[:2])) and skipped[2:] == [0.0, 0.0, 1.0]
        assert normal[:2] == pytest.approx([1.0, 2.0], abs=0.15) and normal[4] == 0.0
        assert [g + r for g, r in zip(normal[:2], normal[2:4], strict=True)] == [1.0, 2.0]


def uneven(rank: int, scheme: str) -> list[float]:
    model = line()
    compiled = compiled_of(model, scheme)
    found = []
    for rows in ((4, 4), (3, 5), (2, 6)):
        model.zero_grad()
        compiled(torch.full((rows[rank], 1), rank + 1.0)).mean().backward()
        found.append(model.weight.grad.item())
    return found


@pytest.mark.parametrize("scheme", ["int8", "int4"])
def test_case_23_ranks_compile_at_different_times(scheme):
    first, second = run_ranks(uneven, 2, scheme, timeout_s=60)
    # Feedback pushes each step the other way: what is lost arrives with the next.
    assert first == second and first == pytest.approx([1.5] * 3, rel=2 * RTOL[scheme])


def hooked(rank: int, scheme: str) -> list[float]:
    model, seen = line(), []
    model.weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.item()))
    compiled_of(model, scheme)(torch.full((1, 1), rank + 1.0)).sum().backward()
    return [*seen, model.weight.grad.item()]


def test_case_30_hooks_see_what_was_decoded():
    first, second = run_ranks(hooked, 2, "int8")
    assert first == second and first[0] == first[1] == pytest.approx(1.5, rel=RTOL["int8"])


class Deep(nn.Module):
    """Odd sizes, a conv with channels-last weights, a norm; some parameters smaller than a group."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 5, 3).to(memory_format=torch.channels_last)
        self.norm = nn.GroupNorm(1, 5)
        self.head = nn.Linear(5, 33)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.norm(self.conv(x))).mean((2, 3)))


def trained(rank: int, compression, backend: str, steps: int) -> tuple[list[torch.Tensor], dict]:
    torch.manual_seed(0)
    model = Deep()
    compiled = compiled_of(model, compression, backend, bucket_mb=5e-4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        torch.manual_seed(10 * step + rank)
        compiled(torch.randn(4, 3, 6, 6)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach() for p in model.parameters()], fxpasses.runtime(model).state_dict()["state"]


def expected_states(scheme) -> set[str]:
    names = {"conv.weight", "conv.bias", "norm.weight", "norm.bias", "head.weight", "head.bias"}
    kinds = ["residual"]
    if isinstance(scheme, dict):
        if "norm.*" in scheme:
            names = {name for name in names if not name.startswith("norm")}
        if scheme.get("feedback") == "ef21":
            kinds = ["estimate", "mean_estimate"]
        kinds += ["velocity"] * ("momentum" in scheme)
    found = {f"{kind}/{name}" for kind in kinds for name in names}
    if scheme == LOW_RANK:
        # The convolution's bias has a bucket of its own, which is reduced as it is.
        weights = {"subspace/head.weight", "subspace/conv.weight"}
        return weights | {name for name in found if not name.endswith("conv.bias")}
    if isinstance(scheme, dict) and scheme.get("stochastic"):
        return found | {f"rounds/{bucket}" for bucket in ("head.bias", "norm.weight", "conv.bias")}
    return found


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize(
    "scheme",
    [
        *("int8", "int4", {"*": "topk", "norm.*": "none"}, LOW_RANK),
        {"scheme": "int4", "stochastic": True, "feedback": "ef21"},
        {"scheme": "topk", "ratio": 0.3, "momentum": 0.5},
    ],
    ids=str,
)
def test_ranks_stay_bitwise_alike_and_near_the_dense_run(scheme, world):
    ranks = run_ranks(trained, world, scheme, EAGER, 6)
    dense, _ = run_ranks(trained, world, "none", EAGER, 6)[0]
    for parameters, state in ranks:
        assert all(map(torch.equal, parameters, ranks[0][0]))
        assert set(state) == expected_states(scheme)
    apart = max(float((a - b).abs().max()) for a, b in zip(ranks[0][0], dense, strict=True))
    assert 0 < apart < 0.05


@pytest.mark.parametrize("scheme", ["int4", LOW_RANK], ids=str)
def test_inductor_s_result_is_that_of_the_graph(scheme):
    (with_inductor, _), *_ = run_ranks(trained, 3, scheme, "hardened", 3)
    (eager, _), *_ = run_ranks(trained, 3, scheme, EAGER, 3)
    for a, b in zip(with_inductor, eager, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=5e-3)  # a code may round the other way


def resumed(rank: int) -> bool:
    """State saved with one bucketing goes on with another, bitwise."""

    def made(bucket_mb: float):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))
        return model, compiled_of(model, "int4", bucket_mb=bucket_mb)

    def step(model: nn.Module, compiled, seed: int) -> None:
        torch.manual_seed(10 * seed + rank)
        model.zero_grad()
        compiled(torch.randn(4, 8)).square().mean().backward()

    model, compiled = made(25)
    for seed in range(3):
        step(model, compiled, seed)
    saved = {
        "model": {k: v.clone() for k, v in model.state_dict().items()},
        "hardened": fxpasses.runtime(model).state_dict(),
    }
    saved["hardened"]["state"] = {k: v.clone() for k, v in saved["hardened"]["state"].items()}
    step(model, compiled, 3)
    again, compiled_again = made(1e-6)
    again.load_state_dict(saved["model"])
    fxpasses.runtime(again).load_state_dict(saved["hardened"])
    step(again, compiled_again, 3)
    same = [
        torch.equal(p.grad, q.grad)
        for p, q in zip(model.parameters(), again.parameters(), strict=True)
    ]
    return all(same)


def test_residuals_survive_saving_and_another_bucketing():
    """With two ranks groups start anew at each parameter, wherever buckets end."""
    assert run_ranks(resumed, 2) == [True, True]


ADAPTIVE = {"scheme": "adaptive", "levels": ["int8", "int4"], "threshold": 0.5, "flush": 7}
WARMING = {"scheme": "topk", "ratio": 0.02, "warmup": 6}


class WithEmbedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(8, 16)
        self.first, self.second = nn.Linear(16, 32), nn.Linear(32, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(self.tokens(x))))


def adapted(rank: int, backend: str, scales: list[float]) -> tuple:
    """Losses of these scales; what each step took, and how many bytes."""
    torch.manual_seed(0)
    model, batch = WithEmbedding(), torch.arange(8)
    compiled = compiled_of(model, ADAPTIVE, backend)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    runtime, found = fxpasses.runtime(model), []
    torch._dynamo.utils.counters.clear()
    for scale in scales:
        optimizer.zero_grad()
        (scale * compiled(batch).square().mean()).backward()
        levels = {b.parameter: b.level for b in runtime.branches}
        optimizer.step()
        found.append(
            (levels, runtime.last_step.bytes, [p.grad.clone() for p in model.parameters()])
        )
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    return found, runtime.branches


@pytest.mark.parametrize("backend", [EAGER, "hardened"])
def test_levels_follow_the_norm_without_compiling_the_model_again(backend):
    steady, change = [1.0] * 30, [10.0]
    ranks = run_ranks(adapted, 2, backend, steady + change + [1.0])
    for found, branches in ranks:
        skipped = {"tokens.weight": "none", "first.bias": "none", "second.bias": "none"}
        mild = {"first.weight": "int8", "second.weight": "int8"} | skipped
        strong = {"first.weight": "int4", "second.weight": "int4"} | skipped
        taken = [levels for levels, _, _ in found]
        # The average, from zero on, is two thirds of the norm after 22 steps. The 28th flushes.
        assert taken == [mild] * 22 + [strong] * 5 + [mild] + [strong] * 3 + [mild]
        weights = 16 * 32 + 32 * 8
        assert found[0][1] - found[30][1] == weights / 2  # bytes: 8 bits and 4
        for (_, _, mine), (_, _, first) in zip(found, ranks[0][0], strict=True):
            assert all(map(torch.equal, mine, first))
        assert {b.parameter: b.layer for b in branches} == {
            "tokens.weight": "embedding",
            "first.weight": "weight",
            "first.bias": "bias",
            "second.weight": "weight",
            "second.bias": "bias",
        }
        assert all((b.statistics.count == 31) == (b.layer == "weight") for b in branches)


def resumed_levels(rank: int, option, steps: int) -> bool:
    """What levels depend on is state: what is loaded goes on with the same ones, bitwise."""

    def made():
        torch.manual_seed(0)
        model = WithEmbedding()
        return model, compiled_of(model, option)

    def step(model: nn.Module, compiled) -> list[torch.Tensor]:
        model.zero_grad()
        compiled(torch.arange(8)).square().mean().backward()
        return [p.grad.clone() for p in model.parameters()]

    model, compiled = made()
    for _ in range(steps):
        step(model, compiled)
    saved = copy.deepcopy(fxpasses.runtime(model).state_dict())
    again, compiled_again = made()
    fxpasses.runtime(again).load_state_dict(saved)
    return all(map(torch.equal, step(model, compiled), step(again, compiled_again)))


@pytest.mark.parametrize(("option", "steps"), [(ADAPTIVE, 25), (WARMING, 4)])
def test_levels_go_on_where_they_were(option, steps):
    assert run_ranks(resumed_levels, 2, option, steps) == [True, True]


def loaded_on_one_rank(rank: int) -> str:
    torch.manual_seed(0)
    model = WithEmbedding()
    compiled = compiled_of(model, ADAPTIVE)
    if rank == 1:
        statistics = torch.tensor([1.0, 1.0, 50.0])
        state = {f"statistics/{n}.weight": statistics for n in ("first", "second")}
        fxpasses.runtime(model).load_state_dict({"version": 1, "state": state})
    with pytest.raises(PlanMismatch) as caught:
        compiled(torch.arange(8)).square().mean().backward()
    return str(caught.value)


def test_ranks_with_different_levels_are_told_so():
    first, second = run_ranks(loaded_on_one_rank, 2)
    assert first == second and "the level of compression (load state of one step" in first


def warmed(rank: int, backend: str) -> tuple:
    """Levels, bytes and gradients of each step; what the steps should have sent in all, and residuals."""
    torch.manual_seed(0)
    model, batch = WithEmbedding(), torch.arange(4) + 4 * rank
    local = copy.deepcopy(model)
    local(batch).square().mean().backward()
    compiled = compiled_of(model, WARMING, backend)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    runtime, found, made, make = fxpasses.runtime(model), [], [], Unit._make
    Unit._make = lambda unit, variant: made.append(variant) or make(unit, variant)
    torch._dynamo.utils.counters.clear()
    for _ in range(8):
        optimizer.zero_grad()
        compiled(batch).square().mean().backward()
        levels = {b.level for b in runtime.branches}
        optimizer.step()
        gradients = [p.grad.clone() for p in model.parameters()]
        found.append((levels, runtime.last_step.bytes, gradients))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1 and len(made) == 3
    state = runtime.state_dict()["state"]
    residuals = [state[f"residual/{name}"].view(p.shape) for name, p in model.named_parameters()]
    assert {int(state[f"warmup/{name}"]) for name, _ in model.named_parameters()} == {6}
    return found, [p.grad for p in local.parameters()], residuals


@pytest.mark.parametrize("backend", [EAGER, "hardened"])
def test_a_warm_up_sends_less_in_each_stage_and_loses_nothing(backend):
    ranks = run_ranks(warmed, 2, backend)
    (mine, *_), (other, *_) = ranks
    ratios = [0.25] * 3 + [0.0707] * 3 + [0.02] * 2
    numel = sum(g.numel() for g in mine[0][2])
    for found in (mine, other):
        assert [levels for levels, _, _ in found] == [{f"topk:ratio={r}"} for r in ratios]
        sent = [n for _, n, _ in found]
        assert sent == [TopKLayout(numel, ratio).payload_bytes for ratio in ratios]
    for (_, _, gradients), (_, _, others) in zip(mine, other, strict=True):
        assert all(map(torch.equal, gradients, others))
    for index in range(len(mine[0][2])):
        sent = sum(2 * gradients[index] for _, _, gradients in mine)
        kept = sum(residuals[index] for _, _, residuals in ranks)
        expected = sum(len(mine) * locals_[index] for _, locals_, _ in ranks)
        torch.testing.assert_close(sent + kept, expected, rtol=1e-5, atol=1e-6)
