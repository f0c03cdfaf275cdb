"""Guards that let one module's operators be computed again alone."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

import fxpasses
from fxpasses.guards.alarms import FaultDetected
from tests.acceptance.test_faults import EAGER, INDUCTOR, WIDE, equal, train
from tests.multirank import run_ranks

BACKENDS = [EAGER, pytest.param(INDUCTOR, marks=pytest.mark.inductor)]
FORWARD = "bitflip{bit=29,where=forward:blocks.1.*,op=addmm,step=%s}"
BACKWARD = "bitflip{bit=29,where=backward:blocks.1.*,op=mm,step=%s}"
GUARDS = "products,on=recompute,region=blocks.1"


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.b = (
            nn.Linear(WIDE, 2 * WIDE),
            nn.LayerNorm(2 * WIDE),
            nn.Linear(2 * WIDE, WIDE),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.b(nn.functional.gelu(self.norm(self.a(x))))


class Net(nn.Module):
    def __init__(self, block: type[nn.Module] = Block) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(block() for _ in range(3))
        self.head = nn.Linear(WIDE, WIDE)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def guarded(guards, faults="", backend=EAGER, steps=3, model=None, **options):
    torch._dynamo.reset()
    torch.manual_seed(5)
    model = model or Net()
    options = {"guards": guards, "faults": faults, **options}
    compiled = torch.compile(model, backend=backend, options=options)
    gradients = train(model, compiled, steps)
    return gradients, model, fxpasses.runtime(model)


def clean_and_struck(model, backend=EAGER, rank=0, bit=29, **options):
    """Three steps, and the same again with a fault in the forward of one and in the backward of another, in one
    compilation: of both gradients and buffers and the state of random numbers; and the runtime.
    """
    torch._dynamo.reset()
    faults = [f.replace("bit=29", f"rank={rank},bit={bit}") for f in (FORWARD % 4, BACKWARD % 5)]
    options = {"guards": GUARDS, "faults": faults, **options}
    compiled = torch.compile(model, backend=backend, options=options)
    start = {name: value.clone() for name, value in model.state_dict().items()}
    found = []
    for _ in range(2):
        torch.manual_seed(5)
        model.load_state_dict(start)
        gradients = train(model, compiled, 3)
        tensors = {n: v.clone() for n, v in model.state_dict().items()}
        found.append([*gradients, tensors, {"random": torch.get_rng_state()}])
    return *found, fxpasses.runtime(model)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_region_that_is_computed_again_gives_the_bits_of_a_clean_run(backend):
    clean, struck, runtime = clean_and_struck(Net(), backend=backend)
    assert equal(clean, struck)
    assert [(a.step, a.count, a.place) for a in runtime.alarms.events] == [
        (4, 1, "region: blocks.1"),
        (5, 1, "region: blocks.1"),
    ]
    assert [event.site.phase for event in runtime.faults.events] == ["forward", "backward"]
    assert not runtime.last_step.skipped


def test_a_clean_run_is_that_without_guards():
    clean, _, _ = guarded("")
    found, _, runtime = guarded("products,gradients,on=recompute,region=blocks.*")
    assert equal(clean, found) and runtime.alarms.events == []


def counted(compiled, x, optimizer):
    """How often each operator ran in a step."""
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        compiled(x).square().mean().backward()
        optimizer.step()
    optimizer.zero_grad()
    return Counter(e.name for e in profiled.events() if e.name.startswith("aten::"))


@pytest.mark.parametrize(
    ("fault", "again"),
    [(FORWARD, {"addmm": 2, "gelu": 1}), (BACKWARD, {"mm": 4, "gelu_backward": 1})],
    ids=["forward", "backward"],
)
def test_nothing_but_the_region_runs_again(fault, again):
    model = Net()
    options = {"guards": GUARDS, "faults": fault % 2}
    compiled = torch.compile(model, backend=EAGER, options=options)
    optimizer, x = torch.optim.SGD(model.parameters(), lr=0.1), torch.randn(4, WIDE)
    counted(compiled, x, optimizer)  # compiles
    clean, faulty, after = (counted(compiled, x, optimizer) for _ in range(3))
    heavy = {
        name: (faulty - clean)[f"aten::{name}"] for name in ("addmm", "mm", "gelu", "gelu_backward")
    }
    assert {name: count for name, count in heavy.items() if count} == again
    assert (after - clean)["aten::addmm"] == (after - clean)["aten::mm"] == 0


def test_each_module_that_matches_is_a_region_of_its_own():
    guards = "products,on=recompute,region=blocks.*"
    both = ["bitflip{bit=29,where=forward:blocks.0.a,op=addmm,step=1}", FORWARD % 2]
    clean, _, _ = guarded(
        guards, [f.replace("step=1", "step=none").replace("step=2", "step=none") for f in both]
    )
    found, _, runtime = guarded(guards, both)
    assert equal(clean, found)
    places = [(alarm.step, alarm.place) for alarm in runtime.alarms.events]
    assert places == [(1, "region: blocks.0"), (2, "region: blocks.1")]


def test_a_sum_that_is_wrong_is_computed_again():
    guards = "gradients,on=recompute,region=blocks.1"
    fault = "bitflip{bit=29,where=backward:blocks.1.*,op=sum,step=%s}"
    clean, _, _ = guarded(guards, fault % "none")
    found, _, runtime = guarded(guards, fault % 1)
    assert equal(clean, found)
    assert [alarm.place for alarm in runtime.alarms.events] == ["region: blocks.1"]


def test_what_is_stuck_raises():
    fault = "stuck{bit=29,value=0,where=forward:blocks.1.a,op=addmm,step=1-}"
    model = Net()
    with pytest.raises(FaultDetected, match=r"step 1: 1 alarm.*product: addmm of blocks\.1\.a"):
        guarded(GUARDS, fault, model=model)
    assert fxpasses.runtime(model).alarms.events[0].place == "region: blocks.1"


def test_an_alarm_outside_of_regions_raises():
    with pytest.raises(FaultDetected, match=r"step 1: 1 alarm.*product: addmm of head"):
        guarded(GUARDS, "bitflip{bit=29,where=forward:head,op=addmm,step=1}")


def test_inference_is_computed_again_too():
    model, x = Net(), torch.randn(4, WIDE)
    options = {"guards": GUARDS, "faults": FORWARD % 0}
    compiled = torch.compile(model, backend=EAGER, options=options)
    with torch.no_grad():
        struck, clean = compiled(x), compiled(x)
    assert torch.equal(struck, clean)
    assert len(fxpasses.runtime(model).alarms.events) == 1


class Noisy(Block):
    """Dropout and running statistics: effects that a second run may not have again."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(2 * WIDE)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(torch.dropout(x, 0.25, self.training))


