"""What a word on the command line stands for."""

from __future__ import annotations

import json
import sys
import zipfile
from pathlib import Path

import pytest
import torch
from torch import nn

from fxpasses.cli.errors import InputError
from fxpasses.cli.inputs import Exported, Program, Script, resolve

SOURCE = """
import torch
from torch import nn


def make():
    return nn.Linear(2, 3), (torch.ones(4, 2),)


def make_one():
    return nn.Linear(2, 3), torch.ones(4, 2)


def makes_less():
    return nn.Linear(2, 3)


def fails():
    raise KeyError("batch")


class Model(nn.Linear):
    example_inputs = (torch.ones(4, 2),)

    def __init__(self):
        super().__init__(2, 3)


class Drawn(Model):
    def example_inputs(self):
        return torch.ones(4, self.in_features)


class Bare(nn.Linear):
    def __init__(self):
        super().__init__(2, 3)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current directory, with a module in it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    (tmp_path / "own_models.py").write_text(SOURCE)
    return tmp_path


@pytest.mark.parametrize("attribute", ["make", "make_one", "Model", "Drawn"])
@pytest.mark.parametrize("place", ["own_models", "own_models.py"])
def test_a_module_and_example_inputs(folder, place, attribute):
    found = resolve(f"{place}:{attribute}")
    assert isinstance(found, Program) and found.name == f"{place}:{attribute}"
    assert found.function(*found.args).shape == (4, 3)


def test_a_script_is_run_as_it_is(folder, capsys):
    (folder / "train.py").write_text("import sys, own_models\nprint(__name__, sys.argv)\n")
    found = resolve("train.py")
    assert isinstance(found, Script)
    before = (list(sys.path), list(sys.argv))
    found.run(["--steps", "3"])
    assert capsys.readouterr().out == "__main__ ['train.py', '--steps', '3']\n"
    assert (sys.path, sys.argv) == before


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("x = 1\nraise RuntimeError('out of data')", "train.py:2: RuntimeError: out of data"),
        ("import sys\nsys.exit(3)", "train.py: the script ended with 3"),
        ("x = (", "train.py: SyntaxError: '(' was never closed"),
        ("import nowhere_at_all", "train.py:1: ModuleNotFoundError: No module named"),
    ],
)
def test_a_script_that_fails(folder, code, message):
    (folder / "train.py").write_text(code)
    with pytest.raises(InputError) as caught:
        resolve("train.py").run()
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_a_script_may_end_itself(folder):
    lines = ["import sys", "open('before', 'w')", "sys.exit(0)", "open('behind', 'w')"]
    (folder / "train.py").write_text("\n".join(lines))
    resolve("train.py").run()
    assert (folder / "before").exists() and not (folder / "behind").exists()


def test_an_exported_program(folder):
    torch.export.save(torch.export.export(nn.Linear(2, 3), (torch.ones(4, 2),)), "program.pt2")
    found = resolve("program.pt2")
    assert isinstance(found, Exported) and isinstance(found.program, torch.export.ExportedProgram)


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("nowhere.pt2", "nowhere.pt2: no such file"),
        ("nowhere.py", "nowhere.py: no such file"),
        ("nowhere.py:make", "nowhere.py: no such file"),
        ("nowhere:make", "nowhere: no module of this name"),
        ("own_models.more:make", "own_models.more: no module of this name"),
        ("own_models:mak", "own_models has no 'mak'; did you mean 'make'?"),
        ("own_models:makes_less", "returned Linear; expected (module, args)"),
        ("own_models:fails", "own_models.py:19: KeyError: 'batch'"),
        ("own_models:Bare", "a class without example_inputs"),
        ("model.onnx", "'model.onnx': expected module:name"),
        ("own_models", "'own_models': expected module:name"),
    ],
)
def test_what_is_wrong_is_named(folder, word, message):
    with pytest.raises(InputError) as caught:
        resolve(word)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_a_module_that_fails_when_imported(folder):
    (folder / "own_broken.py").write_text("import torch\nimport own_missing\n")
    with pytest.raises(InputError, match="own_broken.py:2: ModuleNotFoundError"):
        resolve("own_broken:make")


def test_a_file_that_is_no_program(folder):
    (folder / "program.pt2").write_bytes(b"not a zip")
    with pytest.raises(InputError) as caught:
        resolve("program.pt2")
    assert str(caught.value).startswith(f"program.pt2: torch {torch.__version__} can't load it")


def test_a_program_of_another_version(folder, capfd):
    torch.export.save(torch.export.export(nn.Linear(2, 3), (torch.ones(4, 2),)), "good.pt2")
    with zipfile.ZipFile("good.pt2") as good, zipfile.ZipFile("other.pt2", "w") as other:
        for name in good.namelist():
            content = good.read(name)
            if name.endswith("models/model.json"):
                model = json.loads(content)
                model["schema_version"]["major"] = 99
                content = json.dumps(model).encode()
            other.writestr(name, content)
    with pytest.raises(InputError) as caught:
        resolve("other.pt2")
    assert "other.pt2" in str(caught.value) and "major=99" in str(caught.value)
    assert capfd.readouterr().err == ""
