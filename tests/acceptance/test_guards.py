"""Guards: what they notice of injected faults, and what happens then."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fxpasses
from fxpasses.guards.alarms import FaultDetected
from tests.acceptance.test_faults import EAGER, INDUCTOR, WIDE, equal, net, train
from tests.multirank import run_ranks

FORWARD = "bitflip{bit=29,where=forward:2,op=addmm,step=1}"
BACKWARD = "bitflip{bit=29,where=backward,op=mm,step=1}"


def guarded(guards, faults="", backend=EAGER, steps=3, model=None, **options):
    model = model or net()
    options = {"guards": guards, "faults": faults, **options}
    compiled = torch.compile(model, backend=backend, options=options)
    gradients = train(model, compiled, steps)
    return gradients, model, fxpasses.runtime(model)


@pytest.mark.parametrize("fault", [FORWARD, BACKWARD])
def test_a_flip_in_a_product_stops_the_step(fault):
    model = net()
    with pytest.raises(FaultDetected, match=r"step 1: 1 alarm.*product: (add)?mm.*was not taken"):
        guarded("products", fault, model=model)
    torch._dynamo.reset()
    _, clean, _ = guarded("products", "", steps=1)
    assert equal([dict(clean.named_parameters())], [dict(model.named_parameters())])


@pytest.mark.parametrize("fault", [FORWARD, BACKWARD])
def test_a_step_with_an_alarm_is_skipped(fault):
    _, model, runtime = guarded("products,on=skip", fault, steps=2)
    assert runtime.last_step.skipped
    (alarm,) = runtime.alarms.events
    assert (alarm.step, alarm.count) == (1, 1) and "mm" in alarm.place
    _, clean, runtime = guarded("products,on=skip", "", steps=1)
    assert equal([dict(clean.named_parameters())], [dict(model.named_parameters())])
    assert not runtime.last_step.skipped


@pytest.mark.parametrize("fault", [FORWARD, BACKWARD])
def test_recomputed_gradients_are_those_of_a_clean_run(fault):
    clean, _, _ = guarded("products,on=recompute", fault.replace("step=1", "step=none"))
    torch._dynamo.reset()
    found, _, runtime = guarded("products,on=recompute", fault)
    assert equal(clean, found)
    assert len(runtime.alarms.events) == len(runtime.faults.events) == 1


@pytest.mark.inductor
def test_recomputed_gradients_through_inductor():
    """Its code overwrites saved values where a backward runs once, and its cache does not tell which did."""
    fault = BACKWARD.replace("step=1", "step={}")
    guarded("products,on=skip", fault.replace("{}", "none"), INDUCTOR)
    torch._dynamo.reset()
    clean, _, _ = guarded("products,on=recompute", fault.replace("{}", "none"), INDUCTOR)
    torch._dynamo.reset()
    found, _, runtime = guarded("products,on=recompute", fault.replace("{}", "1"), INDUCTOR)
    assert equal(clean, found)
    assert len(runtime.alarms.events) == len(runtime.faults.events) == 1


class Noisy(nn.Module):
    """Dropout and running statistics: state that a second run must not see changed."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.norm, self.b = (
            nn.Linear(WIDE, WIDE),
            nn.BatchNorm1d(WIDE),
            nn.Linear(WIDE, WIDE),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(torch.dropout(self.norm(self.a(x)), 0.5, self.training))


def test_a_recomputed_forward_has_the_same_noise_and_statistics():
    found = []
    for step in ("none", "1"):
        torch._dynamo.reset()
        model = Noisy()
        torch.manual_seed(5)
        fault = f"bitflip{{bit=29,where=forward:b,op=addmm,step={step}}}"
        gradients, model, runtime = guarded("products,on=recompute", fault, model=model)
        buffers = {n: b.clone() for n, b in model.named_buffers()}
        found.append((gradients, buffers, len(runtime.alarms.events)))
    (clean, clean_buffers, none), (again, again_buffers, one) = found
    assert equal(clean, again) and equal([clean_buffers], [again_buffers])
    assert (none, one) == (0, 1)


def test_what_does_not_go_away_is_an_error():
    with pytest.raises(FaultDetected, match="when it was recomputed; the fault is not transient"):
        guarded("products,on=recompute", "stuck{bit=30,value=1,where=forward:2,op=addmm}")


def test_values_that_are_too_large_or_not_finite():
    for fault in (
        "nan{where=gradient:0.weight,step=1}",
        "bitflip{bit=30,where=gradient:2.bias,step=1}",
    ):
        torch._dynamo.reset()
        with pytest.raises(FaultDetected, match=r"gradient of (0\.weight|2\.bias)"):
            guarded("values=1e3", fault)


