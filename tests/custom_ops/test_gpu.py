"""On a GPU: the kernels' bits are those of the reference on the CPU."""

from __future__ import annotations

import os

import pytest
import torch

from custom_ops import kernels
from custom_ops.cuda import nvrtc
from custom_ops.layout import CHUNK, Layout, Layout16, TopKLayout
from tests.custom_ops.buckets import FLT_MAX, SUBNORMAL, _bits, reference
from tests.custom_ops.cases import cases

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.timeout(120),
]

LAYOUTS = [
    Layout((70_000,), bits=8),
    Layout((70_000, 0, 1, 333), 3, 4),
    Layout((70_000, 7), 2, 8, 128, False),
    Layout((5000, 77), 1, 4, 32, False),
    Layout((70_000, 45), 2, 4, 128, True, True),
    Layout((70_000,), 1, 8, 1024, False, True),
    Layout((1000, 3), 1, 4, 1),
    Layout((4096,), 1, 4, 512),
]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.fixture(params=["triton", "cuda"])
def implementation(request, monkeypatch):
    if request.param == "cuda" and not nvrtc.is_found():
        pytest.skip("no NVRTC")
    if request.param == "triton" and not kernels.has_triton():
        pytest.skip("no triton")
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


@pytest.mark.parametrize("name", list(cases()))
def test_small(name, implementation):
    agreed(name, *cases()[name])


@pytest.mark.parametrize("seed", [None, torch.tensor(-3)])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_quantisers(layout, seed, implementation):
    for dtype in DTYPES:
        flat = bucket(layout.numel, dtype)
        residual = torch.randn(layout.numel) * 1e-3
        payload, _ = agreed("quantise", flat, None, seed, *layout.fields)
        other, _ = agreed("quantise", flat, residual, seed, *layout.fields)
    payloads = torch.stack([payload, other, payload, other])
    agreed("dequantise", payloads, *layout.fields)
    for shard in range(layout.shards):
        pieces = payloads.view(4, layout.shards, -1)[:, shard].contiguous()
        owned = torch.randn(layout.shard_numel)
        for out_bits in (4, 8):
            agreed("requantise", pieces, owned, seed, shard, out_bits, *layout.fields)
    flat[layout.numel // 2] = torch.inf
    agreed("quantise", flat, residual, seed, *layout.fields)


@pytest.mark.parametrize("ratio", [0.001, 0.01, 0.3, 1.0])
@pytest.mark.parametrize("numel", [5, CHUNK, 5 * CHUNK + 333])
def test_topk(numel, ratio, implementation):
    layout = TopKLayout(numel, ratio)
    for flat in (bucket(numel), torch.ones(numel), torch.randn(numel).bfloat16()):
        payload, _ = agreed("topk_encode", flat, torch.randn(numel) * 1e-3, *layout.fields)
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


def test_compiled_by_inductor(implementation):
    layout = Layout((4096, 7), bits=4)

    def exchange(flat, residual):
        payload, lost = torch.ops.fxpasses.quantise(flat * 2, residual, None, *layout.fields)
        return torch.ops.fxpasses.dequantise(torch.stack([payload, payload]), *layout.fields), lost

    args = torch.randn(layout.numel).cuda(), torch.randn(layout.numel).cuda()
    compiled = torch.compile(exchange, fullgraph=True)(*args)
    assert all(map(torch.equal, compiled, exchange(*args)))


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
