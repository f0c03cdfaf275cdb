"""Each command on the demo's model, smaller, and on an export of it, as a user types it."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from bench.gpt import small_example
from fxpasses.cli import main

ROOT = Path(__file__).parent.parent.parent
MODEL = "bench.gpt:small_example"
PASSES = "cast{dtype=bf16},bucketing{mb=25},compress{scheme=int4}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """For what commands write, with the exported program in it."""
    folder = tmp_path_factory.mktemp("demo")
    model, tokens = small_example()
    torch.export.save(torch.export.export(model, (tokens,)), folder / "demo.pt2")
    return folder


@pytest.fixture(params=["module:name", ".pt2"])
def program(request: pytest.FixtureRequest, folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The word on the command line."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return MODEL if request.param == "module:name" else str(folder / "demo.pt2")


def run(*words: str, code: int = 0) -> str:
    """A command in this process."""
    result = CliRunner().invoke(main, words)
    assert result.exit_code == code, result.output
    return result.output


def installed() -> str:
    """The command that was installed."""
    places = os.pathsep.join((sysconfig.get_path("scripts"), os.environ["PATH"]))
    command = shutil.which("fxpasses", path=places)
    assert command is not None, "the command fxpasses is not installed"
    return command


def console(*words: str) -> subprocess.CompletedProcess[str]:
    """It, in a process of its own."""
    return subprocess.run(
        [installed(), *words], capture_output=True, text=True, timeout=120, check=False
    )


def graphs_of(program: str) -> list[str]:
    return ["exported"] if program.endswith(".pt2") else ["joint", "backward"]


def test_the_console_command_dumps(program):
    done = console("dump", program, "--passes", PASSES, "--print-changed=quiet")
    assert done.returncode == 0 and done.stderr == "", done.stderr
    assert "# after cast{dtype=bf16,rules=}: lowered=" in done.stdout
    assert "torch.bfloat16" in done.stdout


def test_the_console_command_says_what_is_wrong(program):
    done = console("dump", program, "--passes", "cats")
    assert done.returncode == 2 and done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert "unknown pass 'cats'" in line


def test_whole_graphs(program):
    out = run("dump", program)
    assert out.count("# input of the pipeline") == len(graphs_of(program))


def test_files_of_all_ranks_are_compared(program, folder):
    out = folder / f"dump-{Path(program).suffix}"
    run("dump", program, "--passes", PASSES, "--ranks", "2", "--out", str(out))
    for graph in graphs_of(program):
        assert (out / f"rank0/g0.{graph}/00-input.py").exists()
    assert run("dump", "--compare-ranks", str(out)) == "2 ranks do the same\n"
    last = graphs_of(program)[-1]
    (path,) = (out / f"rank1/g0.{last}").glob("03-compress.py")
    ran = subprocess.run([sys.executable, path], capture_output=True, timeout=120, check=False)
    assert ran.returncode == 0, ran.stderr


def test_one_page_and_drawings(program, folder):
    page, drawings = folder / "page.html", folder / "drawings"
    words = ["--passes", PASSES, "--html", str(page)]
    run("dump", program, *words, *(["--svg", str(drawings)] if shutil.which("dot") else []))
    for graph in graphs_of(program):
        assert f'"name":"rank0/g0.{graph}"' in page.read_text()
        if shutil.which("dot"):
            assert "<svg" in (drawings / f"rank0/g0.{graph}.svg").read_text()


def test_figures_as_json(program):
    options = ["-o", "precision=bf16", "--time-passes", "--errors", "--json"]
    data = json.loads(run("dump", program, *options))
    cast = data["graphs"][0]["passes"][0]
    assert cast["changed"] and cast["counts"]["casts"] > 0 and 0 < cast["error"] < 0.1
    assert data["seconds"]["cast"] > 0


def test_what_changed(program):
    words = ["-o", "precision=bf16", "--print-changed=diff", "--filter-passes", "cast"]
    lines = run("dump", program, *words, "--print-before", "cast").splitlines()
    assert any(line.startswith("+    ") and "bfloat16" in line for line in lines)
    assert any(
        line.endswith(f"g0.{graphs_of(program)[0]} before cast{{dtype=bf16,rules=}}")
        for line in lines
    )


def test_the_plan(program, folder):
    words = ["--ranks", "4", "--compression", "int8", "--curve"]
    out = run("plan", program, *words, "--trace", str(folder / "trace.json"))
    assert out.startswith("step of 4 rank(s)") and "efficiency" in out
    assert json.loads((folder / "trace.json").read_text())["traceEvents"]


def test_recovery(program):
    is_exported = program.endswith(".pt2")  # a forward alone has nothing to update
    data = json.loads(run("verify", "--recovery", program, "--json", code=0 if is_exported else 1))
    assert [g["graph"] for g in data["graphs"]] == [f"rank0/g0.{n}" for n in graphs_of(program)]


def test_the_pass_and_the_rewrite_that_lower_precision_are_found(program, folder):
    if program == MODEL:
        rules = "precision_rules={'*'='deny', head='allow'}"
        words = ["--loss-diff", "1e-9", program, "-o", "precision=bf16", "-o", rules]
    else:
        out, dump = folder / "low", shlex.join([installed(), "dump", program])
        low = f"{dump} 'cast{{dtype=bf16}}' --out {out} && ! grep -rq bfloat16 {out}"
        words = [f"rm -rf {out}; {low}"]
    first, second = CliRunner().invoke(main, ["bisect", *words]).stdout.splitlines()
    assert first == "first pass: cast (1 of 1: cast)"
    assert second.startswith("first rewrite: 1 of ") and "cast/lower of " in second


def test_a_campaign_of_faults(folder, monkeypatch):
    monkeypatch.chdir(ROOT)
    out = str(folder / "campaign")
    text = run("faults", "campaign", MODEL, "--sites", "3", "--output", out)
    assert "campaign.csv" in text and (folder / "campaign" / "report.html").exists()


def test_the_list_of_passes():
    done = console("passes")
    assert done.returncode == 0 and "\ncompress  (backward graph; " in done.stdout
