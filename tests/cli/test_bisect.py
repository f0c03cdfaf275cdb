"""`fxpasses bisect`."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from hypothesis import given
from hypothesis import strategies as st

from fxpasses.bisection import Request
from fxpasses.cli import main
from fxpasses.cli.bisect import Outcome, first_bad
from fxpasses.cli.loss import main as loss
from tests.own_pass import write_own


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own_registry: None) -> Path:
    return write_own(tmp_path, monkeypatch, "wrong")


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["bisect", *arguments])


def python(*words: str) -> str:
    return shlex.join([sys.executable, *words])


def test_pass_and_rewrite_are_named():
    result = run(python("own.py"))
    assert result.exit_code == 0, result.output
    first, second = result.stdout.splitlines()
    assert first == "first pass: wrong (1 of 1: wrong)"
    assert second.startswith("first rewrite: 2 of 2: wrong/multiply of ")
    assert second.endswith(" for bias")


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("true", "it succeeds with all passes: none ran"),
        ("echo out of memory; false", "it fails, and ran no pass\nout of memory"),
    ],
)
def test_nothing_to_find(command, message):
    result = run(command)
    assert result.exit_code == 1 and message in result.output


def note(pipeline: str) -> str:
    """A command that says that this pipeline ran, and fails."""
    code = f"""
import json, os
log = json.loads(os.environ["FXPASSES_BISECT"])["log"]
print({pipeline!r}, file=open(log, "a"))
exit(1)
"""
    return python("-c", code)


def test_a_command_that_fails_anyway():
    result = run(note('{"process": 1, "pipeline": ["cast"]}'))
    assert result.exit_code == 1 and "it fails without any pass as well" in result.output


def test_a_run_that_takes_too_long_fails():
    result = run("sleep 60", "--timeout", "0.2")
    assert result.exit_code == 1 and "it took longer than 0.2 s" in result.output


def test_options_go_with_loss_diff():
    result = run("true", "--passes", "cast")
    assert result.exit_code == 2 and "go with --loss-diff" in result.output


def test_wrong_input_of_loss_diff_is_one_line():
    result = run("--loss-diff", "1e-3", "own.py:mkae")
    assert result.exit_code == 2
    assert result.output == "Error: own.py:mkae: own.py has no 'mkae'; did you mean 'make'?\n"


@pytest.mark.parametrize(
    ("passes", "code"), [("bucketing,wrong{parameter=weight}", 1), ("bucketing", 0)]
)
def test_losses_are_compared(passes, code):
    result = CliRunner().invoke(loss, ["own.py:make", "1e-3", "--passes", passes])
    assert result.exit_code == code, result.output
    assert result.output.splitlines()[0].startswith("step 0: ")


def test_losses_need_a_module():
    result = CliRunner().invoke(loss, ["own.py", "1e-3"])
    assert result.exit_code == 2 and "takes module:name of what makes a module" in result.output


@given(st.integers(1, 60), st.data())
def test_the_search_finds_the_first_failure(count, data):
    bad = data.draw(st.integers(1, count))
    asked: list[int] = []

    def succeeds(n: int) -> bool:
        asked.append(n)
        return n < bad

    assert first_bad(count, succeeds) == (bad - 1, bad)
    assert len(asked) <= count.bit_length() + 1 and len(set(asked)) == len(asked)


@given(st.integers(1, 60), st.data())
def test_what_can_not_be_told_is_passed_by(count, data):
    bad = data.draw(st.integers(1, count))
    unknown = data.draw(st.sets(st.integers(1, count - 1), max_size=3)) if count > 1 else set()
    good, found = first_bad(count, lambda n: None if n in unknown else n < bad)
    assert good < bad <= found
    assert set(range(good + 1, found)) <= unknown


def test_it_gives_up_on_a_pass_that_can_not_be_stopped():
    asked: list[int] = []
    assert first_bad(1000, lambda n: asked.append(n)) == (0, 1000)  # type: ignore[func-returns-value]
    assert len(asked) < 10


def test_rewrites_are_those_of_one_process():
    rows = [
        {"process": p, "made_by": "cast", "rewrite": {"rule": r}}
        for p, r in ((1, "a"), (2, "a"), (2, "b"))
    ]
    assert Outcome(False, rows, "").rewrites("cast") == [{"rule": "a"}, {"rule": "b"}]
    assert Outcome(False, rows, "").rewrites("other") == []


def test_a_request_reads_back(monkeypatch):
    from fxpasses import bisection

    request = Request("log", ("cast",), ("cast", 3))
    (text,) = request.environment().values()
    assert bisection._read(text) == request
