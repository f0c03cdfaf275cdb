"""What holds of the passes that inject faults, on every graph."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from hypothesis import given

from custom_ops.bits import words
from fxpasses.effects import is_launch
from fxpasses.faults.models import AFTER, AT, BEFORE, FORMS, HITS, row_of
from fxpasses.faults.sites import Site, places_of
from fxpasses.faults.spec import BACKWARD, FORWARD, GRADIENT, PAYLOAD, Fault, parse_faults
from fxpasses.graph import DELIVERED, FAULT_NEWS, FAULT_TABLE, STALE, Role, ancestors
from fxpasses.passes.inject import Inject, InjectForward, InjectPayload
from fxpasses.rewrite import origin_of
from fxpasses.testing.check import check_run, settings
from fxpasses.testing.oracles import ORACLES, Run
from fxpasses.testing.oracles.numerics import bitwise
from fxpasses.testing.strategies import SEEDS
from fxpasses.testing.synthetic import GradientGraph
from fxpasses.testing.world import World
from tests.testing.again import changed_inputs
from tests.testing.compression import all_ways_to_send, real_graphs
from tests.testing.refusals import refusal

BOTH = "bitflip bit=3 where=gradient;sign where=backward"
IN_FORWARD = "bitflip bit=3 where=forward;sign where=forward"
PAYLOADS = "bitflip bit=3 where=payload;stale where=payload"


def faults_as_promised(run: Run) -> None:
    """Disarmed nothing happens (results are compared elsewhere); armed, one site is hit, with news of it."""
    faults = parse_faults(run.current.faults)  # type: ignore[attr-defined]
    places = places_of(run.after)
    assert run.reports[0].changed == bool(places.sites)
    _every_gradient_has_one(run, places.sites)
    if not places.sites:
        return
    _readers_get_it(run, places.sites)
    struck = [n for n in run.after.walk() if "fault" in n.meta]
    assert all("effect" in n.meta for n in struck)
    heard = {n.meta[FAULT_NEWS] for n in run.after.walk() if FAULT_NEWS in n.meta}
    assert heard == {n.meta["fault"] for n in struck if origin_of(n).rule != "stale"}
    assert run.reports[0].counts == {"sites": len(places.sites)}
    assert len({site.number for site in places.sites}) == len(places.sites)
    site = places.sites[run.seed % len(places.sites)]
    number = site.faults[run.seed % len(site.faults)]
    fault = faults[number]
    before = run.traced_after.results
    table = armed(run, site, number)

    def on_the_first(rank: int, role: Role, value: Any) -> Any:
        return table if rank == 0 and role.name == f"{FAULT_TABLE}/" else value

    world = World(run.afters, changed_inputs(run, run.afters, on_the_first))
    after = world.run()
    _one_element_differs(run, site, fault, world.values(0))
    (at,) = [i for i, _, role in run.after.outputs("state") if role.name == f"{FAULT_NEWS}/"]
    for rank, rows in enumerate(after):
        news = rows[at].tolist()
        others = [x for i, x in enumerate(news) if i != number]
        assert all(x == [0, 0, 0, 0] for x in others)
        assert news[number][HITS] == (1 if rank == 0 else 0), (
            f"{fault.text} at {site} did not happen"
        )
    if fault.model != "stale":
        mask = (1 << FORMS[site.dtype].width) - 1
        hit = after[0][at][number].tolist()
        flipped = 1 << (fault.bit or (FORMS[site.dtype].width - 1,))[0]
        assert (hit[BEFORE] ^ hit[AFTER]) & mask == flipped
        assert 0 <= hit[AT] < site.numel if site.numel is not None else hit[AT] >= 0
    _only_what_depends(run, site, before[0], after[0])


def armed(run: Run, site: Site, number: int) -> torch.Tensor:
    """The table of faults, (faults, `models.ROW`) int64, with one of them at a site."""
    faults = parse_faults(run.current.faults)  # type: ignore[attr-defined]
    row = row_of(faults[number], site.number, site.dtype, run.seed)
    table = torch.zeros(len(faults), len(row), dtype=torch.int64)
    table[number] = torch.tensor(row)
    return table


def faults_of_all_ways_to_send(examples: int) -> None:
    """However payloads are sent."""

    @settings(examples)
    @given(real_graphs(), all_ways_to_send(3), SEEDS)
    def search(source: GradientGraph, environment: dict[str, Any], seed: int) -> None:
        oracles = (*ORACLES, faults_as_promised)
        check_run(InjectPayload(PAYLOADS), source, environment, seed, oracles)

    search()


def states_are_asked_for() -> None:
    """A forward holds the tables of faults if one may happen there."""
    cpu = torch.device("cpu")
    for text in ("sign where=backward", "sign where=forward;sign where=backward"):
        found = {spec.kind for spec in InjectForward(text).forward_states(cpu)}
        assert found == ({FAULT_TABLE, FAULT_NEWS} if "forward" in text else set())


def wrong_faults() -> None:
    """What is no fault is refused as soon as it is said."""
    message = refusal(lambda: InjectForward("nonsense where=forward"))
    assert "option 'faults'" in message and "nonsense" in message


SINGLE = (states_are_asked_for, wrong_faults)


def _every_gradient_has_one(run: Run, sites: Sequence[Site]) -> None:
    found = {s.parameters for s in sites if s.phase == GRADIENT}
    expected = {
        names
        for node, names in run.before.parameters_by_gradient().items()
        if node.meta["val"].dtype in FORMS and node.meta["val"].numel()
    }
    assert found == (expected if run.current.name == Inject.name else set())


def _readers_get_it(run: Run, sites: Sequence[Site]) -> None:
    """Who reads a value reads what was struck. What is struck as a gradient is read by nobody in the program,
    but by who compares it as it arrives.
    """
    after = {n.name: n for n in run.after.graph.nodes}
    operators = {s.name for s in sites if s.phase in (FORWARD, BACKWARD)}
    for name in operators:
        assert {origin_of(n).pass_name for n in after[name].users} == {run.current.name}
    for site in (s for s in sites if s.phase == PAYLOAD):
        _travels(run, site)
    gradients = [s for s in sites if s.phase == GRADIENT]
    outputs = {g.parameter: g.node for g in run.after.gradients()}
    for site in gradients:
        (struck,) = {outputs[name] for name in site.parameters}
        assert struck.meta["fault"].name == site.name and struck.meta["fault"].phase == GRADIENT
        for reader in (n for n in run.before.walk() if site.name in map(str, n.all_input_nodes)):
            reads = struck in after[reader.name].all_input_nodes
            assert reads == (DELIVERED in reader.meta), f"{reader.name} reads {site}: {reads}"


def _travels(run: Run, site: Site) -> None:
    """What is sent is what was struck, and still a bucket; what comes too late is read by all who read."""
    faults = parse_faults(run.current.faults)  # type: ignore[attr-defined]
    models = {faults[number].model for number in site.faults}
    (name,) = (
        n.name
        for n in run.before.walk()
        if is_launch(n) and site.name == n.all_input_nodes[0].name and origin_of(n).parameters
    )
    (launch,) = (n for n in run.after.walk() if n.name == name)
    (sent,) = launch.all_input_nodes
    (wait,) = launch.users
    if "bitflip" in models:
        assert sent.meta["fault"] == site and sent.all_input_nodes[0].name == site.name
        assert ("bucket" in sent.meta) == ("bucket" in sent.all_input_nodes[0].meta)
    if "stale" in models:
        written = [r.name for _, n, r in run.after.outputs("state") if n is wait]
        assert [name.split(".")[0] for name in written] == [f"{STALE}1"]
        readers = [n for n in wait.users if n.op != "output"]
        assert {origin_of(n).rule for n in readers} == {"stale"}


def _one_element_differs(run: Run, site: Site, fault: Fault, values: Mapping[str, Any]) -> None:
    """Of what was hit; what is late is what the state holds."""
    (struck,) = (
        n
        for n in run.after.walk()
        if n.meta.get("fault") == site and origin_of(n).rule == fault.model
    )
    value, old = values[struck.name], values[site.name]
    if fault.model == "stale":
        late = next(
            n for n in struck.all_input_nodes if n.op == "placeholder" and "state" in n.meta
        )
        assert bitwise(value, values[late.name])
    else:
        assert int((words(old) != words(value)).sum()) == 1


def _only_what_depends(run: Run, site: Site, before: Any, after: Any) -> None:
    nodes = [n for n in run.after.walk() if n.meta.get("fault") == site]
    for at, node, role in run.after.outputs():
        if node is None or role.kind == "state" or ancestors([node]).intersection(nodes):
            continue
        assert bitwise(before[at], after[at]), f"{role.name} does not depend on {site} and changed"
