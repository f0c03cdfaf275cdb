"""A graph as JSON, and back: all that passes and readers of dumps go by.

One node a line. Arguments are JSON values; what JSON has not is an object with one key: `{"node": "mm"}`,
`{"dtype": "float32"}`, `{"tuple": […]}`. Symbolic sizes become their example values. What is none of this is
named by its type, and can't be read back.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from fxpasses.dump.code import attribute, callee, short_line
from fxpasses.graph import Role, StateSpec, TrainingGraph
from fxpasses.pipeline import Done
from fxpasses.rewrite import Provenance, model_line
from fxpasses.sizes import example

FORMAT = 1
_NAMED = {torch.dtype: "dtype", torch.layout: "layout", torch.memory_format: "memory_format"}
# What passes read of a node besides its value; JSON values already.
_PLAIN_META = ("custom", "effect", "encoding", "reduces", "contribution")
_STACKS = ("nn_module_stack", "fwd_nn_module_stack")
_CONSTANT_LIMIT = 4096  # elements: a larger tensor that a graph holds is written without its values


class Records:
    """Writes graphs as JSON. What is known of a node is not written anew."""

    def __init__(self) -> None:
        self._known: dict[fx.Node, tuple[tuple[Any, ...], tuple[Any, ...], str]] = {}

    def text(self, previous: Done | None, graph: TrainingGraph) -> str:
        """The file."""
        head = json.dumps(
            {
                "format": FORMAT,
                "after": previous.made_by.spec if previous else None,
                "changed": previous.report.changed if previous else None,
                "counts": previous.report.counts if previous else {},
                "written_buffers": [_state(spec) for spec in graph.written_buffers],
                "attributes": _attributes(graph.module),
            }
        )
        nodes = ",\n".join(self._line(node) for node in graph.graph.nodes)
        return f'{head[:-1]}, "nodes": [\n{nodes}\n]}}\n'

    def _line(self, node: fx.Node) -> str:
        if node.op in ("placeholder", "output"):
            return json.dumps(record(node))
        names = (node.name, *(n.name for n in node.all_input_nodes))
        same = (node.args, node.kwargs, node.target, node.meta.get("provenance"))
        known = self._known.get(node)
        if known is not None and known[0] == (names, len(node.meta)) and _all_same(known[1], same):
            return known[2]
        line = json.dumps(record(node))
        self._known[node] = ((names, len(node.meta)), same, line)
        return line


def _all_same(old: tuple[Any, ...], new: tuple[Any, ...]) -> bool:
    return all(a is b for a, b in zip(old, new, strict=True))


def record(node: fx.Node) -> dict[str, Any]:
    """A node as a JSON object."""
    found: dict[str, Any] = {"name": node.name, "op": node.op, "target": _target(node)}
    found["args"] = [encoded(value) for value in node.args]
    if node.kwargs:
        found["kwargs"] = {key: encoded(value) for key, value in node.kwargs.items()}
    if "val" in node.meta:
        found["value"] = _value(node.meta["val"])
    if "role" in node.meta:
        found["role"] = dataclasses.asdict(node.meta["role"])
    if "roles" in node.meta:
        found["roles"] = [dataclasses.asdict(role) for role in node.meta["roles"]]
    if "state" in node.meta:
        found["state"] = _state(node.meta["state"])
    if line := short_line(model_line(node)):
        found["line"] = line
    if "provenance" in node.meta:
        origin = dataclasses.asdict(node.meta["provenance"])
        found["provenance"] = {**origin, "model_line": short_line(origin["model_line"])}
    for key in _STACKS:
        if node.meta.get(key):
            found[key] = [value[0] for value in node.meta[key].values()]
    found.update({key: node.meta[key] for key in _PLAIN_META if node.meta.get(key) is not None})
    return found


def graph_of(data: Mapping[str, Any]) -> TrainingGraph:
    """The graph that `Records.text` wrote, in a fake mode of its own.

    Raises:
        ValueError: for data of another format.
    """
    if data.get("format") != FORMAT:
        raise ValueError(f"got a graph of format {data.get('format')!r}; expected {FORMAT}")
    mode = FakeTensorMode()
    module = _module(data["attributes"], data["nodes"], mode)
    module.meta["fake_mode"] = mode
    if data["written_buffers"]:
        module.meta["written_buffers"] = tuple(map(_read_state, data["written_buffers"]))
    return TrainingGraph(module)


def _module(
    attributes: Mapping[str, Any], nodes: list[Mapping[str, Any]], mode: FakeTensorMode
) -> fx.GraphModule:
    root = torch.nn.Module()
    for name, value in attributes.items():
        _set(root, name, _read_attribute(value, mode))
    graph = fx.Graph()
    known: dict[str, fx.Node] = {}
    for row in nodes:
        args = tuple(_decoded(value, known) for value in row["args"])
        kwargs = {key: _decoded(value, known) for key, value in row.get("kwargs", {}).items()}
        target = _read_target(row["op"], row["target"])
        node = graph.create_node(row["op"], target, args, kwargs, name=row["name"])
        known[row["name"]] = node
        node.meta.update(_read_meta(row, mode))
    return fx.GraphModule(root, graph)


def encoded(value: Any) -> Any:
    """An argument as a JSON value."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, fx.Node):
        return {"node": value.name}
    if isinstance(value, float):
        return value if math.isfinite(value) else {"float": repr(value)}
    if isinstance(value, tuple):
        return {"tuple": [encoded(x) for x in value]}
    if isinstance(value, list):
        return [encoded(x) for x in value]
    if isinstance(value, dict):
        return {"dict": [[key, encoded(x)] for key, x in value.items()]}
    if isinstance(value, slice):
        return {"slice": [encoded(x) for x in (value.start, value.stop, value.step)]}
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    if isinstance(value, torch.device):
        return {"device": str(value)}
    if type(value) in _NAMED:
        return {_NAMED[type(value)]: str(value).removeprefix("torch.")}
    return {"unknown": f"{type(value).__module__}.{type(value).__qualname__}"}


