"""Fixtures that all tests share."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import settings
from torch.testing._internal.distributed.fake_pg import FakeStore

from fxpasses import registry
from fxpasses.distributed.group import resolve
from tests.graphs import WORLD
from tests.multirank import run_ranks

# The same examples in each run: a change that breaks nothing passes.
settings.register_profile("tests", derandomize=True)
settings.load_profile("tests")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--bless", action="store_true", help="accept what passes change as right")


@pytest.fixture(autouse=True)
def seeded() -> None:
    """What a test draws is the same in each run, whatever ran before it."""
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    yield
    torch._dynamo.reset()


@pytest.fixture
def fake_world() -> Iterator[str]:
    """Name of the default process group: rank 0 of four, whose collectives do nothing."""
    dist.init_process_group("fake", rank=0, world_size=WORLD, store=FakeStore())
    yield str(resolve(None).name)
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def waiting_runs(request: pytest.FixtureRequest) -> Iterator[dict[str, Future[list[Any]]]]:
    """By test, the runs of this module that mostly wait: some at a time, in the order of the tests."""
    items = [item for item in request.session.items if item.path == request.path]
    marks = {item.nodeid: item.get_closest_marker("ranks") for item in items}
    pool = ThreadPoolExecutor(3)
    yield {
        name: pool.submit(run_ranks, *mark.args, **mark.kwargs)
        for name, mark in marks.items()
        if mark is not None
    }
    pool.shutdown(cancel_futures=True)


@pytest.fixture
def found(request: pytest.FixtureRequest, waiting_runs: dict[str, Future[list[Any]]]) -> list[Any]:
    """What the ranks of this test returned: `pytest.mark.ranks` has the arguments of `run_ranks`."""
    return waiting_runs[request.node.nodeid].result()


@pytest.fixture
def own_registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Passes registered during the test are forgotten after it."""
    monkeypatch.setattr(registry, "_decorated", dict(registry._decorated))
    registry._installed.cache_clear()
    yield
    registry._installed.cache_clear()


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Ctrl-C raises KeyboardInterrupt, also in a job in the background, which is started to ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
