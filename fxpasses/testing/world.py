"""A simulated world: one graph, or one a rank, run on W ranks in one process, collectives included.

Every rank runs until it launches a collective; once all ranks stand at a launch, it is carried out and they go
on. So a graph means here what it means on W processes, with no process group and no clock:

    rank 0   mm ─ mm ─ all_reduce ┐         ┌ wait ─ output
    rank 1   mm ─ mm ─ all_reduce ┴ a + b ──┴ wait ─ output

Sums run over the ranks in their order, in the dtype of the payload: the plainest order that a real
collective may take. What a graph draws at random, each rank draws from a generator that starts anew with its
number: two runs of one graph draw alike, as do two graphs that draw in the same order.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from fxpasses.effects import is_launch, is_wait
from fxpasses.graph import TrainingGraph


class WorldError(RuntimeError):
    """The ranks can't go on: they launch different collectives, or read what is still in flight."""


class InFlight:
    """What a collective returned and nobody awaited yet: no tensor, so that no operator can read it."""

    def __init__(self, launch: str, value: torch.Tensor) -> None:
        self.launch, self.value, self.awaited = launch, value, False


@dataclasses.dataclass(frozen=True)
class Launch:
    """A collective at which a rank stands.

    Attributes:
        operator: such as `"all_reduce"`.
        payload: what this rank sends.
        settings: its other arguments: reduction, group size, source, split sizes, group.
        node: name of the node.
        reduces: whether the node says that it reduces gradients.
    """

    operator: str
    payload: torch.Tensor
    settings: tuple[Any, ...]
    node: str
    reduces: bool = False

    def same_for_all(self) -> tuple[Any, ...]:
        """What every rank has to bring alike. An all-to-all may differ in its splits, and so in its sizes."""
        split = self.operator == "all_to_all_single"
        settings = self.settings[-1:] if split else self.settings
        shape = self.payload.shape[1:] if split else self.payload.shape
        return self.operator, self.payload.dtype, tuple(shape), settings

    def __str__(self) -> str:
        form = f"{self.payload.dtype}{list(self.payload.shape)}".removeprefix("torch.")
        return f"{self.operator}({', '.join(map(str, (form, *self.settings)))}) by {self.node!r}"


def run_world(
    graphs: TrainingGraph | Sequence[TrainingGraph], inputs: Sequence[Sequence[Any]]
) -> list[tuple[Any, ...]]:
    """The outputs of each rank, given the inputs of each rank.

    Args:
        graphs: one graph for all ranks, or one for each.

        inputs: of each rank, one for each input of its graph.

    Raises:
        WorldError: when ranks launch different collectives, or a graph reads what is in flight.
        ValueError: for other numbers of graphs or inputs.
    """
    return World(graphs, inputs).run()


class World:
    """As `run_world`, keeping the launches for a look afterwards (`launches[i][rank]`)."""

    def __init__(
        self, graphs: TrainingGraph | Sequence[TrainingGraph], inputs: Sequence[Sequence[Any]]
    ) -> None:
        each = [graphs] * len(inputs) if isinstance(graphs, TrainingGraph) else list(graphs)
        _check_inputs(each, inputs)
        pairs = zip(each, inputs, strict=True)
        self.ranks = [_Rank(graph, row, rank) for rank, (graph, row) in enumerate(pairs)]
        self.launches: list[list[Launch]] = []

    def values(self, rank: int) -> dict[str, Any]:
        """What the nodes of a rank's graph have come to so far, by name."""
        return {node.name: value for node, value in self.ranks[rank].env.items()}

    def run(self) -> list[tuple[Any, ...]]:
        while True:
            standing = [rank.advance() for rank in self.ranks]
            launches = [launch for launch in standing if launch is not None]
            if not launches:
                return [rank.outputs() for rank in self.ranks]
            if len(launches) < len(standing) or len({x.same_for_all() for x in launches}) > 1:
                rows = [f"  rank {r}: {x or 'has ended'}" for r, x in enumerate(standing)]
                where = f"collective {len(self.launches)}"
                raise WorldError("\n".join([f"{where}: the ranks launch different things", *rows]))
            self.launches.append(launches)
            for rank, value in zip(self.ranks, carry_out(launches), strict=True):
                rank.receive(value)


def _check_inputs(graphs: Sequence[TrainingGraph], inputs: Sequence[Sequence[Any]]) -> None:
    if len(graphs) != len(inputs):
        found = f"{len(graphs)} graphs and inputs of {len(inputs)} ranks"
        raise ValueError(f"run_world: {found}; expected as many")
    for rank, (graph, row) in enumerate(zip(graphs, inputs, strict=True)):
        expected = len(graph.inputs())
        if isinstance(row, torch.Tensor) or len(row) != expected:
            found = "a tensor" if isinstance(row, torch.Tensor) else f"{len(row)} inputs"
            raise ValueError(
                f"run_world: rank {rank} is given {found}; expected a list of {expected}, one for each input "
                "of its graph"
            )


