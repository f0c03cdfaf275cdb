"""A graph as a Python file: readable, and it runs alone.

# after bucketing{mb=25}: buckets=1, gradients=2
import torch
…
def forward(self, tangents_1, …): …

if __name__ == "__main__": …        inputs drawn at random, collectives that send nothing
"""

from __future__ import annotations

import operator
from typing import Any

import torch
import torch.distributed as dist
import torch.utils._pytree as pytree
from torch import fx

from custom_ops import kernels
from fxpasses.distributed.group import is_initialized
from fxpasses.dump.code import (
    attribute,
    call_of,
    comment_of,
    literal,
    on_one_line,
    registered_by,
    value_text,
)
from fxpasses.effects import is_launch
from fxpasses.graph import TrainingGraph
from fxpasses.pipeline import Done
from fxpasses.sizes import example


def heading(previous: Done | None) -> str:
    """What the pass did; None: the input."""
    if previous is None:
        return "# input of the pipeline"
    counts = ", ".join(f"{k}={v}" for k, v in previous.report.counts.items())
    changed = counts or ("changed" if previous.report.changed else "unchanged")
    return f"# after {previous.made_by.spec}: {changed}"


def text(previous: Done | None, graph: TrainingGraph) -> str:
    """A graph as Python, headed by the pass that made it (none: the input)."""
    return file_text(preamble(previous, graph), graph, Lines().of(graph))


def file_text(preamble: list[str], graph: TrainingGraph, lines: list[str]) -> str:
    """The file that holds these lines of a graph."""
    return "\n".join([*preamble, *lines, "", "", *_main(graph), ""])


def preamble(previous: Done | None, graph: TrainingGraph) -> list[str]:
    """The lines of a file in front of the graph's."""
    return [heading(previous), *_kernels(graph), *_imports(graph), "", ""]


def _kernels(graph: TrainingGraph) -> list[str]:
    """What runs behind the operators of `custom_ops`, if there are any."""
    devices = {
        x.device: None
        for node in graph.walk()
        if isinstance(node.target, torch._ops.OpOverload) and node.target.namespace == "fxpasses"
        for x in pytree.tree_leaves(node.meta.get("val"))
        if isinstance(x, torch.Tensor)
    }
    return [f"# operators on {device}: {kernels.described(device)}" for device in devices]


class Lines:
    """Writes graphs line by line. What a pass left as it was is not written anew."""

    def __init__(self) -> None:
        self._known: dict[fx.Node, tuple[tuple[Any, ...], str]] = {}
        self._names: dict[fx.Node, str] = {}

    def of(self, graph: TrainingGraph) -> list[str]:
        """The function `forward` of a graph: a line for each input, node and output."""
        self._forget_renamed(graph.graph)
        inputs = [
            f"    {n.name},  # {value_text(n.meta.get('val'))}  "
            + on_one_line(f"input {n.name}: {r.kind} {r.name}")
            for n, r in graph.inputs()
        ]
        outputs = [
            f"        {n},  # " + on_one_line(f"output {i}: {r.kind} {r.name} = {n}")
            for i, n, r in graph.outputs()
        ]
        body = [self._line(n) for n in graph.graph.nodes if n.op not in ("placeholder", "output")]
        return [
            "def forward(",
            "    self,",
            *inputs,
            "):",
            *body,
            "    return (",
            *outputs,
            "    )",
        ]

    def _line(self, node: fx.Node) -> str:
        key = (node.args, node.kwargs, node.target, node.meta.get("provenance"))
        if node in self._known and all(
            a is b for a, b in zip(self._known[node][0], key, strict=True)
        ):
            return self._known[node][1]
        line = f"    {node.name} = {call_of(node)}"
        if comment := comment_of(node):
            line += f"  # {comment}"
        self._known[node] = (key, line)
        return line

    def _forget_renamed(self, graph: fx.Graph) -> None:
        """A line holds the names of the nodes that it reads."""
        names = {node: node.name for node in graph.nodes}
        if any(names.get(node, name) != name for node, name in self._names.items()):
            self._known.clear()
        self._names = names


