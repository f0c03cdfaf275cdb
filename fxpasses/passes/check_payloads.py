"""Checksums in what is sent.

    compressed   payload ─▶ seal ─▶ launch ─ … ─▶ wait ─┬▶ decode
                                                        └▶ broken? ─▶ alarm (state)
    dense        payload ─┬▶ all_reduce ─ … ─▶ wait ─┬▶ views
                          └▶ sums ─▶ all_reduce ─ … ─┴▶ sums again, against these ─▶ alarm (state)
    exchanged    payload ─┬▶ all_to_all, all_gather ─ … ─▶ wait ─┬▶ sum by rank
                          └▶ sums of bits ─▶ the same ─ … ───────┴▶ sums again, other ones? ─▶ alarm (state)

Before: payloads on their way. After: the same, each compressed one with a checksum in its header
(`custom_ops.checksum`), which the receivers compare; of each dense one the sums of chunks and of their
absolute values are reduced as well, in fp64, and compared with the sums of the result; of each that arrives as
it was sent (`reduce_order="fixed"`) the sums of its bits go the same way. What a fault hits on the way to the
wire it hits behind the seal.

A result is rounded W - 1 times or less in the dtype of the wire, whose unit roundoff is u, so the sum of a
chunk of n elements is off by no more than u (W - 1) times the sum of their absolute values. The sums themselves
are rounded 2 (n - 1) + W - 1 times or less, in fp64: of payloads in fp64 that is most of it.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import torch
from torch import Tensor, fx

import custom_ops.checksum  # noqa: F401  (registers operators)
from custom_ops.bits import words
from fxpasses.effects import is_launch
from fxpasses.graph import TrainingGraph
from fxpasses.guards.alarms import write_alarms
from fxpasses.passes.base import Pass, Report, from_environment
from fxpasses.rewrite import Provenance, splice

C10D = torch.ops._c10d_functional
CHUNK = 1024  # elements that one dense checksum covers


@dataclasses.dataclass(frozen=True)
class CheckPayloads(Pass):
    """Environment: `group` (registered name of the process group), `world` (its size)."""

    group: str | None = from_environment("group")
    world: int | None = from_environment("world")

    name: ClassVar[str] = "check_payloads"
    stage: ClassVar[str] = "backward"
    requires: ClassVar[frozenset[str]] = frozenset({"reduced"})
    idempotent: ClassVar[bool] = False  # what is wrong would count twice

    def has_work(self, graph: TrainingGraph) -> bool:
        return any(kind(n) for n in graph.walk() for kind in (_is_sealed, _is_dense, _is_exchanged))

    def run(self, graph: TrainingGraph) -> Report:
        kinds = {
            "sealed": (_is_sealed, self._seal),
            "summed": (_is_dense, self._sum),
            "compared": (_is_exchanged, self._compare),
        }
        found = [
            (launch, name, check)
            for launch in graph.walk()
            for name, (is_kind, check) in kinds.items()
            if is_kind(launch)
        ]
        if not found:
            return Report(changed=False)
        wrong = [
            (check(graph, launch), f"payload of {', '.join(launch.meta['provenance'].parameters)}")
            for launch, _, check in found
        ]
        write_alarms(graph, self.name, wrong)
        names = [name for _, name, _ in found]
        return Report(True, {name: names.count(name) for name in kinds})

    def _write(self, graph: TrainingGraph, before: fx.Node, launch: fx.Node, fn, *args) -> fx.Node:  # type: ignore[no-untyped-def]
        origin = dataclasses.replace(
            launch.meta["provenance"], pass_name=self.name, rule="checksum"
        )
        return splice(graph, before, fn, *args, name=f"check_{launch.name}", provenance=origin)

    def _seal(self, graph: TrainingGraph, launch: fx.Node) -> fx.Node:
        (payload,), (wait,) = launch.all_input_nodes, launch.users
        world = self.world
        pieces = world if launch.target is C10D.all_to_all_single.default else 1
        sealed = self._write(
            graph, launch, launch, lambda x: torch.ops.fxpasses.seal(x, pieces), payload
        )
        if "bucket" in payload.meta:
            sealed.meta["bucket"] = payload.meta["bucket"]
        launch.replace_input_with(payload, sealed)
        return self._write(
            graph,
            wait.next,
            launch,
            lambda x: torch.ops.fxpasses.broken(x.view(world, -1), 1).any(),
            wait,
        )

    def _sum(self, graph: TrainingGraph, launch: fx.Node) -> fx.Node:
        (payload,), (wait,) = launch.all_input_nodes, launch.users
        origin = Provenance(self.name, "checksum", launch.name)
        sums = splice(
            graph,
            launch.next,
            lambda x: C10D.all_reduce(_sums(x), "sum", self.group),
            payload,
            name=f"check_{launch.name}",
            provenance=origin,
        )
        assert self.world is not None
        value = payload.meta["val"]
        units = [torch.finfo(dtype).eps / 2 for dtype in (value.dtype, torch.float64)]
        rounding = units[0] * self.world + units[1] * (2 * CHUNK + self.world)
        return self._write(
            graph,
            wait.next,
            launch,
            lambda x, sums: _differ(x, C10D.wait_tensor(sums), rounding),
            wait,
            sums,
        )

    def _compare(self, graph: TrainingGraph, launch: fx.Node) -> fx.Node:
        (payload,), (wait,) = launch.all_input_nodes, launch.users
        world, group = self.world, self.group
        assert world is not None
        each = [1] * world

        def send(x: Tensor) -> Tensor:
            if launch.target is C10D.all_to_all_single.default:
                return C10D.all_to_all_single(_bits(x, world), each, each, group)
            return C10D.all_gather_into_tensor(_bits(x, 1), world, group)

        sums = splice(
            graph,
            launch.next,
            send,
            payload,
            name=f"check_{launch.name}",
            provenance=Provenance(self.name, "checksum", launch.name),
        )
        return self._write(
            graph,
            wait.next,
            launch,
            lambda x, sums: (_bits(x, world) != C10D.wait_tensor(sums)).any(),
            wait,
            sums,
        )


def _bits(x: Tensor, pieces: int) -> Tensor:
    """[pieces] int64: the sum of each piece's bits (`custom_ops.bits`)."""
    return words(x).view(pieces, -1).sum(1, dtype=torch.int64)


