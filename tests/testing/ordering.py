"""The order of collectives among the products: on graphs, and in code as Inductor writes it, that nobody wrote
by hand.
"""

from __future__ import annotations

import dataclasses
import itertools
import random
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import fx

from fxpasses.effects import is_launch, is_wait
from fxpasses.passes.compress import Compress
from fxpasses.passes.gradient_sync import GradientSync
from fxpasses.schedule.order import (
    Event,
    OrderError,
    check_emitted,
    emitted_events,
    events_of,
    links,
)
from fxpasses.testing.check import run_over, settings
from fxpasses.testing.program import Layer, Program
from fxpasses.testing.strategies import SEEDS, environments
from fxpasses.testing.synthetic import GradientGraph, Leaf, Step
from tests.testing.compression import real_graphs

_SIZES = (1, 4, 6, 12, 0)  # 0: not known
_FROM_ELSEWHERE = "primals_9"  # a buffer that this code does not launch


# On graphs


def events_as_promised(examples: int) -> None:
    """What is launched, what is awaited, products and codecs, in the order of the graph; nothing of a graph
    that launches nothing.
    """

    @settings(examples)
    @given(
        _products(),
        environments(3),
        st.sampled_from((GradientSync(), Compress(scheme="int8"), None)),
        st.booleans(),
        SEEDS,
    )
    def search(
        source: GradientGraph, environment: dict[str, Any], current: Any, known: bool, seed: int
    ) -> None:
        graph = source.build()
        if current is not None:
            graph = run_over(current, graph, environment, seed).after
        if not known:
            for node in filter(is_launch, graph.walk()):
                node.args[0].meta.pop("val", None)  # type: ignore[union-attr]
        found = events_of(graph.graph)
        expected = [event for node in graph.walk() for event in _expected(node)]
        launches = any(map(is_launch, graph.walk()))
        assert list(found) == (expected if launches else [])

    search()


def _products() -> st.SearchStrategy[GradientGraph]:
    square = Leaf((2, 2))
    steps = st.lists(
        st.builds(
            Step,
            st.sampled_from(("product", "product", "halves", "add", "sin", "transpose")),
            st.integers(0, 5),
            st.integers(0, 5),
        ),
        max_size=5,
    ).map(tuple)
    gradients = st.lists(st.integers(0, 6), max_size=3).map(tuple)
    squares = st.builds(
        GradientGraph, st.just((square,)), steps, gradients, saved=st.just((square,))
    )
    return st.one_of(squares, real_graphs())


def _expected(node: fx.Node) -> list[Event]:
    operator, own = str(node.target), str(node.target).startswith("fxpasses.")
    if is_wait(node):
        return [Event("wait", node.name, of=node.args[0].name)]  # type: ignore[union-attr]
    if is_launch(node):
        value = node.args[0].meta.get("val")  # type: ignore[union-attr]
        return [Event("launch", node.name, 0 if value is None else value.numel())]
    return [Event("compute", node.name)] if own or operator == "aten.mm.default" else []


def sizes_that_vary() -> None:
    """What is not known of a payload, or of several, is not compared."""
    graph = Program((Layer("views"),), batch=3, dynamic=True).captured().backward.copy()
    tangent = next(n for n, _ in graph.inputs("tangent"))
    operators = torch.ops._c10d_functional
    with graph.graph.inserting_before(graph.output_node):
        one = graph.graph.call_function(operators.all_reduce.default, (tangent, "sum", "0"))
        some = graph.graph.call_function(
            operators.all_reduce_coalesced.default, ([tangent, tangent], "sum", "0")
        )
    assert not isinstance(tangent.meta["val"].numel(), int)
    assert {Event("launch", n.name, 0) for n in (one, some)} <= set(events_of(graph.graph))


# Plans


@st.composite
def plans(draw: st.DrawFn, most: int = 8) -> list[Event]:
    """Products, launches, and waits behind their launches."""
    events: list[Event] = []
    begun: list[str] = []
    for i, kind in enumerate(draw(st.lists(st.sampled_from("cclw"), min_size=1, max_size=most))):
        if kind == "l":
            begun.append(f"all_reduce_{i}")
            events.append(Event("launch", begun[-1], draw(st.sampled_from(_SIZES))))
        elif kind == "w" and begun:
            of = begun.pop(draw(st.integers(0, len(begun) - 1)))
            events.append(Event("wait", f"wait_{i}", of=of))
        else:
            events.append(Event("compute", f"mm_{i}"))
    return events


