"""From a graph to tasks: what computes, what codes, what is sent, and what each of them waits for.

    gradient ─▶ fill, encode ─▶ launch ─▶ (link) ─▶ wait ─▶ decode ─▶ what reads it
      compute        codec        codec     link      codec    codec

Codecs run on the host's thread, on CUDA on the SMs that compute: their tasks occupy `compute` as well, whatever
their track is called. A launch takes the host a moment, then the link, and beside it the host what it loses by
sending; a wait takes no time itself, but the host does nothing else until what it waits for has arrived.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator

from torch import fx

from fxpasses.effects import is_launch, is_wait
from fxpasses.graph import TrainingGraph
from fxpasses.schedule.cost import (
    Cost,
    Transfer,
    bytes_of,
    evaluated,
    fused,
    is_view,
    seconds,
    single,
    sizes_of,
    transfer,
)
from fxpasses.schedule.machine import Machine
from fxpasses.schedule.order import is_heavy
from fxpasses.schedule.tasks import CODEC, COMPUTE, LINK, Task

LAUNCH, SEND, WAIT = "launch", "send", "wait"


@dataclasses.dataclass(frozen=True)
class Work:
    """What a task stands for.

    Attributes:
        kind: `"compute"`, `"codec"`, `"launch"`, `"link"`, `"send"` or `"wait"`.
        nodes: of the graph, in order; a launch's stands for its link and for what the host loses by it too.
        cost: of all of them.
        bucket: parameters whose gradients it is about; empty for the model's own computation.
    """

    kind: str
    nodes: tuple[fx.Node, ...]
    cost: Cost | Transfer
    bucket: tuple[str, ...] = ()

    @property
    def track(self) -> str:
        """Where it is shown: `"compute"`, `"codec"` or `"link"`."""
        return self.kind if self.kind in (COMPUTE, LINK) else CODEC


@dataclasses.dataclass(frozen=True)
class Program:
    """A graph as tasks, in its order; `works[i]` is what `tasks[i]` stands for."""

    works: tuple[Work, ...]
    tasks: tuple[Task, ...]


def build(
    graph: TrainingGraph, machine: Machine, world: int, only: Iterable[fx.Node] = ()
) -> Program:
    """The tasks of a graph.

    Args:
        machine: what durations are computed with.
        world: number of ranks.
        only: leave out all other nodes; empty: leave out none.
    """
    chosen = set(only)
    works = list(_works((n for n in graph.walk() if not chosen or n in chosen), machine))
    sizes = sizes_of(graph.graph)
    position: dict[fx.Node, int] = {}  # of the task that makes a node's value
    tasks: list[Task] = []
    own = -1  # the last task that is not about a bucket: these keep their order
    launch = -1  # the last one
    for i, work in enumerate(works):
        after = {launch} if work.kind in (LINK, SEND) else set(_before(work, position))
        launch = i if work.kind == LAUNCH else launch
        if not work.bucket and work.kind not in (LINK, SEND):
            after |= {own} - {-1}
            own = i
        if work.kind != SEND:
            position.update(dict.fromkeys(work.nodes, i))
        group = str(work.nodes[0].args[-1]) if work.kind == LINK else ""
        tasks.append(
            Task(
                name=work.nodes[0].name if len(work.nodes) == 1 else f"{work.nodes[0].name}…",
                duration=seconds(work.cost, machine, world, sizes),
                resource=f"{LINK}:{group}" if work.kind == LINK else COMPUTE,
                after=tuple(sorted(after)),
                memory=_held(work, sizes),
            )
        )
    return Program(tuple(works), tuple(tasks))


def _works(nodes: Iterable[fx.Node], machine: Machine) -> Iterator[Work]:
    """Kernels one by one, and what stands between them as far as it belongs together."""
    loop: list[fx.Node] = []
    for node in nodes:
        if is_view(node):
            continue
        alone = is_wait(node) or is_launch(node) or is_kernel(node)
        if loop and (alone or _bucket(node) != _bucket(loop[0])):
            yield _loop(loop)
            loop = []
        if not alone:
            loop.append(node)
        elif is_wait(node):
            yield Work(WAIT, (node,), Cost(), _bucket(node))
        elif is_launch(node):
            sent = transfer(node)
            yield Work(LAUNCH, (node,), Cost(launches=1), _bucket(node))
            yield Work(LINK, (node,), sent, _bucket(node))
            if machine.host_s:
                yield Work(SEND, (node,), Cost(sent=sent), _bucket(node))
        else:
            bucket = _bucket(node)
            yield Work(CODEC if bucket else COMPUTE, (node,), single(node), bucket)
    if loop:
        yield _loop(loop)


def _loop(nodes: list[fx.Node]) -> Work:
    bucket = _bucket(nodes[0])
    return Work(CODEC if bucket else COMPUTE, tuple(nodes), fused(nodes), bucket)


def is_kernel(node: fx.Node) -> bool:
    """Whether a compiler calls it as it is: a heavy operator, or one of a package's own."""
    namespace = getattr(node.target, "namespace", "aten")
    return is_heavy(node) or namespace not in ("aten", "prims")


def _bucket(node: fx.Node) -> tuple[str, ...]:
    origin = node.meta.get("provenance")
    return origin.parameters if origin is not None else ()


def _before(work: Work, position: dict[fx.Node, int]) -> Iterator[int]:
    """The tasks whose results a task reads, through views."""
    pending = [n for node in work.nodes for n in node.all_input_nodes]
    own, seen = set(work.nodes), set()
    while pending:
        node = pending.pop()
        if node in own or node in seen:
            continue
        seen.add(node)
        if node in position:
            yield position[node]
        elif is_view(node):
            pending += node.all_input_nodes


def _held(work: Work, sizes: dict) -> int:
    """Bytes of what a task has made for a bucket on its way: a payload, what arrives, a residual."""
    if work.kind not in (CODEC, LINK):
        return 0
    made = [n for n in work.nodes if any(user not in work.nodes for user in n.users)]
    size = sum((bytes_of(node) for node in made), 0)
    return int(evaluated(size, sizes))
