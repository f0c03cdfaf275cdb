"""`fxpasses plan`."""

from __future__ import annotations

import json
import textwrap
import tomllib

import pytest
import torch
from click.testing import CliRunner

from fxpasses.cli import main
from fxpasses.schedule.machine import Machine


@pytest.fixture
def program(tmp_path):
    path = tmp_path / "model.py"
    path.write_text(
        textwrap.dedent(
            """
            import torch
            def make():
                layers = [torch.nn.Linear(64, 64) for _ in range(4)]
                return torch.nn.Sequential(*layers), torch.ones(8, 64)
            """
        )
    )
    return f"{path}:make"


def run(*words: str) -> str:
    result = CliRunner().invoke(main, ["plan", *words])
    assert result.exit_code == 0, result.output
    return result.output


def test_what_if_on_one_process(program, tmp_path):
    words = [
        "--ranks",
        "1024",
        "--bandwidth",
        "25Gbit",
        "--latency",
        "20us",
        "--compression",
        "int4",
    ]
    trace, chart = tmp_path / "t.json", tmp_path / "t.png"
    out = run(program, *words, "-o", "bucket_mb=0.03", "--trace", str(trace), "--gantt", str(chart))
    assert out.startswith("step of 1024 rank(s)  ")
    assert "no order takes less than" in out and "exposed" in out and "in flight" in out
    assert len([line for line in out.splitlines() if "MiB" in line and "ms" in line]) >= 2
    assert "sum of all costs, s = " in out and "(W - 1)" in out
    assert json.loads(trace.read_text())["traceEvents"] and chart.stat().st_size > 1000


def test_as_json_with_a_curve(program):
    one, two, four, eight = json.loads(run(program, "--ranks", "8", "--curve", "--json"))
    assert [p["world"] for p in (one, two, four, eight)] == [1, 2, 4, 8]
    assert one["exposed_s"] == 0 < two["step_s"] < eight["step_s"]
    assert eight["busy_s"].keys() == {"compute", "codec", "link"}
    assert {"ratio", "feasible", "advice", "needed"} <= eight["buckets"][0].keys()


def test_an_exported_program(tmp_path):
    exported = torch.export.export(torch.nn.Linear(32, 32), (torch.ones(4, 32),))
    torch.export.save(exported, tmp_path / "m.pt2")
    assert "step of 2 rank(s)" in run(str(tmp_path / "m.pt2"))


def test_a_profile_and_what_is_given_over_it(program, tmp_path):
    profile = tmp_path / "p.toml"
    profile.write_text('schedule = "serial"\n' + Machine(bandwidth=1e6, flops=1e9).table())
    (slow,) = json.loads(run(program, "--profile", str(profile), "--json"))
    (fast,) = json.loads(run(program, "--profile", str(profile), "--json", "--bandwidth", "1Gbit"))
    assert slow["machine"]["flops"] == fast["machine"]["flops"] == 1e9
    assert fast["machine"]["bandwidth"] == 1.25e8
    assert fast["step_s"] < slow["step_s"]


def test_calibration_writes_a_profile_that_predicts_what_was_measured(program, tmp_path):
    profile = tmp_path / "p.toml"
    run(program, "--calibrate", str(profile))
    machine = Machine.parse(tomllib.loads(profile.read_text())["machine"])
    assert 1e8 < machine.flops < 1e15 and 1e7 < machine.memory < 1e14
    assert all(1e-12 < s < 1e-6 for s in (*machine.encode_s.values(), *machine.decode_s.values()))
    assert machine.bandwidth == Machine().bandwidth  # one rank has no link
    (plan,) = json.loads(run(program, "--ranks", "1", "--profile", str(profile), "--json"))
    assert 1e-6 < plan["step_s"] < 1.0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "expected INPUT, or --calibrate FILE"),
        (["PROGRAM", "--bandwidth", "25"], "bandwidth '25': expected a number and one of gbit"),
        (["PROGRAM", "-o", "bucket_mb"], "expected KEY=VALUE"),
        (["PROGRAM", "--schedule", "atuo"], "option 'schedule': got 'atuo'; did you mean 'auto'?"),
        (["PROGRAM", "--compression", "int3"], "option 'compression'"),
        (["PROGRAM", "-o", "machine={flop=1}"], "unknown key 'flop'; did you mean 'flops'?"),
    ],
)
def test_what_is_wrong_is_one_line(program, words, message):
    result = CliRunner().invoke(main, ["plan", *(program if w == "PROGRAM" else w for w in words)])
    assert result.exit_code == 2
    assert message in result.output
    assert len(result.output.strip().splitlines()) == 1