def links_as_promised(examples: int) -> None:
    """Every order that keeps the links keeps the collectives in theirs, and each product between the two that
    it stands between; and every such order keeps the links.
    """

    @settings(examples)
    @given(plans(most=6))
    def search(events: list[Event]) -> None:
        pairs, names = links(events), [e.name for e in events]
        assert all(names.index(a) < names.index(b) for a, b in pairs)
        for order in itertools.permutations(events):
            at = {event.name: place for place, event in enumerate(order)}
            assert all(at[a] < at[b] for a, b in pairs) == _keeps_places(events, order)

    search()


def _keeps_places(plan: Sequence[Event], order: Sequence[Event]) -> bool:
    """Whether everything stands between the collectives between which it is planned."""
    sent = [[e.name for e in x if e.kind != "compute"] for x in (plan, order)]
    return sent[0] == sent[1] and _places(plan) == _places(order)


def _places(events: Sequence[Event]) -> dict[str, int]:
    """How many collectives stand before each product."""
    return {
        event.name: sum(e.kind != "compute" for e in events[:place])
        for place, event in enumerate(events)
        if event.kind == "compute"
    }


# In generated code


def order_as_promised(examples: int) -> None:
    """Code is read as it runs, in whatever form it is written; the plan is accepted, and what only moves
    products that no collective stands between; of anything else it is said truly what stands where it should
    not.
    """

    @settings(examples)
    @given(plans(), SEEDS)
    def search(plan: list[Event], seed: int) -> None:
        dice = random.Random(seed)
        for changes in (0, 1, 1, 1, 1, 2, 2, 3):
            emitted = plan
            for _ in range(changes):
                emitted = _changed(emitted, dice)
            _read_and_checked(plan, emitted, dice)

    search()


def _read_and_checked(plan: list[Event], emitted: list[Event], dice: random.Random) -> None:
    products = frozenset(e.name for e in plan if e.kind == "compute")
    writer = _Writer(dice, {e.name for e in plan})
    code = writer.write(emitted)
    assert emitted_events(code, products) == writer.expected, code
    try:
        check_emitted(tuple(plan), code)
    except OrderError as error:
        _said_truly(str(error), plan, emitted, writer.buffers)
    else:
        assert _fits(plan, emitted), "another order went through"


def _changed(events: list[Event], dice: random.Random) -> list[Event]:
    """Two neighbours the other way round, or two waits, one left out, one more, or another size; waits behind
    launches.
    """
    found = list(events)
    place = dice.randrange(len(found)) if found else 0
    way = dice.choice((*("swap",) * 6, "drop", "more", "size", "waits", "waits"))
    waits = [i for i, event in enumerate(found) if event.kind == "wait"]
    if way == "waits" and len(waits) > 1:
        one, other = dice.sample(waits, 2)
        found[one], found[other] = found[other], found[one]
    elif way == "swap" and place + 1 < len(found):
        found[place], found[place + 1] = found[place + 1], found[place]
    elif way == "drop" and found:
        found.pop(place)
    elif way == "more":
        name = f"more_{len(found)}"
        launch = Event("launch", name, dice.choice(_SIZES))
        found.insert(place, dice.choice((launch, Event("wait", name, of=_FROM_ELSEWHERE))))
    elif found and found[place].kind == "launch":
        found[place] = dataclasses.replace(found[place], numel=dice.choice(_SIZES))
    begun = {_FROM_ELSEWHERE}
    for event in found:
        begun.add(event.name)
        if event.kind == "wait" and event.of not in begun:
            return events
    return found


def _matched(plan: Sequence[Event], emitted: Sequence[Event]) -> int | None:
    """The first collective that is not the planned one; launches are told by their place and size."""
    planned, found = ([e for e in x if e.kind != "compute"] for x in (plan, emitted))
    launched = iter([e.name for e in planned if e.kind == "launch"])
    meant: dict[str, str] = {}
    for at, (want, got) in enumerate(itertools.zip_longest(planned, found)):
        if want is None or got is None or want.kind != got.kind:
            return at
        if got.kind == "launch":
            meant[got.name] = next(launched)
            if want.numel and got.numel and want.numel != got.numel:
                return at
        elif want.of != meant.get(got.of):
            return at
    return None


