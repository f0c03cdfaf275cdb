"""The compiled kernels for the CPU: built with the machine's C++ compiler when they are first needed, kept on
disk.

They are plain C++ behind a C interface, so that a build takes seconds, needs no header of torch, and serves
every version of it. `custom_ops.kernels` chooses them, for tensors on the CPU.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch

from custom_ops.kernels import CHOICE

BYTES_PER_THREAD = 2**18  # less is done sooner than another thread is woken
SOURCES = Path(__file__).parent / "cpp"
COMPILERS = ("g++", "clang++", "c++")
# Without contraction: a fused multiply-add rounds once where other machines round twice.
FLAGS = (
    *("-O3", "-march=native", "-std=c++17", "-shared", "-fPIC", "-fopenmp"),
    *("-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"),
)
X86_FLAGS = ("-mprefer-vector-width=512",)


def call(function: str, *args: torch.Tensor | ctypes.Structure | ctypes.Array | int | None) -> None:
    """Run a kernel with as many threads as torch uses, or with fewer if its tensors are small.

    Args:
        function: its name, without the prefix.
        args: tensors as pointers to their first element, structures and arrays as pointers, integers as
            int64; None is a null pointer.

    Raises:
        RuntimeError: when the kernels can't be built.
    """
    largest_bytes = max(arg.nbytes for arg in args if isinstance(arg, torch.Tensor))
    threads = min(torch.get_num_threads(), 1 + largest_bytes // BYTES_PER_THREAD)
    getattr(library(), f"fxpasses_{function}")(*map(_argument, (*args, threads)))


def _argument(value: torch.Tensor | ctypes.Structure | ctypes.Array | int | None) -> object:
    if isinstance(value, torch.Tensor):
        return ctypes.c_void_p(value.data_ptr())
    if isinstance(value, int):
        return ctypes.c_int64(value)
    return None if value is None else ctypes.byref(value)


@functools.cache
def library() -> ctypes.CDLL:
    """The kernels, built if need be. Calling it early moves the build out of the first step.

    Raises:
        RuntimeError: when there is no compiler, or it refuses the sources.
    """
    compiler = _compiler()
    flags = FLAGS + (X86_FLAGS if platform.machine() in ("x86_64", "AMD64") else ())
    path = _cache() / f"kernels-{_key(compiler, flags)}.so"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        with _locked(path.with_suffix(".lock")):
            if not path.exists():
                _build(compiler, flags, path)
    return ctypes.CDLL(str(path))


def _compiler() -> str:
    named = os.environ.get("CXX")
    for name in (named,) if named else COMPILERS:
        if shutil.which(name):
            return name
    raise RuntimeError(
        f"no C++ compiler ({'CXX=' + named if named else ', '.join(COMPILERS)}) was found, and "
        "compression on the CPU builds its kernels with one; install g++, name a compiler in CXX, or set "
        f"{CHOICE}=reference for the same results from plain PyTorch, many times slower"
    )


def _key(compiler: str, flags: tuple[str, ...]) -> str:
    """Of what the binary depends on. Macros tell the compiler's version and the CPU's instructions."""
    macros = _run([compiler, *flags, "-dM", "-E", "-x", "c++", os.devnull])
    digest = hashlib.sha256(repr((compiler, flags, macros)).encode())
    for source in sorted(SOURCES.glob("*.[ch]*")):
        digest.update(source.read_bytes())
    return digest.hexdigest()[:16]


def _cache() -> Path:
    """Where torch keeps extensions: TORCH_EXTENSIONS_DIR, or the user's cache."""
    root = os.environ.get("TORCH_EXTENSIONS_DIR")
    user = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root or Path(user) / "torch_extensions") / "fxpasses"


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """So that of several ranks on a machine one builds."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _build(compiler: str, flags: tuple[str, ...], path: Path) -> None:
    print(f"fxpasses: building its CPU kernels with {compiler}, once: {path}", file=sys.stderr)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        built = Path(folder) / path.name
        _run([compiler, *flags, *map(str, sorted(SOURCES.glob("*.cpp"))), "-o", str(built)])
        built.rename(path)  # whole or not at all


def _run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(
            f"the CPU kernels of fxpasses can't be built: {' '.join(command)}\n{done.stderr.strip()}\n"
            f"g++ 9 or newer, or clang++ with OpenMP, should do (name it in CXX); {CHOICE}=reference gives "
            "the same results from plain PyTorch, many times slower"
        )
    return done.stdout
