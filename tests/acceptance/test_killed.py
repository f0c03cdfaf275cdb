"""Training that saves each step is killed at random: the newest file is the state of one step.

FXPASSES_KILLS=50 pytest tests/acceptance/test_killed.py
"""

from __future__ import annotations

import math
import multiprocessing
import os
import random
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

import fxpasses
import tests.multirank  # noqa: F401  (has the server that ranks are forked from load torch first)

KILLS = int(os.environ.get("FXPASSES_KILLS", 6))
LIMIT_S = 60.0  # for one save to appear


class Training:
    """Low-precision weights with masters, Adam, a dynamic loss scale; every fifth step overflows."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)).bfloat16()
        options = {"loss_scale": {"init": 2.0**10, "growth_interval": 3}}
        self.compiled = torch.compile(self.model, backend="hardened_aot_eager", options=options)
        of = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.optimizer = fxpasses.optimizer(of, masters=True)
        self.steps = 0

    def step(self) -> None:
        generator = torch.Generator().manual_seed(self.steps)
        x = torch.randn(4, 8, generator=generator).bfloat16()
        x *= math.inf if self.steps % 5 == 2 else 1
        self.compiled(x).sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.steps += 1

    def state(self) -> dict[str, Any]:
        return {
            "steps": self.steps,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "hardened": fxpasses.runtime(self.model).state_dict(),
        }

    def load(self, state: dict[str, Any]) -> None:
        self.steps = state["steps"]
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        fxpasses.runtime(self.model).load_state_dict(state["hardened"])


def save(state: dict[str, Any], path: Path) -> None:
    partial = path.with_suffix(".partial")
    with partial.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    partial.rename(path)


def train_and_save(path: Path) -> None:
    """Until somebody kills it."""
    torch.set_num_threads(1)
    training = Training()
    if path.exists():
        training.load(torch.load(path))
    while True:
        training.step()
        save(training.state(), path)


def same(found: Any, expected: Any) -> bool:
    if isinstance(expected, torch.Tensor):
        return found.dtype == expected.dtype and torch.equal(found, expected)
    if isinstance(expected, dict):
        return found.keys() == expected.keys() and all(
            same(found[k], expected[k]) for k in expected
        )
    if isinstance(expected, list | tuple):
        return len(found) == len(expected) and all(map(same, found, expected))
    return found == expected


def test_the_newest_file_holds_one_step(tmp_path):
    path = tmp_path / "newest.pt"
    context = multiprocessing.get_context("forkserver")
    moments = random.Random(0)
    reference, seen = Training(), 0
    for _ in range(KILLS):
        started = path.stat().st_mtime_ns if path.exists() else 0
        process = context.Process(target=train_and_save, args=(path,), daemon=True)
        process.start()
        deadline = time.monotonic() + LIMIT_S
        while not (path.exists() and path.stat().st_mtime_ns != started):
            assert time.monotonic() < deadline and process.is_alive(), "no step was saved"
            time.sleep(0.005)
        time.sleep(moments.uniform(0, 0.05))  # some ten steps
        process.kill()
        process.join()
        found = torch.load(path)
        assert found["steps"] > seen
        seen = found["steps"]
        while reference.steps < seen:
            reference.step()
        assert same(found, reference.state())
    assert seen > 2, "no step has overflowed"
