"""Launching kernels: compiled by NVRTC when first needed, with sizes as constants, and loaded through the CUDA
driver's public interface."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from custom_ops.cuda import nvrtc

SOURCES = Path(__file__).parent
THREADS = 256  # of a block, where nothing else is said

Argument = torch.Tensor | int | float | None


def launch(
    kernel: str,
    blocks: tuple[int, int],
    *args: Argument,
    constants: Mapping[str, int] | None = None,
    threads: int = THREADS,
) -> None:
    """Start a kernel on the current stream of the current device.

    Args:
        kernel: `family.name`, of `family.cu`.
        blocks: the grid, x and y.
        args: tensors as pointers, integers as 64 bits, floats as 32; None is a null pointer.
        constants: what the source is compiled with.

    Raises:
        ValueError: for a tensor that is not on a GPU.
        RuntimeError: when it can't be compiled, loaded or started.
    """
    if not all(blocks):
        return
    for arg in args:
        if isinstance(arg, torch.Tensor) and not arg.is_cuda:
            raise ValueError(f"{kernel}: got a tensor on {arg.device} beside tensors on a GPU")
    device = torch.cuda.current_device()
    _enter(device)
    stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
    function = _function(kernel, tuple(sorted((constants or {}).items())), device)
    values = [native(arg) for arg in args]
    pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(v) for v in values))
    shape = (*blocks, 1, threads, 1, 1)
    _check(kernel, _driver().cuLaunchKernel(function, *shape, 0, stream, pointers, None))


def _enter(device: int) -> None:
    """Make the context that torch uses this thread's. A new thread has none until something of CUDA's runtime
    runs in it; taking memory from torch's cache is no such thing."""
    context, handle = ctypes.c_void_p(), ctypes.c_int()
    _check("context", _driver().cuCtxGetCurrent(ctypes.byref(context)))
    if context.value is None:
        _check("device", _driver().cuDeviceGet(ctypes.byref(handle), device))
        _check("context", _driver().cuDevicePrimaryCtxRetain(ctypes.byref(context), handle))
        _check("context", _driver().cuCtxSetCurrent(context))


def native(arg: Argument) -> ctypes.c_void_p | ctypes.c_int64 | ctypes.c_float:
    """As the kernels take it."""
    if arg is None or isinstance(arg, torch.Tensor):
        return ctypes.c_void_p(None if arg is None else arg.data_ptr())
    return ctypes.c_float(arg) if isinstance(arg, float) else ctypes.c_int64(int(arg))


def source(family: str, constants: Mapping[str, int]) -> str:
    """What is compiled."""
    defines = "".join(f"#define {name} {int(value)}\n" for name, value in constants.items())
    parts = [(SOURCES / name).read_text() for name in ("common.cuh", f"{family}.cu")]
    return defines + "\n".join(parts).replace("#pragma once", "")


@functools.cache
def _function(kernel: str, constants: tuple[tuple[str, int], ...], device: int) -> ctypes.c_void_p:
    family, name = kernel.split(".")
    function = ctypes.c_void_p()
    module = _module(family, constants, device)
    _check(kernel, _driver().cuModuleGetFunction(ctypes.byref(function), module, name.encode()))
    return function


@functools.cache
def _module(family: str, constants: tuple[tuple[str, int], ...], device: int) -> ctypes.c_void_p:
    major, minor = torch.cuda.get_device_capability(device)
    code = nvrtc.cubin(source(family, dict(constants)), f"{family}.cu", f"sm_{major}{minor}")
    module = ctypes.c_void_p()
    _check(family, _driver().cuModuleLoadData(ctypes.byref(module), code))
    return module


@functools.cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def _check(what: str, status: int) -> None:
    if status:
        text = ctypes.c_char_p()
        _driver().cuGetErrorString(status, ctypes.byref(text))
        reason = text.value.decode() if text.value else "unknown error"
        raise RuntimeError(f"CUDA: {what}: {reason} ({status})")


def flat_kind(flat: torch.Tensor) -> dict[str, Any]:
    """The constant that says a bucket's dtype."""
    return {"FLAT": {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}[flat.dtype]}


def blocks_for(work: int, each: int) -> tuple[int, int]:
    return -(-work // each), 1


def finish(
    family: str,
    constants: Mapping[str, int],
    payload: torch.Tensor,
    residual: torch.Tensor | None,
    lost: torch.Tensor,
    bad: torch.Tensor,
    gaps: torch.Tensor,
    held: int,
    pieces: torch.Tensor | None = None,
) -> None:
    """The last step of what encodes; arguments as in `custom_ops.triton.finish`."""
    rows, row_bytes = (0, 0) if pieces is None else (pieces.shape[0], pieces.shape[1])
    work = max(payload.nbytes // 8, lost.numel())
    launch(
        f"{family}.finish",
        (min(512, 1 + work // THREADS), 1),
        *(payload, residual, lost, bad, pieces, rows, row_bytes),
        *(gaps, gaps.shape[1], gaps.shape[2], payload.nbytes, held, lost.numel()),
        constants=constants,
    )


def processors(device: torch.device) -> int:
    """Multiprocessors of a GPU."""
    return torch.cuda.get_device_properties(device).multi_processor_count
