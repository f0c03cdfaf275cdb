"""Cases 36 and 39, and caches: the way in, and what keeps it honest."""

import os
import subprocess
import sys
import textwrap

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo.utils import counters

import fxpasses
from fxpasses.graph import Role, TrainingGraph
from fxpasses.observers import CheckRules
from fxpasses.pipeline import Pipeline
from fxpasses.spec import SpecError
from tests.feedback import Feedback, RoundWithFeedback
from tests.multirank import run_alone


def run_fresh(code: str) -> str:
    """Run code in a process of its own that has imported nothing; returns the last line it printed."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip().splitlines()[-1]


def test_case_36_found_without_import():
    code = """
        import sys, torch
        assert "fxpasses" not in sys.modules
        assert "hardened" in torch._dynamo.list_backends()
        model = torch.nn.Linear(1, 1, bias=False)
        compiled = torch.compile(model, backend="hardened", options={"bucket_mb": 1, "reduce": "sum"})
        compiled(torch.full((1, 1), 3.0)).sum().backward()
        print(model.weight.grad.item())
    """
    assert run_fresh(code) == "3.0"


@pytest.mark.parametrize(
    "options, message",
    [
        ({"bucket_mbs": 1}, "unknown option 'bucket_mbs'; did you mean 'bucket_mb'"),
        ({"reduce": "means"}, "option 'reduce': got 'means'; did you mean 'mean'"),
        ({"bucket_mb": -1}, "option 'bucket_mb': got -1"),
        ({"passes": "bucketting"}, "unknown pass 'bucketting'; did you mean 'bucketing'"),
        ({"passes": "bucketing,gradient_sync"}, "'gradient_sync' communicates, but"),
        ({"process_group": "9"}, "torch.distributed is not initialised"),
    ],
)
def test_case_36_wrong_options_are_value_errors(options, message):
    compiled = torch.compile(nn.Linear(1, 1), backend="hardened", options=options)
    with pytest.raises(ValueError, match=message):
        compiled(torch.ones(1, 1))


def test_one_process_without_options_is_bitwise_inductor():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 4))
    x = torch.randn(8, 16)
    found = []
    for backend in ("inductor", "hardened"):
        model.zero_grad()
        loss = torch.compile(model, backend=backend)(x).square().sum()
        loss.backward()
        found.append([loss.detach(), *(p.grad.clone() for p in model.parameters())])
        torch._dynamo.reset()
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def identity_graph() -> TrainingGraph:
    """One gradient: the tangent itself."""
    graph = torch.fx.Graph()
    tangent = graph.placeholder("tangents_1")
    with torch._subclasses.FakeTensorMode():
        tangent.meta.update(val=torch.empty(3), role=Role("tangent", "tangents_1"))
    output = graph.output((tangent,))
    output.meta["roles"] = (Role("gradient", "w"),)
    return TrainingGraph(torch.fx.GraphModule({}, graph))


def test_case_39_the_error_names_pass_and_node():
    import dataclasses
    from typing import ClassVar

    from fxpasses import Pass, Report

    @dataclasses.dataclass(frozen=True)
    class UseBeforeDefinition(Pass):
        name: ClassVar[str] = "use_before_definition"
        stage: ClassVar[str] = "backward"

        def run(self, graph: TrainingGraph) -> Report:
            (gradient,) = graph.gradients()
            with graph.graph.inserting_before(graph.output_node):
                first = graph.graph.call_function(torch.ops.aten.neg.default, (gradient.node,))
                second = graph.graph.call_function(torch.ops.aten.neg.default, (first,))
            for node in (first, second):
                node.meta["val"] = gradient.node.meta["val"]
            graph.set_output(gradient.index, second)
            second.append(first)
            return Report(changed=True)

    with pytest.raises(
        SpecError, match=r"after pass 'use_before_definition': .*node 'neg_default_1'"
    ):
        Pipeline((UseBeforeDefinition(),)).run("backward", identity_graph(), [CheckRules()])


def test_case_39_effects_survive_dead_code_elimination(fake_world):
    graph = identity_graph()
    tangent, _ = graph.inputs()[0]
    with graph.graph.inserting_before(graph.output_node):
        reduce = graph.graph.call_function(
            torch.ops._c10d_functional.all_reduce.default, (tangent, "sum", "0")
        )
        fault = graph.graph.call_function(torch.ops.aten.neg.default, (tangent,))
        dead = graph.graph.call_function(torch.ops.aten.abs.default, (tangent,))
    fault.meta["effect"] = "fault"
    names = {reduce.name, fault.name}
    assert graph.eliminate_dead_code()
    left = {node.name for node in graph.graph.nodes}
    assert names <= left and dead.name not in left


def reduced(options: dict[str, str], cache: str) -> dict[str, float]:
    """The gradient of one compilation as rank 0 of two, and what it found in the caches of a folder."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache
    dist.init_process_group("fake", rank=0, world_size=2, store=dist.HashStore())
    model = nn.Linear(1, 1, bias=False)
    compiled = torch.compile(model, backend="hardened", options=options)
    compiled(torch.full((1, 1), 3.0)).sum().backward()
    return {
        "gradient": model.weight.grad.item(),
        "plan": len(fxpasses.runtime(model).plan),
        "hits": counters["inductor"]["fxgraph_cache_hit"],
    }


