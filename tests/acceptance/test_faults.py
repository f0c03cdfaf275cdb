"""Faults in training: case 41 and its kind, on one rank and on several."""

from __future__ import annotations

import math
import time

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

import fxpasses
from fxpasses.faults.spec import MODELS
from tests.multirank import run_ranks

EAGER, INDUCTOR = "hardened_aot_eager", "hardened"
WIDE = 32


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDE, WIDE), nn.GELU(), nn.Linear(WIDE, WIDE))


def train(model, compiled, steps, optimizer=None, seed=1):
    """The gradients of each step, by name."""
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(steps):
        compiled(torch.randn(4, WIDE, generator=generator)).square().mean().backward()
        found.append({name: p.grad.clone() for name, p in model.named_parameters()})
        optimizer.step()
        optimizer.zero_grad()
    return found


def faulty(faults, backend=EAGER, steps=4, **options):
    """Gradients and events of a run."""
    model = net()
    compiled = torch.compile(model, backend=backend, options={"faults": faults, **options})
    gradients = train(model, compiled, steps)
    runtime = fxpasses.runtime(model)
    events = [] if runtime.faults is None else [described(e) for e in runtime.faults.events]
    return gradients, events


def described(event):
    bits = (event.bits_before, event.bits_after)
    return (
        event.site.phase,
        event.site.names,
        event.index,
        event.bit,
        *bits,
        event.rank,
        event.step,
    )


def equal(a, b):
    return all(torch.equal(x[name], y[name]) for x, y in zip(a, b, strict=True) for name in x)


def case_41(rank, backend, seed):
    faults = f"bitflip{{where=gradient:2.*,rank=1,step=2,seed={seed}}}"
    with_fault, events = faulty(faults, backend)
    torch._dynamo.reset()
    without, _ = faulty("", backend)
    return with_fault, without, events


@pytest.mark.parametrize("backend", [EAGER, pytest.param(INDUCTOR, marks=pytest.mark.inductor)])
def test_case_41_a_seeded_flip_in_one_gradient_of_rank_1(backend):
    first = run_ranks(case_41, 2, backend, 7)
    again = run_ranks(case_41, 2, backend, 7)
    for rank in (0, 1):
        with_fault, without, events = first[rank]
        assert events == again[rank][2]
        assert equal(with_fault[:2], without[:2])
        assert not equal(with_fault[2:3], without[2:3])  # the mean carries it to both
    assert first[0][2] == []
    ((phase, names, index, bit, before, after, rank, step),) = first[1][2]
    assert (phase, rank, step) == ("gradient", 1, 2) and names[0].startswith("2.")
    assert before ^ after == 1 << bit and 0 <= index < WIDE * WIDE


def test_case_41_another_seed_is_another_fault():
    (a, b) = (
        faulty(f"bitflip{{where=gradient,step=1,seed={seed}}}", steps=2)[1] for seed in (7, 8)
    )
    assert a != b and len(a) == len(b) == 1


def test_case_41_the_report_names_parameter_index_bit_values_and_rank():
    model = net()
    options = {"faults": "bitflip{bit=30,index=5,where=gradient:2.weight,step=1}"}
    train(model, torch.compile(model, backend=EAGER, options=options), 2)
    (event,) = fxpasses.runtime(model).faults.events
    text = str(event)
    assert (
        text.startswith("bitflip at gradient:2.weight ")
        and "rank 0, step 1: index 5, bit 30" in text
    )
    assert (
        f"{event.before:g} became {event.after:g}" in text
        and "test_faults.py" not in event.site.name
    )


def test_off_is_gone(tmp_path):
    for name, options in (("a", {}), ("b", {"faults": ""}), ("c", {"faults": []})):
        torch._dynamo.reset()
        model = net()
        options = {"dump": tmp_path / name, "clip_norm": 1e9, **options}
        train(model, torch.compile(model, backend=EAGER, options=options), 1)
    texts = [
        [(p.name, p.read_text()) for p in sorted((tmp_path / name).rglob("*.py"))] for name in "abc"
    ]
    assert texts[0] and texts[0] == texts[1] == texts[2]


@pytest.mark.parametrize("backend", [EAGER, pytest.param(INDUCTOR, marks=pytest.mark.inductor)])
def test_disarmed_changes_nothing(backend):
    """Bitwise with eager kernels. Inductor may fuse, and so round, differently around a fault."""
    clean, _ = faulty("", backend)
    torch._dynamo.reset()
    disarmed, events = faulty(
        "zero{where=forward,step=none};zero{where=gradient,step=none}", backend
    )
    assert events == []
    if backend == EAGER:
        assert equal(clean, disarmed)
    for a, b in zip(clean, disarmed, strict=True):
        torch.testing.assert_close(a, b)


