"""The kernels of `custom_ops.cuda` on the CPU: their sources, compiled by the C++ compiler with an emulator of
CUDA's threads in front. A plugin of pytest (`-p tests.custom_ops.emulated`) that runs them in place of the
operators' implementation.
"""

from __future__ import annotations

import ctypes
import functools
import os
import re
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path

from custom_ops import kernels
from custom_ops.cuda import driver

EMULATOR = Path(__file__).parent / "cuda_emulator.h"
FLAGS = ("-std=c++20", "-O1", "-ffp-contract=off", "-fno-strict-aliasing", "-fPIC", "-w")


def launch(
    kernel: str,
    blocks: tuple[int, int],
    *args: driver.Argument,
    constants: Mapping[str, int] | None = None,
    threads: int = driver.THREADS,
) -> None:
    """As `driver.launch`."""
    if not all(blocks):
        return
    family, name = kernel.split(".")
    library = built(family, tuple(sorted((constants or {}).items())))
    values = [driver.native(arg) for arg in args]
    pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(v) for v in values))
    getattr(library, f"launch_{name}")(*blocks, threads, pointers)


@functools.cache
def built(family: str, constants: tuple[tuple[str, int], ...]) -> ctypes.CDLL:
    source = driver.source(family, dict(constants))
    names = re.findall(
        r'extern "C" __global__ void (?:__launch_bounds__\([\w, ]+\)\s*)?(\w+)\(', source
    )
    entries = "".join(
        f'extern "C" void launch_{name}(int x, int y, int threads, void** pointers) '
        f"{{ emulator::launch({name}, x, y, threads, pointers); }}\n"
        for name in names
    )
    with tempfile.TemporaryDirectory(prefix="emulated-") as folder:
        text, path = Path(folder) / "all.cpp", Path(folder) / "all.so"
        text.write_text(f'#include "{EMULATOR.name}"\n{source}\n{entries}')
        compiled(f"-I{header().name}", "-shared", str(text), "-o", str(path))
        return ctypes.CDLL(str(path))


@functools.cache
def header() -> tempfile.TemporaryDirectory:
    """A folder with the emulator's header as the compiler keeps it: most of what is compiled is in it."""
    folder = tempfile.TemporaryDirectory(prefix="emulator-")
    compiled("-x", "c++-header", str(EMULATOR), "-o", f"{folder.name}/{EMULATOR.name}.gch")
    return folder


def compiled(*arguments: str) -> None:
    done = subprocess.run(["g++", *FLAGS, *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def pytest_configure() -> None:
    """Patched before any module of `custom_ops.cuda` takes its names."""
    driver.launch = launch
    driver.processors = lambda device: 1
    chosen = kernels._on_cpu
    kernels._on_cpu = lambda choice: "cuda" if choice == "cuda" else chosen(choice)
    assert os.environ[kernels.CHOICE] == "cuda"
