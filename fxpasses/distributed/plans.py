"""What a rank is about to send in a backward, and what to do where ranks are about to send different things.

A plan holds nothing that depends on a batch. Ranks whose plans are equal go ahead. Where only the parameters
that take part differ, or their order, all ranks adopt the union in one order; anything else is an error, the
same on all ranks, that names the first difference.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
from collections.abc import Callable, Iterable, Sequence


@dataclasses.dataclass(frozen=True)
class PlannedCollective:
    """A collective that one backward graph issues.

    Attributes:
        operator: functional collective, `"all_reduce"`.
        group: registered name of the process group.
        dtype: of the payload on the wire.
        numel: elements of the payload on each rank; 0 where only data decide.
        bytes: bytes of the payload on each rank (what travels depends on the algorithm: a ring all-reduce
            sends `2 (W - 1) / W` times as many).
        parameters: whose gradients it carries; empty for control messages.
        model_line: `file:line` that the last of these gradients comes from.
        made_by: name of the pass that wrote it; `"program"` for the model's own.
    """

    operator: str
    group: str
    dtype: str
    numel: int
    bytes: int
    parameters: tuple[str, ...]
    model_line: str
    made_by: str = "program"

    def on_the_wire(self) -> tuple[object, ...]:
        """What has to be the same on all ranks (a group may be registered under different names)."""
        return (self.operator, self.dtype, self.numel, self.parameters, self.made_by)

    def __str__(self) -> str:
        of = f" for {', '.join(map(repr, self.parameters[:3]))}" if self.parameters else ""
        more = f" and {len(self.parameters) - 3} more" if len(self.parameters) > 3 else ""
        line = f" ({self.model_line})" if self.model_line else ""
        return f"{self.operator} of {self.numel} {self.dtype}{of}{more}{line}"


@dataclasses.dataclass(frozen=True)
class Form:
    """A tensor as all ranks must see it.

    Attributes:
        name: qualified name.
        shape, dtype: of the tensor.
        order: dimensions from the largest stride to the smallest, as its gradient lies in memory.
        model_line: where the model uses it.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    order: tuple[int, ...] = ()
    model_line: str = ""

    def same_tensor(self, other: Form) -> bool:
        return (self.shape, self.dtype) == (other.shape, other.dtype)

    def __str__(self) -> str:
        line = f" ({self.model_line})" if self.model_line else ""
        return f"{self.name!r} of {self.dtype}{list(self.shape)}{line}"


@dataclasses.dataclass(frozen=True)
class Plan:
    """What a rank will send in one backward.

    Attributes:
        code: the code whose backward it is.
        instance: which of the modules that share that code: numbers of their tensors' first uses.
        passes: pipeline string.
        collectives: in order.
        parameters: whose gradients the backward makes, in output order.
        buffers: those that its forward writes.
        reachable: trained parameters and buffers that this rank could send zeros for, or a value.
        sets_gradients: parameters whose `.grad` the code sets when its graph has run (a whole step).
        works_on_gradients: where the graph uses reduced gradients (a whole step); else empty.
        levels: of compression that changes, parameters and schemes.
    """

    code: str
    instance: tuple[int, ...]
    passes: str
    collectives: tuple[PlannedCollective, ...]
    parameters: tuple[Form, ...]
    buffers: tuple[Form, ...] = ()
    reachable: tuple[Form, ...] = ()
    sets_gradients: tuple[str, ...] = ()
    works_on_gradients: str = ""
    levels: tuple[tuple[str, str], ...] = ()

    def digest(self, whole: bool = False) -> bytes:
        """Equal on two ranks exactly if they will send the same.

        Args:
            whole: count in what could take part, and what the code does with `.grad`.
        """
        tensors = (self.parameters, self.buffers, self.reachable if whole else ())
        forms = [[dataclasses.astuple(form)[:-1] for form in some] for some in tensors]
        wire = [c.on_the_wire() for c in self.collectives]
        text = repr((self.code, self.instance, self.passes, self.levels, wire, forms))
        text += repr((self.sets_gradients, self.works_on_gradients)) if whole else ""
        return hashlib.sha256(text.encode()).digest()