def planned(phase, models):
    """Each once, in steps 1 to 3."""
    own = {"stuck": ",bit=3", "delay": ",seconds=0"}
    return [f"{m}{{where={phase},step={1 + i % 3}{own.get(m, '')}}}" for i, m in enumerate(models)]


def happened(plans, backend):
    """How often each fault did, by phase and model, in graphs without a break."""
    model = net()
    before = counters["graph_break"].copy()
    compiled = torch.compile(model, backend=backend, fullgraph=True, options={"faults": plans})
    train(model, compiled, 5)
    faults = fxpasses.runtime(model).faults
    assert faults.missed() == () and counters["graph_break"] == before
    return sorted((e.site.phase, e.fault.model) for e in faults.events)


@pytest.mark.parametrize("phase", ["forward", "backward", "gradient"])
def test_each_planned_fault_happens_once(phase):
    models = [m for m in MODELS if m not in ("stale", "missing", "exit")]
    assert happened(planned(phase, models), EAGER) == sorted((phase, m) for m in models)


@pytest.mark.inductor
def test_each_planned_fault_happens_once_in_compiled_code():
    plans = [
        "bitflip{where=forward:0,step=1}",
        "scale{where=backward:2,step=2}",
        "truncate{bits=9,where=gradient:2.*,step=3}",
    ]
    models = [("backward", "scale"), ("forward", "bitflip"), ("gradient", "truncate")]
    assert happened(plans, INDUCTOR) == models


def test_a_campaign_has_one_compilation():
    model = net()
    options = {"faults": "bitflip{where=forward,step=none};bitflip{where=gradient,step=none}"}
    compiled = torch.compile(model, backend=EAGER, options=options)
    train(model, compiled, 1)
    faults = fxpasses.runtime(model).faults
    compilations = counters["stats"]["unique_graphs"]
    expected = []
    for trial in range(60):
        site = faults.sites[trial % len(faults.sites)]
        number = site.faults[0]
        faults.strike(site, fault=number, index=trial % 4, bit=(trial % 32,))
        train(model, compiled, 1)
        expected.append((site.name, trial % 4, 1 << trial % 32))
    found = [(e.site.name, e.index, e.bits_before ^ e.bits_after) for e in faults.events]
    assert found == expected
    assert counters["stats"]["unique_graphs"] == compilations


def test_a_resumed_run_has_the_same_faults():
    faults = (
        "bitflip{where=gradient,step=1-6};truncate{bits=20,probability=0.5,where=forward,step=4}"
    )
    whole, events = faulty(faults, steps=8)
    model = net()
    compiled = torch.compile(model, backend=EAGER, options={"faults": faults})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(1)

    def steps(model, compiled, optimizer, count):
        for _ in range(count):
            compiled(torch.randn(4, WIDE, generator=generator)).square().mean().backward()
            optimizer.step()
            last = {name: p.grad.clone() for name, p in model.named_parameters()}
            optimizer.zero_grad()
        return last

    steps(model, compiled, optimizer, 3)
    early = [described(e) for e in fxpasses.runtime(model).faults.events]
    saved = {"model": model.state_dict(), "hardened": fxpasses.runtime(model).state_dict()}
    torch._dynamo.reset()
    resumed = net()
    resumed.load_state_dict(saved["model"])
    fxpasses.runtime(resumed).load_state_dict(saved["hardened"])  # before its first forward
    compiled = torch.compile(resumed, backend=EAGER, options={"faults": faults})
    last = steps(resumed, compiled, torch.optim.SGD(resumed.parameters(), lr=0.1), 5)
    late = [described(e) for e in fxpasses.runtime(resumed).faults.events]
    assert early + late == events and len(events) == 7
    assert equal([last], whole[-1:])


def test_micro_batches_are_hit_once_a_step():
    _, events = faulty("bitflip{where=gradient,step=0}", steps=1, accumulate=1)
    model = net()
    options = {"faults": "bitflip{where=forward,step=0}"}
    compiled = torch.compile(model, backend=EAGER, options=options)
    for _ in range(3):
        compiled(torch.randn(4, WIDE)).sum().backward()
    assert len(fxpasses.runtime(model).faults.events) == len(events) == 1


def test_what_is_stuck_stays_at_its_place():
    _, events = faulty("stuck{bit=30,value=1,where=gradient:2.weight}", steps=4)
    assert [e[-1] for e in events] == [0, 1, 2, 3]
    assert len({e[2] for e in events}) == 1
    assert all(after >> 30 & 1 for *_, after, _, _ in events)


