"""One call of each operator, for what is asked of all of them."""

from __future__ import annotations

import torch

from custom_ops import checksum, faults, gradients, quantise, topk, wire16
from custom_ops.layout import Layout, Layout16, TopKLayout

N = 300
INT4, HALF, TOPK = Layout((200, 0, 100), 2, 4), Layout16(N, 2), TopKLayout(N, 0.1)


def cases() -> dict[str, tuple]:
    """Arguments by the operator's name; tensors are contiguous and of the CPU."""
    generator = torch.Generator().manual_seed(0)
    flat, residual = torch.randn(2, N, generator=generator)
    seed = torch.tensor(7)
    codes = quantise.quantise(flat, None, None, *INT4.fields)[0]
    halves = wire16.encode16(flat, *HALF.fields)
    largest = topk.topk_encode(flat, residual, *TOPK.fields)[0]
    sealed = checksum.seal(halves, HALF.shards)
    pieces = codes.view(2, -1)
    owned = torch.zeros(INT4.shard_numel)
    return {
        "quantise": (flat, residual, seed, *INT4.fields),
        "dequantise": (codes[None], *INT4.fields),
        "requantise": (pieces, owned, seed, 0, 8, *INT4.fields),
        "encode16": (flat, *HALF.fields),
        "decode16": (halves[None], *HALF.fields),
        "topk_encode": (flat, residual, *TOPK.fields),
        "topk_decode": (largest[None], *TOPK.fields),
        "seal": (halves, HALF.shards),
        "broken": (sealed[None], HALF.shards),
        "unscale": (flat, torch.tensor(0.5)),
        "strike": (flat, torch.tensor([3, 5, -1, 1 << 30, 0]), 3),
    }


MODULES = {
    operator: module.__name__.split(".")[-1]
    for module, operators in {
        quantise: ("quantise", "dequantise", "requantise"),
        wire16: ("encode16", "decode16"),
        topk: ("topk_encode", "topk_decode"),
        checksum: ("seal", "broken"),
        gradients: ("unscale",),
        faults: ("strike",),
    }.items()
    for operator in operators
}


class Call(torch.nn.Module):
    """Operators by name, as a module; all results in a flat tuple."""

    def __init__(self, names: list[str]) -> None:
        super().__init__()
        self.names = names
        self.constants = {
            name: [None if isinstance(a, torch.Tensor) else (a,) for a in args]
            for name, args in cases().items()
        }

    def forward(self, tensors: dict[str, list[torch.Tensor]]) -> dict[str, list[torch.Tensor]]:
        results = {}
        for name in self.names:
            given = iter(tensors[name])
            args = [next(given) if c is None else c[0] for c in self.constants[name]]
            result = getattr(torch.ops.fxpasses, name)(*args)
            results[name] = list(result) if isinstance(result, tuple) else [result]
        return results


def tensors_of(names: list[str]) -> dict[str, list[torch.Tensor]]:
    every = cases()
    return {name: [a for a in every[name] if isinstance(a, torch.Tensor)] for name in names}


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return len(a) == len(b) and all(map(torch.equal, a, b))
