"""`fxpasses plan`: what a step will take, and what of its communication is hidden."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from fxpasses.cli.errors import Command, InputError
from fxpasses.cli.inputs import Exported, Program, Script, resolve
from fxpasses.cli.running import backend_options, option

if TYPE_CHECKING:
    from fxpasses.schedule.plan import Plan

_RANKS_SHOWN = 8  # of a trace and a chart: all ranks have the same plan
_FILE = click.Path(dir_okay=False, path_type=Path)


@click.command(cls=Command)
@click.argument("input", metavar="[INPUT]", required=False)
@click.option("--ranks", type=click.IntRange(1), default=2, show_default=True)
@click.option("--bandwidth", metavar="25Gbit", help="Of each rank's link.")
@click.option("--latency", metavar="20us", help="From one rank to another.")
@click.option("--compression", metavar="SCHEME", help="Option of this name of the backend.")
@click.option("--schedule", metavar="fixed|auto|serial", help="Option of this name of the backend.")
@backend_options("Any option of the backend, such as bucket_mb=8.")
@click.option("--profile", type=_FILE, help="Options and rates of the machine, a TOML file.")
@click.option("--curve", is_flag=True, help="Also for fewer ranks: 1, 2, 4, … up to --ranks.")
@click.option("--json", "as_json", is_flag=True, help="Print everything as JSON instead.")
@click.option("--trace", type=_FILE, help="Write the schedule for Perfetto, as Chrome JSON.")
@click.option("--gantt", type=_FILE, help="Draw the schedule, as PNG.")
@click.option("--calibrate", type=_FILE, help="Measure this machine, and write a profile.")
def plan(
    input: str | None,
    ranks: int,
    bandwidth: str | None,
    latency: str | None,
    compression: str | None,
    schedule: str | None,
    options: tuple[str, ...],
    profile: Path | None,
    curve: bool,
    as_json: bool,
    trace: Path | None,
    gantt: Path | None,
    calibrate: Path | None,
) -> None:
    """Predict a training step of INPUT: forward and backward, without the optimizer.

    INPUT is module:name (or file.py:name) of a function that returns (module, args) or of a class with
    `example_inputs`, or a .pt2 that torch.export.save wrote. Nothing is compiled or sent: one process stands
    for all ranks. Times come from a cost model, with rates from a table, from --profile, or as given.

    --calibrate measures rates of this machine, on all ranks of `torchrun` also those of their links; with
    INPUT, rates of computing are such that its forward and backward take what they were measured to take.
    """
    import torch

    from fxpasses.schedule.calibrate import calibrated
    from fxpasses.schedule.machine import quantity

    torch.manual_seed(0)
    program = _program(input) if input else None
    if calibrate is not None:
        measured = (program.function, program.args) if program else (None, ())
        machine = calibrated(*measured)
        if machine is not None:  # on rank 0
            calibrate.write_text(machine.table())
            click.echo(machine.table() if not as_json else json.dumps({"profile": str(calibrate)}))
        return
    if program is None:
        raise InputError("expected INPUT, or --calibrate FILE")
    chosen = _options(options, profile, compression=compression, schedule=schedule)
    rates = dict(chosen.get("machine", {}))
    for kind, word in (("bandwidth", bandwidth), ("latency", latency)):
        if word is not None:
            rates[kind] = quantity(kind, word)
    plans = _plans(program, {**chosen, "machine": rates}, ranks, curve)
    if as_json:
        click.echo(json.dumps([one.data() for one in plans], indent=1))
    else:
        click.echo("\n".join(_text(plans[-1], plans if curve else [])))
    _write(plans[-1], trace, gantt)


def _program(word: str) -> Program:
    found = resolve(word)
    if isinstance(found, Script):
        raise InputError(f"{word}: expected module:name or a .pt2; a script is not planned")
    if isinstance(found, Exported):
        args, kwargs = found.program.example_inputs or ((), {})
        if kwargs:
            raise InputError(f"{word}: was exported with keyword arguments; export it without")
        return Program(word, found.program.module(), tuple(args))
    return found


def _options(given: tuple[str, ...], profile: Path | None, **named: str | None) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if profile is not None:
        try:
            found.update(tomllib.loads(profile.read_text()))
        except tomllib.TOMLDecodeError as error:
            raise InputError(f"{profile}: is not TOML: {error}") from error
    found.update(map(option, given))
    found.update({key: word for key, word in named.items() if word is not None})
    return found


def _plans(program: Program, options: dict[str, Any], ranks: int, curve: bool) -> list[Plan]:
    from fxpasses.schedule.machine import Machine
    from fxpasses.schedule.plan import at_other_worlds, plan_step
    from fxpasses.trace import trace

    machine = Machine.parse(options["machine"])
    graphs = trace(program.function, program.args, options, world=ranks)
    fewer = [2**n for n in range(ranks.bit_length()) if 2**n < ranks] if curve else []
    if len(fewer) > 8:
        fewer = [w for n, w in enumerate(fewer) if n < 3 or n % 2 == 0]
    return [*at_other_worlds(graphs, options, machine, fewer), plan_step(graphs, machine, ranks)]


def _text(plan: Plan, curve: list[Plan]) -> list[str]:
    busy = plan.busy_s
    lines = [
        f"step of {plan.world} rank(s)  {_ms(plan.step_s)}   (no order takes less than {_ms(plan.bound)})",
        f"  compute {_ms(busy['compute'])}, codec {_ms(busy['codec'])}, link {_ms(busy['link'])}, "
        f"exposed {_ms(plan.exposed_s)}",
        "  memory  " + ", ".join(f"{name} {_mib(size)}" for name, size in plan.memory.items()),
    ]
    if plan.buckets:
        lines += [
            "",
            f"{'bucket':>6} {'gradient':>11} {'sent':>11} {'ratio':>6} {'saved':>6} "
            f"{'window':>10} {'needed':>10} {'exposed':>10}",
        ]
    for row in plan.buckets:
        saved = 1 - 1 / row.ratio if row.ratio else 0.0
        lines.append(
            f"{row.number:>6} {_mib(row.gradient_bytes):>11} {_mib(row.sent_bytes):>11} {row.ratio:>6.2f} "
            f"{saved:>6.0%} {_ms(row.available):>10} {_ms(row.needed):>10} {_ms(row.exposed):>10}  "
            f"{'feasible' if row.feasible else row.advice}"
        )
    if curve:
        lines += ["", f"{'ranks':>7} {'step':>11} {'exposed':>11} {'efficiency':>10}"]
        alone = curve[0].step_s
        lines += [
            f"{p.world:>7} {_ms(p.step_s):>11} {_ms(p.exposed_s):>11} {alone / p.step_s:>10.1%}"
            for p in curve
        ]
    return [*lines, "", f"sum of all costs, s = {plan.form}"]


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.2f} ms"


def _mib(size: float) -> str:
    return f"{size / 2**20:.2f} MiB"


def _write(plan: Plan, trace: Path | None, gantt: Path | None) -> None:
    from fxpasses.schedule.timeline import draw, predicted, write_trace

    slices = predicted(plan.program, plan.schedule)
    if trace is not None:
        shown = min(plan.world, _RANKS_SHOWN)
        write_trace(trace, dict.fromkeys(range(shown), slices), "predicted")
    if gantt is not None:
        draw(gantt, {0: slices}, f"predicted step of {plan.world} ranks")
