"""CUDA C++: the tests of the operators, emulated on the CPU; and as machine code, by NVRTC and nvcc."""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from custom_ops.cuda import driver, nvrtc
from custom_ops.kernels import CHOICE
from tests.custom_ops.buckets import EXAMPLES, run_families
from tests.custom_ops.cubins import ARCHITECTURES, find_cuobjdump, usage

STEP_8 = 0x3B810285  # a float's bits; any will do to compile
GROUPS = {"GROUP": 128, "SYMMETRIC": 1, "ROTATE": 0, "STOCHASTIC": 0, "WORLD": 4, "STEP": STEP_8}
# By family, what its source is compiled with.
CONSTANTS = {
    "quantise": [
        {**GROUPS, "BITS": 8, "OUT_BITS": 8, "FLAT": 0},
        {**GROUPS, "BITS": 4, "OUT_BITS": 4, "FLAT": 1},
        {**GROUPS, "BITS": 4, "OUT_BITS": 8, "FLAT": 2, "SYMMETRIC": 0, "STOCHASTIC": 1},
        {**GROUPS, "BITS": 4, "OUT_BITS": 4, "FLAT": 0, "ROTATE": 1, "GROUP": 1024},
        {**GROUPS, "BITS": 8, "OUT_BITS": 4, "FLAT": 0, "GROUP": 512},
    ],
    "topk": [{"THREADS": 512, "WORLD": 4, "FLAT": flat} for flat in (0, 1)],
    "wire16": [{"BRAIN": brain, "WORLD": 4, "FLAT": 0} for brain in (0, 1)],
    "checksum": [{}],
    "gradients": [{"THREADS": 256, "FLAT": 1}],
    "faults": [{"SIZE": 2}],
}
FAMILIES = list(CONSTANTS)


@pytest.mark.timeout(600)
def test_the_same_properties_hold_in_the_emulator():
    run_families({**os.environ, CHOICE: "cuda", EXAMPLES: "1"}, "-p", "tests.custom_ops.emulated")


@pytest.mark.parametrize("family", FAMILIES)
def test_machine_code_of_nvrtc(family):
    """No spills."""
    if not nvrtc.is_found():
        pytest.skip("no NVRTC")
    tool = find_cuobjdump()
    for constants, arch in itertools.product(CONSTANTS[family], ARCHITECTURES):
        text = driver.source(family, constants)
        check(usage(nvrtc.cubin(text, f"{family}.cu", arch), tool), family, arch)


@pytest.mark.parametrize("family", FAMILIES)
def test_machine_code_of_nvcc(family, tmp_path):
    """The same by the other compiler, its warnings as errors, but for unused constants."""
    if shutil.which("nvcc") is None:
        pytest.skip("no nvcc")
    tool = find_cuobjdump()
    source, cubin = tmp_path / f"{family}.cu", tmp_path / f"{family}.cubin"
    source.write_text(driver.source(family, CONSTANTS[family][0]))
    subprocess.run(
        [
            *("nvcc", "-cubin", "-std=c++17", "-fmad=false", f"-arch={ARCHITECTURES[0]}"),
            *("-diag-suppress", "177", "-Werror", "all-warnings", str(source), "-o", str(cubin)),
        ],
        check=True,
        timeout=120,
    )
    check(usage(cubin.read_bytes(), tool), family, ARCHITECTURES[0])


def check(found, family: str, arch: str) -> None:
    assert "finish" in found and len(found) > 1
    for kernel, used in found.items():
        print(
            f"{family + '.' + kernel:22} {arch}  {used.registers:3} registers  {used.shared} bytes"
        )
        assert not used.spills, (kernel, arch, used)


def test_what_does_not_compile_is_quoted():
    if not nvrtc.is_found():
        pytest.skip("no NVRTC")
    with pytest.raises(
        RuntimeError, match=r"NVRTC can't compile wrong.cu for sm_80:\n[\s\S]*nothing"
    ):
        nvrtc.cubin("int x = nothing;", "wrong.cu", "sm_80")


def test_without_nvrtc(monkeypatch):
    monkeypatch.setattr(nvrtc, "_library", lambda: None)
    assert not nvrtc.is_found()
    with pytest.raises(RuntimeError, match="NVRTC was not found: install nvidia-cuda-nvrtc"):
        nvrtc.cubin("", "x.cu", "sm_80")


class Driver:
    """CUDA's, as far as contexts go, of a thread that has `context`; remembers what is called."""

    def __init__(self, context: int | None) -> None:
        self.context, self.called = context, []

    def __getattr__(self, name):
        def function(result, *_):
            self.called.append(name)
            if name == "cuCtxGetCurrent":
                result._obj.value = self.context
            if name == "cuDevicePrimaryCtxRetain":
                result._obj.value = 7
            if name == "cuCtxSetCurrent":
                self.context = result.value
            return 0

        return function


def test_a_thread_without_a_context_takes_that_of_its_device(monkeypatch):
    fake = Driver(None)
    monkeypatch.setattr(driver, "_driver", lambda: fake)
    driver._enter(0)
    assert fake.context == 7
    fake.called.clear()
    driver._enter(0)
    assert fake.called == ["cuCtxGetCurrent"] and fake.context == 7


def test_sources_need_no_headers():
    """NVRTC has none."""
    for source in Path(driver.SOURCES).glob("*.cu*"):
        assert "#include" not in source.read_text()