class _Rank(fx.Interpreter):
    """One rank's copy of a graph, run piece by piece."""

    def __init__(self, graph: TrainingGraph, inputs: Sequence[Any], rank: int) -> None:
        super().__init__(graph.module)
        self._rank = rank
        self.args_iter = iter(inputs)
        self._ahead = iter(list(graph.graph.nodes))
        self._at: fx.Node | None = None
        self._in_flight: list[InFlight] = []
        self._random = torch.Generator().manual_seed(rank).get_state()

    def advance(self) -> Launch | None:
        """Run up to the next launch; None at the end of the graph."""
        with torch.random.fork_rng(devices=[]):
            torch.set_rng_state(self._random)
            launch = self._advance()
            self._random = torch.get_rng_state()
        return launch

    def _advance(self) -> Launch | None:
        for node in self._ahead:
            if is_launch(node):
                self._at = node
                return self._launch(node)
            self.env[node] = self._run(node)
        return None

    def receive(self, value: torch.Tensor) -> None:
        """What the collective at which this rank stands gives it."""
        assert self._at is not None
        flying = InFlight(self._at.name, value)
        self._in_flight.append(flying)
        self.env[self._at] = flying

    def outputs(self) -> tuple[Any, ...]:
        for flying in self._in_flight:
            if not flying.awaited:
                raise WorldError(f"rank {self._rank}: nothing awaits {flying.launch!r}")
        return tuple(next(v for n, v in self.env.items() if n.op == "output"))

    def _run(self, node: fx.Node) -> Any:
        if is_wait(node):
            flying = self.env[node.args[0]]  # type: ignore[index]
            if not isinstance(flying, InFlight):
                raise WorldError(f"rank {self._rank}: {node.name!r} awaits what is not in flight")
            flying.awaited = True
            return flying.value
        for used in node.all_input_nodes:
            if isinstance(self.env[used], InFlight):
                raise WorldError(
                    f"rank {self._rank}: {node.name!r} reads {used.name!r}, still in flight"
                )
        return self.run_node(node)

    def _launch(self, node: fx.Node) -> Launch:
        target = node.target
        assert isinstance(target, torch._ops.OpOverload)
        args, kwargs = self.fetch_args_kwargs_from_env(node)
        names = [argument.name for argument in target._schema.arguments]
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        payload, *settings = [given[name] for name in names]
        if target._opname not in _COLLECTIVES:
            raise WorldError(f"the simulated world knows no {target._opname!r} ({node.name!r})")
        if not isinstance(payload, torch.Tensor):
            raise WorldError(
                f"rank {self._rank}: {node.name!r} sends {payload!r}, which is no tensor"
            )
        frozen = tuple(tuple(s) if isinstance(s, list) else s for s in settings)
        reduces = bool(node.meta.get("reduces", False))
        # A copy: the payload is what it was at the launch, whatever the graph does later.
        return Launch(target._opname, payload.clone(), frozen, node.name, reduces)


def carry_out(launches: Sequence[Launch]) -> list[torch.Tensor]:
    """What each rank receives; tensors of its own, since ranks share no memory."""
    first = launches[0]
    payloads = [launch.payload for launch in launches]
    received = _COLLECTIVES[first.operator](payloads, launches)
    return [value.clone() for value in received]


def _sum(payloads: Sequence[torch.Tensor]) -> torch.Tensor:
    return functools.reduce(torch.add, payloads)


REDUCTIONS: dict[str, Callable[[Sequence[torch.Tensor]], torch.Tensor]] = {
    "sum": _sum,
    "avg": lambda payloads: _sum(payloads) / len(payloads),
    "max": lambda payloads: functools.reduce(torch.maximum, payloads),
    "min": lambda payloads: functools.reduce(torch.minimum, payloads),
}


def _reduce(payloads: Sequence[torch.Tensor], operation: str) -> torch.Tensor:
    if operation not in REDUCTIONS:
        raise WorldError(f"the simulated world knows no reduction {operation!r}")
    return REDUCTIONS[operation](payloads)


def _check_size(launch: Launch, size: int, world: int) -> None:
    if size != world:
        raise WorldError(f"{launch} says {size} ranks, and there are {world}")


def _all_reduce(payloads: Sequence[torch.Tensor], launches: Sequence[Launch]) -> list[torch.Tensor]:
    operation, _ = launches[0].settings
    return [_reduce(payloads, operation)] * len(payloads)


def _all_gather(payloads: Sequence[torch.Tensor], launches: Sequence[Launch]) -> list[torch.Tensor]:
    _check_size(launches[0], launches[0].settings[0], len(payloads))
    return [torch.cat(list(payloads))] * len(payloads)


def _reduce_scatter(
    payloads: Sequence[torch.Tensor], launches: Sequence[Launch]
) -> list[torch.Tensor]:
    operation, size, _ = launches[0].settings
    _check_size(launches[0], size, len(payloads))
    if payloads[0].shape[0] % size:
        raise WorldError(f"{launches[0]}: {size} ranks can't share its first dimension")
    return list(_reduce(payloads, operation).chunk(size))


def _all_to_all(payloads: Sequence[torch.Tensor], launches: Sequence[Launch]) -> list[torch.Tensor]:
    ranks = range(len(payloads))
    parts = [
        p.split(list(launch.settings[1])) for p, launch in zip(payloads, launches, strict=True)
    ]
    for receiver in ranks:
        sizes = tuple(parts[sender][receiver].shape[0] for sender in ranks)
        if sizes != launches[receiver].settings[0]:
            raise WorldError(f"rank {receiver}: {launches[receiver]} is sent parts of {sizes}")
    return [torch.cat([parts[sender][receiver] for sender in ranks]) for receiver in ranks]


def _broadcast(payloads: Sequence[torch.Tensor], launches: Sequence[Launch]) -> list[torch.Tensor]:
    source, _ = launches[0].settings
    return [payloads[source]] * len(payloads)


_COLLECTIVES: dict[
    str, Callable[[Sequence[torch.Tensor], Sequence[Launch]], list[torch.Tensor]]
] = {
    "all_reduce": _all_reduce,
    "all_gather_into_tensor": _all_gather,
    "reduce_scatter_tensor": _reduce_scatter,
    "all_to_all_single": _all_to_all,
    "broadcast": _broadcast,
}
