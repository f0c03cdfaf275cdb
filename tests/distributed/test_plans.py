"""Plans: when two are the same, and what ranks with different ones agree on."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from fxpasses.distributed.plans import (
    Form,
    Plan,
    PlanMismatch,
    PlannedCollective,
    Union,
    reconcile,
)

CODE = "Net.forward (net.py:12)"
PASSES = "participation,bucketing{mb=25.0},gradient_sync{reduce=mean}"


def form(name: str, *shape: int, **fields: Any) -> Form:
    return Form(name, shape or (3,), "float32", **fields)


def sends(*names: str, numel: int = 3, **fields: Any) -> PlannedCollective:
    """An all-reduce of the gradients of these."""
    given = {"model_line": "net.py:14", "made_by": "gradient_sync", **fields}
    return PlannedCollective("all_reduce", "0", "float32", numel, 4 * numel, names, **given)


def own(operator: str = "all_gather", numel: int = 5) -> PlannedCollective:
    """A collective of the model itself."""
    return PlannedCollective(operator, "0", "float32", numel, 4 * numel, (), "net.py:20")


def plan(*parameters: Form, **fields: Any) -> Plan:
    """The gradients of these, a bucket each."""
    collectives = tuple(sends(f.name, model_line=f.model_line) for f in parameters)
    given = {"code": CODE, "instance": (0,), "passes": PASSES, "collectives": collectives}
    return Plan(**{**given, "parameters": parameters, **fields})


A, B, C = form("a"), form("b"), form("c")
MEAN = form("running_mean", 2)


def names(forms: tuple[Form, ...]) -> list[str]:
    return [f.name for f in forms]


def mismatch(*plans: Plan) -> str:
    with pytest.raises(PlanMismatch) as caught:
        reconcile(plans)
    return str(caught.value)


# Digests


WHOLE = plan(
    form("a", 2, 3, order=(1, 0), model_line="net.py:14"),
    B,
    collectives=(own(), sends("a", "b", numel=9)),
    buffers=(MEAN,),
    reachable=(C,),
)


def changed(position: int, **fields: Any) -> Callable[[Plan], Plan]:
    """Change one collective of a plan."""

    def change(of: Plan) -> Plan:
        found = list(of.collectives)
        found[position] = dataclasses.replace(found[position], **fields)
        return dataclasses.replace(of, collectives=tuple(found))

    return change


def set_to(**fields: Any) -> Callable[[Plan], Plan]:
    return lambda of: dataclasses.replace(of, **fields)


def with_form(of: str, **fields: Any) -> Callable[[Plan], Plan]:
    """Change the first form of `parameters`, `buffers` or `reachable`."""

    def change(plan: Plan) -> Plan:
        first, *rest = getattr(plan, of)
        return dataclasses.replace(plan, **{of: (dataclasses.replace(first, **fields), *rest)})

    return change


DIFFERENT = {
    "the code": set_to(code="Net.forward (net.py:13)"),
    "the instance": set_to(instance=(1,)),
    "the pipeline": set_to(passes="bucketing,gradient_sync"),
    "a level of compression": set_to(levels=(("a", "int4"),)),
    "an operator": changed(0, operator="reduce_scatter"),
    "a dtype on the wire": changed(1, dtype="bfloat16"),
    "a size": changed(1, numel=10),
    "whose gradients": changed(1, parameters=("a",)),
    "the order in a bucket": changed(1, parameters=("b", "a")),
    "which pass made it": changed(0, made_by="gradient_sync"),
    "one collective less": set_to(collectives=WHOLE.collectives[:1]),
    "no collective": set_to(collectives=()),
    "the order of collectives": set_to(collectives=WHOLE.collectives[::-1]),
    "one gradient less": set_to(parameters=WHOLE.parameters[:1]),
    "the order of gradients": set_to(parameters=WHOLE.parameters[::-1]),
    "the name of a gradient": with_form("parameters", name="c"),
    "the shape of a gradient": with_form("parameters", shape=(3, 2)),
    "the dtype of a gradient": with_form("parameters", dtype="float64"),
    "how a gradient lies in memory": with_form("parameters", order=(0, 1)),
    "no buffer": set_to(buffers=()),
    "the shape of a buffer": with_form("buffers", shape=(3,)),
}
ALIKE = {
    "nothing": lambda of: of,
    "the line of a collective": changed(1, model_line="elsewhere/net.py:15"),
    "the name of the group": changed(1, group="7"),
    "the line of a gradient": with_form("parameters", model_line="elsewhere/net.py:15"),
    "the line of a buffer": with_form("buffers", model_line="elsewhere/net.py:15"),
    "what is reachable": set_to(reachable=()),
    "the form of what is reachable": with_form("reachable", shape=(9,)),
    "whose .grad the code sets": set_to(sets_gradients=("a",)),
    "what the code does with gradients": set_to(works_on_gradients="net.py:18"),
}


@pytest.mark.parametrize("what", DIFFERENT)
def test_the_digest_tells_plans_apart_that_send_different_things(what):
    other = DIFFERENT[what](WHOLE)
    assert other != WHOLE and other.digest() != WHOLE.digest()


@pytest.mark.parametrize("what", ALIKE)
def test_the_digest_is_the_same_for_what_does_not_travel(what):
    other = ALIKE[what](WHOLE)
    assert (other == WHOLE) == (what == "nothing")
    assert other.digest() == WHOLE.digest()


@pytest.mark.parametrize(
    "what", ["what is reachable", "whose .grad the code sets", "what the code does with gradients"]
)
def test_the_digest_of_the_whole_tells_what_ranks_reconcile_by(what):
    assert ALIKE[what](WHOLE).digest(whole=True) != WHOLE.digest(whole=True)


def test_every_field_of_a_plan_is_told_apart_or_alike():
    """A new field must be put into one of the two lists."""
    seen = {field.name: set() for field in dataclasses.fields(Plan)}
    for changes, kind in ((DIFFERENT, "different"), (ALIKE, "alike")):
        for change in changes.values():
            other = change(WHOLE)
            for name, found in seen.items():
                if getattr(other, name) != getattr(WHOLE, name):
                    found.add(kind)
    assert all(seen.values())
    alike = {name for name, kinds in seen.items() if "different" not in kinds}
    assert alike == {"reachable", "sets_gradients", "works_on_gradients"}


def test_the_digest_is_the_same_in_every_process():
    """No hash of Python's, which differs from process to process."""
    text = (
        "('f', (0,), '', (), [('all_reduce', 'float32', 3, ('a',), 'gradient_sync')], "
        "[[('a', (3,), 'float32', ())], [], []])"
    )
    found = plan(A, code="f", passes="").digest()
    assert found == hashlib.sha256(text.encode()).digest() and len(found) == 32


