"""What guards notice of bit flips: products, payloads, gradients, parameters; clean steps; what checks cost.

    python -m bench.detection [--keep]            # 3,000 harmful trials for each dtype, 10,000 clean steps
    python -m bench.detection --harmful 10 --clean 100 --cost-steps 20

One process; a small GPT (`bench.gpt`). A trial is harmful if outputs or gradients change by more than 1e-4
(relative, in norm). Payloads and replicas are checked by the guards' own tensor code, on two ranks' tensors.
`--keep` also adds what it prints to bench/results/detection.txt, under its date.
"""

from __future__ import annotations

import argparse
import collections
import datetime
import statistics
import time
from typing import Any

import torch
from torch import nn

from bench import RESULTS
from bench.gpt import GPT, GPTConfig
from fxpasses.faults.models import FORMS, drawn, row_of, strike
from fxpasses.faults.spec import Fault
from fxpasses.faults.statistics import wilson
from fxpasses.faults.trials import DETECTED, MASKED, Trials, options_of
from fxpasses.guards.replicas import digest

TOLERANCE = 1e-4
PRODUCTS = ("mm", "addmm", "bmm")
GUARDS = "products,gradients,values=1e3,on=skip"  # all that see a single process
TABLE = RESULTS / "detection.txt"
_lines: list[str] = []


def say(line: str) -> None:
    print(line, flush=True)
    _lines.append(line)


