"""What compiled kernels need of a GPU, read from the machine code by NVIDIA's tools."""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import NamedTuple

import pytest

ARCHITECTURES = ("sm_80", "sm_90")


class Usage(NamedTuple):
    """Of a thread, and of a block; in registers and bytes."""

    registers: int
    stack: int
    local: int
    shared: int

    @property
    def spills(self) -> bool:
        """Whether something that should be in registers is in memory."""
        return bool(self.stack or self.local)


def usage(cubin: bytes, tool: str) -> dict[str, Usage]:
    """By kernel."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernels.cubin"
        path.write_bytes(cubin)
        done = subprocess.run(
            [tool, "-res-usage", str(path)], capture_output=True, text=True, check=True, timeout=60
        )
    pattern = r"Function (\S+):\s+REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)"
    return {
        name: Usage(int(registers), int(stack), int(local), int(shared))
        for name, registers, stack, shared, local in re.findall(pattern, done.stdout)
    }


def find_cuobjdump() -> str:
    """That of a toolkit, or Triton's; the test is skipped where there is none."""
    found = shutil.which("cuobjdump")
    if found is None:
        triton = pytest.importorskip("triton")
        inside = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
        found = str(inside) if inside.exists() else None
    if found is None:
        pytest.skip("no cuobjdump")
    return found
