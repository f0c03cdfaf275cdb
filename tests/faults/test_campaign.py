"""Campaigns: outcomes, what a stopped one goes on with, and what is written."""

import subprocess
import sys

import pytest
import torch
from click.testing import CliRunner

from fxpasses.cli import main
from fxpasses.faults.campaign import COLUMNS, read
from fxpasses.faults.statistics import by, wilson
from fxpasses.faults.trials import Trials, options_of
from tests.faults.programs import random, small

HERE = "tests.faults.programs"


def campaign(folder, program="small", *arguments, sites=12):
    words = ["faults", "campaign", f"{HERE}:{program}", "--output", str(folder)]
    return CliRunner().invoke(main, [*words, "--sites", str(sites), *arguments])


def test_outcomes_of_trials_without_and_with_guards():
    function, args = small()
    trials = Trials(function, args, options_of("bitflip{bit=30}", ["forward", "gradient"], ""))
    results = [trials.run(trials.shot(0, t)) for t in range(12)]
    assert {r.outcome for r in results} <= {"silent", "masked"} and "silent" in str(results)
    function, args = small()
    options = options_of("bitflip{bit=28}", ["forward:2"], "products")
    trials = Trials(function, args, options)
    assert {trials.run(trials.shot(0, t)).outcome for t in range(6)} <= {"detected", "masked"}
    function, args = small()
    options = options_of("bitflip{bit=30}", ["forward:2"], "products,on=recompute")
    trials = Trials(function, args, options)
    results = [trials.run(trials.shot(0, t)) for t in range(6)]
    assert {r.outcome for r in results} == {"corrected"} and {r.error for r in results} == {0.0}


def test_the_same_trial_is_the_same_fault():
    function, args = small()
    options = options_of("bitflip{bits=2}", ["backward"], "")
    first = Trials(function, args, options)
    shots = [first.shot(3, t) for t in range(20)]
    function, args = small()
    second = Trials(function, args, options)
    assert shots == [second.shot(3, t) for t in range(20)]
    assert all(len(shot.bits) == 2 for shot in shots)
    assert len({(s.site.name, s.index) for s in shots}) > 5


