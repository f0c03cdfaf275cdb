"""Time of the pipeline itself: on synthetic backward graphs of growing size, and beside Inductor.

    python -m bench.pipeline

Prints the share that the passes have in compiling a GPT, then seconds of the passes alone and with the rules
checked, for 1 k, 10 k and 100 k nodes.
"""

from __future__ import annotations

import gc
import time

import torch
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # registers the backend "fake"
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from bench.gpt import GPT, GPTConfig
from fxpasses import pipeline, unit
from fxpasses.config import Hardening
from fxpasses.graph import Role, TrainingGraph
from fxpasses.observers import CheckRules


def chain(nodes: int, per_gradient: int = 20) -> TrainingGraph:
    """A backward of about `nodes` nodes: a chain in which each `per_gradient`-th node is a gradient."""
    graph = fx.Graph()
    with FakeTensorMode():
        value = torch.empty(64, 64)
    current = graph.placeholder("tangents_1")
    current.meta.update(val=value, role=Role("tangent", "tangents_1"))
    gradients = []
    for position in range(nodes):
        current = graph.call_function(torch.ops.aten.mm.default, (current, current))
        current.meta["val"] = value
        if position % per_gradient == 0:
            gradients.append(current)
    output = graph.output(tuple(gradients))
    output.meta["roles"] = tuple(Role("gradient", f"layer{i}") for i in range(len(gradients)))
    return TrainingGraph(fx.GraphModule({}, graph))


def pipeline_seconds(nodes: int, check: bool) -> float:
    graph = chain(nodes)
    passes = pipeline.build(Hardening(bucket_mb=1), "0", 4, 0)
    gc.collect()  # of what earlier graphs left
    started = time.perf_counter()
    passes.run("backward", graph, [CheckRules()] if check else [])
    return time.perf_counter() - started


def compile_seconds() -> tuple[float, float]:
    """(seconds in our passes, seconds of the whole backward and forward compilation) of a GPT, cold."""
    spent = 0.0
    transform = unit.Unit._transform_backward

    def timed(self: unit.Unit, module: fx.GraphModule) -> None:
        nonlocal spent
        started = time.perf_counter()
        transform(self, module)
        spent += time.perf_counter() - started

    model = GPT(GPTConfig(layers=4, width=128))
    tokens = torch.randint(0, 256, (2, 64))
    compiled = torch.compile(model, backend="hardened", options={"bucket_mb": 1})
    unit.Unit._transform_backward = timed  # type: ignore[method-assign]
    started = time.perf_counter()
    with torch._inductor.utils.fresh_inductor_cache():
        compiled(tokens).sum().backward()
    unit.Unit._transform_backward = transform  # type: ignore[method-assign]
    return spent, time.perf_counter() - started


def main() -> None:
    dist.init_process_group("fake", rank=0, world_size=4, store=dist.HashStore())
    pipeline_seconds(100, check=True)  # the first trace pays for imports
    ours, whole = compile_seconds()
    print(
        f"compiling a GPT: passes {ours:.2f} s of {whole:.2f} s, "
        f"{100 * ours / (whole - ours):.1f} % of the rest"
    )
    print(f"{'nodes':>8} {'passes s':>10} {'with rules s':>13} {'us per node':>12}")
    for nodes in (1_000, 10_000, 100_000):
        bare, checked = pipeline_seconds(nodes, False), pipeline_seconds(nodes, True)
        print(f"{nodes:8} {bare:10.3f} {checked:13.3f} {1e6 * checked / nodes:12.1f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