class Small(nn.Module):
    """The GPT with its loss inside."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        config = GPTConfig(vocab=256, block=32, layers=layers, heads=4, width=width)
        self.gpt = GPT(config)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits = self.gpt(tokens)
        return nn.functional.cross_entropy(logits.flatten(0, -2).float(), tokens.flatten())


def trials_of(model: str, phases: list[str], precision: str, width: int, guards: str) -> Trials:
    module = Small(width, 2)
    tokens = torch.randint(0, 256, (4, 32), generator=torch.Generator().manual_seed(1))
    options = {**options_of(model, phases, guards), "precision": precision}
    return Trials(module, (tokens,), options, loss=lambda loss: loss, tolerance=TOLERANCE)


def flips(
    args: argparse.Namespace, place: str, model: str, phases: list[str], precision: str
) -> None:
    """Harmful flips at one kind of place, and who noticed."""
    torch._dynamo.reset()
    trials = trials_of(model, phases, precision, args.width, GUARDS)
    found: collections.Counter[str] = collections.Counter()
    by_bit: dict[str, list[int]] = {}
    missed: collections.Counter[str] = collections.Counter()
    total = trial = 0
    while total < args.harmful and trial < 60 * args.harmful:
        shot = trials.shot(args.seed, trial)
        result = trials.run(shot)
        trial += 1
        if result.error <= TOLERANCE:
            found["clean"] += result.outcome == MASKED
            continue
        total += 1
        detected = result.outcome == DETECTED
        found[result.said.split()[0].strip(":") if detected else "undetected"] += 1
        row = by_bit.setdefault(f"{max(shot.bits):2d}", [0, 0])
        row[0] += detected
        row[1] += 1
        if not detected:
            missed[f"{shot.site.operator} bit {max(shot.bits)}"] += 1
    detected = total - found["undetected"]
    low, high = wilson(detected, total)
    say(
        f"{place} | {model} | {precision} | {trial} trials | {total} harmful | {detected} detected "
        f"({detected / max(total, 1):.2%}, {low:.2%} to {high:.2%})"
    )
    noticed = {guard: n for guard, n in found.items() if guard not in ("clean", "undetected")}
    say(f"    by guard: {noticed}")
    shares = {bit: f"{a}/{b}" for bit, (a, b) in sorted(by_bit.items())}
    say(f"    by bit: {shares}")
    if missed:
        say(f"    undetected: {dict(missed.most_common(8))}")


def clean_steps(args: argparse.Namespace, precision: str) -> None:
    """Alarms where there was no fault: other batches, and parameters that change."""
    torch._dynamo.reset()
    model = Small(args.width, 2)
    options = {"guards": GUARDS, "precision": precision}
    compiled = torch.compile(model, backend="hardened_aot_eager", options=options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    from fxpasses.owners import runtime

    generator = torch.Generator().manual_seed(2)
    for _ in range(args.clean):
        compiled(torch.randint(0, 256, (4, 32), generator=generator)).backward()
        optimizer.step()
        optimizer.zero_grad()
    alarms = runtime(model).alarms
    assert alarms is not None
    raised = len(alarms.events) + alarms.forgotten
    say(f"clean steps | {precision} | {args.clean} steps | {raised} alarms")


def replicas(args: argparse.Namespace, dtype: torch.dtype) -> None:
    """Flips in a parameter or optimizer state, against its digest."""
    x = torch.randn(100_003, generator=torch.Generator().manual_seed(3)).to(dtype)
    clean, noticed = digest(x).tolist(), 0
    for trial in range(args.harmful):
        fault = Fault("bitflip", bits=1 + trial % 3)
        row = row_of(fault, 1, dtype, drawn(args.seed, "replica", trial))
        struck, _ = strike(x, torch.tensor(row), fault, 1)
        noticed += digest(struck).tolist() != clean
    name = str(dtype).removeprefix("torch.")
    say(
        f"replicas | bitflip of 1 to 3 bits | {name} | {args.harmful} trials | {noticed} noticed at the "
        "next digest"
    )


def payloads(args: argparse.Namespace) -> None:
    """Flips behind the seal of a compressed payload, and in a dense one against its sums."""
    from fxpasses.passes.check_payloads import _differ, _sums

    torch.ops.fxpasses.seal  # noqa: B018  (registered by the import above)
    generator = torch.Generator().manual_seed(4)
    payload = torch.randint(0, 256, (1 << 16,), dtype=torch.uint8, generator=generator)
    sealed = torch.ops.fxpasses.seal(payload, 1)
    ranks = [torch.randn(1 << 16, generator=generator) for _ in range(2)]
    sums = sum(_sums(x) for x in ranks)
    noticed = dense = harmful = 0
    for trial in range(args.harmful):
        draw = drawn(args.seed, "payload", trial)
        fault = Fault("bitflip", bits=1 + trial % 3)
        struck, _ = strike(sealed, torch.tensor(row_of(fault, 1, torch.uint8, draw)), fault, 1)
        noticed += bool(torch.ops.fxpasses.broken(struck[None], 1).any())
        struck, _ = strike(ranks[0], torch.tensor(row_of(fault, 1, torch.float32, draw)), fault, 1)
        total, clean = struck + ranks[1], ranks[0] + ranks[1]
        if not (total - clean).norm() <= TOLERANCE * clean.norm():
            harmful += 1
            wrong = bool(_differ(total, sums, torch.finfo(torch.float32).eps))
            dense += wrong
    say(f"payloads, sealed | {args.harmful} trials | {noticed} noticed")
    say(f"payloads, dense fp32 | {args.harmful} trials | {harmful} harmful | {dense} noticed")


def cost(args: argparse.Namespace) -> None:
    """Time of a compiled step by options, interleaved; medians of ratios to the step without."""
    torch._dynamo.reset()
    never = "bitflip{where=gradient,step=none}"
    variants: dict[str, dict[str, Any]] = {
        "plain": {},
        "products": {"guards": "products,on=skip"},
        "gradients": {"guards": "gradients,on=skip"},
        "disarmed faults": {"faults": [never, never.replace("gradient", "forward")]},
        "disarmed fault, one gradient": {"faults": never.replace("gradient", "gradient:0.weight")},
    }
    x = torch.randn(args.cost_width, args.cost_width)
    steps = {}
    for name, options in variants.items():
        torch.manual_seed(0)
        layers = [
            m for _ in range(3) for m in (nn.Linear(args.cost_width, args.cost_width), nn.GELU())
        ]
        model = nn.Sequential(*layers)
        compiled = torch.compile(model, backend="hardened", options=options)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)

        def step(compiled=compiled, optimizer=optimizer):
            compiled(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

        step()
        step()
        steps[name] = step
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(args.cost_steps):
        for name, step in steps.items():
            started = time.perf_counter()
            step()
            seconds[name].append(time.perf_counter() - started)
    for name in steps:
        ratios = [a / b for a, b in zip(seconds[name], seconds["plain"], strict=True)]
        say(
            f"cost | {name} | {statistics.median(seconds[name]) * 1e3:.2f} ms | "
            f"{statistics.median(ratios):.3f}x"
        )
    parameters = list(model.parameters())
    started = time.perf_counter()
    for p in parameters:
        digest(p)
    share = (time.perf_counter() - started) / statistics.median(seconds["plain"])
    say(
        f"cost | a digest of all parameters | {share:.1%} of a step; every 100 steps {share / 100:.3%}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--harmful", type=int, default=375, help="of each of 8 places and faults")
    parser.add_argument("--clean", type=int, default=10_000)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--cost-width", type=int, default=512)
    parser.add_argument("--cost-steps", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", action="store_true")
    parser.add_argument("--only", default="", help="flips, clean, replicas, payloads or cost")
    args = parser.parse_args()
    torch.set_num_threads(1)
    say(f"{datetime.date.today()}, torch {torch.__version__}, {args.only or 'all'}")
    parts = {
        "flips": lambda: [
            flips(args, place, model, phases, precision)
            for precision in ("fp32", "bf16")
            for model in ("bitflip", "bitflip{bits=3}")
            for place, phases in PLACES.items()
        ],
        "clean": lambda: [clean_steps(args, precision) for precision in ("fp32", "bf16")],
        "replicas": lambda: [replicas(args, dtype) for dtype in FORMS if dtype.is_floating_point],
        "payloads": lambda: payloads(args),
        "cost": lambda: cost(args),
    }
    for name, part in parts.items():
        if args.only in ("", name):
            part()
    if args.keep:
        with TABLE.open("a") as file:
            file.write("\n".join([*_lines, "", ""]))


PLACES = {
    "products, forward": [f"forward,op={op}" for op in PRODUCTS],
    "products, backward": [f"backward,op={op}" for op in PRODUCTS],
    "gradients": ["gradient"],
    "any operator": ["forward", "backward"],
}

if __name__ == "__main__":
    main()