# One union


def test_equal_plans_are_their_own_union():
    assert reconcile([plan(A, B)] * 3) == Union((A, B), ())


def test_a_rank_that_lacks_a_parameter_adopts_it():
    plans = [plan(A, B), plan(A, reachable=(A, B))]
    assert reconcile(plans) == Union((A, B), ())


def test_the_first_rank_may_be_the_one_that_lacks_it():
    plans = [plan(B, reachable=(A, B)), plan(A, B)]
    assert reconcile(plans) == Union((B, A), ())


def test_where_only_the_order_differs_it_is_that_of_the_first_rank():
    assert reconcile([plan(C, A, B), plan(A, B, C)]) == Union((C, A, B), ())


def test_ranks_that_have_nothing_in_common_send_all():
    plans = [plan(A, reachable=(A, B)), plan(B, reachable=(A, B))]
    assert reconcile(plans) == Union((A, B), ())


def test_three_ranks_in_the_order_of_the_first_that_has_each():
    everything = (A, B, C)
    plans = [plan(p, q, reachable=everything) for p, q in ((C, A), (A, B), (B, C))]
    assert reconcile(plans) == Union((C, A, B), ())


def test_a_rank_without_any_gradient_adopts_all():
    plans = [plan(reachable=(A, B)), plan(A, B), plan(B, reachable=(A,))]
    assert reconcile(plans) == Union((A, B), ())


