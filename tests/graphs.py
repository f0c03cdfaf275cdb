"""Graphs, inputs and ways to run them that several tests share."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import fx, nn
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from fxpasses.graph import Role, TrainingGraph
from fxpasses.observers import CheckRules
from fxpasses.passes.base import Pass, Report
from fxpasses.passes.bucketing import Bucketing
from fxpasses.passes.gradient_sync import GradientSync
from fxpasses.pipeline import Done, Pipeline
from fxpasses.rewrite import Provenance
from fxpasses.testing import capture

C10D = torch.ops._c10d_functional
WORLD = 4
ANY_ORIGIN = Provenance("test", "rule")


def traced(fn: Callable[..., Any], *examples: torch.Tensor) -> TrainingGraph:
    """A backward graph written by hand: inputs are tangents, output i is the gradient of `p{i}`."""
    mode = FakeTensorMode()
    with mode:
        # Not `from_tensor`: it would make one fake tensor of an example that is given twice.
        fakes = [torch.empty_strided(x.shape, x.stride(), dtype=x.dtype) for x in examples]
        module = make_fx(fn)(*fakes)
    for node in module.graph.find_nodes(op="placeholder"):
        node.meta["role"] = Role("tangent", node.name)
    output = module.graph.output_node()
    output.args = (tuple(output.args[0]),)
    output.meta["roles"] = tuple(Role("gradient", f"p{i}") for i in range(len(output.args[0])))
    return TrainingGraph(module)


def doubled(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> TrainingGraph:
    """One gradient of each shape, each twice its own tangent."""
    tangents = [torch.ones(shape, dtype=dtype) for shape in shapes]
    return traced(lambda *xs: [x * 2 for x in xs], *tangents)


def backward_of(program: Callable[..., Any], *args: Any) -> TrainingGraph:
    return capture(program, *args).backward


def mlp(*widths: int) -> nn.Sequential:
    layers = ((nn.Linear(a, b), nn.ReLU()) for a, b in itertools.pairwise(widths))
    return nn.Sequential(*itertools.chain(*layers))


class TwoHeads(nn.Module):
    """Two outputs, each with parameters of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 2), nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.a(x), self.b(x)


class Zoo(nn.Module):
    """Parameters of many forms: channels-last, 0-dim, empty, two dtypes, an expanded gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
        self.linear = nn.Linear(4, 5)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.nothing = nn.Parameter(torch.empty(0, 3))
        self.shift = nn.Parameter(torch.randn(2, 3))
        self.fine = nn.Parameter(torch.randn(5, 2, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(self.conv(x).mean((2, 3))) * self.scale
        return (y.double() @ self.fine).float() + self.shift.sum() + self.nothing.sum()

    @staticmethod
    def example() -> torch.Tensor:
        return torch.randn(2, 3, 6, 6).to(memory_format=torch.channels_last)


def random_inputs(graph: TrainingGraph, seed: int = 0) -> list[torch.Tensor]:
    """Real inputs in the layouts of the fake ones; integers and masks are zero."""
    generator = torch.Generator().manual_seed(seed)
    return [_random_like(node.meta["val"], generator) for node, _ in graph.inputs()]


def _random_like(value: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    real = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype)
    if value.dtype.is_floating_point or value.dtype.is_complex:
        return real.copy_(torch.randn(value.shape, generator=generator))
    return real.zero_()


def execute(graph: TrainingGraph, inputs: Sequence[torch.Tensor]) -> tuple[Any, ...]:
    return fx.Interpreter(graph.module).run(*inputs)


@dataclasses.dataclass(frozen=True)
class PerRank:
    values: tuple[Any, ...]


class Ranks(fx.Interpreter):
    """Runs one graph on several ranks at once: a collective sees the values of all of them."""

    def __init__(self, graph: TrainingGraph, world: int = WORLD) -> None:
        super().__init__(graph.module)
        self.world = world
        self.payloads: list[torch.Tensor] = []

    def run_all(self, inputs: Sequence[Sequence[torch.Tensor]]) -> list[tuple[Any, ...]]:
        """The outputs of each rank, given the inputs of each rank."""
        outputs = self.run(*(PerRank(column) for column in zip(*inputs, strict=True)))
        return [_pick(outputs, rank) for rank in range(self.world)]

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target is C10D.wait_tensor.default:
            return args[0]
        if target is C10D.all_reduce.default:
            self.payloads.append(args[0].values[0])
            return PerRank((functools.reduce(torch.add, args[0].values),) * self.world)
        ranks = range(self.world)
        return PerRank(tuple(target(*_pick(args, r), **_pick(kwargs, r)) for r in ranks))


def _pick(values: Any, rank: int) -> Any:
    return fx.node.map_aggregate(values, lambda v: v.values[rank] if isinstance(v, PerRank) else v)


def checked(graph: TrainingGraph, *passes: Pass, stage: str = "backward") -> list[Done]:
    """Run passes with the rules checked after each."""
    return Pipeline(passes).run(stage, graph, [CheckRules()])


def reduced(graph: TrainingGraph, group: str, mb: float = 1.0, **options: Any) -> Report:
    """Bucket and reduce a graph's gradients; the report of `gradient_sync`."""
    sync = GradientSync(**{"group": group, "world": WORLD, "reduce": "mean", **options})
    return checked(graph, Bucketing(mb=mb), sync)[-1].report


def nodes_with(graph: TrainingGraph, target: Any) -> list[fx.Node]:
    return graph.graph.find_nodes(op="call_function", target=target)


def add_call(graph: TrainingGraph, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
    """Append an operator call right before the output, as a pass without `splice` would."""
    with graph.graph.inserting_before(graph.output_node):
        node = graph.graph.call_function(target, args, kwargs)
    with graph.fake_mode:
        node.meta["val"] = target(*fx.map_arg(args, lambda n: n.meta["val"]), **kwargs)
    return node


@dataclasses.dataclass(frozen=True)
class Does(Pass):
    """A pass made of a function, which may return the report; by default it says that it acted."""

    action: Callable[[TrainingGraph], Report | None] = lambda graph: None

    name: ClassVar[str] = "does"
    stage: ClassVar[str] = "backward"

    def run(self, graph: TrainingGraph) -> Report:
        return self.action(graph) or Report(changed=True)