@pytest.mark.parametrize("backend", BACKENDS)
def test_noise_and_statistics_are_those_of_one_run(backend):
    model = Net(Noisy)
    clean, struck, runtime = clean_and_struck(model, backend=backend)
    assert equal(clean, struck) and [a.step for a in runtime.alarms.events] == [4, 5]
    assert all(b.item() == 3 for n, b in model.named_buffers() if n.endswith("tracked"))


class Checkpointed(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.head(x)


def test_recomputed_activations_and_low_precision():
    clean, struck, runtime = clean_and_struck(
        Checkpointed(), bit=14, precision="bf16", loss_scale=8.0, clip_norm=1.0
    )
    assert equal(clean, struck) and [a.step for a in runtime.alarms.events] == [4, 5]


def test_dropout_has_the_same_masks_as_without_a_region():
    clean, _, _ = guarded("products", model=Net(Noisy))
    found, _, _ = guarded(GUARDS, model=Net(Noisy))
    assert equal(clean, found)


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.outer = nn.Linear(WIDE, WIDE), nn.Linear(WIDE, WIDE)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(self.outer(self.inner(x).relu()).relu())


def test_calls_of_one_module_are_regions_of_their_own():
    options = {
        "guards": "products,on=recompute,region=inner",
        "faults": "bitflip{bit=29,where=forward:inner,op=addmm,step=none}",
    }

    def run(strikes):
        torch._dynamo.reset()
        model = Twice()
        compiled = torch.compile(model, backend=EAGER, options=options)
        found = train(model, compiled, 1)
        runtime = fxpasses.runtime(model)
        for call in (0, 1):
            if strikes:
                sites = sorted(runtime.faults.sites, key=lambda site: (len(site.name), site.name))
                runtime.faults.strike(sites[call])
            found += train(model, compiled, 1, seed=2 + call)
        return found, [alarm.place for alarm in runtime.alarms.events]

    (clean, none), (found, places) = run(False), run(True)
    assert equal(clean, found)
    assert (none, places) == ([], ["region: inner", "region: inner (call 2)"])


def test_a_region_that_there_is_not():
    with pytest.raises(ValueError, match=r"region='block\.1' selects no module.*mean 'blocks\.1'"):
        guarded("products,on=recompute,region=block.1", steps=1)


def on_ranks(rank):
    found = []
    for compression in ("none", {"scheme": "int8", "feedback": False}):
        clean, struck, runtime = clean_and_struck(Net(), rank=1, compression=compression)
        assert equal(clean, struck)
        found.append((struck, [alarm.step for alarm in runtime.alarms.events]))
    return found


def test_one_rank_alone_computes_again():
    """It would wait for ever, or reduce other tensors than the others, if it sent anything twice."""
    first, second = run_ranks(on_ranks, 2)
    for (own, alarms), (other, others) in zip(first, second, strict=True):
        assert (alarms, others) == ([], [4, 5])
        assert equal(own[:-1], other[:-1]), "all ranks have the same, but for random numbers"
