"""Where in a graph a fault may happen."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import torch
from torch import fx

from fxpasses.effects import is_effectful, is_launch, is_wait
from fxpasses.faults.models import FORMS, check_dtype, drawn
from fxpasses.faults.spec import FORWARD, GRADIENT, PAYLOAD, UPDATE, Fault
from fxpasses.graph import TrainingGraph, ancestors
from fxpasses.precision import CLEAR, class_of, modules_of, operator_name
from fxpasses.rewrite import model_line, origin_of
from fxpasses.sizes import has_elements


@dataclasses.dataclass(frozen=True)
class Site:
    """A place where faults may happen: one tensor of one graph.

    Attributes:
        phase: one of `faults.spec.PHASES`.
        name: of the node; of the parameter (update).
        operator: that makes it, such as `"mm"`.
        modules: qualified names of the modules it belongs to, the outermost first (forward, backward).
        parameters: whose gradient it is or carries (gradient, payload), or that it is (update).
        dtype: of its elements.
        numel: how many; None where that is not known at compile time.
        model_line: `file:line` of the user's code.
        faults: which of the option's faults may happen here, by number.
    """

    phase: str
    name: str
    operator: str
    modules: tuple[str, ...]
    parameters: tuple[str, ...]
    dtype: torch.dtype
    numel: int | None
    model_line: str
    faults: tuple[int, ...] = ()

    @functools.cached_property
    def number(self) -> int:
        """What stands for it in a row of the table; never 0, the same in each run."""
        return drawn("site", self.phase, self.name) | 1

    @property
    def names(self) -> tuple[str, ...]:
        """What patterns are matched with."""
        return self.parameters or self.modules

    def __str__(self) -> str:
        return f"{self.phase}:{(self.names or ('',))[-1]} {self.operator} ({self.name})"


@dataclasses.dataclass(frozen=True)
class Places:
    """What a graph has for the faults of an option.

    Attributes:
        sites: where they may happen.
        names: (phase, name) of all that they could have selected.
    """

    sites: tuple[Site, ...] = ()
    names: frozenset[tuple[str, str]] = frozenset()

    @functools.cached_property
    def by_number(self) -> dict[int, Site]:
        return {site.number: site for site in self.sites}

    @functools.cached_property
    def by_fault(self) -> dict[int, list[Site]]:
        """The sites at which a fault, by its number, may happen; only faults that have some."""
        found: dict[int, list[Site]] = {}
        for site in self.sites:
            for number in site.faults:
                found.setdefault(number, []).append(site)
        return dict(sorted(found.items()))


_NAMES = "fault_names"
# Of another tensor they read its form alone.
_CONSTANT = ("empty_like", "zeros_like", "ones_like", "full_like", "new_zeros", "new_full", "zero")


def places_of(graph: TrainingGraph) -> Places:
    """What passes have found and written."""
    sites = dict.fromkeys(n.meta["fault"] for n in graph.walk_deep() if "fault" in n.meta)
    return Places(tuple(sites), graph.module.meta.get(_NAMES, frozenset()))


def forward_nodes(graph: TrainingGraph) -> set[fx.Node]:
    """What the program's own outputs are computed from."""
    outputs = [n for _, n, r in graph.outputs() if r.kind in ("output", "mutation")]
    return ancestors(n for n in outputs if isinstance(n, fx.Node))


def operator_sites(graph: TrainingGraph, phase: str) -> list[tuple[fx.Node, Site]]:
    """Results of the forward's, or of the backward's, own operators, views left out."""
    forward = forward_nodes(graph)
    found = []
    for node in graph.walk():
        is_own = "provenance" not in node.meta and not is_effectful(node) and node.users
        if is_own and (node in forward) == (phase == FORWARD) and computes(node):
            modules = tuple(filter(None, modules_of(_origin(node))))
            found.append((node, _site(node, phase, (), modules)))
    return found


def gradient_sites(graph: TrainingGraph) -> list[tuple[fx.Node, Site]]:
    """The gradients, each node once, whosesoever it is."""
    found: dict[fx.Node, list[str]] = {}
    for gradient in graph.gradients():
        if _fits(gradient.node):
            found.setdefault(gradient.node, []).append(gradient.parameter)
    return [(n, _site(n, GRADIENT, tuple(names), ())) for n, names in found.items()]


