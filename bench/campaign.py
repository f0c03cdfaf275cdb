"""Injections per second, beside hooks on modules, in one run on the same model and places.

    python -m bench.campaign                  # 300 injections each
    python -m bench.campaign --injections 50 --backend hardened_aot_eager

A forward pass of an MLP in inference; each injection overwrites one element of one layer's result. The hooks
are written here, in the manner of PyTorchFI 0.6: for each injection a copy of the model with a hook at one
layer. A second form keeps one model and only exchanges the hook. The step without a fault is timed with the
option off, too.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Callable

import torch
from torch import nn

from fxpasses.owners import runtime


def model_of(width: int, layers: int) -> nn.Sequential:
    torch.manual_seed(0)
    blocks = [m for _ in range(layers) for m in (nn.Linear(width, width), nn.ReLU())]
    return nn.Sequential(*blocks).eval()


def hooked(model: nn.Module, layer: int, index: int) -> torch.utils.hooks.RemovableHandle:
    def overwrite(module: nn.Module, args: object, output: torch.Tensor) -> torch.Tensor:
        output = output.clone()
        output.view(-1)[index] = 1e4
        return output

    return model[layer].register_forward_hook(overwrite)  # type: ignore[index]


def with_copies(model: nn.Module, x: torch.Tensor, layer: int, index: int) -> torch.Tensor:
    faulty = copy.deepcopy(model)
    hooked(faulty, layer, index)
    return faulty(x)


def with_hooks(model: nn.Module, x: torch.Tensor, layer: int, index: int) -> torch.Tensor:
    handle = hooked(model, layer, index)
    try:
        return model(x)
    finally:
        handle.remove()


def rate(inject: Callable[[int], torch.Tensor], clean: torch.Tensor, count: int) -> float:
    """Injections per second; each has to change the result."""
    started, fired = time.perf_counter(), 0
    for trial in range(count):
        fired += not torch.equal(inject(trial), clean)
    seconds = time.perf_counter() - started
    print(f"    {fired} of {count} changed the result")
    return count / seconds


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--injections", type=int, default=300)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--backend", default="hardened")
    args = parser.parse_args()
    torch.set_num_threads(1)
    model, x = model_of(args.width, args.layers), torch.randn(args.batch, args.width)
    compiled = torch.compile(
        model,
        backend=args.backend,
        options={"faults": "scale{where=forward,op=addmm,factor=1e4,step=none}"},
    )
    plain = torch.compile(model_of(args.width, args.layers), backend=args.backend)
    with torch.no_grad():
        clean, eager = compiled(x), model(x)
        plain(x)
        faults = runtime(model).faults
        assert faults is not None

        def ours(trial: int) -> torch.Tensor:
            faults.strike(
                faults.sites[trial % len(faults.sites)], index=trial % (args.batch * args.width)
            )
            return compiled(x)

        places = [
            (2 * (t % args.layers), t % (args.batch * args.width)) for t in range(args.injections)
        ]
        rates = {
            "this": rate(ours, clean, args.injections),
            "hooks, a copy for each": rate(
                lambda t: with_copies(model, x, *places[t]), eager, args.injections
            ),
            "hooks, exchanged": rate(
                lambda t: with_hooks(model, x, *places[t]), eager, args.injections
            ),
        }
        events = len(faults.events)
        seconds: dict[str, list[float]] = {"off": [], "disarmed": []}
        for _ in range(args.injections):
            for name, call in (("off", plain), ("disarmed", compiled)):
                started = time.perf_counter()
                call(x)
                seconds[name].append(time.perf_counter() - started)
    for name, value in rates.items():
        print(f"{name} | {value:.0f} injections/s | {rates['this'] / value:.1f}x")
    print(f"planned {args.injections}, fired {events}")
    for name, values in seconds.items():
        print(f"forward, {name} | {statistics.median(values) * 1e3:.3f} ms")


if __name__ == "__main__":
    main()
