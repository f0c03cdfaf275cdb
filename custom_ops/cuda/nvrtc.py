"""NVRTC, the compiler of CUDA C++ that is a library: sources in, machine code out, without a GPU.

It comes with torch for CUDA, and as the package nvidia-cuda-nvrtc. Its C interface is public and stable.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
from pathlib import Path

import torch

# Without contraction: a fused multiply-add rounds once where other machines round twice.
FLAGS = (
    "--std=c++17",
    "--fmad=false",
    "--ftz=false",
    "--prec-div=true",
    "--extra-device-vectorization",
)
_MAJORS = ("13", "12")
_TOOLKIT = Path("/usr/local/cuda/lib64")


def is_found() -> bool:
    """Whether there is an NVRTC of the major version that torch was built for, or any if it was for none."""
    return _library() is not None


def cubin(source: str, name: str, arch: str) -> bytes:
    """Machine code.

    Args:
        source: CUDA C++ without includes.
        name: what messages call it.
        arch: `sm_90` for example.

    Raises:
        RuntimeError: when there is no NVRTC, or it refuses the source.
    """
    library = _library()
    if library is None:
        raise RuntimeError(
            "NVRTC was not found: install nvidia-cuda-nvrtc (of the CUDA version that torch is for)"
        )
    program = ctypes.c_void_p()
    _check(
        library,
        library.nvrtcCreateProgram(
            ctypes.byref(program), source.encode(), name.encode(), 0, None, None
        ),
        name,
    )
    try:
        flags = (f"--gpu-architecture={arch}", *FLAGS)
        options = (ctypes.c_char_p * len(flags))(*(flag.encode() for flag in flags))
        failed = library.nvrtcCompileProgram(program, len(flags), options)
        if failed:
            log = _text(library.nvrtcGetProgramLogSize, library.nvrtcGetProgramLog, program)
            raise RuntimeError(f"NVRTC can't compile {name} for {arch}:\n{log.decode().rstrip()}")
        return _text(library.nvrtcGetCUBINSize, library.nvrtcGetCUBIN, program)
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))


@functools.cache
def _library() -> ctypes.CDLL | None:
    majors = _MAJORS if torch.version.cuda is None else (torch.version.cuda.split(".")[0],)
    names = [f"libnvrtc.so.{major}" for major in majors]
    folders = [*_package_folders(), _TOOLKIT]
    for path in (*names, *(folder / name for folder in folders for name in names)):
        if isinstance(path, Path) and not path.exists():
            continue
        try:
            return ctypes.CDLL(str(path))
        except OSError:
            if isinstance(path, Path):
                raise  # it is there, and broken
    return None


def _package_folders() -> list[Path]:
    """Where the packages of NVIDIA keep libraries."""
    spec = importlib.util.find_spec("nvidia")
    roots = spec.submodule_search_locations or [] if spec else []
    return sorted(folder for root in roots for folder in Path(root).glob("*/lib"))


def _text(size_of, text_of, program: ctypes.c_void_p) -> bytes:  # type: ignore[no-untyped-def]
    size = ctypes.c_size_t()
    size_of(program, ctypes.byref(size))
    buffer = ctypes.create_string_buffer(size.value)
    text_of(program, buffer)
    return buffer.raw


def _check(library: ctypes.CDLL, failed: int, name: str) -> None:
    if failed:
        library.nvrtcGetErrorString.restype = ctypes.c_char_p
        raise RuntimeError(f"NVRTC: {name}: {library.nvrtcGetErrorString(failed).decode()}")
