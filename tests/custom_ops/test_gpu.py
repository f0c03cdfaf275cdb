"""On a GPU: the kernels' bits are those of the reference on the CPU.

    python -m pytest -q tests/custom_ops/test_gpu.py
    FXPASSES_GPU=all python -m pytest -q tests/custom_ops/test_gpu.py

The first is meant for a few minutes with nothing compiled yet: a layout of each kind, Triton's first
configuration. The second takes all layouts and roundings, and lets the autotuner try all configurations, each
of which has to be compiled.
"""

from __future__ import annotations

import concurrent.futures
import os

import pytest
import torch

from custom_ops import kernels
from custom_ops.cuda import nvrtc
from custom_ops.layout import CHUNK, Layout, Layout16, TopKLayout
from tests.custom_ops.buckets import FLT_MAX, SUBNORMAL, _bits, reference
from tests.custom_ops.cases import MODULES, cases

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.timeout(600),
]

ALL = os.environ.get("FXPASSES_GPU") == "all"
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Layouts with a seed or none, and the dtype of gradients.
QUANTISERS = [
    (Layout((70_000, 0, 1, 333), 3, 4), None, torch.bfloat16),
    (Layout((70_000, 7), 2, 8, 128, False), -3, torch.float32),
    (Layout((70_000, 45), 1, 4, 128, True, True), None, torch.float16),
]
CHUNKS = [(5 * CHUNK + 333, 0.01), (CHUNK, 1.0)]
if ALL:
    layouts = [
        *(layout for layout, *_ in QUANTISERS),
        Layout((70_000,), bits=8),
        Layout((5000, 77), 1, 4, 32, False),
        Layout((70_000,), 1, 8, 1024, False, True),
        Layout((1000, 3), 1, 4, 1),
        Layout((4096,), 1, 4, 512),
    ]
    QUANTISERS = [(la, seed, dtype) for la in layouts for seed in (None, -3) for dtype in DTYPES]
    CHUNKS = [(n, r) for n in (5, CHUNK, 5 * CHUNK + 333) for r in (0.001, 0.01, 0.3, 1.0)]


@pytest.fixture(params=["triton", "cuda"])
def implementation(request, monkeypatch):
    if request.param == "cuda" and not nvrtc.is_found():
        pytest.skip("no NVRTC")
    if request.param == "triton" and not kernels.has_triton():
        pytest.skip("no triton")
    if request.param == "triton" and not ALL:
        from triton.runtime.autotuner import Autotuner

        fitting = Autotuner.prune_configs
        monkeypatch.setattr(Autotuner, "prune_configs", lambda *args: fitting(*args)[:1])
    monkeypatch.setenv(kernels.CHOICE, request.param)


def agreed(name: str, *args):
    """The result on the CPU, after a GPU gave the same bits."""
    operator = getattr(torch.ops.fxpasses, name)
    moved = [a.cuda() if isinstance(a, torch.Tensor) else a for a in args]
    found = operator(*moved)
    with reference():
        wanted = operator(*args)
    found, wanted = (r if isinstance(r, tuple) else (r,) for r in (found, wanted))
    for a, b in zip(found, wanted, strict=True):
        if name == "unscale" and a.dim() == 0:
            torch.testing.assert_close(a.cpu(), b, rtol=2.0**-23, atol=0)
        else:
            assert a.dtype == b.dtype and torch.equal(_bits(a.cpu()), _bits(b)), name
    return wanted


