"""Dumps of a training program: by option, by environment, with caches warm and cold, in torch's trace."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo.utils import counters

from tests.multirank import run_alone

SCRIPT = """
import sys, torch, torch.distributed as dist
from torch import nn

dist.init_process_group("fake", rank=1, world_size=2, store=dist.HashStore())
torch.manual_seed(0)
model = nn.Linear(32, 32)
compiled = torch.compile(model, backend=sys.argv[1])
compiled(torch.ones(4, 32)).sum().backward()
"""
# Beside Python, if its environment is not activated.
PLACES = os.pathsep.join((sysconfig.get_path("scripts"), os.environ.get("PATH", "")))
TLPARSE = shutil.which("tlparse", path=PLACES)
STEMS = ("00-input", "01-participation", "02-running_stats", "03-bucketing", "04-gradient_sync")


def train(tmp_path: Path, backend: str, **environment: str) -> None:
    script = tmp_path / "train.py"
    script.write_text("import torch.testing._internal.distributed.fake_pg\n" + SCRIPT)
    done = subprocess.run(
        [sys.executable, str(script), backend],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]


def trained(environment: dict[str, str]) -> int:
    """What the script does, in this process; returns how often Inductor's cache was hit."""
    os.environ.update(environment)
    dist.init_process_group("fake", rank=1, world_size=2, store=dist.HashStore())
    compiled = torch.compile(nn.Linear(32, 32), backend="hardened")
    compiled(torch.ones(4, 32)).sum().backward()
    return counters["inductor"]["fxgraph_cache_hit"]


def files(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@pytest.mark.inductor
def test_the_environment_asks_for_it_with_warm_and_cold_caches(tmp_path):
    cache = str(tmp_path / "cache")
    for run in ("cold", "warm"):
        dump = str(tmp_path / run)
        hits = run_alone(trained, {"FXPASSES_DUMP": dump, "TORCHINDUCTOR_CACHE_DIR": cache})
        assert hits == {"cold": 0, "warm": 2}[run]
    cold = files(tmp_path / "cold")
    assert cold == files(tmp_path / "warm")
    assert {f"rank1/g0.backward/{stem}.py" for stem in STEMS} <= cold.keys()


def test_records_in_torchs_trace(tmp_path):
    train(tmp_path, "hardened_aot_eager", TORCH_TRACE=str(tmp_path / "trace"))
    (path,) = (tmp_path / "trace").glob("*.log")
    found: dict[str, dict[str, Any]] = {}
    payload: dict[str, str] = {}
    for line in path.read_text().splitlines():
        if line.startswith("V"):
            record = json.loads(line[line.index("{") :])
            name = record.get("artifact", {}).get("name", "")
            if name.startswith("fxpasses_"):
                found[name] = record
        elif found:
            last = list(found)[-1]
            payload[last] = payload.get(last, "") + line.strip("\t") + "\n"
    names = [f"fxpasses_rank1_g0.backward_{stem}" for stem in STEMS]
    assert [name for name in found if "backward" in name] == names
    assert all(
        record["frame_id"] == 0 for record in found.values()
    )  # known to belong to the compilation
    assert "+    bucket0_cat = " in payload[names[3]]


@pytest.mark.skipif(TLPARSE is None, reason="needs tlparse: pip install tlparse")
def test_tlparse_shows_them(tmp_path):
    train(tmp_path, "hardened_aot_eager", TORCH_TRACE=str(tmp_path / "trace"))
    command = [str(TLPARSE), "trace", "--all-ranks-html", "--no-browser", "-o", "report"]
    subprocess.run(command, cwd=tmp_path, check=True, timeout=60, capture_output=True)
    (shown,) = (tmp_path / "report").glob("rank_1/-_0_0_0/*03-bucketing*.txt")
    assert "+    bucket0_cat = " in shown.read_text()
    index = (tmp_path / "report" / "rank_1" / "index.html").read_text()
    assert shown.name in index
    assert [stem for stem in STEMS if f"fxpasses_rank1_g0.backward_{stem}" in index] == list(STEMS)


def test_nothing_is_written_unless_asked_for(tmp_path):
    train(tmp_path, "hardened_aot_eager", FXPASSES_DUMP="")
    assert [p.name for p in tmp_path.iterdir()] == ["train.py"]
