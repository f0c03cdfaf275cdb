"""Time that a dump adds to the passes, on a backward graph of 10,000 nodes with eight passes.

    python -m bench.dump [--nodes 10000]

Prints seconds of processor time: the passes alone, with the rules checked, with the rules and the dump (.py,
.diff, .json and .dot of each pass, written to a temporary folder), and their ratios. Minima of three runs.
"""

from __future__ import annotations

import argparse
import gc
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # noqa: F401  (registers the backend "fake")

from bench.pipeline import chain
from fxpasses import pipeline
from fxpasses.config import Hardening
from fxpasses.dump.folder import Dump
from fxpasses.observers import CheckRules
from fxpasses.pipeline import Observer, Pipeline

RUNS = 3
OPTIONS = Hardening(
    bucket_mb=1, precision="bf16", compression="int8", clip_norm=1.0, loss_scale="dynamic"
)


def seconds(nodes: int, passes: Pipeline, observers: Callable[[], list[Observer]]) -> float:
    """Of one run over all stages."""
    graph, onlookers = chain(nodes), observers()
    gc.collect()  # of what earlier graphs left
    started = time.process_time()
    for stage in ("joint", "backward"):
        passes.run(stage, graph, onlookers)
    return time.process_time() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nodes", type=int, default=10_000)
    nodes = parser.parse_args().nodes
    dist.init_process_group("fake", rank=0, world_size=4, store=dist.HashStore())
    passes = pipeline.build(OPTIONS, "0", 4, 0)
    with tempfile.TemporaryDirectory() as folder:
        ways: dict[str, Callable[[], list[Observer]]] = {
            "passes": lambda: [],
            "with rules": lambda: [CheckRules()],
            "with rules and dump": lambda: [CheckRules(), Dump(Path(folder))],
        }
        seconds(100, passes, ways["with rules and dump"])  # the first trace pays for imports
        best = {way: min(seconds(nodes, passes, f) for _ in range(RUNS)) for way, f in ways.items()}
    dist.destroy_process_group()
    print(f"{nodes} nodes, {len(passes.passes)} passes: {passes.spec}")
    for way, value in best.items():
        print(f"{way:<20} {value:7.3f} s")
    alone, rules, dump = best.values()
    print(
        f"with the dump, without rules, to the passes alone: {(alone + dump - rules) / alone:.2f}"
    )
    print(f"with rules and dump to passes with rules: {dump / rules:.2f}")


if __name__ == "__main__":
    main()