def bucket(numel: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Normal numbers of many magnitudes, and special ones."""
    generator = torch.Generator().manual_seed(numel)
    flat = torch.randn(numel, generator=generator)
    flat *= 10.0 ** (torch.arange(numel) // 200 % 70 - 40).float()
    special = torch.tensor([0.0, -0.0, FLT_MAX, -FLT_MAX, SUBNORMAL, -SUBNORMAL, 2.0**-126])
    flat[: len(special)] = special[:numel]
    return flat.to(dtype).float().nan_to_num(posinf=3e4, neginf=-3e4).to(dtype)


@pytest.mark.parametrize("name", list(MODULES))
def test_small(name, implementation):
    with reference():  # which is all that runs on the CPU here
        args = cases()[name]
    agreed(name, *args)


@pytest.mark.parametrize(("layout", "seed", "dtype"), QUANTISERS, ids=str)
def test_quantisers(layout, seed, dtype, implementation):
    seed = None if seed is None else torch.tensor(seed)
    flat, residual = bucket(layout.numel, dtype), torch.randn(layout.numel) * 1e-3
    payload, _ = agreed("quantise", flat, None, seed, *layout.fields)
    other, _ = agreed("quantise", flat, residual, seed, *layout.fields)
    payloads = torch.stack([payload, other, payload, other])
    agreed("dequantise", payloads, *layout.fields)
    for shard in range(layout.shards):
        pieces = payloads.view(4, layout.shards, -1)[:, shard].contiguous()
        owned = torch.randn(layout.shard_numel)
        for out_bits in (4, 8) if ALL else (8,):
            agreed("requantise", pieces, owned, seed, shard, out_bits, *layout.fields)
    flat[layout.numel // 2] = torch.inf
    agreed("quantise", flat, residual, seed, *layout.fields)


@pytest.mark.parametrize(("numel", "ratio"), CHUNKS)
def test_topk(numel, ratio, implementation):
    layout = TopKLayout(numel, ratio)
    subnormal = torch.arange(numel) % 7 * 2.0**-130  # as a third of it is
    for flat in (bucket(numel), torch.ones(numel), torch.randn(numel).bfloat16(), subnormal):
        residual = torch.zeros(numel) if flat is subnormal else torch.randn(numel) * 1e-3
        payload, _ = agreed("topk_encode", flat, residual, *layout.fields)
        agreed("topk_decode", torch.stack([payload] * 3), *layout.fields)
    flat[-1] = torch.nan
    agreed("topk_encode", flat, torch.randn(numel), *layout.fields)


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_wire16(dtype, implementation):
    for numel, shards in ((5, 1), (70_001, 3), (65_536, 2)):
        layout = Layout16(numel, shards, dtype)
        payload = agreed("encode16", bucket(numel), *layout.fields)[0]
        agreed("decode16", torch.stack([payload] * 3), *layout.fields)
        sealed = agreed("seal", payload, shards)[0]
        agreed("broken", torch.stack([sealed, payload]), shards)


def test_more_pieces_than_a_grid_has_rows(implementation):
    pieces = 70_000
    sealed = agreed("seal", torch.ones(8 * pieces).byte(), pieces)[0]
    sealed[-1] ^= 1
    assert agreed("broken", sealed[None], pieces)[0].all()


def test_in_a_new_thread(implementation):
    """Which has no context of CUDA's; all memory is in torch's cache."""
    layout = Layout((4096, 7))
    flat = torch.randn(layout.numel, device="cuda")
    payload, _ = torch.ops.fxpasses.quantise(flat, None, None, *layout.fields)
    wanted = torch.ops.fxpasses.dequantise(payload[None], *layout.fields).cpu()
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        found = pool.submit(torch.ops.fxpasses.dequantise, payload[None], *layout.fields)
        assert torch.equal(found.result(timeout=60).cpu(), wanted)


@pytest.mark.parametrize("mode", [None, "reduce-overhead"])
def test_compiled_by_inductor(mode, implementation):
    layout = Layout(
        (4096, 7 if mode is None else 9), bits=4
    )  # first met in a graph that is compiled

    def exchange(flat, residual):
        payload, lost = torch.ops.fxpasses.quantise(flat * 2, residual, None, *layout.fields)
        return torch.ops.fxpasses.dequantise(torch.stack([payload, payload]), *layout.fields), lost

    compiled = torch.compile(exchange, fullgraph=True, mode=mode)
    for _ in range(4):  # the first ones are recorded, the others replayed
        args = torch.randn(layout.numel).cuda(), torch.randn(layout.numel).cuda()
        found = [result.clone() for result in compiled(*args)]
        assert all(map(torch.equal, found, exchange(*args)))


def test_more_than_two_to_the_31_elements(implementation):
    """Where the last elements of a bucket go is decided by 64-bit numbers."""
    numel = 2**31 + 256
    if torch.cuda.mem_get_info()[0] < 24 * 2**30:
        pytest.skip("needs 24 GiB of a GPU's memory")
    layout = Layout((numel,))
    flat = torch.zeros(numel, dtype=torch.bfloat16, device="cuda")
    flat[-300:] = torch.arange(300).cuda().bfloat16()
    payload, _ = torch.ops.fxpasses.quantise(flat, None, None, *layout.fields)
    back = torch.ops.fxpasses.dequantise(payload[None], *layout.fields)
    assert (back[-300:] - flat[-300:].float()).abs().max() <= 300 / 254 * 1.02
    assert not back[: 2**31 - 300].any()
    assert os.environ[kernels.CHOICE] in ("triton", "cuda")