def _fits(plan: Sequence[Event], emitted: Sequence[Event]) -> bool:
    planned, found = _places(plan), _places(emitted)
    moved = [name for name, place in found.items() if planned[name] != place]
    return _matched(plan, emitted) is None and not moved


def _said_truly(
    message: str, plan: Sequence[Event], emitted: Sequence[Event], buffers: Mapping[str, str]
) -> None:
    assert message.startswith("the generated code does not keep the planned order: expected ")
    wrong = _matched(plan, emitted)
    if wrong is not None:
        assert message.endswith(f"(collective {wrong})")
        want, got = re.findall(r"expected (.*), found (.*) \(", message)[0]
        planned, found = ([e for e in x if e.kind != "compute"] for x in (plan, emitted))
        assert want == _described(planned[wrong : wrong + 1])
        assert got == _described(_as_planned(planned, found, buffers)[wrong : wrong + 1])
        return
    name, side, collective = re.findall(r"expected '(\w+)' (before|behind) (.*), found", message)[0]
    sent = [e for e in plan if e.kind != "compute"]
    (at,) = (i for i, e in enumerate(sent) if _described([e]) == collective)
    planned, found = _places(plan)[name], _places(emitted)[name]
    assert (planned <= at) == (side == "before") and (found <= at) == (side == "behind")


def _as_planned(
    planned: Sequence[Event], found: Sequence[Event], buffers: Mapping[str, str]
) -> list[Event]:
    """What was found, called as in the plan: launches by their place, those too many by their buffers."""
    names = [e.name for e in planned if e.kind == "launch"]
    launches = [e.name for e in found if e.kind == "launch"]
    named = {**buffers, **dict(zip(launches, names, strict=False))}
    return [
        dataclasses.replace(e, of=named[e.of])
        if e.of
        else dataclasses.replace(e, name=named[e.name])
        for e in found
    ]


def _described(events: Sequence[Event]) -> str:
    for event in events:
        size = f" of {event.numel} elements" if event.numel else ""
        return f"the wait for {event.of!r}" if event.of else f"launch {event.name!r}{size}"
    return "nothing"


_C10D = "torch.ops._c10d_functional"
_LAUNCHES = (
    "all_reduce.default({}, 'sum', '0')",
    "all_gather_into_tensor.default({}, 4, '0')",
    "all_to_all_single.default({}, [4, 4], [4, 4], '0')",
)
_QUIET = (
    "    del primals_8",
    "    assert_size_stride(primals_8, (64, 64), (64, 1), 'input')",
    "    buf900 = empty_strided_cpu((4, 2), (2, 1), torch.float32)",
)
# Kernels' sources stand in front of the entry point, below the comments of what they compute.
_HEAD = """
# Topologically Sorted Source Nodes: [{names}], Original ATen: [aten.mm]
cpp_fused_0 = async_compile.cpp_pybinding(['const float*', 'float*'], r'''
extern "C"  void  kernel(const float* in_ptr0, float* out_ptr0)
{{ auto tmp0 = at::vec::Vectorized<float>::loadu(in_ptr0 + static_cast<int64_t>(x0)); }}
''')

def {entry}(args):
    primals_3, tangents_1 = args
"""


