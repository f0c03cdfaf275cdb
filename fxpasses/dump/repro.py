"""A script that shows again how a pass fails: the graph that the passes began with, and the call.

python repro.py      fails as it did
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import runpy
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from fxpasses.distributed.fake import fake_world
from fxpasses.distributed.group import is_initialized
from fxpasses.distributed.group import resolve as resolve_group
from fxpasses.dump.serial import Records, graph_of
from fxpasses.graph import TrainingGraph
from fxpasses.observers import CheckRules, GraphName, watchers_of
from fxpasses.passes.base import Pass
from fxpasses.pipeline import Done, Pipeline, Run, made_by_pass
from fxpasses.registry import parse_pipeline
from fxpasses.spec import SpecError

_TEMPLATE = '''"""{error}

Graph {name}, on rank {rank} of {world}. Needs what the passes need, nothing else of the program.
"""

import json

from fxpasses.dump.repro import rerun

# The graph in front of the passes, one node a line.
GRAPH = json.loads(r"""
{graph}""")

if __name__ == "__main__":
    rerun(
        GRAPH,
        passes={passes!r},
        stage={stage!r},
        local={local!r},
        rank={rank},
        world={world},
        sources={sources!r},
    )
'''


class Repro:
    """An observer that leaves a script when a pass fails.

    Args:
        path: of the script.
        name: of the graph.
    """

    def __init__(self, path: Path, name: str) -> None:
        self._path, self._name = path, name
        self._graph = ""

    def __call__(self, previous: Done | None, following: Pass | None, graph: TrainingGraph) -> None:
        if previous is None:
            self._graph = Records().text(None, graph)

    def failed(self, error: Exception, run: Run) -> None:
        """Write the script, and say so in a note of the error; not if another observer failed."""
        if not (made_by_pass(error) or isinstance(error, SpecError)):
            return
        rank, world = (dist.get_rank(), dist.get_world_size()) if is_initialized() else (0, 1)
        said = f"{type(error).__name__}: {error}".replace("\\", "/").replace('"""', "'''")
        text = _TEMPLATE.format(
            error=said,
            name=self._name,
            graph=self._graph,
            passes=run.pipeline.spec,
            stage=run.stage,
            local=run.local,
            rank=rank,
            world=world,
            sources=_sources(run.pipeline.passes),
        )
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.write_text(text)
        error.add_note(f"{NOTE}{self._path}")


NOTE = "to see it again: python "


def rerun(
    graph: Mapping[str, Any],
    *,
    passes: str,
    stage: str,
    local: bool | None,
    rank: int,
    world: int,
    sources: Sequence[tuple[str, str]] = (),
) -> list[Done]:
    """Run passes over a saved graph.

    Args:
        graph: as `serial.Records` writes it.
        passes: the pipeline string.
        stage, local: as for `Pipeline.run`.
        rank, world: which of how many ranks; others are pretended.
        sources: module and file of passes that no entry point knows.
    """
    for module, file in sources:
        _load(module, file)
    with fake_world(world, rank):
        group = resolve_group(None).name
        pipeline = Pipeline(parse_pipeline(passes)).bind(group=group, world=world, rank=rank)
        name = GraphName(rank, 0, stage)
        return pipeline.run(stage, graph_of(graph), [CheckRules(), *watchers_of(name)], local)


def _sources(pipeline: Sequence[Pass]) -> list[tuple[str, str]]:
    """Where passes come from that are registered by a decorator."""
    classes = [type(p) for p in pipeline]
    foreign = [cls for cls in classes if not cls.__module__.startswith("fxpasses.")]
    return list(dict.fromkeys((cls.__module__, inspect.getfile(cls)) for cls in foreign))


def _load(name: str, file: str) -> None:
    if name == "__main__":  # a script: run, but not as the one that was started
        runpy.run_path(file, run_name="__fxpasses__")
        return
    try:
        importlib.import_module(name)
    except ModuleNotFoundError:
        spec = importlib.util.spec_from_file_location(name, file)
        assert spec is not None and spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
