"""Triton's kernels: the tests of the operators, in its interpreter."""

from __future__ import annotations

import os

import pytest

from custom_ops.kernels import CHOICE
from tests.custom_ops.buckets import EXAMPLES, run_families


@pytest.mark.timeout(600)
def test_the_same_properties_hold_in_the_interpreter():
    """In a process of its own: Triton looks at TRITON_INTERPRET when kernels are defined."""
    pytest.importorskip("triton")
    run_families({**os.environ, CHOICE: "triton", "TRITON_INTERPRET": "1", EXAMPLES: "2"})