@pytest.mark.parametrize("bits", ["bit=0", "bit=3+20", "bits=3,seed=4"])
@pytest.mark.parametrize("parameter", ["0.weight", "2.bias"])
def test_any_flip_in_a_gradient_is_noticed(bits, parameter):
    with pytest.raises(FaultDetected, match=f"bits of the gradient of {parameter}"):
        guarded("gradients", f"bitflip{{{bits},where=gradient:{parameter},step=1}}")


@pytest.mark.inductor
def test_the_compiler_does_not_merge_what_is_compared():
    fault = "bitflip{bit=0,where=gradient:%s,step=%s}"
    options = {"guards": "gradients,on=recompute"}
    clean, _, _ = guarded(options["guards"], fault % ("0.weight", "none"), INDUCTOR)
    for parameter in ("0.weight", "0.bias"):
        torch._dynamo.reset()
        found, _, runtime = guarded(options["guards"], fault % (parameter, 1), INDUCTOR)
        assert equal(clean, found)
        assert len(runtime.alarms.events) == len(runtime.faults.events) == 1


def test_a_sum_that_is_wrong_is_recomputed():
    fault = "bitflip{bit=29,where=backward,op=sum,step=%s,seed=1}"
    clean, _, _ = guarded("gradients,on=recompute", fault % "none")
    torch._dynamo.reset()
    found, _, runtime = guarded("gradients,on=recompute", fault % 1)
    assert equal(clean, found)
    (alarm,) = runtime.alarms.events
    assert alarm.place.startswith("sum: sum")


def test_a_clean_run_is_bitwise_the_same_with_guards():
    clean, _, _ = guarded("")
    torch._dynamo.reset()
    found, _, runtime = guarded("products,gradients,values,on=skip")
    assert equal(clean, found) and runtime.alarms.events == []


def test_inference_is_guarded():
    model = net()
    options = {"guards": "products", "faults": FORWARD.replace("step=1", "step=0")}
    compiled = torch.compile(model, backend=EAGER, options=options)
    with torch.no_grad(), pytest.raises(FaultDetected, match="product: addmm of 2"):
        compiled(torch.randn(4, WIDE))


def test_fxpasses_optimizer_skips_too():
    model = net()
    options = {"guards": "products,on=skip", "faults": BACKWARD}
    compiled = torch.compile(model, backend=EAGER, options=options)
    optimizer = fxpasses.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    train(model, compiled, 1, optimizer)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    train(model, compiled, 1, optimizer)
    assert fxpasses.runtime(model).last_step.skipped
    assert equal([before], [dict(model.named_parameters())])
    train(model, compiled, 1, optimizer)
    assert not equal([before], [dict(model.named_parameters())])


def on_ranks(rank, guards, faults, compression="none", reduce_order="any"):
    try:
        gradients, model, runtime = guarded(
            guards, faults, compression=compression, reduce_order=reduce_order
        )
    except FaultDetected as error:
        return str(error)
    parameters = {n: p.detach().clone() for n, p in model.named_parameters()}
    return gradients, parameters, [a.step for a in runtime.alarms.events], runtime.last_step.skipped


@pytest.mark.parametrize("fault", [FORWARD, BACKWARD])
def test_all_ranks_stop_for_an_alarm_on_one(fault):
    found = run_ranks(on_ranks, 2, "products", fault.replace("step=1", "step=1,rank=1"))
    assert all("step 1: 1 alarm(s); product" in message for message in found)


def test_a_gradient_that_is_hit_before_it_is_packed():
    fault = "bitflip{bit=2,where=gradient:0.bias,rank=1,step=%s}"
    for compression in ("none", "int8"):
        clean = run_ranks(on_ranks, 2, "gradients,on=recompute", fault % "none", compression)
        found = run_ranks(on_ranks, 2, "gradients,on=recompute", fault % 1, compression)
        assert [row[2] for row in found] == [[1], [1]]
        assert all(equal(a[0], b[0]) for a, b in zip(clean, found, strict=True))


def test_all_ranks_skip_together():
    fault = BACKWARD.replace("step=1", "step=2,rank=1")
    found = run_ranks(on_ranks, 2, "products,on=skip", fault)
    assert [row[2] for row in found] == [[2], [2]] and all(row[3] for row in found)
    assert equal([found[0][1]], [found[1][1]])


def test_all_ranks_recompute_together():
    fault = BACKWARD.replace("step=1", "step={},rank=1")
    clean = run_ranks(on_ranks, 2, "products,on=recompute", fault.replace("{}", "none"))
    found = run_ranks(on_ranks, 2, "products,on=recompute", fault.replace("{}", "1"))
    assert [row[2] for row in found] == [[1], [1]]
    assert all(equal(a[0], b[0]) for a, b in zip(clean, found, strict=True))


