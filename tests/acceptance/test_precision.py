"""Cases 1, 3 and 5, and what else a program may say about precision."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.multirank import run_ranks

BACKENDS = ["hardened", "hardened_aot_eager"]


class LossInFp32(nn.Module):
    """Case 1: the last layer runs under `autocast(enabled=False)`; its gradient does not fit fp16."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("b", torch.ones(4, 4))
        self.last = nn.Linear(4, 1)
        nn.init.ones_(self.last.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = x @ self.b
        with torch.autocast("cpu", enabled=False):
            return self.last(h.float())


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("by", ["autocast", "option", "both"])
def test_case_1_a_region_in_fp32_is_so_in_the_backward_too(backend, by):
    model = LossInFp32()
    options = {} if by == "autocast" else {"precision": "fp16"}
    compiled = torch.compile(model, backend=backend, options=options)
    with torch.autocast("cpu", torch.float16, enabled=by != "option"):
        y = compiled(torch.ones(1, 4))
        (y * 16384).sum().backward()
    assert model.last.weight.grad.tolist() == [[65536.0] * 4]
    assert model.last.weight.grad.dtype == torch.float32
    assert model.last.bias.grad.tolist() == [16384.0]


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        s = self.layer(x) @ x.mT
        return s.masked_fill(torch.ones(4, 4, dtype=torch.bool).triu(1), -1e9).softmax(-1)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_case_3_a_mask_that_does_not_fit_half(backend, precision):
    model = Masked()
    y = torch.compile(model, backend=backend, options={"precision": precision})(
        torch.randn(1, 4, 8)
    )
    y.square().sum().backward()
    assert y.dtype == torch.float32 and y[0, 0].tolist() == [1, 0, 0, 0]
    assert all(p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("backend", BACKENDS)
def test_case_5_a_low_model_is_left_as_it_is(backend):
    torch.manual_seed(0)
    norm = nn.RMSNorm(8, dtype=torch.bfloat16)
    x = torch.randn(2, 8, dtype=torch.bfloat16)
    results = []
    for options in ({}, {"precision": "bf16"}):
        torch._dynamo.reset()
        y = torch.compile(norm, backend=backend, options=options)(x)
        y.sum().backward()
        results.append((y, norm.weight.grad))
        norm.weight.grad = None
    assert results[0][0].dtype == torch.bfloat16
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


class Explicit(nn.Module):
    """`.float()` says: from here on in fp32, although nothing is cast where all is fp32 already."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = (nn.Linear(1, 1, bias=False) for _ in range(2))
        for layer in (self.first, self.last):
            nn.init.ones_(layer.weight)

    def forward(self, x: torch.Tensor, explicit: bool) -> torch.Tensor:
        y = self.first(x)
        y = y.float() if explicit else y
        return self.last((y + 1.0) - 1.0)


@pytest.mark.parametrize("explicit", [False, True])
def test_elementwise_code_behind_an_explicit_cast_is_fp32(explicit):
    compiled = torch.compile(
        Explicit(), backend="hardened_aot_eager", options={"precision": "bf16"}
    )
    tiny = 2.0**-10  # 1 + tiny is 1 in bf16
    y = compiled(torch.full((1, 1), tiny), explicit)
    assert y.item() == (tiny if explicit else 0.0)


@pytest.mark.parametrize("backend", BACKENDS)
def test_precision_holds_in_eval_too(backend):
    model = nn.Linear(32, 32, bias=False)
    nn.init.constant_(model.weight, 1 + 2.0**-10)
    compiled = torch.compile(model, backend=backend, options={"precision": "bf16"})
    rounded = torch.ones(32, 32)
    with torch.no_grad():
        assert torch.equal(compiled(torch.eye(32)), rounded)
    y = compiled(torch.eye(32))
    y.sum().backward()
    assert torch.equal(y, rounded)
    assert model.weight.dtype == model.weight.grad.dtype == torch.float32


class TwoLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = (nn.Linear(1, 1, bias=False) for _ in range(2))
        for layer in (self.body, self.head):
            nn.init.constant_(layer.weight, 1 + 2.0**-10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x), self.head(x)


def test_rules_by_module_name():
    options = {"precision": "bf16", "precision_rules": {"head": "deny"}}
    body, head = torch.compile(TwoLayers(), backend="hardened_aot_eager", options=options)(
        torch.ones(1, 1)
    )
    assert (body.item(), head.item()) == (1.0, 1 + 2.0**-10)


def losses(model: nn.Module, forward, x: torch.Tensor, target: torch.Tensor) -> list[float]:
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    found = []
    for _ in range(60):
        loss = F.cross_entropy(forward(x), target)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(16, 32),
        nn.GELU(),
        nn.LayerNorm(32),
        nn.Linear(32, 32),
        nn.ReLU(),
        nn.Linear(32, 5),
    )


@pytest.mark.parametrize("backend", BACKENDS)
def test_it_trains_as_autocast_does(backend):
    torch.manual_seed(1)
    x, target = torch.randn(64, 16), torch.randint(0, 5, (64,))
    ours, theirs = build(), build()
    compiled = torch.compile(ours, backend=backend, options={"precision": "bf16"})

    def autocast(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return theirs(x).float()

    a, b = losses(ours, compiled, x, target), losses(theirs, autocast, x, target)
    assert b[-1] < 0.5 * b[0], "it learns"
    # bf16 rounds differently in fused code; the curve stays.
    assert max(abs(p - q) for p, q in zip(a, b, strict=True)) < 0.03


def two_ranks(rank: int) -> tuple[float, str, str]:
    model = nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)
    compiled = torch.compile(model, backend="hardened_aot_eager", options={"precision": "bf16"})
    compiled(torch.full((1, 1), rank + 1.0)).sum().backward()
    import fxpasses

    (collective,) = fxpasses.runtime(model).plan
    return model.weight.grad.item(), str(model.weight.grad.dtype), collective.dtype


def test_gradients_are_reduced_in_fp32():
    assert run_ranks(two_ranks, 2) == [(1.5, "torch.float32", "float32")] * 2


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"precision": "bf61"}, "option 'precision': got 'bf61'; did you mean 'bf16'"),
        ({"precision": "bf16", "precision_rules": {"aten.exp": "low"}}, "option 'precision_rules'"),
        ({"precision": "bf16", "precision_rules": 3}, "option 'precision_rules': got 3"),
    ],
)
def test_wrong_options(options, words):
    with pytest.raises(ValueError, match=words):
        torch.compile(nn.Linear(1, 1), backend="hardened", options=options)(torch.ones(1, 1))
