"""`fxpasses` itself, and its list of passes."""

from __future__ import annotations

import dataclasses
import json
import re
from typing import ClassVar

import pytest
from click.testing import CliRunner, Result

from fxpasses import __version__
from fxpasses.cli import main
from fxpasses.cli.completion import pass_names
from fxpasses.passes.base import Pass, Report
from fxpasses.passes.gradient_sync import GradientSync
from fxpasses.registry import passes, register_pass


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, arguments)


def sections() -> dict[str, str]:
    """What `fxpasses passes` says of each pass."""
    result = run("passes")
    assert result.exit_code == 0, result.output
    texts = re.findall(r"^\S.*\n(?: .*\n)*", result.output, re.MULTILINE)
    return {text.split()[0]: text for text in texts}


def test_the_version():
    result = run("--version")
    assert result.exit_code == 0 and __version__ in result.output


def test_help_names_the_commands():
    result = run("--help")
    assert result.exit_code == 0 and "passes" in result.output and "dump" in result.output


@pytest.mark.parametrize("arguments", [["pases"], ["passes", "more"], ["passes", "--what"]])
def test_wrong_usage_is_refused(arguments):
    result = run(*arguments)
    assert result.exit_code == 2 and "Error: " in result.output


def test_all_passes_are_listed_in_order():
    assert list(sections()) == sorted(passes())


def test_a_pass_is_listed_with_contract_and_options():
    assert sections()["bucketing"].splitlines() == [
        "bucketing  (backward graph; bitwise)",
        "    provides: buckets",
        "    mb: float | None = from 'bucket_mb'",
        "    scheme: str | None = from 'compression'",
    ]


def test_a_pass_that_changes_numerics_is_listed_with_its_bound():
    text = sections()["gradient_sync"]
    assert GradientSync().error_bound() in text.splitlines()[0]
    assert "    requires: buckets\n" in text and "    provides: reduced\n" in text
    assert "    overlap: bool = True\n" in text


def third_party(**attributes: object) -> type[Pass]:
    namespace = {"name": "third_party", "stage": "joint", "__module__": __name__}
    namespace |= {"run": lambda self, graph: Report(changed=False), **attributes}
    return dataclasses.dataclass(frozen=True)(type("ThirdParty", (Pass,), namespace))


def test_a_third_party_pass_is_listed(own_registry):
    register_pass(third_party(conflicts=frozenset({"bucketing"})))
    assert sections()["third_party"].splitlines() == [
        "third_party  (joint graph; bitwise)",
        "    conflicts: bucketing",
    ]


@dataclasses.dataclass(frozen=True)
class NeedsLevel(Pass):
    level: int

    name: ClassVar[str] = "needs_level"
    stage: ClassVar[str] = "joint"
    preserves_numerics: ClassVar[bool] = False

    def error_bound(self) -> str:
        return f"|out - g| <= 2 ** -{self.level}"

    def run(self, graph):
        raise AssertionError("it is only listed")


def test_a_pass_with_an_option_without_default_is_listed(own_registry):
    register_pass(NeedsLevel)
    assert "    level: int\n" in sections()["needs_level"]


def test_the_list_as_json():
    rows = json.loads(run("passes", "--json").output)
    assert [row["name"] for row in rows] == sorted(passes())
    bucketing = next(row for row in rows if row["name"] == "bucketing")
    assert bucketing == {
        "name": "bucketing",
        "stage": "backward",
        "bitwise": True,
        "error_bound": "bitwise",
        "requires": [],
        "provides": ["buckets"],
        "conflicts": [],
        "local": False,
        "options": [
            {"name": "mb", "type": "float | None", "from_option": "bucket_mb"},
            {"name": "scheme", "type": "str | None", "from_option": "compression"},
        ],
    }


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_scripts(shell):
    result = run("completion", shell)
    assert result.exit_code == 0 and "_FXPASSES_COMPLETE" in result.output


def test_completion_of_passes_goes_on_behind_a_comma():
    found = [item.value for item in pass_names(None, None, "cast,bucke")]
    assert found == ["cast,bucketing"]