def test_buffers_are_agreed_on_apart_from_parameters():
    var = form("running_var", 2)
    plans = [plan(A, buffers=(MEAN,), reachable=(var,)), plan(A, buffers=(var, MEAN))]
    assert reconcile(plans) == Union((A,), (MEAN, var))


def test_what_is_reachable_everywhere_but_used_nowhere_is_left_out():
    assert reconcile([plan(A, reachable=(A, B)), plan(A, reachable=(A, B))]) == Union((A,), ())


def test_a_parameter_that_is_used_need_not_be_listed_as_reachable():
    plans = [plan(A, B, reachable=()), plan(B, reachable=(A,))]
    assert names(reconcile(plans).parameters) == ["a", "b"]


def test_how_a_gradient_lies_in_memory_may_differ():
    """A union's buckets are filled in logical order."""
    turned = dataclasses.replace(form("a", 2, 3), order=(1, 0))
    straight = dataclasses.replace(turned, order=(0, 1))
    assert reconcile([plan(turned), plan(straight)]).parameters == (turned,)


def test_lines_may_differ():
    """Ranks may have the code in different folders."""
    here = dataclasses.replace(A, model_line="/home/a/net.py:3")
    there = dataclasses.replace(A, model_line="/home/b/net.py:3")
    assert reconcile([plan(here, reachable=(B,)), plan(there, B)]) == Union((here, B), ())


def test_lines_of_the_models_own_collectives_may_differ():
    theirs = dataclasses.replace(own(), model_line="/home/b/net.py:20")
    plans = [plan(A, collectives=(own(),), reachable=(B,)), plan(B, A, collectives=(theirs,))]
    assert reconcile(plans) == Union((A, B), ())


def test_the_models_own_collectives_may_stand_between_others():
    first = plan(A, B, collectives=(own(), sends("a"), sends("b")))
    second = plan(A, collectives=(sends("a"), own()), reachable=(A, B))
    assert reconcile([first, second]) == Union((A, B), ())


def test_a_whole_step_may_set_and_work_on_what_takes_part():
    whole = {"sets_gradients": ("a", "b"), "works_on_gradients": "net.py:18"}
    plans = [dataclasses.replace(plan(*forms), **whole) for forms in ((A, B), (B, A))]
    assert reconcile(plans) == Union((A, B), ())


# Errors, the same on all ranks


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"sets_gradients": ("b",)}, "Net.forward (net.py:12) sets its .grad"),
        (
            {"works_on_gradients": "net.py:18"},
            "works on all gradients behind its backward (net.py:18)",
        ),
    ],
)
def test_a_whole_step_that_leaves_no_room_for_others_gradients(fields, message):
    here, there = plan(A, B), dataclasses.replace(plan(A, reachable=(A, B)), **fields)
    found = mismatch(here, there)
    assert (
        found.startswith("'b' of float32[3] does not take part on rank 1, whose")
        and message in found
    )


def test_a_whole_step_may_set_another_gradient():
    there = dataclasses.replace(plan(A, reachable=(A, B)), sets_gradients=("a", "c"))
    assert reconcile([plan(A, B), there]) == Union((A, B), ())


def test_other_code_is_named_on_both_ranks_with_the_first_difference():
    here = plan(form("a", model_line="net.py:14"))
    there = plan(form("b", model_line="net.py:33"), code="Net.generate (net.py:30)")
    assert mismatch(here, there) == (
        "the ranks are about to run different backwards: the code is Net.forward (net.py:12) on rank 0 and "
        "Net.generate (net.py:30) on rank 1; first differing collective, number 0: all_reduce of 3 float32 "
        "for 'a' (net.py:14) on rank 0, all_reduce of 3 float32 for 'b' (net.py:33) on rank 1"
    )


