"""Training in fp16 whose gradients underflow without a loss scale: it reaches the loss of fp32 with one."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fxpasses
from tests.multirank import run_ranks

STEPS = 200
TINY = 2.0**-18  # of the loss, made up for by the learning rate: gradients that fp16 does not hold
GROWTH_INTERVAL = 15


def fresh() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))
    )
    return model, torch.optim.SGD(model.parameters(), lr=0.1 / TINY, momentum=0.9)


def batch(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    inputs = torch.randn(64, 16, generator=torch.Generator().manual_seed(seed))
    return inputs, torch.sin(inputs.sum(1, keepdim=True) * 0.5)


def loss_of(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return (outputs.float() - targets).square().mean() * TINY


@torch.no_grad()
def held_out(model: nn.Module) -> float:
    inputs, targets = batch(10**6)
    return loss_of(model(inputs), targets).item() / TINY


def trained(rank: int, options: dict, ranks: int = 1) -> tuple[float, list[float]]:
    """Held-out loss in fp32, and the loss scale after each step."""
    model, optimizer = fresh()
    compiled = torch.compile(model, backend="hardened_aot_eager", options=options)
    scales = []
    for step in range(STEPS):
        inputs, targets = (part.chunk(ranks)[rank] for part in batch(step))
        optimizer.zero_grad()
        loss_of(compiled(inputs), targets).backward()
        optimizer.step()
        scaler = fxpasses.runtime(model).scaler
        scales += [] if scaler is None else [scaler.scale]
    return held_out(model), scales


def trained_by_torch() -> list[float]:
    """The loss scale after each step, under autocast and torch's GradScaler."""
    model, optimizer = fresh()
    scaler = torch.amp.GradScaler("cpu", growth_interval=GROWTH_INTERVAL)
    scales = []
    for step in range(STEPS):
        inputs, targets = batch(step)
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            outputs = model(inputs)
        scaler.scale(loss_of(outputs, targets)).backward()
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return scales


SCALED = {"precision": "fp16", "loss_scale": {"growth_interval": GROWTH_INTERVAL}}


def test_with_a_loss_scale_fp16_reaches_the_loss_of_fp32():
    exact, _ = trained(0, {})
    assert exact < 0.05
    unscaled, _ = trained(0, {"precision": "fp16"})
    assert unscaled > 10 * exact
    scaled, scales = trained(0, SCALED)
    assert scaled == pytest.approx(exact, rel=0.01)
    assert max(scales) == 2.0**29 and scales == trained_by_torch()


def test_on_two_ranks_as_well():
    (exact, _), _ = run_ranks(trained, 2, {}, 2)
    first, second = run_ranks(trained, 2, SCALED, 2)
    assert first == second and first[0] == pytest.approx(exact, rel=0.01)
    assert max(first[1]) >= 2.0**28
