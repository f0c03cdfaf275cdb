"""Injections per second, beside PyTorchFI and MRFI, in one run on the same models and places.

    python -m bench.campaign                      # LeNet and VGG-11, 300 injections each
    python -m bench.campaign --models lenet --injections 50 --backend hardened_aot_eager

Forward passes in inference, one image each, as an injection's outcome is one image's class; each injection
overwrites one element of one convolution's result. The models are those that these tools' own examples and
publications run campaigns on, for images of CIFAR-10. PyTorchFI (a copy of the model with hooks for each
injection) and MRFI (hooks on all modules) run themselves where they are installed (`pip install pytorchfi mrfi
scipy`); besides, the least that a hook can cost: a model copied and hooked for each injection, and one whose
one hook is exchanged. The step without a fault is timed with the option off, too.
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import statistics
import time
from collections.abc import Callable

import torch
from torch import nn

from fxpasses.owners import runtime

VALUE = 1e4
FAULT = f"scale{{where=forward,op=convolution,factor={VALUE},step=none}}"
TURN = 20  # injections
Inject = Callable[[int, int], torch.Tensor]  # at an element of a convolution's result


def lenet() -> nn.Sequential:
    return nn.Sequential(
        *(nn.Conv2d(3, 6, 5), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()),
        *(nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10)),
    )


def vgg11() -> nn.Sequential:
    layers: list[nn.Module] = []
    channels = 3
    for width in (64, 0, 128, 0, 256, 256, 0, 512, 512, 0, 512, 512, 0):
        if width:
            layers += [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU()]
            channels = width
        else:
            layers.append(nn.MaxPool2d(2))
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(512, 10))


MODELS = {"lenet": lenet, "vgg11": vgg11}


def model_of(name: str) -> nn.Sequential:
    torch.manual_seed(0)
    return MODELS[name]().eval()


def convolutions(model: nn.Module) -> list[nn.Module]:
    return [m for m in model.modules() if isinstance(m, nn.Conv2d)]


def shapes(model: nn.Module, x: torch.Tensor) -> list[torch.Size]:
    """Of the convolutions' results."""
    found: list[torch.Size] = []
    hooks = [
        m.register_forward_hook(lambda m, i, out: found.append(out.shape))
        for m in convolutions(model)
    ]
    model(x)
    for hook in hooks:
        hook.remove()
    return found


def ours(model: nn.Module, x: torch.Tensor, backend: str) -> Inject:
    compiled = torch.compile(model, backend=backend, options={"faults": FAULT})
    compiled(x)
    faults = runtime(model).faults
    assert faults is not None
    sites = faults.sites

    def inject(layer: int, index: int) -> torch.Tensor:
        faults.strike(sites[layer], index=index)
        return compiled(x)

    return inject


def hooked(layer: nn.Module, index: int) -> torch.utils.hooks.RemovableHandle:
    def overwrite(module: nn.Module, args: object, output: torch.Tensor) -> None:
        output.view(-1)[index] = VALUE

    return layer.register_forward_hook(overwrite)


def copied_hooks(model: nn.Module, x: torch.Tensor, backend: str) -> Inject:
    def inject(layer: int, index: int) -> torch.Tensor:
        faulty = copy.deepcopy(model)
        hooked(convolutions(faulty)[layer], index)
        return faulty(x)

    return inject


def one_hook(model: nn.Module, x: torch.Tensor, backend: str) -> Inject:
    layers = convolutions(model)

    def inject(layer: int, index: int) -> torch.Tensor:
        handle = hooked(layers[layer], index)
        try:
            return model(x)
        finally:
            handle.remove()

    return inject