def test_the_first_rank_that_differs_from_rank_0_is_named():
    message = mismatch(plan(A), plan(A), plan(A, code="other (x.py:1)"), plan(A, code="third"))
    assert "is Net.forward (net.py:12) on rank 0 and other (x.py:1) on rank 2; " in message
    assert message.endswith("; their collectives are alike")


def test_another_module_of_the_same_code_is_an_error():
    message = mismatch(plan(A), plan(A, instance=(1, 4)))
    assert (
        "the module (by the order of first uses) is [0] on rank 0 and [1, 4] on rank 1" in message
    )


def test_another_pipeline_is_an_error():
    other = PASSES.replace("25.0", "1.0")
    message = mismatch(plan(A), plan(A, passes=other))
    assert f"the pipeline is {PASSES} on rank 0 and {other} on rank 1" in message


def test_other_levels_of_compression_are_an_error():
    message = mismatch(plan(A, levels=(("a", "int4"),)), plan(A, levels=(("a", "topk"),)))
    assert "the level of compression (load state of one step on all ranks) is " in message
    assert "{'a': 'int4'} on rank 0 and {'a': 'topk'} on rank 1" in message


@pytest.mark.parametrize(
    ("theirs", "said"),
    [
        ((), "and [] on rank 1; first differing collective, number 1: {ours} on rank 0, none"),
        ((own(numel=6),), "on rank 0, all_gather of 6 float32 (net.py:20) on rank 1"),
        ((own("broadcast"),), "on rank 0, broadcast of 5 float32 (net.py:20) on rank 1"),
    ],
    ids=["none", "size", "operator"],
)
def test_other_collectives_of_the_model_itself_are_an_error(theirs, said):
    here = plan(A, collectives=(sends("a"), own()))
    there = plan(A, collectives=(sends("a"), *theirs))
    message = mismatch(here, there)
    assert "the list of the model's own collectives is [('all_gather', 'float32', 5" in message
    assert said.format(ours="all_gather of 5 float32 (net.py:20)") in message


def test_a_parameter_that_a_rank_cannot_reach_is_named_with_its_line():
    here = plan(A, form("b", 2, 4, model_line="net.py:16"))
    message = mismatch(here, plan(A, reachable=(A, C)))
    assert message == (
        "rank 0 is about to send 'b' of float32[2, 4] (net.py:16), which does not take part on rank 1 and "
        "can't be found there in Net.forward (net.py:12): it must be reachable from the module that is "
        "compiled, and a parameter trained, on all ranks; first differing collective, number 1: all_reduce of "
        "3 float32 for 'b' (net.py:16) on rank 0, none on rank 1"
    )


def test_the_rank_that_cannot_reach_it_may_be_the_first():
    message = mismatch(plan(A), plan(A, C), plan(A, C))
    assert message.startswith("rank 1 is about to send 'c' of float32[3], which does not take part")
    assert "does not take part on rank 0" in message


def test_a_buffer_that_a_rank_cannot_reach_is_an_error():
    message = mismatch(plan(A, buffers=(MEAN,)), plan(A))
    assert message.startswith("rank 0 is about to send 'running_mean' of float32[2], which")


CLASHES = {
    "both use it": lambda other: plan(other),
    "one can only reach it": lambda other: plan(B, reachable=(other,)),
}


@pytest.mark.parametrize("how", CLASHES)
@pytest.mark.parametrize(
    ("fields", "said"), [({"shape": (4,)}, "float32[4]"), ({"dtype": "float64"}, "float64[3]")]
)
def test_a_parameter_of_another_form_is_an_error_that_names_both(how, fields, said):
    here = dataclasses.replace(A, model_line="net.py:14")
    there = CLASHES[how](dataclasses.replace(A, **fields, model_line="net.py:33"))
    message = mismatch(plan(here, reachable=(B,)), there)
    assert message.startswith(
        f"rank 0 has 'a' of float32[3] (net.py:14), rank 1 has 'a' of {said} (net.py:33); "
    )


