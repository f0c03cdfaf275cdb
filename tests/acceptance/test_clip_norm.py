"""Option `clip_norm`: a step is what it is with `torch.nn.utils.clip_grad_norm_` behind its backward."""

from __future__ import annotations

import copy
import math
import re

import pytest
import torch
from torch import nn
from torch._inductor.utils import run_and_get_code

import fxpasses
from fxpasses.distributed.plans import PlanMismatch
from tests.multirank import run_ranks

BACKENDS = ["hardened_aot_eager", "hardened"]
BACKEND = BACKENDS[0]
LIMIT = 0.5
WORLD = 2


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def compiled_of(model, backend: str = BACKEND, clip_norm: float = LIMIT, **options):
    return torch.compile(
        model, backend=backend, options={"clip_norm": clip_norm, "bucket_mb": 1e-4, **options}
    )


def batches(rank: int, count: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(4, 6, generator=generator) for _ in range(count)]


def loss_of(output: torch.Tensor) -> torch.Tensor:
    return output.square().sum()


def reference(world: int, steps: int, micro: int = 1, limit: float = LIMIT, reduce: str = "mean"):
    """Parameters and norms of a loop that averages over ranks, then clips."""
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    inputs = [batches(rank, steps * micro) for rank in range(world)]
    norms = []
    for step in range(steps):
        optimizer.zero_grad()
        for rank in range(world):
            for x in inputs[rank][step * micro : (step + 1) * micro]:
                loss_of(model(x)).backward()
        for p in model.parameters():
            p.grad /= world if reduce == "mean" else 1
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), limit).item())
        optimizer.step()
    return [p.detach() for p in model.parameters()], norms


def trained(
    rank: int,
    steps: int,
    micro: int = 1,
    backend: str = BACKEND,
    zero=True,
    atomic=False,
    **options,
):
    model = mlp()
    compiled = compiled_of(model, backend, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    optimizer = fxpasses.optimizer(optimizer) if atomic else optimizer
    norms = []
    for index, x in enumerate(batches(rank, steps * micro)):
        loss_of(compiled(x)).backward()
        if (index + 1) % micro == 0:
            norms.append(fxpasses.runtime(model).last_step.gradient_norm.item())
            optimizer.step()
            optimizer.zero_grad(set_to_none=zero)
    return [p.detach() for p in model.parameters()], norms


def same(found, wanted) -> bool:
    (parameters, norms), (theirs, total) = found, wanted
    close = [
        torch.allclose(a, b, rtol=1e-4, atol=1e-6) for a, b in zip(parameters, theirs, strict=True)
    ]
    return all(close) and norms == pytest.approx(total, rel=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("limit", [LIMIT, 1e3])
def test_one_rank(backend, limit):
    wanted = reference(1, 4, limit=limit)
    assert same(trained(0, 4, backend=backend, clip_norm=limit), wanted)


def test_an_atomic_update():
    assert same(trained(0, 4, atomic=True, watch={}), reference(1, 4))


@pytest.mark.parametrize("backend", BACKENDS)
def test_two_ranks(backend):
    ranks = run_ranks(trained, WORLD, 4, 1, backend)
    assert all(same(found, reference(WORLD, 4)) for found in ranks)
    assert all(torch.equal(a, b) for a, b in zip(ranks[0][0], ranks[1][0], strict=True))
    assert ranks[0][1] == ranks[1][1]


def test_a_bucket_is_written_once_behind_its_reduction(fake_world):
    """The cast from the wire's dtype, the factor and the check for overflow are one loop."""
    model = mlp()
    compiled = compiled_of(
        model, "hardened", reduce_dtype="bf16", loss_scale="dynamic", bucket_mb=25
    )
    loss = loss_of(compiled(batches(0, 1)[0]))
    _, codes = run_and_get_code(loss.backward)
    numel = sum(p.numel() for p in model.parameters())
    allocated = re.findall(rf"empty_strided_cpu\(\({numel}, \), \(1, \), (\S+)\)", codes[-1])
    assert sorted(allocated) == ["torch.bfloat16", "torch.float32"]


def summed(rank: int):
    return trained(rank, 3, reduce="sum", zero=False)


def test_two_ranks_that_sum_and_keep_zeros():
    """Zeros that `zero_grad(set_to_none=False)` leaves are part of the total like any other value."""
    assert all(same(f, reference(WORLD, 3, reduce="sum")) for f in run_ranks(summed, WORLD))


def accumulated(rank: int):
    return trained(rank, 3, 2, accumulate=2)


def test_micro_batches_are_clipped_once_by_the_norm_of_their_sum():
    assert same(accumulated(0), reference(1, 3, 2))
    assert all(same(found, reference(WORLD, 3, 2)) for found in run_ranks(accumulated, WORLD))


def test_no_sync_leaves_micro_batches_as_they_are():
    model, (a, b) = mlp(), batches(0, 2)
    twin = copy.deepcopy(model)
    compiled, runtime = compiled_of(model), fxpasses.runtime(model)
    with runtime.no_sync():
        loss_of(compiled(a)).backward()
    loss_of(twin(a)).backward()
    assert runtime.last_step.gradient_norm is None
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.allclose(ours.grad, theirs.grad, rtol=1e-5)
    loss_of(compiled(b)).backward()
    loss_of(twin(b)).backward()
    norm = nn.utils.clip_grad_norm_(twin.parameters(), LIMIT)
    assert runtime.last_step.gradient_norm.item() == pytest.approx(norm.item(), rel=1e-5)
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.allclose(ours.grad, theirs.grad, rtol=1e-5)


def test_gradients_that_are_never_cleared_are_clipped_as_a_whole():
    model = mlp()
    twin, compiled = copy.deepcopy(model), compiled_of(model)
    ours, theirs = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, twin))
    for x in batches(0, 3):
        loss_of(compiled(x)).backward()
        loss_of(twin(x)).backward()
        norm = nn.utils.clip_grad_norm_(twin.parameters(), LIMIT)
        assert fxpasses.runtime(model).last_step.gradient_norm.item() == pytest.approx(norm.item())
        for a, b in zip(model.parameters(), twin.parameters(), strict=True):
            assert torch.allclose(a.grad, b.grad, rtol=1e-5, atol=1e-7)
        ours.step()
        theirs.step()


