"""One line and exit code 2 for what the user got wrong; a traceback for what we did."""

from __future__ import annotations

import subprocess
import sys

import click
import pytest
from click.testing import CliRunner, Result

from fxpasses.cli.errors import Command, InputError, one_line, raised_in


def run(error: BaseException, *arguments: str) -> Result:
    @click.command(cls=Command)
    def command() -> None:
        raise error

    return CliRunner().invoke(command, arguments)


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (ValueError("option 'x': got 1\nmore of it"), "Error: option 'x': got 1"),
        (InputError("a.py: no such file"), "Error: a.py: no such file"),
        (FileNotFoundError(2, "No such file", "a.pt2"), "Error: a.pt2: No such file"),
        (ValueError(""), "Error: ValueError: "),
    ],
)
def test_the_users_errors_are_one_line(error, line):
    result = run(error)
    assert result.exit_code == 2 and result.output == f"{line}\n"


def test_traceback_shows_it_and_the_exit_code_stays():
    result = run(ValueError("wrong"), "--traceback")
    assert result.exit_code == 2
    first, *_, last = result.output.splitlines()
    assert first == "Traceback (most recent call last):" and last == "Error: wrong"


def test_what_is_not_the_users_is_raised():
    result = run(AssertionError("ours"))
    assert isinstance(result.exception, AssertionError) and "Error:" not in result.output


def test_a_reader_that_went_away_is_no_error():
    command = f"{sys.executable} -c 'from fxpasses.cli import main; main()' passes | true"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and done.stderr == ""


def test_an_error_of_a_library_says_its_kind():
    assert one_line(RuntimeError("\n\n  broken\nmore")) == "RuntimeError: broken"


def test_users_code_is_named_by_its_last_line(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text("import json\n\n\ndef f():\n    return json.loads('{')\n")
    namespace: dict = {}
    exec(compile(path.read_text(), str(path), "exec"), namespace)
    with pytest.raises(ValueError) as caught:
        namespace["f"]()
    message = str(raised_in(caught.value, "mine"))
    assert message.startswith(f"{path}:5: JSONDecodeError: Expecting property name")
    assert "\n" not in message


def test_code_without_a_line_is_named():
    assert str(raised_in(KeyError("x"), "mine:f")) == "mine:f: KeyError: 'x'"


def test_a_reader_of_a_scripts_graphs_may_go_away(tmp_path):
    model = 'torch.compile(torch.nn.Linear(4, 4), backend="hardened_aot_eager")'
    (tmp_path / "train.py").write_text(
        f"import torch\n\n{model}(torch.ones(2, 4)).sum().backward()\n"
    )
    command = f"{sys.executable} -c 'from fxpasses.cli import main; main()' dump train.py | true"
    done = subprocess.run(command, shell=True, capture_output=True, cwd=tmp_path, timeout=120)
    assert done.returncode == 0 and done.stderr == b""
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]


SCRIPT = """import logging

import torch

logging.getLogger("mine").error("my own words")
model = torch.compile(torch.nn.Linear(4, 3), backend="hardened_aot_eager")
model(torch.randn(2, 5))
"""


@pytest.mark.parametrize("flags", [[], ["--traceback"]])
def test_a_script_that_does_not_compile_says_so_in_one_line(tmp_path, flags):
    (tmp_path / "bad.py").write_text(SCRIPT)
    main = "from fxpasses.cli import main; main()"
    command = [sys.executable, "-c", main, "dump", "bad.py", *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=tmp_path)
    assert done.returncode == 2
    own, *rest = done.stderr.splitlines()
    assert own == "my own words" and rest[-1].startswith("Error: bad.py:7: TorchRuntimeError")
    assert ("Traceback" in done.stderr) == bool(flags) and (len(rest) == 1) != bool(flags)
