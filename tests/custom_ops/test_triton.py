"""Triton's kernels: the tests of the operators, in its interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from custom_ops.kernels import CHOICE
from tests.custom_ops.buckets import EXAMPLES

FAMILIES = ("quantise", "topk", "wire16", "checksum", "gradients", "faults")
# Those of the CPU's threads; those that draw or scan very much, which the interpreter takes minutes for.
LEFT_OUT = "not threads and not average and not unrelated and not whatever and not compiled_graph"


@pytest.mark.timeout(600)
def test_the_same_properties_hold_in_the_interpreter():
    """In a process of its own: Triton looks at TRITON_INTERPRET when kernels are defined."""
    pytest.importorskip("triton")
    folder = Path(__file__).parent
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-q", "--show-capture=no", "-p", "no:cacheprovider"),
            *(f"{folder}/test_{family}.py" for family in FAMILIES),
            *("-k", LEFT_OUT),
        ],
        env={**os.environ, CHOICE: "triton", "TRITON_INTERPRET": "1", EXAMPLES: "2"},
        cwd=folder.parents[1],
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    assert " passed" in done.stdout and "skipped" not in done.stdout.splitlines()[-1]
