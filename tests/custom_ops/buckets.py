"""Drawn buckets of gradients, and what the tests of operators share."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from custom_ops.faults import INTEGERS
from custom_ops.kernels import CHOICE
from custom_ops.layout import HEADER_BYTES, Layout

FAMILIES = ("quantise", "topk", "wire16", "checksum", "gradients", "faults")
EXAMPLES = "FXPASSES_TEST_EXAMPLES"  # how many are drawn: fewer for slow implementations
FLT_MAX = torch.finfo(torch.float32).max
SUBNORMAL = 2.0**-149
SPECIAL = (0.0, -0.0, 1.0, FLT_MAX, -FLT_MAX, SUBNORMAL, -SUBNORMAL, 2.0**-126, 3e-31)

LENGTHS = st.lists(st.sampled_from((0, 1, 2, 3, 16, 31, 33, 64, 100, 257)), max_size=5).map(tuple)


@st.composite
def layouts(draw: st.DrawFn, rotate: bool | None = None, **fixed: Any) -> Layout:
    rotated = draw(st.booleans()) if rotate is None else rotate
    drawn = {
        "lengths": draw(LENGTHS),
        "shards": draw(st.sampled_from((1, 1, 2, 3, 4))),
        "bits": draw(st.sampled_from((4, 8))),
        "group": draw(st.sampled_from((32, 128, 1024) if rotated else (1, 2, 16, 128, 1024))),
        "symmetric": draw(st.booleans()),
        "rotate": rotated,
    }
    return Layout(**(drawn | fixed))


@st.composite
def values(draw: st.DrawFn, numel: int) -> torch.Tensor:
    """Finite fp32 of all magnitudes: noise, constants, few non-zeros, and extreme numbers among them."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**16)))
    magnitude = 10.0 ** draw(st.integers(-44, 37))
    kind = draw(st.sampled_from(("noise", "positive", "sparse", "equal", "special")))
    noise = torch.randn(numel, generator=generator)
    if kind == "positive":
        noise = noise.abs() + 3
    if kind == "sparse":
        noise *= torch.rand(numel, generator=generator) < 0.05
    if kind == "equal":
        noise = torch.full((numel,), 1.7)
    found = noise * magnitude
    if kind == "special" and numel:
        chosen = draw(st.lists(st.sampled_from(SPECIAL), min_size=1, max_size=6))
        where = torch.randint(numel, (len(chosen),), generator=generator)
        found[where] = torch.tensor(chosen)
    return found


seeds = st.one_of(st.none(), st.integers(-(2**63), 2**63 - 1).map(torch.tensor))


def drawn(test: Callable[[Any], None]) -> Callable[[], None]:
    """A test of an argument `data` to draw from; without a deadline, since the kernels may be built in it."""
    examples = int(os.environ.get(EXAMPLES, "25"))
    return settings(deadline=None, max_examples=examples)(given(data=st.data())(test))


def run_families(environment: dict[str, str], *options: str) -> None:
    """The operators' own tests in another process, for another implementation; but not those of the CPU's
    threads, of schemas and arguments, and those that draw or scan very much."""
    folder = Path(__file__).parent
    left_out = ("threads", "schema", "fit", "average", "unrelated", "whatever", "compiled_graph")
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-q", "--show-capture=no", "-p", "no:cacheprovider"),
            *(*options, *(f"{folder}/test_{family}.py" for family in FAMILIES)),
            *("-k", " and ".join(f"not {word}" for word in left_out)),
        ],
        env=environment,
        cwd=folder.parents[1],
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-1000:]
    assert " passed" in done.stdout and "skipped" not in done.stdout.splitlines()[-1]


def on_both(operator: Callable[..., Any], *args: Any) -> Any:
    """The result of the implementation that is chosen, found to be the reference's, bit by bit (NaN is NaN)."""
    compiled = operator(*args)
    with reference():
        expected = operator(*args)
    for a, b in zip(_tensors(compiled), _tensors(expected), strict=True):
        assert a.dtype == b.dtype and torch.equal(_bits(a), _bits(b)), (compiled, expected)
    return compiled


def _tensors(result: Any) -> tuple[torch.Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    if not tensor.is_floating_point():
        return tensor
    return tensor.where(~tensor.isnan(), torch.nan).view(INTEGERS[tensor.dtype.itemsize])


@contextlib.contextmanager
def reference() -> Iterator[None]:
    before = os.environ.get(CHOICE)
    os.environ[CHOICE] = "reference"
    try:
        yield
    finally:
        del os.environ[CHOICE]
        if before is not None:
            os.environ[CHOICE] = before


def groups(layout: Layout) -> torch.Tensor:
    """Number of each element's group, [n]: in the order of the bucket."""
    found, count = [], 0
    for segment in layout.segments:
        found.append(count + torch.arange(segment.length) // layout.group)
        count += -(-segment.length // layout.group)
    return torch.cat([torch.arange(0), *found])


def scales(payload: torch.Tensor, layout: Layout) -> torch.Tensor:
    """The scale of each element, [n] fp64, read from the payload."""
    found = []
    for segment in layout.segments:
        start = segment.shard * layout.piece_bytes + HEADER_BYTES + 2 * segment.group
        count = -(-segment.length // layout.group)
        scale = payload[start : start + 2 * count].view(torch.bfloat16).double()
        found.append(scale.repeat_interleave(layout.group)[: segment.length])
    return torch.cat([torch.zeros(0).double(), *found])