def _decoded(value: Any, nodes: Mapping[str, fx.Node]) -> Any:
    if isinstance(value, list):
        return [_decoded(x, nodes) for x in value]
    if not isinstance(value, dict):
        return value
    ((kind, inner),) = value.items()
    if kind == "node":
        return nodes[inner]
    if kind == "unknown":
        raise ValueError(f"the graph holds a {inner}, which was not written")
    if kind in _NAMED.values():
        return getattr(torch, inner)
    if kind in ("float", "device"):
        return float(inner) if kind == "float" else torch.device(inner)
    if kind == "complex":
        return complex(*inner)
    if kind == "dict":
        return {key: _decoded(x, nodes) for key, x in inner}
    items = [_decoded(x, nodes) for x in inner]
    return tuple(items) if kind == "tuple" else slice(*items)


def _target(node: fx.Node) -> str:
    return node.target if isinstance(node.target, str) else callee(node.target)


def _read_target(op: str, text: str) -> Any:
    if op != "call_function":
        return text
    if text.startswith("torch.ops."):
        found: Any = torch.ops
        for part in text.split(".")[2:]:
            found = getattr(found, part)
        return found
    module, _, name = text.rpartition(".")
    return getattr(importlib.import_module(module), name)


def _value(value: Any) -> Any:
    """What is known of a node's value."""
    if isinstance(value, torch.Tensor):
        return {
            "dtype": str(value.dtype).removeprefix("torch."),
            "shape": [example(x) for x in value.shape],
            "stride": [example(x) for x in value.stride()],
            "device": str(value.device),
        }
    if isinstance(value, list | tuple):
        return [_value(x) for x in value]
    return example(value)


def _read_value(data: Any, mode: FakeTensorMode) -> Any:
    if isinstance(data, list):
        return tuple(_read_value(x, mode) for x in data)
    if not isinstance(data, dict):
        return data
    with mode:
        return torch.empty_strided(
            data["shape"],
            data["stride"],
            dtype=getattr(torch, data["dtype"]),
            device=data["device"],
        )


def _read_meta(row: Mapping[str, Any], mode: FakeTensorMode) -> dict[str, Any]:
    meta: dict[str, Any] = {key: row[key] for key in _PLAIN_META if key in row}
    if "value" in row:
        meta["val"] = _read_value(row["value"], mode)
    if "role" in row:
        meta["role"] = Role(**row["role"])
    if "roles" in row:
        meta["roles"] = tuple(Role(**role) for role in row["roles"])
    if "state" in row:
        meta["state"] = _read_state(row["state"])
    if "line" in row:
        path, _, number = row["line"].rpartition(":")
        meta["stack_trace"] = f'File "{path}", line {number}, in forward'
    if "provenance" in row:
        origin = row["provenance"]
        meta["provenance"] = Provenance(**{**origin, "parameters": tuple(origin["parameters"])})
    for key in _STACKS:
        if key in row:
            meta[key] = {str(i): (path, "") for i, path in enumerate(row[key])}
    return meta


def _state(spec: StateSpec) -> dict[str, Any]:
    dtype, device = str(spec.dtype).removeprefix("torch."), str(spec.device)
    return {**dataclasses.asdict(spec), "dtype": dtype, "device": device}


def _read_state(data: Mapping[str, Any]) -> StateSpec:
    return StateSpec(
        kind=data["kind"],
        parameter=data["parameter"],
        shape=tuple(data["shape"]),
        dtype=getattr(torch, data["dtype"]),
        device=torch.device(data["device"]),
        fill=data["fill"],
        parts=tuple((name, numel) for name, numel in data["parts"]),
    )


def _attributes(module: fx.GraphModule) -> dict[str, Any]:
    """What `get_attr` nodes read: graphs and constants."""
    names = [str(node.target) for node in module.graph.find_nodes(op="get_attr")]
    return {name: _attribute(attribute(module, name)) for name in dict.fromkeys(names)}


def _attribute(value: Any) -> Any:
    if isinstance(value, fx.GraphModule):
        nodes = [record(node) for node in value.graph.nodes]
        return {"attributes": _attributes(value), "nodes": nodes}
    data = _value(value)
    fake = isinstance(value, torch._subclasses.FakeTensor)
    if not fake and value.numel() <= _CONSTANT_LIMIT:
        data["data"] = encoded(value.tolist())
    return data


def _read_attribute(data: Any, mode: FakeTensorMode) -> Any:
    if "nodes" in data:
        return _module(data["attributes"], data["nodes"], mode)
    dtype = getattr(torch, data["dtype"])
    if "data" in data:
        return torch.tensor(_decoded(data["data"], {}), dtype=dtype, device=data["device"])
    return torch.zeros(data["shape"], dtype=dtype, device=data["device"])


def _set(root: torch.nn.Module, name: str, value: Any) -> None:
    if isinstance(value, torch.nn.Module):
        root.add_module(name, value)
    else:
        root.register_buffer(name, value)
