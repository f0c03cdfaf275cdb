"""The script that a failing pass leaves."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from fxpasses.cli import main
from tests.own_pass import write_own

FAILURES = {
    "sloppy": "SpecError: after pass 'sloppy': it reports a change, which is not so",
    "sloppy{how=raises}": "KeyError: 'no such gradient'",
}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own_registry: None) -> Path:
    return write_own(tmp_path, monkeypatch, "bucketing,sloppy")


def python(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, timeout=120, check=False
    )


@pytest.mark.parametrize("failing", FAILURES)
def test_a_failing_pass_leaves_a_script_that_fails_the_same_way(failing):
    passes = f"participation,running_stats,bucketing{{mb=1}},{failing},gradient_sync"
    command = ["dump", "own.py:make", "--passes", passes, "--ranks", "3", "--out", "dump"]
    result = CliRunner().invoke(main, command)
    script = "dump/rank0/g0.backward/repro.py"
    assert result.exit_code == 1, result.output
    last = result.output.splitlines()[-1]
    assert last == f"Error: {FAILURES[failing]}; to see it again: python {script}"
    again = python(script)
    assert again.returncode == 1 and FAILURES[failing] in again.stderr
    assert "of 3" in Path(script).read_text()


def test_a_repro_is_an_input_of_dump():
    CliRunner().invoke(main, ["dump", "own.py:make", "--passes", "bucketing,sloppy"])
    assert Path("fxpasses-repro.py").exists()
    result = CliRunner().invoke(main, ["dump", "fxpasses-repro.py", "--print-changed=diff"])
    assert result.exit_code == 1
    assert "rank0/g0.backward 01 bucketing" in result.output
    assert FAILURES["sloppy"] in result.output.splitlines()[-1]


def test_a_training_script_leaves_one_where_it_dumps(monkeypatch):
    monkeypatch.setenv("FXPASSES_DUMP", "dump")
    trained = python("own.py")
    assert trained.returncode == 1 and FAILURES["sloppy"] in trained.stderr
    (script,) = Path("dump").rglob("repro.py")
    again = python(str(script))
    assert again.returncode == 1 and FAILURES["sloppy"] in again.stderr


def test_a_pass_that_works_leaves_none():
    result = CliRunner().invoke(main, ["dump", "own.py:make", "--passes", "bucketing"])
    assert result.exit_code == 0 and not list(Path().rglob("*repro*"))
