"""Triton's kernels as machine code, on machines with no GPU: every launch of every operator is compiled."""

from __future__ import annotations

import re

import pytest
import torch

from custom_ops import checksum, faults, gradients, kernels, quantise, topk, wire16
from custom_ops.layout import Layout, Layout16, TopKLayout
from tests.custom_ops.cubins import ARCHITECTURES, find_cuobjdump, usage

if not kernels.interpreted():
    triton = pytest.importorskip("triton")
else:
    pytest.skip("kernels are interpreted in this process", allow_module_level=True)

from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

N = 2**16


@pytest.fixture
def compiled(monkeypatch):
    """[(kernel, architecture, what Triton made)] of each launch, which does nothing else."""
    found = []

    def launch(self, *args, grid, warmup=False, num_warps=4, **kwargs):
        options = {"num_warps": num_warps, "enable_fp_fusion": kwargs.pop("enable_fp_fusion", True)}
        given = dict(zip(self.arg_names, args, strict=False)) | kwargs
        source = ASTSource(self, *described(self, given))
        for arch in ARCHITECTURES:
            target = GPUTarget("cuda", int(arch[3:]), 32)
            found.append((self.fn.__name__, arch, triton.compile(source, target, options)))

    monkeypatch.setattr(JITFunction, "run", launch)
    monkeypatch.setattr(triton.runtime.autotuner.Autotuner, "run", hungriest)
    monkeypatch.setattr(kernels, "implementation", lambda device: "triton")
    monkeypatch.setattr("custom_ops.triton.topk._programs", lambda device: 264)
    return found


def hungriest(self, *args, **kwargs):
    """Of what the autotuner tries, that with most elements a thread."""
    self.nargs = dict(zip(self.arg_names, args, strict=False))
    config = max(self.prune_configs(kwargs), key=lambda c: c.kwargs["TILE"] / c.num_warps)
    self.fn.run(*args, **kwargs, **config.all_kwargs())


def described(kernel, given):
    """Signature, constants and attributes of a launch, as Triton would find them."""
    signature, constants, attributes = {}, {}, {}
    for index, parameter in enumerate(kernel.params):
        value = given[parameter.name]
        may_specialise = not parameter.do_not_specialize
        if parameter.is_constexpr or value is None or (may_specialise and is_one(value)):
            signature[parameter.name] = "constexpr"
            constants[parameter.name] = value
            continue
        signature[parameter.name] = type_of(value)
        address = value.data_ptr() if isinstance(value, torch.Tensor) else value
        if isinstance(address, int) and address % 16 == 0 and may_specialise:
            attributes[(index,)] = [["tt.divisibility", 16]]
    return signature, constants, attributes


def is_one(value) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value == 1


def type_of(value) -> str:
    if isinstance(value, torch.Tensor):
        name = str(value.dtype).removeprefix("torch.")
        return "*" + {"uint8": "u8", "bfloat16": "bf16"}.get(
            name, name.replace("float", "fp").replace("int", "i")
        )
    return "fp32" if isinstance(value, float) else ("i32" if abs(value) < 2**31 else "i64")


def launches(name: str) -> None:
    """Call the operator with what matters for its code: bits, rotation, zero points, rounding, dtypes."""
    flat, residual, seed = torch.zeros(N), torch.zeros(N), torch.tensor(3)
    if name == "quantise":
        quantise.quantise(flat.bfloat16(), None, None, *Layout((N,), bits=4).fields)
        quantise.quantise(flat, residual, None, *Layout((N,)).fields)
        for layout in (Layout((N,), symmetric=False), Layout((N - 1, 1), 2, 4, rotate=True)):
            quantise.quantise(flat, residual, seed, *layout.fields)
    elif name == "dequantise":
        for layout in (Layout((N,), 1, 8, symmetric=False), Layout((N,), 1, 4, rotate=True)):
            payloads = torch.zeros(4, layout.payload_bytes, dtype=torch.uint8)
            quantise.dequantise(payloads, *layout.fields)
    elif name == "requantise":
        for layout in (Layout((N,), bits=4), Layout((N,), 1, 8, symmetric=False, rotate=True)):
            payloads = torch.zeros(4, layout.payload_bytes, dtype=torch.uint8)
            quantise.requantise(payloads, residual, seed, 0, 8, *layout.fields)
    elif name == "topk":
        layout = TopKLayout(N)
        topk.topk_encode(flat, residual, *layout.fields)
        topk.topk_decode(torch.zeros(4, layout.payload_bytes).byte(), *layout.fields)
    elif name == "wire16":
        for dtype in ("fp16", "bf16"):
            layout = Layout16(N, 2, dtype)
            wire16.encode16(flat, *layout.fields)
            wire16.decode16(torch.zeros(4, layout.payload_bytes).byte(), *layout.fields)
    else:
        checksum.seal(torch.zeros(N).byte(), 1)
        checksum.broken(torch.zeros(2, N).byte(), 1)
        gradients.unscale(flat.bfloat16(), torch.ones(()))
        faults.strike(flat, torch.zeros(5).long(), 1)


@pytest.mark.parametrize(
    "name", ["quantise", "dequantise", "requantise", "topk", "wire16", "others"]
)
def test_machine_code(name, compiled):
    """No spills; nothing contracted, flushed to zero or divided approximately."""
    tool = find_cuobjdump()
    launches(name)
    assert compiled
    if name == "quantise":  # accesses of 16 bytes, where a bucket is one parameter
        codes = [made.asm["ptx"] for kernel, _, made in compiled if kernel == "_quantise"]
        assert all("ld.global.v4.b32" in ptx for ptx in codes[:4])
    if (
        name == "dequantise"
    ):  # of 8, of the first row and the others, whose distance is no multiple of 16
        codes = [made.asm["ptx"] for kernel, _, made in compiled if kernel == "_dequantise"]
        assert all(ptx.count("ld.global.v2.b32") == 4 for ptx in codes[:2])
    for kernel, arch, made in compiled:
        (found,) = usage(made.asm["cubin"], tool).values()
        print(f"{kernel:14} {arch}  {found.registers:3} registers  {made.metadata.num_warps} warps")
        assert not found.spills, (kernel, arch, found)
        ptx = made.asm["ptx"]
        assert not re.search(r"\.ftz|div\.(full|approx)|rcp\.approx|fma\.rn\.f32", ptx), kernel