@dataclasses.dataclass(frozen=True)
class Union:
    """What all ranks send where their graphs differ: the same tensors in the same order."""

    parameters: tuple[Form, ...]
    buffers: tuple[Form, ...]


class PlanMismatch(RuntimeError):
    """The ranks are about to send different things, and can't."""


def reconcile(plans: Sequence[Plan]) -> Union:
    """What to send instead, given the plans of all ranks, by rank.

    Raises:
        PlanMismatch: naming the first difference, where they are not backwards of the same code over the
            same model, with the same passes.
    """
    for what, of in _SAME:
        for rank, plan in enumerate(plans):
            if of(plan) != of(plans[0]):
                raise PlanMismatch(
                    f"the ranks are about to run different backwards: {what} is {of(plans[0])} on rank 0 and "
                    f"{of(plan)} on rank {rank}; {_first_difference(plans, 0, rank)}"
                )
    parameters = _together(plans, lambda p: p.parameters)
    for rank, plan in enumerate(plans):
        _check_open(rank, plan, parameters)
    return Union(parameters, _together(plans, lambda p: p.buffers))


_SAME: tuple[tuple[str, Callable[[Plan], object]], ...] = (
    ("the code", lambda p: p.code),
    ("the module (by the order of first uses)", lambda p: list(p.instance)),
    ("the pipeline", lambda p: p.passes),
    (
        "the level of compression (load state of one step on all ranks)",
        lambda p: dict(p.levels),
    ),
    (
        "the list of the model's own collectives",
        lambda p: [c.on_the_wire() for c in p.collectives if c.made_by == "program"],
    ),
)


def _first_difference(plans: Sequence[Plan], a: int, b: int) -> str:
    pairs = itertools.zip_longest(plans[a].collectives, plans[b].collectives)
    for index, (here, there) in enumerate(pairs):
        if here is None or there is None or here.on_the_wire() != there.on_the_wire():
            return (
                f"first differing collective, number {index}: {here or 'none'} on rank {a}, {there or 'none'} "
                f"on rank {b}"
            )
    return "their collectives are alike"


def _together(plans: Sequence[Plan], of: Callable[[Plan], Iterable[Form]]) -> tuple[Form, ...]:
    """Each tensor once, in the order in which the ranks, from the first on, have them."""
    found: dict[str, tuple[int, Form]] = {}
    for rank, plan in enumerate(plans):
        for form in of(plan):
            first, other = found.setdefault(form.name, (rank, form))
            if not form.same_tensor(other):
                raise _clash(plans, first, other, rank, form)
    for rank, plan in enumerate(plans):
        here = {form.name: form for form in (*plan.reachable, *of(plan))}
        for first, form in found.values():
            if form.name not in here:
                raise PlanMismatch(
                    f"rank {first} is about to send {form}, which does not take part on rank {rank} and can't "
                    f"be found there in {plan.code}: it must be reachable from the module that is compiled, "
                    f"and a parameter trained, on all ranks; {_first_difference(plans, first, rank)}"
                )
            if not form.same_tensor(here[form.name]):
                raise _clash(plans, first, form, rank, here[form.name])
    return tuple(form for _, form in found.values())


def _check_open(rank: int, plan: Plan, parameters: Iterable[Form]) -> None:
    """That a rank's code leaves room for gradients of parameters that only others use."""
    own = {form.name for form in plan.parameters}
    for form in parameters:
        if form.name in own:
            continue
        if plan.works_on_gradients:
            raise PlanMismatch(
                f"{form} does not take part on rank {rank}, whose {plan.code} works on all gradients behind "
                f"its backward ({plan.works_on_gradients}): move that out of the compiled function, or use "
                "the same parameters on all ranks"
            )
        if form.name in plan.sets_gradients:
            raise PlanMismatch(
                f"{form} does not take part on rank {rank}, whose {plan.code} sets its .grad: no loss there "
                "depends on it although it is used, or it is cleared in the compiled function; leave it alone "
                "there, or use the same parameters on all ranks"
            )


def _clash(plans: Sequence[Plan], a: int, ours: Form, b: int, theirs: Form) -> PlanMismatch:
    return PlanMismatch(
        f"rank {a} has {ours}, rank {b} has {theirs}; {_first_difference(plans, a, b)}"
    )