def payload_sites(graph: TrainingGraph) -> list[tuple[fx.Node, Site]]:
    """The launches of gradients, each with the site that is its payload."""
    found = []
    for launch in graph.walk():
        origin = launch.meta.get("provenance")
        if is_launch(launch) and origin is not None and origin.parameters:
            (payload,) = launch.all_input_nodes
            if _fits(payload):
                site = _site(payload, PAYLOAD, origin.parameters, ())
                operator = operator_name(launch)
                line = origin.model_line
                named = dataclasses.replace(site, operator=operator, model_line=line)
                found.append((launch, named))
    return found


def update_site(name: str, parameter: torch.Tensor) -> Site:
    return Site(UPDATE, name, "step", (), (name,), parameter.dtype, parameter.numel(), "")


def written_parameters(graph: TrainingGraph) -> list[tuple[fx.Node, Site]]:
    """The writes of parameters, in a graph whose tail writes them; of several of one the last."""
    found: dict[str, tuple[fx.Node, Site]] = {}
    names = {node: role.name for node, role in graph.inputs("parameter")}
    for node in graph.walk():
        place = node.args[0] if node.target is torch.ops.aten.copy_.default else None
        if isinstance(place, fx.Node) and place in names and _fits(node):
            found[names[place]] = node, update_site(names[place], node.meta["val"])
    return list(found.values())


def select(
    graph: TrainingGraph, sites: Sequence[tuple[fx.Node, Site]], faults: Sequence[Fault]
) -> list[tuple[fx.Node, Site]]:
    """The sites at which one of the faults may happen. The graph remembers the names of all.

    Raises:
        ValueError: for a bit or an index that a site does not have.
    """
    names = {(site.phase, name) for _, site in sites for name in site.names}
    graph.module.meta[_NAMES] = graph.module.meta.get(_NAMES, frozenset()) | names
    found = []
    for node, site in sites:
        if numbers := matching(site, faults):
            for number in numbers:
                check(faults[number], site)
            found.append((node, dataclasses.replace(site, faults=numbers)))
    return found


def matching(site: Site, faults: Sequence[Fault]) -> tuple[int, ...]:
    """The numbers of the faults that may happen at a site."""
    return tuple(
        i for i, f in enumerate(faults) if f.selects(site.phase, site.names, site.operator)
    )


def check(fault: Fault, site: Site) -> None:
    """
    Raises:
        ValueError: for a bit or an index that a site does not have.
    """
    check_dtype(fault, site.dtype)
    if fault.index is not None and site.numel is not None and fault.index >= site.numel:
        raise ValueError(
            f"option 'faults': {fault.text!r}: index {fault.index} is outside of {site}, which has "
            f"{site.numel} elements"
        )


def _site(node: fx.Node, phase: str, parameters: tuple[str, ...], modules: tuple[str, ...]) -> Site:
    value = node.meta["val"]
    numel = value.numel()
    return Site(
        phase=phase,
        name=node.name,
        operator=operator_name(node),
        modules=modules,
        parameters=parameters,
        dtype=value.dtype,
        numel=None if isinstance(numel, torch.SymInt) else int(numel),
        model_line=model_line(_origin(node)),
    )


def _origin(node: fx.Node) -> fx.Node:
    """The program's node that one which a pass wrote stands for."""
    source = origin_of(node).source
    return next((n for n in node.graph.nodes if source and n.name == source), node)


def _fits(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.dtype in FORMS and has_elements(value)


def computes(node: fx.Node) -> bool:
    """Whether it makes new floating-point numbers: neither a view nor a constant."""
    if not _fits(node) or not node.meta["val"].is_floating_point() or is_wait(node):
        return False
    if operator_name(node) in _CONSTANT:
        return False
    if operator_name(node) == "getitem":
        (whole,) = node.all_input_nodes
        return class_of(whole) != CLEAR
    return bool(node.all_input_nodes) and class_of(node) != CLEAR