def overflowing(
    rank: int, loss_scale, backend: str = BACKEND
) -> tuple[list[bool], list[bool], list[bool]]:
    model = mlp()
    compiled = compiled_of(model, backend, loss_scale=loss_scale)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    finite, skipped, gradients = [], [], []
    for step, x in enumerate(batches(rank, 3)):
        loss_of(compiled(x * math.inf if rank == 0 and step == 1 else x)).backward()
        gradients.append(any(p.grad.isfinite().any().item() for p in model.parameters()))
        optimizer.step()
        optimizer.zero_grad()
        record = fxpasses.runtime(model).last_step
        finite.append(record.gradient_norm.isfinite().item())
        skipped.append(record.skipped)
    return finite, skipped, gradients


def test_an_overflow_is_seen_on_all_ranks_and_the_step_is_skipped():
    expected = [True, False, True]
    ranks = run_ranks(overflowing, WORLD, "dynamic")
    assert ranks == [(expected, [False, True, False], expected)] * WORLD


@pytest.mark.parametrize("backend", BACKENDS)
def test_without_a_loss_scale_all_gradients_are_nan_then(backend):
    finite, skipped, gradients = overflowing(0, "none", backend)
    assert finite[:2] == gradients[:2] == [True, False] and not any(skipped)


class Scaled(nn.Module):
    """Gradients that underflow in fp16 without a loss scale."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 32, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)


def test_the_norm_is_that_of_unscaled_gradients():
    model = Scaled()
    compiled = compiled_of(model, clip_norm=2.0**-18, precision="fp16", loss_scale=65536.0)
    (compiled(torch.ones(32, 32)) * 2.0**-26).sum().backward()
    norm = fxpasses.runtime(model).last_step.gradient_norm.item()
    assert norm == pytest.approx(32 * 32 * 2.0**-26, rel=1e-3)
    factor = 2.0**-18 / (norm + 1e-6)
    assert model.linear.weight.grad[0, 0].item() == pytest.approx(32 * 2.0**-26 * factor, rel=1e-3)


class Branches(nn.Module):
    """Rank 1 does not use `b`."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, both: bool) -> torch.Tensor:
        y = self.a(x)
        return self.b(y) if both else y


def branching(rank: int):
    model = Branches()
    compiled = compiled_of(model)
    x = torch.full((2, 4), 1.0 + rank)
    loss_of(compiled(x, rank == 0)).backward()
    norm = fxpasses.runtime(model).last_step.gradient_norm
    return [p.grad for p in model.parameters()], norm.item()


def test_the_norm_is_that_of_the_union_where_ranks_differ():
    model = Branches()
    for rank in range(WORLD):
        (loss_of(model(torch.full((2, 4), 1.0 + rank), rank == 0)) / WORLD).backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), LIMIT).item()
    for gradients, found in run_ranks(branching, WORLD):
        assert found == pytest.approx(norm, rel=1e-5)
        for ours, theirs in zip(gradients, model.parameters(), strict=True):
            assert torch.allclose(ours, theirs.grad, rtol=1e-4)


def leaving(rank: int) -> str:
    model = Branches()
    compiled = compiled_of(model, accumulate=2)
    loss_of(compiled(torch.ones(2, 4), True)).backward()
    try:
        loss_of(compiled(torch.ones(2, 4), False)).backward()
    except PlanMismatch as error:
        return str(error)
    return ""