@pytest.mark.parametrize("compression", ["none", "int8", "int4", "bf16", "topk"])
@pytest.mark.parametrize("world", [2, 3])
def test_a_payload_that_is_hit_on_its_way(compression, world):
    if world == 3 and compression not in ("none", "int8"):
        pytest.skip("the ways of a payload are those of int8")
    fault = "bitflip{bit=%d,index=44,where=payload,rank=1,step=1}"
    text = fault % (26 if compression == "none" else 6)
    found = run_ranks(on_ranks, world, "payloads,on=skip", text, compression)
    assert [row[2] for row in found] == [[1]] * world
    assert all(equal([found[0][1]], [row[1]]) for row in found)


@pytest.mark.parametrize("bit", [0, 30])
def test_any_bit_of_a_payload_that_arrives_as_it_was_sent(bit):
    fault = f"bitflip{{bit={bit},index=44,where=payload,rank=1,step=1}}"
    found = run_ranks(on_ranks, 3, "payloads,on=skip", fault, "none", "fixed")
    assert [row[2] for row in found] == [[1]] * 3


@pytest.mark.parametrize("bit", [26, 30])
def test_a_factor_of_powersgd_that_is_hit_on_its_way(bit):
    fault = f"bitflip{{bit={bit},index=4,where=payload,rank=1,step=1}}"
    found = run_ranks(on_ranks, 2, "payloads,on=skip", fault, {"scheme": "powersgd", "rank": 2})
    assert [row[2] for row in found] == [[1]] * 2


def test_a_payload_that_was_hit_is_sent_again():
    """The whole backward runs again, on all ranks, and sends what a clean run sends, residuals included."""
    fault = "bitflip{bit=6,index=44,where=payload,rank=1,step=%s}"
    for compression in ("none", "int8"):
        bit = fault.replace("bit=6", "bit=26") if compression == "none" else fault
        clean = run_ranks(on_ranks, 2, "payloads,on=recompute", bit % "none", compression)
        found = run_ranks(on_ranks, 2, "payloads,on=recompute", bit % "1", compression)
        assert [row[2] for row in found] == [[1], [1]]
        assert all(equal(a[0], b[0]) for a, b in zip(clean, found, strict=True))


def replicas(rank, fault, digest, momentum=False):
    """The message, and the step at which the ranks stopped."""
    model = net()
    options = {"guards": {"digest": digest}, "faults": fault}
    compiled = torch.compile(model, backend=EAGER, options=options)
    optimizer = fxpasses.optimizer(torch.optim.AdamW(model.parameters()))
    step = 0
    try:
        for step in range(7):
            if momentum and rank == 1 and step == 2:
                state = optimizer.state[model[0].weight]["exp_avg"].view(torch.int32)
                state[3, 4] ^= 1 << 2
            train(model, compiled, 1, optimizer, seed=step)
    except FaultDetected as error:
        return str(error), step
    return "", step


def test_a_flip_in_a_parameter_is_found_at_the_next_digest():
    fault = "bitflip{bit=0,index=0,where=update:2.bias,rank=1,step=2}"
    found = run_ranks(replicas, 2, fault, 4)
    assert [step for _, step in found] == [4, 4]
    assert all("parameter '2.bias' differs over the ranks" in message for message, _ in found)
    assert run_ranks(replicas, 2, fault.replace("step=2", "step=none"), 4) == [("", 6)] * 2


def test_a_flip_in_optimizer_state_is_found_at_the_next_digest():
    found = run_ranks(replicas, 2, "", 3, True)
    assert [step for _, step in found] == [3, 3]
    assert all("exp_avg of '0.weight' differs" in message for message, _ in found)


@pytest.mark.parametrize("fault", ["bitflip{bit=29,where=forward:2,op=addmm,step=1}", BACKWARD])
def test_whole_steps_are_guarded(fault):
    with torch._dynamo.config.patch(trace_autograd_ops=True):
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        options = {"guards": "products,on=skip", "faults": fault}

        @torch.compile(backend=EAGER, fullgraph=True, options=options)
        def step(batch):
            loss = model(batch).square().mean()
            loss.backward()
            return loss.detach()

        skipped = []
        for _ in range(3):
            step(torch.randn(4, WIDE))
            optimizer.step()
            optimizer.zero_grad()
            skipped.append(fxpasses.runtime(model).last_step.skipped)
        assert skipped == [False, True, False]


def test_a_whole_step_can_not_be_recomputed():
    with torch._dynamo.config.patch(trace_autograd_ops=True):
        model = net()

        @torch.compile(backend=EAGER, options={"guards": "products,on=recompute"})
        def step(batch):
            model(batch).square().mean().backward()
            return batch

        with pytest.raises(ValueError, match="the compiled function holds both; use 'skip' or"):
            step(torch.randn(4, WIDE))
