"""`fxpasses dump`, driven as a user would."""

from __future__ import annotations

import errno
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result
from torch import nn

from fxpasses.cli import main

SOURCE = """
import torch
from torch import nn


class Net(nn.Module):
    example_inputs = (torch.ones(4, 8),)

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 16), nn.Linear(16, 1)

    def forward(self, x):
        return self.b(self.a(x).relu())


class Wrong(Net):
    def forward(self, x):
        return self.b(x)


def frozen():
    return Net().requires_grad_(False), Net.example_inputs


def gpt():
    from bench.gpt import GPT, GPTConfig

    return GPT(GPTConfig(layers=1, width=32, block=16)), torch.zeros(2, 16, dtype=torch.long)
"""
PASSES = "cast{dtype=bf16},bucketing{mb=25},compress{scheme=int4}"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current directory, with models in it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "own.py").write_text(SOURCE)
    torch.manual_seed(0)
    return tmp_path


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["dump", *arguments])


def done(*arguments: str) -> str:
    result = run(*arguments)
    assert result.exit_code == 0, result.output
    return result.output


def files(folder: str) -> dict[str, str]:
    found = sorted(p for p in Path(folder).rglob("*") if p.is_file())
    return {str(p.relative_to(folder)): p.read_text() for p in found}


# Files


def test_files_of_each_pass():
    done("own.py:Net", "--passes", PASSES, "--out", "dump")
    assert list(files("dump")) == [
        *(f"rank0/g0.backward/00-input.{suffix}" for suffix in ("dot", "json", "py")),
        *(
            f"rank0/g0.backward/{stem}.{suffix}"
            for stem in ("02-bucketing", "03-compress")
            for suffix in ("diff", "dot", "json", "py")
        ),
        *(f"rank0/g0.joint/00-input.{suffix}" for suffix in ("dot", "json", "py")),
        *(f"rank0/g0.joint/01-cast.{suffix}" for suffix in ("diff", "dot", "json", "py")),
    ]


def test_two_runs_write_the_same_bytes():
    for out in ("first", "second"):
        done("own.py:Net", "--passes", PASSES, "--ranks", "2", "--out", out)
    first = files("first")
    assert first == files("second") and {name.split("/")[0] for name in first} == {"rank0", "rank1"}


def test_another_process_writes_the_same_bytes():
    arguments = ["own.py:Net", "-o", "precision=bf16", "--out"]
    done(*arguments, "first")
    command = [sys.executable, "-c", "from fxpasses.cli import main; main()", "dump", *arguments]
    subprocess.run([*command, "second"], check=True, timeout=120, capture_output=True)
    assert files("first") == files("second")