def _sums(payload: Tensor) -> Tensor:
    """[chunks, 2] fp64: the sum of each chunk, and of its absolute values."""
    wide = payload.double()
    short = -payload.numel() % CHUNK
    chunks = torch.nn.functional.pad(wide, (0, short)).view(-1, CHUNK)
    return torch.stack([chunks.sum(1), chunks.abs().sum(1)], 1)


def _differ(result: Tensor, sums: Tensor, rounding: float) -> Tensor:
    found = _sums(result)[:, 0]
    expected, size = sums.unbind(1)
    agrees = (found - expected).abs() <= rounding * size + torch.finfo(result.dtype).tiny * CHUNK
    # A gradient that is not finite is not the wire's fault; sums of those that are may overflow there.
    unusual = ~(size < torch.finfo(result.dtype).max)
    return ~(agrees | unusual).all()


def _carries_gradients(node: fx.Node) -> bool:
    origin = node.meta.get("provenance")
    return is_launch(node) and origin is not None and bool(origin.parameters)


def _is_sealed(node: fx.Node) -> bool:
    """A payload with a header, which has room for a checksum."""
    return _arrives_as_sent(node) and _payload(node).dtype == torch.uint8


def _is_exchanged(node: fx.Node) -> bool:
    """A payload of numbers that are added up where they arrive."""
    return _arrives_as_sent(node) and _payload(node).dtype != torch.uint8


def _is_dense(node: fx.Node) -> bool:
    """A payload of numbers that are added up on the way."""
    is_sum = _carries_gradients(node) and node.target is C10D.all_reduce.default
    return is_sum and _payload(node).is_floating_point()


def _arrives_as_sent(node: fx.Node) -> bool:
    copies = (C10D.all_gather_into_tensor.default, C10D.all_to_all_single.default)
    return _carries_gradients(node) and node.target in copies


def _payload(launch: fx.Node) -> Tensor:
    value: Tensor = launch.all_input_nodes[0].meta["val"]
    return value
