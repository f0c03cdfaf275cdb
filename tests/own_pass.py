"""A program with a pass of its own that goes wrong: what `fxpasses bisect` and a saved repro are about."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

_SOURCE = '''
import copy, dataclasses
from typing import ClassVar

import torch
from torch import nn

from fxpasses import Pass, Report, register_pass, splice
from fxpasses.rewrite import Provenance


@register_pass
@dataclasses.dataclass(frozen=True)
class Wrong(Pass):
    """Negates the gradient of one parameter."""

    parameter: str = "bias"

    name: ClassVar[str] = "wrong"
    stage: ClassVar[str] = "backward"

    def run(self, graph):
        for g in graph.gradients():
            factor = -1 if g.parameter == self.parameter else 1
            origin = Provenance(self.name, "multiply", g.node.name, parameters=(g.parameter,))
            node = splice(
                graph, graph.output_node, lambda x: x * factor, g.node, name="w", provenance=origin
            )
            graph.set_output(g.index, node)
        return Report(changed=True)


@register_pass
@dataclasses.dataclass(frozen=True)
class Sloppy(Pass):
    """Raises, or says that it changed what it did not."""

    how: str = "lies"

    name: ClassVar[str] = "sloppy"
    stage: ClassVar[str] = "backward"

    def run(self, graph):
        if self.how == "raises":
            raise KeyError("no such gradient")
        return Report(changed=True)


def make():
    torch.manual_seed(0)
    return nn.Linear(4, 2), torch.ones(3, 4)


if __name__ == "__main__":
    model, x = make()
    twin = copy.deepcopy(model)
    options = {"passes": "PASSES"}
    torch.compile(model, backend="hardened_aot_eager", options=options)(x).sum().backward()
    twin(x).sum().backward()
    for a, b in zip(model.parameters(), twin.parameters()):
        assert torch.allclose(a.grad, b.grad)
'''


def write_own(folder: Path, monkeypatch: pytest.MonkeyPatch, passes: str) -> Path:
    """Make `own.py`, a script that trains with these passes, in a folder that becomes the current one."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (folder / "own.py").write_text(_SOURCE.replace("PASSES", passes))
    return folder
