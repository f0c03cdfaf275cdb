"""Cases 20 and 22: the order of collectives survives code generation, and overlap changes no bit."""

import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._inductor.utils import run_and_get_code

import fxpasses
from bench.gpt import GPT, GPTConfig
from fxpasses.schedule import order
from tests.multirank import run_ranks


def backward_code(model: nn.Module, options: dict, *inputs: torch.Tensor) -> str:
    """Inductor's code for the backward of `model(*inputs).sum()`."""
    compiled = torch.compile(model, backend="hardened", options=options)
    _, codes = run_and_get_code(lambda: compiled(*inputs).float().sum().backward())
    return next(code for code in codes if "all_reduce" in code)


def emitted(code: str) -> list[str]:
    """`launch`, `wait` and `product`, as they stand in the code."""
    words = {"all_reduce_": "launch", "wait_tensor": "wait"}
    found = re.findall(
        r"_c10d_functional\.(all_reduce_|wait_tensor)\.default\(|(extern_kernels\.\w*mm\()", code
    )
    return ["product" if product else words[name] for name, product in found]


def three_layers() -> nn.Module:
    return nn.Sequential(
        *(layer for _ in range(3) for layer in (nn.Linear(64, 64, bias=False), nn.ReLU()))
    )


def test_case_20_waits_stand_behind_the_next_product(fake_world):
    code = backward_code(three_layers(), {"bucket_mb": 0.01}, torch.randn(8, 64))
    events = emitted(code)
    assert events.count("launch") == events.count("wait") == 3
    # The first gradient is on the wire while the two products of each earlier layer run.
    assert events == [
        *("product", "product", "launch"),
        *("product", "product", "launch"),
        *("product", "launch", "wait", "wait", "wait"),
    ] or events == [
        *("product", "launch", "product"),
        *("product", "launch", "product"),
        *("product", "launch", "wait", "wait", "wait"),
    ]


def small_gpt() -> tuple[nn.Module, torch.Tensor]:
    config = GPTConfig(vocab=64, block=32, layers=4, heads=2, width=64)
    return GPT(config), torch.randint(0, 64, (2, 32))


def test_order_of_a_gpt_in_the_generated_code(fake_world):
    model, tokens = small_gpt()
    events = emitted(backward_code(model, {"bucket_mb": 0.2}, tokens))
    launches = [i for i, e in enumerate(events) if e == "launch"]
    waits = [i for i, e in enumerate(events) if e == "wait"]
    products = [i for i, e in enumerate(events) if e == "product"]
    assert len(launches) == len(waits) == len(fxpasses.runtime(model).plan) >= 4
    assert min(waits) > max(products), "a wait stands in front of a computation that could hide it"
    behind = [sum(p > launch for p in products) for launch in launches]
    assert behind[0] > len(products) / 2, "the first bucket is launched late"
    assert behind == sorted(behind, reverse=True)


def test_a_whole_step_sends_while_its_last_backward_computes(fake_world):
    model = three_layers()

    def step(x: torch.Tensor) -> torch.Tensor:
        for part in x.chunk(2):
            model(part).sum().backward()
        return nn.utils.clip_grad_norm_(model.parameters(), 1.0)

    with torch._dynamo.config.patch(trace_autograd_ops=True):
        compiled = torch.compile(
            step, backend="hardened", fullgraph=True, options={"bucket_mb": 0.01}
        )
        _, codes = run_and_get_code(compiled, torch.randn(16, 64))
    events = emitted(codes[-1])
    products = [i for i, e in enumerate(events) if e == "product"]
    launches = [i for i, e in enumerate(events) if e == "launch"]
    assert len(launches) == events.count("wait") == len(fxpasses.runtime(model).plan) == 3
    # Forward, backward, forward; what the second backward still computes hides the first two.
    assert [sum(p > launch for p in products) for launch in launches][-1] <= 1
    assert launches[0] < launches[1] < products[-1] < events.index("wait")


def test_without_overlap_each_wait_follows_its_launch(fake_world):
    model, tokens = small_gpt()
    options = {"bucket_mb": 0.2, "passes": "bucketing,gradient_sync{overlap=false}"}
    events = [e for e in emitted(backward_code(model, options, tokens)) if e != "product"]
    assert events == ["launch", "wait"] * (len(events) // 2)


def test_a_broken_order_stops_the_compilation(fake_world, monkeypatch):
    honest = order.links
    monkeypatch.setattr(order, "links", lambda events: honest(_waits_first(events)))
    model, tokens = small_gpt()
    # Not by monkeypatch: the setting is an alias, which it would delete when it undoes itself.
    fresh = torch._inductor.config.patch(force_disable_caches=True)
    with fresh, pytest.raises(order.OrderError, match="expected .* found"):
        backward_code(model, {"bucket_mb": 0.2}, tokens)


def _waits_first(events):
    """Each wait right behind its launch: another order than the one that was planned."""
    events = list(events)
    waits = {e.of: e for e in events if e.kind == "wait"}
    rest = [e for e in events if e.kind != "wait"]
    return [x for e in rest for x in ((e, waits[e.name]) if e.name in waits else (e,))]


def in_fixed_order(rank: int, backend: str, bucket_mb: float) -> list[torch.Tensor]:
    torch.manual_seed(rank)
    batch = torch.randn(8, 33)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(33, 64), nn.Tanh(), nn.Linear(64, 64), nn.Linear(64, 5))
    options = {"bucket_mb": bucket_mb, "reduce_order": "fixed"}
    compiled = torch.compile(model, backend=backend, options=options)
    compiled(batch).square().mean().backward()
    return [p.grad.clone() for p in model.parameters()]


def test_in_a_fixed_order_buckets_change_no_bit():
    small, large = (run_ranks(in_fixed_order, 4, "hardened_aot_eager", mb) for mb in (0.001, 1024))
    (with_inductor, *_) = run_ranks(in_fixed_order, 4, "hardened", 0.02)
    for found in (*small, *large):
        assert all(map(torch.equal, found, small[0]))
    for a, b in zip(with_inductor, small[0], strict=True):
        torch.testing.assert_close(a, b)


def train(rank: int, backend: str, overlap: bool) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model, _ = small_gpt()
    options = {"bucket_mb": 0.2, "passes": f"bucketing,gradient_sync{{overlap={overlap}}}"}
    compiled = torch.compile(model, backend=backend, options=options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(rank)
    losses = []
    for _ in range(20):
        tokens = torch.randint(0, 64, (2, 33), generator=generator)
        loss = F.cross_entropy(compiled(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
        last = [p.grad.clone() for p in model.parameters()]
        optimizer.zero_grad()
    return [*losses, *last]


@pytest.mark.parametrize("backend", ["hardened", "hardened_aot_eager"])
def test_case_22_overlap_changes_no_bit(backend):
    with_overlap, without = (run_ranks(train, 2, backend, overlap) for overlap in (True, False))
    for rank in range(2):
        pairs = zip(with_overlap[rank], without[rank], strict=True)
        assert all(torch.equal(a, b) for a, b in pairs)