def test_what_an_earlier_micro_batch_left_is_refused():
    for message in [leaving(0), *run_ranks(leaving, WORLD)]:
        assert "option 'clip_norm': 'b.weight'" in message
        assert "torch.nn.utils.clip_grad_norm_" in message


class Broken(nn.Module):
    def __init__(self, first: bool = True) -> None:
        super().__init__()
        self.first, self.last = (nn.Linear(2, 2, bias=False) for _ in range(2))
        self.first.requires_grad_(first)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        torch._dynamo.graph_break()
        return self.last(y).sum()


def test_several_graphs_with_gradients_are_refused():
    with pytest.raises(RuntimeError, match="option 'clip_norm': the backward of Broken.forward"):
        compiled_of(Broken())(torch.ones(3, 2)).backward()


def test_graphs_without_gradients_don_t_matter():
    model = Broken(first=False)
    compiled_of(model)(torch.ones(3, 2)).backward()
    assert model.last.weight.grad.norm().item() == pytest.approx(LIMIT, rel=1e-5)


def test_a_region_that_runs_twice_in_a_backward_is_refused():
    block = compiled_of(nn.Sequential(nn.Linear(2, 2), nn.Tanh()))
    with pytest.raises(RuntimeError, match="option 'clip_norm': .* is not the first of its step"):
        block(block(torch.ones(3, 2))).sum().backward()


def test_a_second_backward_of_a_step_is_refused():
    model = mlp()
    compiled, (a, b, c) = compiled_of(model), batches(0, 3)
    loss_of(compiled(a)).backward()
    model.zero_grad()
    loss_of(compiled(b)).backward()  # nothing is there to be added to
    with pytest.raises(RuntimeError, match="is not the first of its step.*no_sync"):
        loss_of(compiled(c)).backward()


def test_an_optimizer_with_gradients_of_something_else_is_refused():
    model, other = mlp(), nn.Linear(3, 1)
    optimizer = torch.optim.SGD([*model.parameters(), *other.parameters()], lr=0.1)
    other(compiled_of(model)(batches(0, 1)[0])).sum().backward()
    with pytest.raises(
        RuntimeError, match="the gradient of parameter 4 of group 0 .* is not part of"
    ):
        optimizer.step()


def test_optimizers_of_parts_of_a_model_share_its_norm():
    model = mlp()
    optimizers = [torch.optim.SGD(layer.parameters(), lr=0.1) for layer in (model[0], model[2])]
    loss_of(compiled_of(model)(batches(0, 1)[0])).backward()
    expected = [p.detach() - 0.1 * p.grad for p in model.parameters()]
    for optimizer in optimizers:
        optimizer.step()
    for p, value in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(p.detach(), value)


def test_a_parameter_that_is_used_outside_as_well_is_noticed():
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    output = compiled_of(model)(batches(0, 1)[0])
    (loss_of(output) + 5 * model[2].weight.square().sum()).backward()
    with pytest.raises(RuntimeError, match="something else added to them"):
        optimizer.step()


def test_parts_of_a_model_agree_on_the_options():
    model = mlp()
    fxpasses.runtime(model)
    (x,) = batches(0, 1)
    y = compiled_of(model[0])(x)
    refusal = "options 'clip_norm' and 'watch': got {'clip_norm': 2.0, 'watch': None}, but another"
    with pytest.raises(ValueError, match=refusal):
        compiled_of(model[2], clip_norm=2.0)(y.tanh())


def whole(rank: int, backend: str = BACKEND):
    torch._dynamo.config.trace_autograd_ops = True
    try:
        model = mlp()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)

        def step(x: torch.Tensor) -> torch.Tensor:
            loss = loss_of(model(x))
            loss.backward()
            return loss.detach()

        compiled = compiled_of(step, backend)
        norms = []
        for index, x in enumerate(batches(rank, 4)):
            compiled(x)
            norms.append(fxpasses.runtime(model).last_step.gradient_norm.item())
            optimizer.step()
            optimizer.zero_grad(set_to_none=index % 2 == 0)  # with .grad there, it is another graph
        return [p.detach() for p in model.parameters()], norms
    finally:
        torch._dynamo.config.trace_autograd_ops = False


@pytest.mark.parametrize("backend", BACKENDS)
def test_whole_steps(backend):
    assert same(whole(0, backend), reference(1, 4))


def test_whole_steps_on_two_ranks():
    assert all(same(found, reference(WORLD, 4)) for found in run_ranks(whole, WORLD))


def test_the_pass_may_be_asked_for_by_name():
    model = mlp()
    compiled = torch.compile(model, backend=BACKEND, options={"passes": "clip_norm{max_norm=0.5}"})
    loss_of(compiled(batches(0, 1)[0])).backward()
    norm = nn.utils.get_total_norm([p.grad for p in model.parameters()])
    assert norm.item() == pytest.approx(LIMIT, rel=1e-5)
    assert fxpasses.runtime(model).last_step.gradient_norm > LIMIT
