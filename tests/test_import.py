"""`import fxpasses` is cheap, and its names are where they should be."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

import fxpasses


def modules_after(code: str) -> set[str]:
    """`sys.modules` of a process of its own after it ran this code."""
    program = f"import json, sys\n{code}\nprint(json.dumps(sorted(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120
    )
    return set(json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.parametrize(
    "code",
    [
        "import fxpasses",
        "import fxpasses; fxpasses.__version__, fxpasses.__all__",
        "import fxpasses; fxpasses.Hardening(bucket_mb=3)",
        "import fxpasses.cli",
        "import custom_ops",
    ],
)
def test_the_import_loads_no_torch(code):
    loaded = modules_after(code)
    assert {code.split(";")[0].split()[1]} <= loaded
    assert not {
        name for name in loaded if name.split(".")[0] in ("torch", "triton", "numpy", "sympy")
    }


def test_using_a_name_initialises_no_process_group_and_no_inductor():
    code = "import fxpasses; fxpasses.TrainingGraph, fxpasses.register_pass, fxpasses.splice"
    program = f"{code}\nimport torch.distributed as d\nassert not d.is_initialized()"
    loaded = modules_after(program)
    assert "fxpasses.graph" in loaded
    assert not loaded & {"triton", "torch._inductor.compile_fx", "fxpasses.backend"}


def test_custom_operators_do_not_import_the_package():
    assert "fxpasses" not in modules_after("import custom_ops, torch")


@pytest.mark.parametrize("name", fxpasses.__all__)
def test_public_names_are_importable(name):
    value = getattr(fxpasses, name)
    assert value.__module__.startswith("fxpasses.") and value.__name__ == name


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'fxpasses' has no attribute 'hardened'"):
        _ = fxpasses.hardened
