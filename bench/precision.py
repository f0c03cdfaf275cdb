"""Low precision by graph passes beside autocast: step time, memory, loss; over the zoo, loss and gradients.

    python -m bench.precision [--rounds 12]                       step time of a GPT and a CNN, bf16, Inductor
    python -m bench.precision --zoo [--steps 100] [--seeds 4]     architectures of tests/zoo, no Inductor

On a GPU the first says whether throughput is at least, peak memory at most, that of autocast. On a CPU it runs
for form: most of them have no fast bf16 products. The second trains on as many streams of batches as there are
seeds: two runs that round differently drift apart, so that one stream's loss says little. `apart` is by how
much the means over the streams differ, with its standard error; `noise` the same of two runs of autocast, one
of which starts from weights that differ by 1e-6 of themselves.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
import torch.utils._pytree as pytree
from torch import nn

from bench.gpt import GPT, GPTConfig

LOW = torch.bfloat16
UNTIMED_STEPS = 3
LOSS_GOAL = 0.005  # of autocast's
LAST = 10  # steps whose mean loss is compared
GRADIENT_FACTOR = 2.0  # times autocast's distance from fp64, below which gradients count as good

Forward = Callable[..., torch.Tensor]
Loss = Callable[[Forward], torch.Tensor]


def cnn() -> nn.Module:
    """A residual network of 2.8 M parameters for images of 32 x 32."""

    class Block(nn.Module):
        def __init__(self, before: int, width: int) -> None:
            super().__init__()
            stride = 1 if before == width else 2
            self.body = nn.Sequential(
                nn.Conv2d(before, width, 3, stride, 1, bias=False),
                nn.BatchNorm2d(width),
                nn.ReLU(),
                nn.Conv2d(width, width, 3, 1, 1, bias=False),
                nn.BatchNorm2d(width),
            )
            self.skip = (
                nn.Conv2d(before, width, 1, stride, bias=False) if stride > 1 else nn.Identity()
            )

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.relu(self.body(x) + self.skip(x))

    widths = [64, 64, 128, 128, 256, 256]
    blocks = [Block(a, b) for a, b in zip([64, *widths], widths, strict=False)]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(256, 10)]
    return nn.Sequential(nn.Conv2d(3, 64, 3, 1, 1, bias=False), *blocks, *head)


def made(name: str, device: str) -> tuple[nn.Module, Loss]:
    """A model and its loss on one batch, which it is called with."""
    torch.manual_seed(0)
    small = device == "cpu"
    if name == "gpt":
        config = GPTConfig(layers=4) if small else GPTConfig(1024, 512, 12, 12, 768)
        model = GPT(config).to(device)
        shape = (4 if small else 32, config.block + 1)
        tokens = torch.randint(0, config.vocab, shape, device=device)

        def loss(forward: Forward) -> torch.Tensor:
            logits = forward(tokens[:, :-1])
            return F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())

        return model, loss
    model = cnn().to(device)
    images = torch.randn(8 if small else 512, 3, 32, 32, device=device)
    labels = torch.randint(0, 10, (len(images),), device=device)
    return model, lambda forward: F.cross_entropy(forward(images).float(), labels)


def autocast(forward: Forward, device: str) -> Forward:
    """Call it under autocast, as its users do: around the forward, not around the backward."""

    def run(*args: torch.Tensor) -> torch.Tensor:
        with torch.autocast(device, LOW):
            return forward(*args)

    return run


def hardened(model: nn.Module, backend: str = "hardened") -> Forward:
    return torch.compile(model, backend=backend, options={"precision": "bf16"})


class Run:
    """One model, trained in one way."""

    def __init__(self, name: str, device: str, wrap: Callable[[nn.Module], Forward]) -> None:
        self._model, self._loss = made(name, device)
        self._device, self._forward = device, wrap(self._model)
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=0.01, momentum=0.9)
        self.losses: list[float] = []
        self.peak_bytes = 0

    def step(self) -> float:
        """Seconds that it took."""
        if self._device == "cuda":
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        started = time.perf_counter()
        loss = self._loss(self._forward)
        loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        self.losses.append(loss.item())  # waits for the device
        seconds = time.perf_counter() - started
        if self._device == "cuda":
            self.peak_bytes = torch.cuda.max_memory_allocated()
        return seconds


def compared(name: str, device: str, rounds: int) -> str:
    """A row: steps of both in turn, every other round in reverse."""
    ways = {
        "hardened": hardened,
        "autocast": lambda model: autocast(torch.compile(model), device),
    }
    runs = {way: Run(name, device, wrap) for way, wrap in ways.items()}
    for run in runs.values():
        for _ in range(UNTIMED_STEPS):
            run.step()
    times: dict[str, list[float]] = {way: [] for way in runs}
    for index in range(rounds):
        for way in list(runs)[:: -1 if index % 2 else 1]:
            times[way].append(runs[way].step())
    ratio = statistics.median(
        a / b for a, b in zip(times["hardened"], times["autocast"], strict=True)
    )
    ms = [statistics.median(times[way]) * 1e3 for way in runs]
    losses = [run.losses[-1] for run in runs.values()]
    peaks = [f"{run.peak_bytes / 2**20:.0f}" if run.peak_bytes else "n/a" for run in runs.values()]
    figures = f"{ms[0]:9.1f} {ms[1]:9.1f} {ratio:6.3f} {losses[0]:8.4f} {losses[1]:8.4f}"
    return f"{name:5} {figures} {peaks[0]:>8} {peaks[1]:>8}"


HEADER = (
    f"{'model':5} {'hardened':>9} {'autocast':>9} {'ratio':>6} {'loss':>8} {'autocast':>8} "
    f"{'peak MiB':>8} {'autocast':>8}"
)


def over_the_zoo(models: list[str], steps: int, seeds: int) -> None:
    """Loss after as many steps beside autocast's; distance of the first gradients from fp64's, too."""
    from tests.zoo import ZOO
    from tests.zoo.training import train

    ways: list[Callable[[nn.Module], Forward]] = [
        lambda model: as_fp32(hardened(model, "hardened_aot_eager")),
        lambda model: as_fp32(autocast(model, "cpu")),
        lambda model: as_fp32(autocast(nudged(model), "cpu")),
    ]
    columns = f"{'hardened':>9} {'autocast':>9} {'apart':>15} {'noise':>15} {'gradients':>9} {'autocast':>9}"
    print(f"{'model':10} {columns}   goals")
    for name in models or ZOO:
        entry, losses = ZOO[name], []
        for wrap in ways:
            last = []
            for seed in range(seeds):
                torch._dynamo.reset()  # each stream has a model of its own
                run = train(entry, wrap, steps, first_seed=steps * seed)
                last.append(run.losses[-LAST:].mean())
            losses.append(torch.stack(last))
        ours, theirs, again = losses
        apart, noise = _apart(ours, theirs), _apart(again, theirs)
        distances = [gradient_distance(entry, wrap) for wrap in ways[:2]]
        good = distances[0] <= GRADIENT_FACTOR * distances[1]
        goals = f"loss {_verdict(apart[0] <= LOSS_GOAL)}, gradients {_verdict(good)}"
        spread = " ".join(f"{share:7.2%} ±{error:6.2%}" for share, error in (apart, noise))
        figures = f"{ours.mean():9.4f} {theirs.mean():9.4f} {spread}"
        print(f"{name:10} {figures} {distances[0]:9.1e} {distances[1]:9.1e}   {goals}", flush=True)


def _apart(ours: torch.Tensor, theirs: torch.Tensor) -> tuple[float, float]:
    """By how much the means of as many streams differ, as a share, and the standard error of that."""
    differences = (ours - theirs) / theirs.mean()
    error = differences.std() / len(differences) ** 0.5
    return differences.mean().abs().item(), error.item()


@torch.no_grad()
def nudged(model: nn.Module) -> nn.Module:
    for parameter in model.parameters():
        parameter.mul_(1 + 1e-6)
    return model


def gradient_distance(entry: object, wrap: Callable[[nn.Module], Forward]) -> float:
    """Relative, in the norm over all parameters, from gradients in fp64."""
    found = _gradients(entry, wrap, torch.float32)
    exact = _gradients(entry, lambda model: model, torch.float64)
    return ((found - exact).norm() / exact.norm()).item()


def _gradients(
    entry: object, wrap: Callable[[nn.Module], Forward], dtype: torch.dtype
) -> torch.Tensor:
    model = entry.seeded().to(dtype)  # type: ignore[attr-defined]
    batch = pytree.tree_map(lambda x: x.to(dtype) if x.is_floating_point() else x, entry.batch(0))  # type: ignore[attr-defined]
    torch.manual_seed(0)
    entry.apply(wrap(model), batch).backward()  # type: ignore[attr-defined]
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    return torch.cat([g.double().flatten() for g in gradients])


def as_fp32(forward: Forward) -> Forward:
    """Outputs for a loss in fp32, whatever they were."""

    def convert(value: object) -> object:
        is_low = isinstance(value, torch.Tensor) and value.dtype == LOW
        return value.float() if is_low else value

    return lambda *args: pytree.tree_map(convert, forward(*args))


def _verdict(met: bool) -> str:
    return "met" if met else "missed"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--zoo", action="store_true")
    parser.add_argument("--models", default="", help="of the zoo, separated by commas; all without")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--steps", type=int, default=100, help="of each architecture of the zoo")
    parser.add_argument("--seeds", type=int, default=4, help="streams of batches of each")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.zoo:
        over_the_zoo([name for name in args.models.split(",") if name], args.steps, args.seeds)
        return
    device = "cuda" if torch.cuda.is_available() else "cpu"
    print(f"{device}, {LOW}; ms a step" + (": for form, no claim" if device == "cpu" else ""))
    print(HEADER)
    for name in ("gpt", "cnn"):
        print(compared(name, device, args.rounds), flush=True)


if __name__ == "__main__":
    main()
