"""Cases 20 and 22: the order of collectives survives code generation, and overlap changes no bit."""

import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._inductor.utils import run_and_get_code

import fxpasses
from bench.gpt import GPT, GPTConfig
from fxpasses.distributed.plans import PlanMismatch
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


def options_of(schedule: str, **more) -> dict:
    return {"schedule": schedule, "bucket_mb": 0.02, **more}


def gradients(rank: int, variants: list[dict]) -> list[list[torch.Tensor]]:
    """Gradients of the same steps, under each of these options."""
    found = []
    for options in variants:
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(5)))
        compiled = torch.compile(model, backend="hardened_aot_eager", options=options)
        generator = torch.Generator().manual_seed(rank)
        for _ in range(2):
            compiled(torch.randn(8, 64, generator=generator)).square().sum().backward()
        found.append([p.grad.clone() for p in model.parameters()])
        torch._dynamo.reset()
    return found


def assert_alike(world: int, variants: list[dict]) -> None:
    for rank in run_ranks(gradients, world, variants):
        first, *others = rank
        assert all(p.abs().sum() > 0 for p in first)
        for other in others:
            assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("compression", ["none", "int4"])
def test_overlap_on_and_off_give_equal_gradients(world, compression):
    assert_alike(world, [options_of(s, compression=compression) for s in ("serial", "fixed")])


def test_small_and_huge_buckets_give_equal_gradients_on_two_ranks():
    sizes = (2**-10, 1024.0)  # one KiB: a bucket a gradient; one GiB: all in one
    assert_alike(
        2, [{"schedule": s, "bucket_mb": mb} for mb in sizes for s in ("serial", "fixed", "auto")]
    )


def test_a_planned_order_gives_equal_gradients():
    # Its second legs move; that buckets stay as they are lets the sums of four ranks be compared.
    machine = "bandwidth=20000000.0;flops=2000000000.0;latency=0.0"
    passes = "participation,running_stats,bucketing{mb=0.02},compress{scheme=int8}"
    moved = f"{passes},schedule{{machine={machine}}}"
    assert_alike(
        4, [{"passes": passes, "compression": "int8"}, {"passes": moved, "compression": "int8"}]
    )


def ends_alike(rank: int) -> list[torch.Tensor]:
    """Ranks with batches of other shapes may plan otherwise; they agree on the order of the options."""
    torch.manual_seed(0)
    model = three_layers()
    machine = {"bandwidth": 1e5, "flops": 1e6, "latency": 0.0, "operator_s": 0.0}
    options = {"schedule": "auto", "bucket_mb": 0.03, "machine": machine}
    compiled = torch.compile(model, backend="hardened_aot_eager", options=options, dynamic=False)
    compiled(torch.ones(1 + 63 * rank, 64)).sum().backward()
    return [p.grad.clone() for p in model.parameters()]


def test_ranks_that_would_plan_otherwise_send_the_same():
    one, two = run_ranks(ends_alike, 2)
    assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


def with_other_rates(rank: int) -> str:
    torch.manual_seed(0)
    rates = [{"bandwidth": 1e5, "latency": 0.0}, {"bandwidth": 1e12, "latency": 0.1}]
    options = {"schedule": "auto", "bucket_mb": 0.02, "compression": "int8", "machine": rates[rank]}
    compiled = torch.compile(three_layers(), backend="hardened_aot_eager", options=options)
    with pytest.raises(PlanMismatch) as caught:
        compiled(torch.randn(8, 64)).sum().backward()
    return str(caught.value)


def test_rates_that_differ_between_ranks_are_an_error_on_each():
    for message in run_ranks(with_other_rates, 2):
        assert "bandwidth=100000.0" in message and "bandwidth=1000000000000.0" in message


COMPRESSED = {
    "all_to_all_single": "launch",
    "all_gather_into_tensor": "launch",
    "wait_tensor": "wait",
    "dequantise": "decode",
    "requantise": "decode",
}


def compressed_events(model: nn.Module, options: dict, *inputs: torch.Tensor) -> list[str]:
    compiled = torch.compile(model, backend="hardened", options=options)
    _, codes = run_and_get_code(lambda: compiled(*inputs).float().sum().backward())
    code = next(code for code in codes if "wait_tensor" in code)
    found = re.findall(
        r"(?:_c10d_functional|ops\.fxpasses)\.(\w+)\.default\(|(extern_kernels\.\w*mm\()", code
    )
    return ["product" if product else COMPRESSED.get(name, name) for name, product in found]


@pytest.mark.inductor
@pytest.mark.parametrize("schedule", ["fixed", "auto"])
def test_case_20_with_compression(fake_world, schedule):
    """In two legs, a wait and what decodes come behind a later layer's products; the order given is kept."""
    # On a link that takes no time to begin, several buckets are worth it.
    machine = {
        "latency": 0.0,
        "bandwidth": 1e6,
        "flops": 1e8,
        "collective_s": 0.0,
        "operator_s": 0.0,
    }
    options = {"bucket_mb": 0.01, "compression": "int8", "schedule": schedule, "machine": machine}
    events = compressed_events(three_layers(), options, torch.randn(8, 64))
    assert events.count("launch") == events.count("wait") == events.count("decode") >= 4
    launches = [i for i, e in enumerate(events) if e == "launch"]
    assert "product" in events[launches[0] : events.index("wait")]
    last = max(i for i, e in enumerate(events) if e == "product")
    for i, event in enumerate(events):
        if event == "decode":
            assert events[:i].count("wait") > events[:i].count("decode")
            assert i > last or "product" in events[launches[0] : i]


@pytest.mark.inductor
def test_a_broken_order_may_be_a_warning(fake_world, monkeypatch):
    honest = order.links
    monkeypatch.setattr(order, "links", lambda events: honest(_waits_first(events)))
    model, tokens = small_gpt()
    options = {"bucket_mb": 0.2, "schedule_check": "warn"}
    fresh = torch._inductor.config.patch(force_disable_caches=True)
    with fresh, pytest.warns(UserWarning, match="does not keep the planned order: expected"):
        backward_code(model, options, tokens)
