"""The `fxpasses` command."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from typing import ClassVar

import pytest
import torch
from click.testing import CliRunner, Result
from torch import nn

from fxpasses import __version__
from fxpasses.cli import main
from fxpasses.passes.base import Pass
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
    namespace = {"name": "third_party", "stage": "joint", "__module__": __name__, **attributes}
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


def test_a_pass_with_an_option_without_default_is_listed(own_registry):
    register_pass(NeedsLevel)
    assert "    level: int\n" in sections()["needs_level"]


def saved(folder, program: Callable[..., torch.Tensor]) -> str:
    """A module with this forward, exported to a file."""
    module = type("Exported", (nn.Module,), {"forward": lambda self, x: program(x)})()
    path = folder / "program.pt2"
    torch.export.save(torch.export.export(module, (torch.randn(2, 2),)), path)
    return str(path)


def test_dump_prints_the_graph_after_each_pass(tmp_path):
    result = run("dump", saved(tmp_path, lambda x: x @ x), "cast{dtype=fp16},bucketing{mb=1}")
    assert result.exit_code == 0, result.output
    heads = [
        line for line in result.output.splitlines() if line.startswith(("# input of", "# after"))
    ]
    assert heads == [
        "# input of the pipeline",
        "# after cast{dtype=fp16,rules=}: lowered=1, casts=2",
        "# after bucketing{mb=1.0}: buckets=0, gradients=0",
    ]
    assert "# output 0: output 0 = mm_float32" in result.output


@pytest.mark.parametrize(
    ("pipeline", "message"),
    [
        ("csat", "option 'passes': unknown pass 'csat'; did you mean 'cast'?"),
        ("bucketing{mb=1},gradient_sync", "'gradient_sync' communicates"),
    ],
)
def test_dump_says_what_is_wrong_with_a_pipeline(tmp_path, pipeline, message):
    result = run("dump", saved(tmp_path, lambda x: x @ x), pipeline)
    assert result.exit_code == 2 and "Error: " in result.output and message in result.output


def test_dump_of_a_file_that_is_not_there():
    result = run("dump", "nowhere.pt2", "cast")
    assert result.exit_code == 2 and "nowhere.pt2" in result.output
