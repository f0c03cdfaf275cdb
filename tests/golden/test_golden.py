"""What each pass changes, line by line, as somebody has seen it. `pytest --bless` accepts what it is now."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from fxpasses.dump.diff import unified
from fxpasses.dump.text import Lines, heading
from fxpasses.registry import passes
from fxpasses.trace import trace
from tests.golden.model import TwoHeads

FOLDER = Path(__file__).parent
WORLD = 4
BLESSED_WITH = "2.13"  # other versions decompose and name differently
EVERYTHING = '{"precision": "bf16", "loss_scale": "dynamic", "clip_norm": 1.0}'
# Passes that this does not ask for, and what does.
OPTIONS = {
    "compress": '{"compression": "int4"}',
    "measure_norms": '{"compression": "adaptive"}',
    "check_products": '{"guards": "products"}',
    "check_gradient_products": '{"guards": "products"}',
    "check_sums": '{"guards": "gradients"}',
    "check_gradients": '{"guards": "gradients"}',
    "settle_checks": '{"guards": "gradients"}',
    "check_values": '{"guards": "values"}',
    "check_payloads": '{"guards": "payloads"}',
    "agree_alarms": '{"guards": "payloads"}',
    "inject_forward": '{"faults": "bitflip{where=forward:left}"}',
    "inject": '{"faults": "bitflip{where=gradient:left.weight}"}',
    "inject_payload": '{"faults": "bitflip{where=payload:left.weight}"}',
    "replay_forward": '{"guards": "products,on=recompute,region=left"}',
    "replay_backward": '{"guards": "products,on=recompute,region=left"}',
    "schedule": '{"compression": "int8", "schedule": "auto"}',
}


def own_passes() -> list[str]:
    found = passes().items()
    return sorted(name for name, cls in found if cls.__module__.startswith("fxpasses.passes."))


@functools.cache
def diffs(options: str) -> dict[str, str]:
    """By pass what it changes in the model's graphs."""
    found: dict[str, str] = {}

    def watcher(name: Any) -> Any:
        lines, before = Lines(), [[""]]
        names: dict[Any, str] = {}

        def observe(previous: Any, following: Any, graph: Any) -> None:
            now = lines.of(graph)
            renamed = {
                old: n.name for n in graph.graph.nodes if (old := names.get(n, n.name)) != n.name
            }
            assert not renamed, f"{previous.made_by.name} renames what it does not write: {renamed}"
            names.update({node: node.name for node in graph.graph.nodes})
            if previous is not None:
                diff = unified(before[0], now, (f"{name.graph} before", f"{name.graph} after"))
                found[previous.made_by.name] = "\n".join([heading(previous), *diff, ""])
            before[0] = now

        return [observe]

    trace(
        TwoHeads(), (torch.ones(3, 4),), json.loads(options), world=WORLD, rank=1, watcher=watcher
    )
    return found


@pytest.mark.skipif(
    not torch.__version__.startswith(BLESSED_WITH), reason="blessed with another torch"
)
@pytest.mark.parametrize("name", own_passes())
def test_what_a_pass_changes(name, request, monkeypatch):
    monkeypatch.chdir(FOLDER.parent.parent)  # lines of the model are relative to it
    found = diffs(OPTIONS.get(name, EVERYTHING))
    assert name in found, f"no options run {name!r}: give some in OPTIONS"
    path = FOLDER / f"{name}.diff"
    if request.config.getoption("--bless"):
        path.write_text(found[name])
    assert path.exists(), f"{path.name} is missing: look at the change, then run pytest --bless"
    assert found[name] == path.read_text(), "look at the change, then run pytest --bless"
    assert found[name].count("\n@@ ") >= 1, "the pass finds nothing to do in this model"


def test_no_diff_is_left_over():
    assert {path.stem for path in FOLDER.glob("*.diff")} == set(own_passes())