def test_caches_never_outlive_a_change_of_options(tmp_path):
    def run(reduce: str, name: str) -> dict[str, float]:
        options = {"reduce": reduce, "dump": str(tmp_path / name)}
        return run_alone(reduced, options, str(tmp_path / "cache"))

    # A fake all-reduce returns its payload: the mean of two ranks is half of it.
    assert run("mean", "cold") == {"gradient": 1.5, "plan": 1, "hits": 0}
    warm = run("mean", "warm")
    assert warm["gradient"] == 1.5 and warm["plan"] == 1 and warm["hits"] == 2
    other = run("sum", "other")
    assert other["gradient"] == 3.0 and other["hits"] == 1  # the forward is the same

    cold_files = sorted(p.relative_to(tmp_path / "cold") for p in (tmp_path / "cold").rglob("*.py"))
    assert len(cold_files) == 6
    for path in cold_files:
        assert (tmp_path / "cold" / path).read_bytes() == (tmp_path / "warm" / path).read_bytes()


@pytest.mark.parametrize("backend", ["hardened", "hardened_aot_eager"])
def test_two_equal_layers_keep_separate_state(backend):
    layers = [nn.Linear(4, 4, bias=False) for _ in range(2)]
    calls = [
        torch.compile(m, backend=backend, options={"passes": RoundWithFeedback().spec})
        for m in layers
    ]
    feedback = [Feedback(m) for m in layers]
    for _ in range(3):
        for k, call in enumerate(calls):
            call(torch.full((1, 4), 0.3 * (k + 1))).sum().backward()
    for k, (layer, seen) in enumerate(zip(layers, feedback, strict=True)):
        total = layer.weight.grad + seen.residual("weight")
        assert torch.allclose(total, torch.full((4, 4), 0.9 * (k + 1)), atol=1e-5)
    assert not torch.equal(feedback[0].residual("weight"), feedback[1].residual("weight"))


@pytest.mark.parametrize("backend", ["hardened", "hardened_aot_eager"])
def test_state_resumes_in_a_new_module_before_its_first_forward(backend):
    def steps(model: nn.Module, count: int) -> torch.Tensor:
        compiled = torch.compile(
            model, backend=backend, options={"passes": RoundWithFeedback().spec}
        )
        for _ in range(count):
            model.zero_grad()
            compiled(torch.full((1, 4), 0.3)).sum().backward()
        return model.weight.grad.clone()

    whole = nn.Linear(4, 4, bias=False)
    expected = steps(whole, 5)

    first = nn.Linear(4, 4, bias=False)
    steps(first, 3)
    saved = Feedback(first).runtime.state_dict()
    assert list(saved["state"]) == ["residual/weight"]

    second = nn.Linear(4, 4, bias=False)
    Feedback(second).runtime.load_state_dict(saved)
    assert torch.equal(steps(second, 2), expected)
    assert torch.equal(Feedback(second).residual("weight"), Feedback(whole).residual("weight"))