def test_a_buffer_of_another_form_is_an_error():
    other = dataclasses.replace(MEAN, shape=(3,))
    message = mismatch(plan(A, buffers=(MEAN,)), plan(A, buffers=(other,)))
    assert "rank 0 has 'running_mean' of float32[2], rank 1 has 'running_mean' of float32[3]" in (
        message
    )


# Texts


@pytest.mark.parametrize(
    ("collective", "text"),
    [
        (own(), "all_gather of 5 float32 (net.py:20)"),
        (dataclasses.replace(own(), model_line=""), "all_gather of 5 float32"),
        (sends("a"), "all_reduce of 3 float32 for 'a' (net.py:14)"),
        (sends(*"abc"), "all_reduce of 3 float32 for 'a', 'b', 'c' (net.py:14)"),
        (sends(*"abcde"), "all_reduce of 3 float32 for 'a', 'b', 'c' and 2 more (net.py:14)"),
    ],
)
def test_a_collective_says_what_it_carries(collective, text):
    assert str(collective) == text


# Any ranks


FORMS = tuple(form(f"p{i}", i + 1) for i in range(6))


@st.composite
def plans_of_ranks(draw: st.DrawFn) -> list[Plan]:
    """Plans over subsets of `FORMS`, each in an order of its own; all can reach all."""
    world = draw(st.integers(1, 5))
    subsets = [draw(st.lists(st.sampled_from(FORMS), unique=True)) for _ in range(world)]
    buffers = [draw(st.lists(st.sampled_from(FORMS[:3]), unique=True)) for _ in range(world)]
    return [
        plan(*subset, buffers=tuple(written), reachable=FORMS)
        for subset, written in zip(subsets, buffers, strict=True)
    ]


@given(plans_of_ranks())
def test_any_union_has_each_tensor_once_and_the_first_ranks_first(plans):
    union = reconcile(plans)
    for found, of in ((union.parameters, "parameters"), (union.buffers, "buffers")):
        everything = {f for p in plans for f in getattr(p, of)}
        assert len(found) == len(everything) and set(found) == everything
        first = getattr(plans[0], of)
        assert found[: len(first)] == first
        ranks = [
            next(r for r, p in enumerate(plans) if f in getattr(p, of)) for f in found
        ]  # the first rank that has it
        assert ranks == sorted(ranks)


@given(plans_of_ranks())
def test_the_union_does_not_depend_on_what_a_rank_knows_besides(plans):
    """Each rank computes it from the same list; what it can reach, and lines, are its own."""
    others = [
        dataclasses.replace(
            p,
            parameters=tuple(dataclasses.replace(f, model_line=f"x:{r}") for f in p.parameters),
            reachable=p.reachable[::-1],
        )
        for r, p in enumerate(plans)
    ]
    here, there = reconcile(plans), reconcile(others)
    assert names(here.parameters) == names(there.parameters)
    assert here.buffers == there.buffers


@given(plans_of_ranks())
def test_all_that_adopt_a_union_are_alike(plans):
    """There is nothing more to agree on."""
    union = reconcile(plans)
    adopted = [plan(*union.parameters, buffers=union.buffers) for _ in plans]
    assert len({p.digest() for p in adopted}) == 1
    assert reconcile(adopted) == union


@given(plans_of_ranks(), st.data())
def test_any_rank_that_lacks_one_out_of_reach_is_an_error(plans, data):
    used = {f.name for p in plans for f in p.parameters}
    places = [
        (r, name)
        for r, p in enumerate(plans)
        for name in sorted(used - {f.name for f in p.parameters})
    ]
    assume(places)
    rank, name = data.draw(st.sampled_from(places))
    less = dataclasses.replace(
        plans[rank], reachable=tuple(f for f in FORMS if f.name != name), buffers=()
    )
    message = mismatch(*plans[:rank], less, *plans[rank + 1 :])
    assert f"is about to send '{name}' of float32" in message
    assert f"does not take part on rank {rank} and can't be found there" in message