def test_a_program_that_differs_from_run_to_run_is_refused():
    function, args = random()
    with pytest.raises(ValueError, match="does not compute the same twice"):
        Trials(function, args, options_of("zero", ["gradient"], ""))


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A campaign of 12 trials, and what was printed."""
    folder = tmp_path_factory.mktemp("whole")
    result = campaign(folder)
    assert result.exit_code == 0, result.output
    return folder, result.output


def test_a_campaign_writes_rows_a_page_and_a_picture(whole):
    folder, output = whole
    rows = read(folder)
    assert [row["trial"] for row in rows] == [str(i) for i in range(12)]
    assert tuple(rows[0]) == COLUMNS
    assert {row["outcome"] for row in rows} <= {"silent", "masked"}
    assert all(row["before"] and row["bit"].isdigit() for row in rows)
    assert (folder / "heatmap.png").read_bytes().startswith(b"\x89PNG")
    page = (folder / "report.html").read_text()
    assert "<h2>operator</h2>" in page and "heatmap.png" in page
    assert "silent, of harmful" in output


def test_a_campaign_that_was_stopped_goes_on_where_it_was(whole, tmp_path):
    lines = (whole[0] / "campaign.csv").read_text().splitlines(keepends=True)
    text = "".join(lines[:5]) + lines[5][:-20]  # killed while it wrote the fifth row
    (tmp_path / "campaign.csv").write_text(text)
    (tmp_path / "campaign.json").write_text((whole[0] / "campaign.json").read_text())
    assert len(read(tmp_path)) == 4
    assert campaign(tmp_path).exit_code == 0
    assert read(tmp_path) == read(whole[0])


def test_a_folder_holds_one_campaign(whole):
    result = campaign(whole[0], "small", "--seed", "4")
    assert result.exit_code == 2 and "its seed is 0, not 4" in result.output


@pytest.mark.parametrize(("program", "outcome"), [("ends", "crash"), ("stops", "hang")])
def test_a_process_that_ends_or_stops_is_an_outcome(tmp_path, program, outcome):
    where = ["--where", "forward:a", "--model", "nan", "--timeout", "4"]
    sites = 2 if program == "ends" else 1
    result = campaign(tmp_path, program, *where, sites=sites)
    assert result.exit_code == 0, result.output
    assert [row["outcome"] for row in read(tmp_path)] == [outcome] * sites
    assert all(row["layer"] == "a" for row in read(tmp_path))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "bitflop"], "unknown model 'bitflop'"),
        (["--model", "bitflip{bit=40}"], "bit 40 is outside of float32"),
        (["--where", "gradients"], "did you mean 'gradient'?"),
        (["--guards", "product"], "did you mean 'products'?"),
    ],
)
def test_what_is_wrong_is_said(tmp_path, arguments, message):
    result = campaign(tmp_path, "small", *arguments, sites=1)
    assert result.exit_code == 2 and message in result.output


def test_a_trial_is_reproduced_by_a_script(whole, tmp_path):
    result = CliRunner().invoke(main, ["faults", "reproduce", str(whole[0]), "3"])
    assert result.exit_code == 0
    path = tmp_path / "again.py"
    path.write_text(result.output)
    done = subprocess.run([sys.executable, str(path)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert read(whole[0])[3]["outcome"] in done.stdout
    missing = CliRunner().invoke(main, ["faults", "reproduce", str(whole[0]), "12"])
    assert missing.exit_code == 2 and "has trials 0 to 11" in missing.output


def test_wilson_intervals():
    """Against the closed form at 0 and n, and a value of the literature (Newcombe 1998: 81 of 263)."""
    low, high = wilson(81, 263)
    assert (round(low, 4), round(high, 4)) == (0.2553, 0.3662)
    assert wilson(0, 10)[0] == 0.0 and wilson(10, 10)[1] == 1.0
    assert wilson(0, 10)[1] == pytest.approx(1.96**2 / (10 + 1.96**2))
    assert wilson(0, 0) == (0.0, 1.0)


def test_groups_are_in_order():
    rows = [{"bit": b, "outcome": "masked"} for b in ("10", "9", "9", "")]
    assert list(by(rows, ["bit"])) == [("9",), ("10",), ("",)]


SCRIPT = """
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
compiled = torch.compile(model, backend="hardened", options={"precision": "bf16"})
compiled(torch.randn(6, 8)).sum().backward()
open("behind", "w")
"""


def on(folder, program, *arguments, sites=6):
    words = ["faults", "campaign", str(program), "--output", str(folder / "found"), *arguments]
    return CliRunner().invoke(main, [*words, "--sites", str(sites)])


def test_a_campaign_over_an_exported_program(tmp_path):
    model, args = small()
    torch.export.save(torch.export.export(model, args), tmp_path / "small.pt2")
    words = ["--where", "forward:2", "--where", "gradient:0.*", "--model", "bitflip{bit=28}"]
    result = on(tmp_path, tmp_path / "small.pt2", *words, "--guards", "products,on=recompute")
    assert result.exit_code == 0, result.output
    rows = read(tmp_path / "found")
    assert {(row["phase"], row["layer"][0]) for row in rows} == {
        ("forward", "2"),
        ("gradient", "0"),
    }
    assert {row["outcome"] for row in rows if row["phase"] == "forward"} == {"corrected"}


def test_a_campaign_over_a_script(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(SCRIPT)
    result = on(tmp_path, "train.py", "--where", "forward")
    assert result.exit_code == 0, result.output
    rows = read(tmp_path / "found")
    assert len(rows) == 6 and not (tmp_path / "behind").exists()
    assert "bfloat16" in {row["dtype"] for row in rows}  # the script's own option holds


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("x = 1", "train.py: it calls nothing that it compiles"),
        (SCRIPT.replace("(6, 8)", "(6, 9)"), "Error: train.py: RuntimeError: mat1 and mat2"),
        (SCRIPT.replace("bf16", "bf61"), "did you mean 'bf16'?"),
    ],
    ids=["no call", "does not run", "wrong option"],
)
def test_a_script_without_a_campaign_is_one_line(tmp_path, monkeypatch, code, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(code)
    result = on(tmp_path, "train.py")
    lines = [line for line in result.output.splitlines() if line.startswith("Error:")]
    assert result.exit_code == 2 and len(lines) == 1 and message in lines[0], result.output


def test_gradients_of_a_function_are_those_of_the_modules_that_it_is_called_with():
    model, (x,) = small()

    def program(module, x):
        return module(x)

    trials = Trials(program, (model, x), options_of("bitflip{bit=30}", ["gradient:2.bias"], ""))
    assert {trials.run(trials.shot(0, t)).outcome for t in range(8)} == {"silent"}


@pytest.mark.parametrize(
    ("where", "message"),
    [
        (
            ["forward:1.*", "gradient"],
            r"where=forward:1.* selects nothing.*known: 0, 1, 2",
        ),
        (["update"], "there is no site of this phase"),
    ],
)
def test_what_selects_nothing_is_refused(where, message):
    function, args = small()
    with pytest.raises(ValueError, match=message):
        Trials(function, args, options_of("bitflip", where, ""))