class _Writer:
    """Writes events as Inductor's Python wrapper may.

    Attributes:
        expected: what is to be read in it.
        buffers: by the name of a launch, where what comes back stands.
    """

    def __init__(self, dice: random.Random, names: set[str]) -> None:
        self._dice, self._names = dice, sorted(names)
        self._lines: list[str] = []
        self._count = 0
        self.buffers = {_FROM_ELSEWHERE: _FROM_ELSEWHERE}
        self.expected: list[Event] = []

    def write(self, events: Sequence[Event]) -> str:
        entry = self._dice.choice(("call", "partition_0", "partition_12"))
        head = _HEAD.format(entry=entry, names=", ".join(self._names))
        left = list(events)
        while left:
            event = left.pop(0)
            if (
                event.kind == "launch"
                and left
                and left[0].kind == "compute"
                and self._dice.random() < 0.3
            ):
                self._between(event, left.pop(0).name)
            elif event.kind == "compute":
                fused = [event]
                while left and left[0].kind == "compute" and self._dice.random() < 0.3:
                    fused.append(left.pop(0))
                self._compute([e.name for e in fused])
            elif event.kind == "launch":
                payload = self._payload(event.numel)
                if self._dice.random() < 0.5:
                    self._comment([])
                self._launch(event, payload)
            else:
                self._wait(event)
        return head + "\n".join(
            [*self._lines, "    return (reinterpret_tensor(buf1, (4, 2), (2, 1), 0), )"]
        )

    def _compute(self, names: list[str]) -> None:
        known = [e.name for e in self.expected if e.kind == "compute"]
        again = [n for n in known if self._dice.random() < 0.2]  # a part of it, which is no event
        others = [*again, *(n for n in ("permute", "relu_2") if self._dice.random() < 0.5)]
        self._comment(others + names)
        if self._dice.random() < 0.3:
            self._lines.append(self._dice.choice(_QUIET))
        self._lines.append("    extern_kernels.mm(buf15, primals_4, out=buf16)")
        self.expected += [Event("compute", name) for name in names]

    def _comment(self, names: list[str]) -> None:
        word = self._dice.choice(("Topologically Sorted", "Unsorted"))
        self._lines.append(
            f"    # {word} Source Nodes: [{', '.join(names)}], Original ATen: [aten.t, aten.mm]"
        )

    def _between(self, launch: Event, name: str) -> None:
        """What is launched between a product's comment and its kernel comes before it."""
        payload = self._payload(launch.numel)
        self._comment([name])
        self._lines += _QUIET
        self._launch(launch, payload)
        self._lines.append("    extern_kernels.mm(buf15, primals_4, out=buf16)")
        self.expected.append(Event("compute", name))

    def _launch(self, event: Event, payload: str) -> None:
        call = self._dice.choice(_LAUNCHES).format(payload)
        if self._dice.random() < 0.5:
            result = payload
            named = self._dice.choice(("", f"{self._buffer()} = "))
            self._lines.append(f"    {named}{_C10D}.{call.replace('.default', '_.default')}")
        else:
            result = self._buffer()
            self._lines.append(f"    {result} = {_C10D}.{call}")
        self.buffers[event.name] = result
        self.expected.append(Event("launch", result, event.numel))

    def _payload(self, numel: int) -> str:
        """Where what is sent stands, in one of the ways in which its size can be told."""
        buffer = self._buffer()
        if not numel and self._dice.random() < 0.5:
            return buffer
        flat = f"({numel}, )"
        other = "()" if numel == 1 else f"(2, {numel // 2})"
        shape = self._dice.choice((flat, other))
        way = self._dice.choice(("allocated", "reused", "view", "inline")) if numel else "unknown"
        if way == "inline":
            return f"reinterpret_tensor({buffer}, {shape}, (1, ), 0)"
        if way == "view":
            self._lines.append(
                f"    {buffer} = reinterpret_tensor(buf10, {shape}, (1, ), 4096)  # alias"
            )
        elif way == "unknown":
            self._lines.append(f"    {buffer} = {self._buffer()}; del primals_3  # reuse")
        else:
            device = self._dice.choice(("_cpu", "_cuda", ""))
            self._lines.append(
                f"    {buffer} = empty_strided{device}({shape}, (1, ), torch.float32)"
            )
        self._comment(["view"])
        self._lines.append(f"    cpp_fused_0(primals_3, {buffer})")
        if way == "reused":
            old, buffer = buffer, self._buffer()
            self._lines.append(f"    {buffer} = {old}; del {old}  # reuse")
        return buffer

    def _wait(self, event: Event) -> None:
        buffer = self.buffers[event.of]
        if self._dice.random() < 0.5:
            self._comment([])
        self._lines.append(f"    {_C10D}.wait_tensor.default({buffer})")
        self.expected.append(Event("wait", buffer, of=buffer))

    def _buffer(self) -> str:
        self._count += 1
        return f"buf{self._count + 20}"


def what_has_no_entry() -> None:
    """Code in which no entry point is found is read from its first line."""
    line = f"    {_C10D}.wait_tensor.default(buf1)"
    assert emitted_events(line, frozenset()) == [Event("wait", "buf1", of="buf1")]


SINGLE: tuple[Callable[[], None], ...] = (sizes_that_vary, what_has_no_entry)
