"""The order of collectives among the heavy computations: chosen on the graph, checked in generated code.

Events are launches, waits, heavy operators and codecs. The compiler behind us may move everything else as it
likes; it may not move a launch past the computation that should hide it, nor a wait ahead of it.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable

import torch
from torch import fx

from fxpasses.effects import is_launch, is_wait

CODECS = "fxpasses"  # namespace of `custom_ops`
HEAVY = re.compile(r"^(.*mm|.*convolution.*|.*attention.*|.*lstm.*|.*rnn.*|.*gru.*)$")


class OrderError(RuntimeError):
    """The generated code does not keep the order that the pipeline chose."""


@dataclasses.dataclass(frozen=True)
class Event:
    """A point of the order.

    Attributes:
        kind: `"launch"`, `"wait"` or `"compute"`.
        name: name of the node.
        numel: elements of a launch's payload, 0 where unknown.
        of: for a wait, the name of its launch.
    """

    kind: str
    name: str
    numel: int = 0
    of: str = ""


def events_of(graph: fx.Graph) -> tuple[Event, ...]:
    """The events of a graph in its order; empty if it launches nothing."""
    found = [event for node in graph.nodes if (event := _event(node)) is not None]
    return tuple(found) if any(e.kind == "launch" for e in found) else ()


def _event(node: fx.Node) -> Event | None:
    if is_wait(node):
        launch = node.args[0]
        assert isinstance(launch, fx.Node)
        return Event("wait", node.name, of=launch.name)
    if is_launch(node):
        return Event("launch", node.name, _payload_numel(node))
    if is_heavy(node):
        return Event("compute", node.name)
    return None


def is_heavy(node: fx.Node) -> bool:
    """Operators that take long enough to hide communication: products, convolutions, attention, cells, and the
    codecs of compressed buckets.
    """
    target = node.target
    if node.op != "call_function" or not isinstance(target, torch._ops.OpOverload):
        return False
    return target.namespace == CODECS or HEAVY.match(target._opname) is not None


def _payload_numel(node: fx.Node) -> int:
    payload = node.args[0]
    value = payload.meta.get("val") if isinstance(payload, fx.Node) else None
    numel = value.numel() if isinstance(value, torch.Tensor) else 0
    return numel if isinstance(numel, int) else 0


def links(events: Iterable[Event]) -> list[tuple[str, str]]:
    """(earlier, later) pairs that fix the order wherever a collective is one of the two.

    Between two collectives heavy operators stay free to change places with each other.
    """
    pairs: list[tuple[str, str]] = []
    last: Event | None = None
    segment: list[Event] = []
    for event in events:
        if event.kind == "compute":
            segment.append(event)
            pairs += [(last.name, event.name)] if last else []
        else:
            before = segment or ([last] if last else [])
            pairs += [(earlier.name, event.name) for earlier in before]
            last, segment = event, []
    return pairs


_ENTRY = re.compile(r"^\s*def (call|partition_\d+)\(")
_COLLECTIVE = re.compile(r"(?:(\w+) = )?torch\.ops\._c10d_functional\.(\w+)\.default\(")
_NAMES = re.compile(r"Source Nodes: \[([^\]]*)\]")
_ALLOCATED = re.compile(r"(\w+) = empty_strided\w*\(\(([\d, ]*)\)")
_REUSED = re.compile(r"(\w+) = (\w+); del")
_VIEW = re.compile(r"reinterpret_tensor\(\w+, \(([\d, ]*)\)")
_NAMED_VIEW = re.compile(r"(\w+) = " + _VIEW.pattern)


class _Reader:
    """Reads Inductor's Python wrapper line by line.

    Args:
        compute: names of the heavy nodes to look for in the comments that name source nodes.
    """

    def __init__(self, compute: frozenset[str]) -> None:
        self.events: list[Event] = []
        self._unseen = set(compute)
        self._names: list[str] = []  # of the comment above
        self._numels: dict[str, int] = {}  # by buffer

    def read(self, line: str) -> None:
        if match := _NAMES.search(line):
            self._names = [name.strip() for name in match[1].split(",")]
            return
        for pattern in (_ALLOCATED, _NAMED_VIEW):
            if match := pattern.search(line):
                self._numels[match[1]] = _product(match[2])
        if match := _REUSED.search(line):
            self._numels[match[1]] = self._numels.get(match[2], 0)
        if match := _COLLECTIVE.search(line):
            self._collective(match[1], match[2], _first_argument(line[match.end() :]))
        elif "(" in line and "empty_strided" not in line and "assert_" not in line:
            here = [name for name in self._names if name in self._unseen]
            self._unseen.difference_update(here)
            self.events += [Event("compute", name) for name in here]
            self._names = []

    def _collective(self, result: str | None, operator: str, payload: str) -> None:
        if operator == "wait_tensor":
            self.events.append(Event("wait", payload, of=payload))
            return
        view = _VIEW.match(payload)
        numel = _product(view[1]) if view else self._numels.get(payload, 0)
        in_place = operator.endswith("_")
        self.events.append(Event("launch", payload if in_place else result or payload, numel))


def emitted_events(code: str, compute: frozenset[str]) -> list[Event]:
    """The events in Inductor's Python wrapper code, in order of execution.

    Args:
        code: the wrapper's source.
        compute: names of the heavy nodes to look for.

    Returns:
        Launches are named by their buffer, waits by the buffer they wait for (`of`), heavy operators by
        their node.
    """
    reader = _Reader(compute)
    lines = code.splitlines()
    # What stands in front of the entry point defines kernels, under comments of the same form.
    entry = next((i for i, line in enumerate(lines) if _ENTRY.match(line)), 0)
    for line in lines[entry:]:
        reader.read(line)
    return reader.events


def _first_argument(text: str) -> str:
    """`reinterpret_tensor(a, (2,), (1,), 0), 'sum', '0')` → `reinterpret_tensor(a, (2,), (1,), 0)`."""
    depth = 0
    for position, character in enumerate(text):
        if depth == 0 and character in ",)":
            return text[:position].strip()
        depth += {"(": 1, ")": -1}.get(character, 0)
    return text.strip()


def check_emitted(planned: tuple[Event, ...], code: str) -> None:
    """Check that generated code keeps a planned order.

    Launches are matched by position and payload size, waits by the buffer of their launch, heavy
    operators by node name and by the collectives that they stand between. A heavy operator that code
    generation renamed or fused away is left out.

    Raises:
        OrderError: naming the two nodes that stand the wrong way round.
    """
    emitted = emitted_events(code, frozenset(e.name for e in planned if e.kind == "compute"))
    collectives = [e for e in planned if e.kind != "compute"]
    _check_collectives(collectives, [e for e in emitted if e.kind != "compute"])
    place = _places(emitted)
    for name, expected in _places(planned).items():
        found = place.get(name, expected)
        if found != expected:
            other, side = (
                (collectives[expected], "before")
                if found > expected
                else (collectives[found], "behind")
            )
            raise OrderError(
                "the generated code does not keep the planned order: expected "
                f"{name!r} {side} {_describe(other)}, found it on the other side"
            )


def _check_collectives(planned: list[Event], emitted: list[Event]) -> None:
    launches = iter([e for e in planned if e.kind == "launch"])
    launch_of: dict[str, str] = {}  # by buffer
    for position in range(max(len(planned), len(emitted))):
        want = planned[position] if position < len(planned) else None
        got = emitted[position] if position < len(emitted) else None
        if got is not None:
            if got.kind == "launch":
                next_launch = next(launches, None)
                launch_of[got.name] = next_launch.name if next_launch else got.name
            buffer = got.of or got.name
            name = launch_of.get(buffer, buffer)
            got = dataclasses.replace(got, name=name, of=name)
        if want is None or got is None or not _same(want, got):
            raise OrderError(
                "the generated code does not keep the planned order: expected "
                f"{_describe(want)}, found {_describe(got)} (collective {position})"
            )


def _places(events: Iterable[Event]) -> dict[str, int]:
    """For each heavy operator how many collectives stand before it."""
    places: dict[str, int] = {}
    before = 0
    for event in events:
        if event.kind == "compute":
            places[event.name] = before
        else:
            before += 1
    return places


def _same(want: Event, got: Event) -> bool:
    if want.kind != got.kind:
        return False
    if want.kind == "wait":
        return want.of == got.of
    return not want.numel or not got.numel or want.numel == got.numel


def _describe(event: Event | None) -> str:
    if event is None:
        return "nothing"
    if event.kind == "wait":
        return f"the wait for {event.of!r}"
    size = f" of {event.numel} elements" if event.numel else ""
    return f"{event.kind} {event.name!r}{size}"


def _product(sizes: str) -> int:
    total = 1
    for size in filter(None, (s.strip() for s in sizes.split(","))):
        total *= int(size)
    return total
