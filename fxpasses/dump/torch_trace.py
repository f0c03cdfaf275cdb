"""Records of each pass in the trace that torch writes to the folder TORCH_TRACE; `tlparse` shows them.

`torch._logging.trace_structured` is private; checked on torch 2.13.
"""

from __future__ import annotations

import os

from torch._logging import trace_structured

from fxpasses.dump.diff import unified
from fxpasses.dump.text import Lines, heading
from fxpasses.graph import TrainingGraph
from fxpasses.passes.base import Pass
from fxpasses.pipeline import Done


def is_traced() -> bool:
    """Whether torch writes such a trace."""
    return bool(os.environ.get("TORCH_TRACE"))


class TorchTrace:
    """Writes the graph in front of the passes, then what each pass changes, as artifacts of the compilation.

    Args:
        name: of the graph (`rank0/g0.backward`).
    """

    def __init__(self, name: str) -> None:
        self._name = f"fxpasses_{name.replace('/', '_')}"
        self._lines = Lines()
        self._before: list[str] = []

    def __call__(self, previous: Done | None, following: Pass | None, graph: TrainingGraph) -> None:
        lines = self._lines.of(graph)
        if previous is None:
            stem, body = "00-input", lines
        else:
            stem = f"{previous.number:02d}-{previous.made_by.name}"
            body = unified(self._before, lines, ("before", "after"))
        self._before = lines
        text = "\n".join([heading(previous), *body])
        trace_structured(
            "artifact",
            metadata_fn=lambda: {"name": f"{self._name}_{stem}", "encoding": "string"},
            payload_fn=lambda: text,
        )