def _imports(graph: TrainingGraph) -> list[str]:
    modules = {"torch"}
    for target in {
        node.target
        for m in _graphs(graph.module)
        for node in m.graph.nodes
        if callable(node.target)
    }:
        if isinstance(target, torch._ops.OpOverload):
            modules |= registered_by(target)
        elif target is not operator.getitem and not isinstance(
            target, torch._ops.HigherOrderOperator
        ):
            modules.add(target.__module__)
    return [*(f"import {name}" for name in sorted(modules)), "from torch import device, inf, nan"]


def _graphs(module: fx.GraphModule) -> list[fx.GraphModule]:
    return [m for m in module.modules() if isinstance(m, fx.GraphModule)]


def _subgraphs(module: fx.GraphModule, prefix: str = "") -> tuple[list[str], str]:
    """Functions for the graphs that a graph holds, and an expression for what it then calls `self`."""
    lines: list[str] = []
    entries: list[str] = []
    for node in module.graph.find_nodes(op="get_attr"):
        name, value = str(node.target), attribute(module, str(node.target))
        if isinstance(value, fx.GraphModule):
            function = f"{prefix}{name}"
            inner, own = _subgraphs(value, f"{function}_")
            lines += [*inner, *_function(function, value), "", ""]
            entries.append(f"{name}=functools.partial({function}, {own})")
        else:
            entries.append(f"{name}={_drawn(value)}")
    unique = dict.fromkeys(entries)
    return lines, f"types.SimpleNamespace({', '.join(unique)})"


def _function(name: str, module: fx.GraphModule) -> list[str]:
    """A graph without roles, as code alone."""
    inputs = ", ".join(n.name for n in module.graph.find_nodes(op="placeholder"))
    calls = [n for n in module.graph.nodes if n.op not in ("placeholder", "output")]
    body = [f"    {n.name} = {call_of(n)}" for n in calls]
    result = literal(module.graph.output_node().args[0])
    return [f"def {name}(self, {inputs}):", *body, f"    return {result}"]


def _main(graph: TrainingGraph) -> list[str]:
    functions, own = _subgraphs(graph.module)
    inputs = [f"        {_drawn(n.meta['val'])},  # {n.name}" for n, _ in graph.inputs()]
    return [
        *functions,
        'if __name__ == "__main__":',
        "    import functools",
        "    import types",
        "",
        *_process_group(graph),
        "    torch.manual_seed(0)",
        "",
        "    def drawn(size, stride, dtype, device):",
        "        value = torch.empty_strided(size, stride, dtype=dtype, device=device)",
        "        return value.normal_() if dtype.is_floating_point else value.zero_()",
        "",
        "    inputs = [",
        *inputs,
        "    ]",
        f"    for result in forward({own}, *inputs):",
        "        print(result)",
    ]


def _drawn(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return repr(example(value))
    size, stride = (tuple(map(example, x)) for x in (value.shape, value.stride()))
    return f"drawn({size}, {stride}, {value.dtype}, {str(value.device)!r})"


def _process_group(graph: TrainingGraph) -> list[str]:
    """A group for the collectives of a graph, which sends nothing."""
    names = sorted({str(node.args[-1]) for node in graph.walk() if is_launch(node)})
    if not names:
        return []
    rank, world = (dist.get_rank(), dist.get_world_size()) if is_initialized() else (0, 1)
    register = "torch._C._distributed_c10d._register_process_group"
    return [
        "    import torch.distributed as dist",
        "    from torch.testing._internal.distributed.fake_pg import FakeStore",
        "",
        f"    dist.init_process_group('fake', rank={rank}, world_size={world}, store=FakeStore())",
        *(f"    {register}({name!r}, dist.group.WORLD)" for name in names if name != "0"),
    ]