def pytorchfi(model: nn.Module, x: torch.Tensor, backend: str) -> Inject:
    from pytorchfi.core import fault_injection

    sizes = shapes(model, x)
    tool = fault_injection(model, x.shape[0], list(x.shape[1:]), [nn.Conv2d], use_cuda=False)

    def inject(layer: int, index: int) -> torch.Tensor:
        place = torch.unravel_index(torch.tensor(index), sizes[layer])
        keys = ("batch", "dim1", "dim2", "dim3")
        at = {key: [int(i)] for key, i in zip(keys, place, strict=True)}
        return tool.declare_neuron_fi(layer_num=[layer], value=[VALUE], **at)(x)

    return inject


def mrfi(model: nn.Module, x: torch.Tensor, backend: str) -> Inject:
    from mrfi import MRFI, EasyConfig

    settings = {
        "type": "activation_out",
        "module_type": "Conv2d",
        "selector": {"method": "FixPosition", "position": 0},
        "error_mode": {"method": "SetValue", "value": VALUE},
    }
    tool = MRFI(model, EasyConfig({"faultinject": [settings]}))
    layers = tool.get_activation_configs(is_out=True)

    def inject(layer: int, index: int) -> torch.Tensor:
        layers.enabled = False
        layers[layer].enabled = True
        layers[layer].selector.args.position = index
        return tool(x)

    return inject


TOOLS = {
    "this": ours,
    "PyTorchFI": pytorchfi,
    "MRFI": mrfi,
    "hooks, a copy for each": copied_hooks,
    "hooks, exchanged": one_hook,
}


def measure(name: str, args: argparse.Namespace) -> None:
    """Tools take turns, some injections each, as a campaign makes one after the other."""
    x = torch.randn(1, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    sizes = shapes(model_of(name), x)
    draw = torch.Generator().manual_seed(args.seed)
    layers = [trial % len(sizes) for trial in range(args.injections)]
    places = [(at, int(torch.randint(sizes[at].numel(), (), generator=draw))) for at in layers]
    tools = {n: t for n, t in TOOLS.items() if _is_here(n)}
    models = {tool: model_of(name) for tool in tools}
    injects = {tool: make(models[tool], x, args.backend) for tool, make in tools.items()}
    seconds: dict[str, list[float]] = {tool: [] for tool in injects}
    for first in range(0, len(places), TURN):
        for tool, inject in injects.items():
            inject(*places[first])  # the caches are another tool's
            started = time.perf_counter()
            for place in places[first : first + TURN]:
                inject(*place)
            ended = time.perf_counter()
            seconds[tool].append((ended - started) / len(places[first : first + TURN]))
    for tool, times in seconds.items():
        each = statistics.median(times)
        ratio = each / statistics.median(seconds["this"])
        print(f"{name} | {tool} | {1 / each:.0f} injections/s | {ratio:.1f}x")
    planned = len(places) + len(seconds["this"])
    faults = runtime(models["this"]).faults
    assert faults is not None
    print(f"{name} | planned {planned}, fired {len(faults.events) + faults.forgotten}")


def overhead(name: str, args: argparse.Namespace) -> None:
    """Of the option, while no fault is armed."""
    x = torch.randn(1, 3, 32, 32)
    model = model_of(name)
    calls = {
        "off": torch.compile(model_of(name), backend=args.backend),
        "disarmed": torch.compile(model, backend=args.backend, options={"faults": FAULT}),
    }
    seconds: dict[str, list[float]] = {key: [] for key in calls}
    for _ in range(args.injections + 3):
        for key, call in calls.items():
            started = time.perf_counter()
            call(x)
            seconds[key].append(time.perf_counter() - started)
    off, disarmed = (statistics.median(times[3:]) * 1e3 for times in seconds.values())
    print(f"{name} | forward: off {off:.3f} ms, disarmed {disarmed:.3f} ms | {disarmed / off:.2f}x")


def _is_here(tool: str) -> bool:
    return tool not in ("PyTorchFI", "MRFI") or importlib.util.find_spec(tool.lower()) is not None


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--injections", type=int, default=300)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--backend", default="hardened")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    with torch.no_grad():
        for name in args.models:
            measure(name, args)
            overhead(name, args)


if __name__ == "__main__":
    main()
