"""What an input calls, for commands that run it many times."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from fxpasses.cli.called import called
from fxpasses.cli.errors import InputError
from fxpasses.cli.inputs import resolve

MODEL = """
import torch
from torch import nn


def double(x):
    return 2 * x


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(2, 3)

    def forward(self, x, shift=0.0):
        return double(self.inner(x)) + shift


net = Net()
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    return tmp_path


def script(folder: Path, code: str):
    (folder / "train.py").write_text(MODEL + code)
    return called(resolve("train.py"))


def save(module: nn.Module, *args: torch.Tensor) -> torch.export.ExportedProgram:
    program = torch.export.export(module, args)
    torch.export.save(program, "program.pt2")
    return program


def test_a_program(folder):
    (folder / "own.py").write_text(MODEL + "def make():\n    return net, (torch.ones(4, 2),)\n")
    call = called(resolve("own.py:make"))
    assert call.function(*call.args, **call.kwargs).shape == (4, 3)
    assert call.options == {}


def test_an_exported_program_is_run_with_what_it_was_exported_with(folder):
    model, x = nn.Sequential(nn.Linear(2, 3), nn.ReLU()), torch.randn(4, 2)
    save(model, x)
    call = called(resolve("program.pt2"))
    assert torch.equal(call.function(*call.args, **call.kwargs), model(x))
    named = dict(call.function.named_parameters())
    assert list(named) == ["0.weight", "0.bias"] and all(p.requires_grad for p in named.values())


def test_an_exported_program_without_inputs(folder):
    program = torch.export.export(nn.Linear(2, 3), (torch.ones(4, 2),))
    program.example_inputs = None
    torch.export.save(program, "program.pt2")
    with pytest.raises(InputError, match=r"program.pt2: holds no example inputs; save it with"):
        called(resolve("program.pt2"))


COMPILE = "torch.compile(%s, backend='hardened', options={'precision': 'bf16'})"


@pytest.mark.parametrize(
    ("code", "shift"),
    [
        (f"compiled = {COMPILE % 'net'}\nrun = lambda: compiled(torch.ones(4, 2), shift=1.0)\n", 1),
        (
            "net.compile(backend='hardened', options={'precision': 'bf16'})\n"
            "run = lambda: net(torch.ones(4, 2))\n",
            0,
        ),
        (
            "@torch.compile(backend='hardened', options={'precision': 'bf16'})\n"
            "def step(x):\n    return net(x)\n"
            "run = lambda: step(torch.ones(4, 2))\n",
            0,
        ),
    ],
    ids=["module", "in place", "decorated"],
)
def test_a_script_runs_up_to_the_first_call_of_what_it_compiles(folder, code, shift):
    rest = "try:\n    run()\nexcept Exception:\n    pass\nopen('behind', 'w')\n"
    call = script(folder, code + rest)
    assert not (folder / "behind").exists()
    assert call.options == {"precision": "bf16"}
    assert call.kwargs == ({"shift": 1.0} if shift else {})
    net = sys.modules["__main__"].net
    expected = 2 * net.inner(torch.ones(4, 2)) + shift
    assert torch.equal(call.function(*call.args, **call.kwargs), expected)


def test_a_compiled_module_answers_as_the_module_until_it_is_called(folder):
    code = f"compiled = {COMPILE % 'net'}\n" + (
        "compiled.eval()\n"
        "assert not net.inner.training and compiled.inner is net.inner\n"
        "optimizer = torch.optim.SGD(compiled.parameters(), lr=0.1)\n"
        "assert len(optimizer.param_groups[0]['params']) == 2\n"
        "compiled(torch.ones(4, 2))\n"
    )
    assert not script(folder, code).function.training


def test_what_is_compiled_for_another_backend_is_left_to_it(folder):
    code = "double = torch.compile(double, backend='eager')\n" + (
        f"assert double(torch.ones(1)).item() == 2.0\n{COMPILE % 'net'}(torch.ones(4, 2))\n"
    )
    original = torch.compile
    assert isinstance(script(folder, code).function, nn.Module)
    assert torch.compile is original


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("net(torch.ones(4, 2))", "train.py: it calls nothing that it compiles with backend='hard"),
        ("raise KeyError('batch')", "KeyError: 'batch'"),
    ],
)
def test_a_script_that_does_not_come_to_a_call(folder, code, message):
    with pytest.raises(InputError, match=message) as caught:
        script(folder, code)
    assert "\n" not in str(caught.value)