def test_shapes_that_change():
    model = net()
    options = {"faults": "bitflip{bit=22,where=forward}"}
    compiled = torch.compile(model, backend=EAGER, options=options, dynamic=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for batch in (3, 5, 7):
        compiled(torch.randn(batch, WIDE)).sum().backward()
        optimizer.step()
    events = fxpasses.runtime(model).faults.events
    assert len(events) == 3
    assert all(0 <= e.index < n * WIDE for e, n in zip(events, (3, 5, 7), strict=True))


def test_inference_can_be_hit():
    model = net().eval()
    compiled = torch.compile(model, backend=EAGER, options={"faults": "nan{where=forward:2}"})
    with torch.no_grad():
        assert compiled(torch.randn(4, WIDE)).isnan().sum() == 1


@pytest.mark.parametrize(
    ("where", "message"),
    [
        (
            "gradient:2.weigth",
            "selects nothing in what has been compiled; did you mean '2.weight'?",
        ),
        ("forward:nowhere", "selects nothing in what has been compiled; known: 0, 1, 2"),
    ],
)
def test_a_pattern_that_selects_nothing(where, message):
    with pytest.raises(ValueError, match="option 'faults'") as caught:
        faulty(f"zero{{where={where}}}", steps=1)
    assert message in str(caught.value)


def test_ranks_and_payloads_that_do_not_exist():
    with pytest.raises(ValueError, match="rank 1 is outside the world"):
        faulty("zero{rank=1}")
    with pytest.raises(ValueError, match="with one rank nothing is sent"):
        faulty("zero{where=payload}")


def updated(faults, optimizer, masters=False):
    model = net()
    compiled = torch.compile(model, backend=EAGER, options={"faults": faults})
    train(model, compiled, 3, optimizer(model))
    return model, fxpasses.runtime(model).faults


def ours(model):
    return fxpasses.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))


def test_updated_parameters_are_hit():
    clean, _ = updated("", ours)
    model, faults = updated("bitflip{bit=20,index=3,where=update:0.bias,step=2}", ours)
    (event,) = faults.events
    assert (event.site.phase, event.site.parameters, event.index) == ("update", ("0.bias",), 3)
    names = dict(model.named_parameters())
    differ = {n for n, p in clean.named_parameters() if not torch.equal(p, names[n])}
    assert differ == {"0.bias"}
    assert names["0.bias"][3].item() == event.after


def test_an_update_that_we_do_not_make_is_refused():
    with pytest.raises(ValueError, match=r"give the optimizer to fxpasses\.optimizer"):
        updated("zero{where=update}", lambda model: torch.optim.SGD(model.parameters()))
    with pytest.raises(ValueError, match="did you mean '0.bias'"):
        updated("zero{where=update:0.bia}", ours)


@pytest.mark.parametrize("through_data", [False, True])
@pytest.mark.parametrize("whole_step", [False, True])
def test_an_update_that_is_written_by_hand_is_refused(through_data, whole_step):
    model = net()

    def backward(batch):
        model(batch).square().mean().backward()

    options = {"faults": "zero{where=update}"}
    compiled = torch.compile(backward if whole_step else model, backend=EAGER, options=options)
    with (
        torch._dynamo.config.patch(trace_autograd_ops=whole_step),
        pytest.raises(ValueError, match=r"'0.weight' was changed by code.*fxpasses\.optimizer"),
    ):
        for _ in range(2):
            compiled(torch.randn(4, WIDE)) if whole_step else backward_of(compiled)
            with torch.no_grad():
                for parameter in model.parameters():
                    target = parameter.data if through_data else parameter
                    target -= 0.1 * parameter.grad
                    parameter.grad = None


def backward_of(compiled):
    compiled(torch.randn(4, WIDE)).square().mean().backward()


def test_a_forward_behind_a_backward_is_no_update():
    model = net()
    compiled = torch.compile(model, backend=EAGER, options={"faults": "zero{where=update}"})
    for _ in range(2):
        backward_of(compiled)  # micro-batches
    optimizer = ours(model)
    optimizer.step()
    backward_of(compiled)
    assert len(fxpasses.runtime(model).faults.events) == 1


def whole_step(faults):
    with torch._dynamo.config.patch(trace_autograd_ops=True):
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        @torch.compile(backend=EAGER, fullgraph=True, options={"faults": faults})
        def step(batch):
            loss = model(batch).square().mean()
            loss.backward()
            return loss.detach()

        losses = []
        for seed in range(3):
            torch.manual_seed(seed)
            losses.append(step(torch.randn(4, WIDE)).item())
            optimizer.step()
            optimizer.zero_grad()
        return losses, [e.site.phase for e in fxpasses.runtime(model).faults.events]


