"""Campaigns: many trials, their outcomes in a file that a campaign which was stopped goes on with.

this process ── starts ─▶ worker: one compilation, trial after trial
     ▲  └── no answer in time: hang; gone: crash; either way a new worker goes on behind it
     └── rows of campaign.csv, each written when it is known
"""

from __future__ import annotations

import csv
import json
import multiprocessing
from collections.abc import Callable, Generator, Iterator, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from fxpasses.faults.trials import CRASH, HANG, Result, Shot, Trials

RESULTS, SETTINGS = "campaign.csv", "campaign.json"
COLUMNS = (
    "trial",
    "outcome",
    "phase",
    "layer",
    "operator",
    "site",
    "dtype",
    "index",
    "bit",
    "before",
    "after",
    "change",
    "line",
    "said",
)
MakeTrials = Callable[[], Trials]


def run_campaign(
    make: MakeTrials,
    folder: Path,
    settings: Mapping[str, Any],
    count: int,
    timeout_s: float = 60.0,
    start_timeout_s: float = 600.0,
) -> Generator[dict[str, str]]:
    """Carry out what is missing of a campaign; yields each row when it is known, those of earlier runs first.

    Args:
        make: compiles the program, in a worker process; can be pickled.
        folder: for results; made if it is not there.
        settings: what the campaign is, `seed` among it; a folder holds one campaign.
        count: trials in all.
        timeout_s: for one trial; what takes longer is a hang.
        start_timeout_s: for a worker to compile.

    Raises:
        ValueError: when the folder holds a campaign with other settings, or the program or its options are
            wrong.
        RuntimeError: for a fault that did not happen, and for a worker that fails before its first trial.
    """
    known = _begin(folder, settings)
    yield from known
    done = len(known)
    with (folder / RESULTS).open("a", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        while done < count:
            for row in _work(make, int(settings["seed"]), done, count, timeout_s, start_timeout_s):
                writer.writerow(row)
                file.flush()
                done += 1
                yield row


def read(folder: Path) -> list[dict[str, str]]:
    """The rows of a campaign. A last line that was cut off counts for nothing."""
    text = (folder / RESULTS).read_text()
    whole = text[: text.rfind("\n") + 1]
    return list(csv.DictReader(whole.splitlines()))


def _begin(folder: Path, settings: Mapping[str, Any]) -> list[dict[str, str]]:
    folder.mkdir(parents=True, exist_ok=True)
    path, text = folder / SETTINGS, json.dumps(dict(settings), indent=2, sort_keys=True)
    if path.exists() and path.read_text() != text:
        old = json.loads(path.read_text())
        different = [key for key in {*old, *settings} if old.get(key) != settings.get(key)]
        key = sorted(different)[0]
        raise ValueError(
            f"{folder} holds another campaign: its {key} is {old.get(key)!r}, not {settings.get(key)!r}; "
            "give another folder"
        )
    path.write_text(text)
    rows = read(folder) if (folder / RESULTS).exists() else []
    with (folder / RESULTS).open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows(rows)
    return rows


def _work(
    make: MakeTrials, seed: int, first: int, count: int, timeout_s: float, start_timeout_s: float
) -> Iterator[dict[str, str]]:
    """Rows from one worker, until all are there or it is lost."""
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    worker = context.Process(target=_serve, args=(sender, make, seed, first, count))
    worker.start()
    sender.close()
    planned: dict[str, str] | None = None  # the trial under way
    try:
        for trial in range(first, count):
            kind, planned = _next(receiver, timeout_s if planned else start_timeout_s, planned)
            if kind == "plan":
                kind, row = _next(receiver, timeout_s, planned)
            else:
                row = planned
            if kind == "refused":
                raise ValueError(row["said"])
            if kind == "failed":
                raise RuntimeError(f"trial {trial}: {row['said']}")
            yield row
            if kind == "lost":
                return
    finally:
        worker.kill()
        worker.join()


def _next(
    receiver: Connection, timeout_s: float, planned: dict[str, str] | None
) -> tuple[str, dict[str, str]]:
    """What the worker says next: `plan`, `row`, `failed` or `refused`; `lost` if it says nothing any more."""
    outcome = HANG if not receiver.poll(timeout_s) else CRASH
    if outcome == CRASH:
        try:
            return receiver.recv()
        except EOFError:
            pass
    if planned is None or planned.get("outcome"):
        said = f"gave no sign of life for {timeout_s:g} s" if outcome == HANG else "died"
        return "failed", {"said": f"the worker {said} while it compiled the program"}
    said = f"no answer in {timeout_s:g} s" if outcome == HANG else "the process ended"
    return "lost", {**planned, "outcome": outcome, "said": said}


def _serve(sender: Connection, make: MakeTrials, seed: int, first: int, count: int) -> None:
    """The worker."""
    trials: Trials | None = None
    try:
        trials = make()
        for trial in range(first, count):
            shot = trials.shot(seed, trial)
            sender.send(("plan", _plan_row(trial, shot)))
            sender.send(("row", {**_plan_row(trial, shot), **_result_row(trials.run(shot))}))
    except Exception as error:
        is_users = trials is None and isinstance(error, ValueError)
        said = str(error) if is_users else f"{type(error).__name__}: {error}"
        sender.send(("refused" if is_users else "failed", {"said": said}))


def _plan_row(trial: int, shot: Shot) -> dict[str, str]:
    site = shot.site
    return {
        "trial": str(trial),
        "phase": site.phase,
        "layer": (site.names or ("",))[-1],
        "operator": site.operator,
        "site": site.name,
        "dtype": str(site.dtype).removeprefix("torch."),
        "index": str(shot.index),
        "bit": "+".join(map(str, shot.bits)),
        "line": site.model_line,
    }


def _result_row(result: Result) -> dict[str, str]:
    event = result.event
    return {
        "outcome": result.outcome,
        "before": "" if event is None else repr(event.before),
        "after": "" if event is None else repr(event.after),
        "change": f"{result.error:.6g}",
        "said": result.said,
    }
