"""A few steps of a program with passes and without: `python -m fxpasses.cli.loss INPUT DIFFERENCE`.

What `fxpasses bisect --loss-diff` runs. The loss is the mean of the squares of all that the program returns.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import click

from fxpasses.cli.errors import NO, Command, InputError
from fxpasses.cli.inputs import Program, resolve
from fxpasses.cli.running import backend_options, settings_of

_STEPS, _RATE = 3, 0.1


@click.command(cls=Command)
@click.argument("input")
@click.argument("difference", type=float)
@click.option("--passes")
@backend_options("Of the passes.")
def main(input: str, difference: float, passes: str | None, options: tuple[str, ...]) -> None:
    """Fail if a loss with passes differs from that in eager mode by more than DIFFERENCE, relative to it."""
    import torch

    found = resolve(input)
    if not (isinstance(found, Program) and isinstance(found.function, torch.nn.Module)):
        raise InputError(f"{input}: --loss-diff takes module:name of what makes a module")
    settings = settings_of(passes, options)
    twin = copy.deepcopy(found.function)
    compiled = torch.compile(twin, backend="hardened_aot_eager", options=settings)
    pairs = zip(
        losses(found.function, found.function, found.args),
        losses(twin, compiled, found.args),
        strict=True,
    )
    for step, (expected, got) in enumerate(pairs):
        click.echo(f"step {step}: {got:.9g} with passes, {expected:.9g} without")
        if not abs(got - expected) <= difference * abs(expected):
            raise SystemExit(NO)


def losses(module: Any, call: Callable[..., Any], args: tuple[Any, ...]) -> list[float]:
    """Train a module on the same batch."""
    import torch

    optimizer = torch.optim.SGD(module.parameters(), lr=_RATE)
    found: list[float] = []
    for _ in range(_STEPS):
        torch.manual_seed(0)  # dropout
        optimizer.zero_grad()
        loss = _loss(call(*args))
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


def _loss(outputs: Any) -> Any:
    import torch
    from torch.utils import _pytree as pytree

    tensors = [x for x in pytree.tree_leaves(outputs) if isinstance(x, torch.Tensor)]
    return torch.stack([x.double().square().mean() for x in tensors if x.is_floating_point()]).sum()


if __name__ == "__main__":
    main()