def test_whole_steps_are_hit():
    losses, phases = whole_step(
        "nan{where=forward,step=2};bitflip{bit=3,where=backward,step=1};bitflip{bit=3,where=gradient,step=0}"
    )
    assert phases == ["gradient", "backward", "forward"]
    assert not math.isnan(losses[1]) and math.isnan(losses[2])


def payload(rank, text, compression, steps=3):
    options = {"compression": compression} if compression else {}
    gradients, events = faulty(text, steps=steps, **options)
    return gradients, events


@pytest.mark.parametrize("compression", [None, "int8", "bf16"])
def test_a_payload_is_hit_and_all_ranks_receive_it(compression):
    clean = run_ranks(payload, 2, "bitflip{where=payload,step=none}", compression)
    text = "bitflip{bit=3,index=200,where=payload,rank=1,step=1}"
    found = run_ranks(payload, 2, text, compression)
    assert found[0][1] == [] and len(found[1][1]) == 1
    assert equal(found[0][0][:1], clean[0][0][:1])
    assert not equal(found[0][0][1:2], clean[0][0][1:2])
    assert equal(found[0][0], found[1][0])


def test_a_stale_result_is_the_step_before():
    def last(found):
        return found[0][0]

    clean = last(run_ranks(payload, 2, "stale{where=payload,step=none}", None, 2))
    stale = last(run_ranks(payload, 2, "stale{where=payload,rank=all,step=1}", None, 2))
    assert equal(stale[1:], clean[:1])


def slow(rank):
    started = time.monotonic()
    _, events = faulty("delay{seconds=1.5,where=payload,rank=1,step=1}", steps=2)
    return time.monotonic() - started, events


def test_a_delay_holds_up_the_others():
    (waited, none), (_, one) = run_ranks(slow, 2)
    assert waited > 1.5 and none == [] and len(one) == 1


def lost(rank, text):
    try:
        faulty(text, steps=2)
    except RuntimeError as error:
        return str(error)
    return "nothing happened"


def test_a_rank_that_does_not_take_part_is_noticed():
    other, own = run_ranks(lost, 2, "missing{where=payload,rank=1,step=1}", gloo_timeout_s=8)
    assert "injected fault: this rank does not take part" in own
    assert "rank 1" in other


def test_a_process_that_ends_is_noticed():
    other, own = run_ranks(
        lost, 2, "exit{code=3,where=backward,rank=1,step=1}", gloo_timeout_s=8, lost=[1]
    )
    assert own is None and "rank 1" in other


def updating(faults, pattern="0.weight"):
    """Three whole steps that update parameters themselves."""
    with torch._dynamo.config.patch(trace_autograd_ops=True):
        torch._dynamo.reset()
        model = net()

        @torch.compile(backend=EAGER, fullgraph=True, options={"faults": faults})
        def step(batch):
            loss = model(batch).square().mean()
            loss.backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter -= 0.1 * parameter.grad
                    parameter.grad = None
            return loss.detach()

        found = []
        for i in range(3):
            step(torch.randn(4, WIDE, generator=torch.Generator().manual_seed(i)))
            found.append({n: p.detach().clone() for n, p in model.named_parameters()})
        return found, fxpasses.runtime(model).faults


def test_a_whole_step_that_updates_parameters_itself_is_hit_there():
    fault = "bitflip{bit=20,index=3,where=update:0.bias,step=%s}"
    clean, _ = updating(fault % "none")
    found, faults = updating(fault % 1)
    (event,) = faults.events
    assert (event.site.phase, event.site.name, event.index, event.step) == (
        "update",
        "0.bias",
        3,
        1,
    )
    assert equal([clean[0]], [found[0]])
    differing = {name for name in clean[1] if not torch.equal(clean[1][name], found[1][name])}
    assert differing == {"0.bias"}
    assert (clean[1]["0.bias"] != found[1]["0.bias"]).nonzero().flatten().tolist() == [3]
    with pytest.raises(
        ValueError, match=r"selects no parameter that the compiled function updates.*0\.bias"
    ):
        updating("zero{where=update:0.bia}")


@pytest.mark.inductor
def test_one_element_of_a_gradient_that_is_one_number_expanded():
    class Shifted(nn.Module):
        def __init__(self):
            super().__init__()
            self.shift, self.layer = nn.Parameter(torch.ones(WIDE, 3)), nn.Linear(WIDE, WIDE)

        def forward(self, x):
            return self.layer(x).sum() + 3 * self.shift.sum()

    model = Shifted()
    options = {"faults": "bitflip{where=gradient:shift,index=5,bit=22}"}
    torch.compile(model, backend=INDUCTOR, options=options)(torch.randn(4, WIDE)).backward()
    assert (model.shift.grad != 3).nonzero().tolist() == [[1, 2]]