def test_a_file_runs_alone():
    done("own.py:Net", "--passes", PASSES, "--world", "4", "--out", "dump")
    path = "dump/rank0/g0.backward/03-compress.py"
    ran = subprocess.run(
        [sys.executable, path], capture_output=True, text=True, timeout=120, check=False
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.count("tensor(") >= 4 and "None" in ran.stdout


def test_the_demo_model():
    out = done("own.py:gpt", "-o", "precision=bf16", "-o", "compression=int8", "--out", "dump")
    assert re.search(r"rank0/g0.joint 01 cast.*: lowered=\d+, casts=\d+ \(\+\d+ -0 nodes\)", out)
    assert "rank0/g0.backward 05 compress" in out


# What is printed


def test_whole_graphs_by_default():
    out = done("own.py:Net", "--passes", PASSES)
    heads = [line for line in out.splitlines() if line.startswith("# ")]
    assert [h.split(":")[0] for h in heads] == [
        "# rank0/g0.joint",
        "# input of the pipeline",
        "# rank0/g0.joint",
        "# after cast{dtype=bf16,rules=}",
        "# rank0/g0.backward",
        "# input of the pipeline",
        "# rank0/g0.backward",
        "# after bucketing{mb=25.0}",
        "# rank0/g0.backward",
        "# after compress{scheme=int4,reduce=mean}",
    ]
    assert out.count("def forward(") == 5


def test_a_forward_without_backward_and_without_passes():
    assert done("own.py:frozen").startswith("# rank0/g0.inference\n# input of the pipeline\n")
    done("own.py:frozen", "--html", "page.html")
    assert "rank0/g0.inference" in Path("page.html").read_text()


def test_a_reader_that_goes_away_blames_no_pass(monkeypatch):
    def gone(*_: object, **__: object) -> None:
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")

    monkeypatch.setattr("fxpasses.cli.printing.click.echo", gone)
    result = run("own.py:Net")
    assert result.exit_code == 1 and result.output == ""  # click's code
    assert not Path("fxpasses-repro.py").exists()


def test_an_unchanged_pass_is_one_line():
    for mode in ("--print-changed", "--print-changed=full", "--print-changed=diff"):
        out = done(mode, "own.py:Net")
        assert out.splitlines()[0] == "rank0/g0.backward 01 participation: unchanged"
    assert "participation" not in done("--print-changed=quiet", "own.py:Net")


def test_differences_show_edits_only():
    out = done("own.py:Net", "--print-changed=diff", "--filter-passes", "gradient_sync")
    lines = out.splitlines()
    assert lines[0].startswith("rank0/g0.backward 04 gradient_sync{reduce=mean}: collectives=1")
    assert lines[1:3] == ["--- 03-bucketing", "+++ 04-gradient_sync"]
    removed = [line for line in lines[3:] if line.startswith("-")]
    assert all("bucket0_cat" in line or "split_with_sizes" in line for line in removed)


def test_colours_only_where_they_are_shown(monkeypatch):
    def colours(mode: str) -> bool:
        result = CliRunner().invoke(main, ["dump", "own.py:Net", mode], color=True)
        return "\x1b[3" in result.output

    assert colours("--print-changed=cdiff") and not colours("--print-changed=diff")
    monkeypatch.setenv("NO_COLOR", "1")
    assert not colours("--print-changed=cdiff")


def test_graphs_around_chosen_passes():
    out = done("own.py:Net", "--print-before", "gradient_sync", "--print-after", "bucketing")
    assert out.count("def forward(") == 2
    heads = [line for line in out.splitlines() if line.startswith("# ")]
    assert heads[1] == "# after bucketing{mb=25.0}: buckets=1, gradients=4"
    assert heads[2] == "# rank0/g0.backward before gradient_sync{reduce=mean}"


def test_times():
    out = done("own.py:Net", "--time-passes")
    rows = [line.split() for line in out.splitlines()]
    assert rows[0] == ["seconds", "share", "pass"]
    assert {row[2] for row in rows[1:]} == {
        "participation",
        "running_stats",
        "bucketing",
        "gradient_sync",
    }
    seconds = [float(row[0]) for row in rows[1:]]
    assert seconds == sorted(seconds, reverse=True) and seconds[0] > 0


def test_json():
    first, second = (done("own.py:Net", "--json", "--ranks", "2") for _ in range(2))
    assert first == second
    graphs = json.loads(first)["graphs"]
    names = [g["name"] for g in graphs]
    assert names == [f"rank{r}/g0.{graph}" for r in (0, 1) for graph in ("joint", "backward")]
    sync = graphs[1]["passes"][-1]
    assert sync["pass"] == "gradient_sync{reduce=mean}" and sync["changed"]
    assert sync["counts"] == {"collectives": 1, "bytes": 4 * (8 * 16 + 16 + 16 + 1)}
    assert "bucket0_all_reduce" in sync["added"] and sync["removed"] == ["bucket0_cat"]


# Inputs


def saved() -> str:
    """An exported program."""
    module = nn.Sequential(nn.Linear(2, 2, bias=False))
    torch.export.save(torch.export.export(module, (torch.randn(2, 2),)), "program.pt2")
    return "program.pt2"


def test_an_exported_program():
    out = done(saved(), "cast{dtype=fp16},bucketing{mb=1}")
    lines = out.splitlines()
    assert lines[0] == "specialised: eval" and lines[-1] == "output spec: USER_OUTPUT"
    heads = [line for line in lines if line.startswith(("# input of", "# after"))]
    assert heads == [
        "# input of the pipeline",
        "# after cast{dtype=fp16,rules=}: lowered=2, casts=3",
        "# after bucketing{mb=1.0}: buckets=0, gradients=0",
    ]


def test_an_exported_program_into_files():
    done(saved(), "--passes", "cast{dtype=fp16}", "--out", "dump")
    assert "rank0/g0.exported/01-cast.diff" in files("dump")


SCRIPT = """
import torch, own

net = own.Net()
compiled = torch.compile(net, backend="hardened_aot_eager", options={"precision": "bf16"})
compiled(torch.ones(4, 8)).sum().backward()
print("trained", net.a.weight.grad.shape)
"""


def test_a_script_is_run_as_it_is(folder):
    (folder / "train.py").write_text(SCRIPT)
    out = done("train.py", "--out", "dump")
    assert "trained torch.Size([16, 8])" in out
    assert [n for n in files("dump") if n.endswith(".py")] == [
        "rank0/g0.backward/00-input.py",
        "rank0/g0.joint/00-input.py",
        "rank0/g0.joint/01-cast.py",
    ]


# What is wrong is one line, and exit code 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["own.py:Net", "--passes", "csat"], "unknown pass 'csat'; did you mean 'cast'?"),
        (["own.py:Net", "cast{dtype=bf16"], "can't read '{dtype=bf16' (character 5"),
        (["own.py:Net", "cast{dtype=int3}"], "int3"),
        (["own.py:Net", "--passes", "bucketing{mb=1},gradient_sync", "cast"], "the passes twice"),
        (["own.py:Net", "gradient_sync"], "'gradient_sync' requires buckets"),
        (["own.py:Net", "-o", "precison=bf16"], "unknown option 'precison'; did you mean"),
        (["own.py:Net", "-o", "precision"], "expected KEY=VALUE"),
        (["own.py:Net", "--print-after", "cat"], "option '--print-after': unknown pass 'cat'"),
        (["own.py:Net", "--world", "2", "--ranks", "3"], "--world 2 and --ranks 3"),
        (["own.py:Net", "--output", "x.pt2"], "own.py:Net is no exported program"),
        (["own.py:Wrong"], "own.py:19: RuntimeError: mat1 and mat2 shapes"),
        (["own.py:Nte"], "has no 'Nte'; did you mean 'Net'?"),
        (["nowhere.pt2", "cast"], "nowhere.pt2: no such file"),
        (["broken.pt2", "cast"], "broken.pt2: torch"),
        (["raises.py"], "raises.py:3: KeyError: 'batch'"),
        (["raises.py", "--world", "2"], "a script says itself"),
        (["own.py", "--html", "page.html"], "own.py: it compiled nothing with backend='hardened'"),
        (["own.onnx"], "expected module:name"),
    ],
)
def test_what_is_wrong_is_one_line(folder, arguments, message):
    (folder / "broken.pt2").write_bytes(b"nothing")
    (folder / "raises.py").write_text("import torch\n\nraise KeyError('batch')\n")
    result = run(*arguments)
    assert result.exit_code == 2, result.output
    assert message in result.output
    assert len(result.output.splitlines()) == 1 and result.output.startswith("Error: ")


def test_traceback_shows_more():
    result = run("own.py:Wrong", "--traceback")
    assert result.exit_code == 2 and "Traceback (most recent call last):" in result.output
    assert 'own.py", line 19, in forward' in result.output
    assert result.output.splitlines()[-1].startswith("Error: ")


def test_a_page_goes_into_a_new_folder():
    done("own.py:Net", "--html", "new/page.html")
    assert Path("new/page.html").exists()
