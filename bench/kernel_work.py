"""What each operator of `custom_ops` is measured on, and what its results have to be by fp64.

A function an operator. It makes its own tensors, of `numel` elements on a device, so that they are gone before
those of the next.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from custom_ops import checksum, faults, gradients, quantise, topk, wire16
from custom_ops.layout import CHUNK, Layout, Layout16, TopKLayout

GROUP = 128
RANKS = 4
RATIO = 0.01
CHECKED = 2**22  # elements that are compared with fp64


@dataclasses.dataclass(frozen=True)
class Work:
    """An operator on a bucket.

    Attributes:
        run: returns the operator's results.
        reads: tensors that it has to read.
        check: raises `AssertionError` if results are not what fp64 says.
        goal: share of a copy's bandwidth, on an H200.
        inductor: the same formula in ATen operators, to be compiled; its arguments are `reads`.
        rival: another way to the same result, not compiled; its name comes first.
    """

    run: Callable[[], Any]
    reads: tuple[Tensor, ...]
    check: Callable[[Any], None]
    goal: float | None = None
    inductor: Callable[..., Any] | None = None
    rival: tuple[str, Callable[[], Any]] | None = None


def works(numel: int, device: torch.device) -> dict[str, Callable[[], Work]]:
    """By name."""
    makers: dict[str, Callable[..., Work]] = {
        "fp32 to int8": functools.partial(_encoding, 8, torch.float32, False, 0.92),
        "int8 to fp32": _decoding,
        "bf16 to int4": functools.partial(_encoding, 4, torch.bfloat16, False, 0.85),
        "feedback + int8": functools.partial(_encoding, 8, torch.float32, True, 0.85),
        f"requantise W={RANKS}": _reducing,
        "feedback + top-k 1 %": _selecting,
        "fp32 to fp16": functools.partial(_wire, "fp16", 2.0**-11),
        "fp32 to bf16": functools.partial(_wire, "bf16", 2.0**-8),
        "seal": _sealing,
        "unscale": _unscaling,
        "strike": _striking,
    }
    return {name: functools.partial(make, numel, device) for name, make in makers.items()}


def _encoding(
    bits: int, dtype: torch.dtype, feedback: bool, goal: float, numel: int, device: torch.device
) -> Work:
    layout = Layout((numel,), bits=bits, group=GROUP)
    values = torch.randn(numel, device=device).to(dtype)
    residual = torch.randn(numel, device=device) * 1e-2 if feedback else None
    reads = (values,) if residual is None else (values, residual)

    def check(results: tuple[Tensor, Tensor]) -> None:
        back = quantise.dequantise(results[0][None], *layout.fields)
        exact = torch.stack([part[:CHECKED].double() for part in reads]).sum(0)
        lost = exact - back[:CHECKED].double()
        assert (lost.abs() <= _half_a_scale(exact, bits)).all(), "errors above half a scale"
        if feedback:
            rounding = 2.0**-22 * exact.abs() + 2.0**-140
            assert ((results[1][:CHECKED].double() - lost).abs() <= rounding).all(), "residual"

    def formula(*parts: Tensor) -> tuple[Tensor, ...]:
        return _encoded(sum(p.float() for p in parts), bits, feedback)

    def run() -> tuple[Tensor, Tensor]:
        return quantise.quantise(values, residual, None, *layout.fields)

    return Work(run, reads, check, goal, formula)


def _decoding(numel: int, device: torch.device) -> Work:
    layout = Layout((numel,), group=GROUP)
    values = torch.randn(numel, device=device)
    payloads = quantise.quantise(values, None, None, *layout.fields)[0][None]

    def check(back: Tensor) -> None:
        exact = values[:CHECKED].double()
        error = (back[:CHECKED].double() - exact).abs()
        assert (error <= _half_a_scale(exact, 8)).all(), "errors above half a scale"

    def run() -> Tensor:
        return quantise.dequantise(payloads, *layout.fields)

    return Work(run, (payloads,), check, 0.88, lambda rows: _decoded(rows, 8))


def _reducing(numel: int, device: torch.device) -> Work:
    layout = Layout((numel,), group=GROUP)
    values = [torch.randn(numel, device=device) for _ in range(RANKS)]
    pieces = torch.stack([quantise.quantise(v, None, None, *layout.fields)[0] for v in values])
    exact = torch.stack([v[:CHECKED].double() for v in values]).mean(0)
    bound = torch.stack([_half_a_scale(v[:CHECKED].double(), 8) for v in values]).mean(0)
    del values

    def check(results: tuple[Tensor, Tensor]) -> None:
        back = quantise.dequantise(results[0][None], *layout.fields)[:CHECKED].double()
        own = _half_a_scale(exact.abs() + bound, 8)
        assert ((back - exact).abs() <= bound + own).all(), "errors of more than two scales"

    def formula(rows: Tensor) -> tuple[Tensor, ...]:
        return _encoded(_decoded(rows, 8), 8, False)

    def run() -> tuple[Tensor, Tensor]:
        return quantise.requantise(pieces, None, None, 0, 8, *layout.fields)

    return Work(run, (pieces,), check, 0.85, formula)


def _selecting(numel: int, device: torch.device) -> Work:
    layout = TopKLayout(numel, RATIO)
    values, residual = (torch.randn(numel, device=device) * by for by in (1.0, 1e-2))

    def check(results: tuple[Tensor, Tensor]) -> None:
        sent = topk.topk_decode(results[0][None], *layout.fields)[:CHECKED]
        total = (values + residual)[:CHECKED]
        assert (sent.double() + results[1][:CHECKED].double() == total.double()).all(), "lost"
        for part, of_sent in zip(total.split(CHUNK), sent.split(CHUNK), strict=True):
            is_sent = of_sent != 0
            assert int(is_sent.sum()) == min(len(part), -int(-RATIO * len(part) // 1)), "count"
            if not is_sent.all():
                smallest, largest = part[is_sent].abs().min(), part[~is_sent].abs().max()
                assert smallest >= largest, "not the largest"

    def with_topk() -> tuple[Tensor, ...]:
        total = (values + residual)[: numel // CHUNK * CHUNK].view(-1, CHUNK)
        where = total.abs().topk(layout.quota(0), dim=1, sorted=False).indices
        sent = total.gather(1, where)
        return sent.bfloat16(), where.short(), total.scatter(1, where, 0.0)

    def run() -> tuple[Tensor, Tensor]:
        return topk.topk_encode(values, residual, *layout.fields)

    return Work(run, (values, residual), check, 0.75, None, ("torch.topk", with_topk))


def _wire(dtype: str, epsilon: float, numel: int, device: torch.device) -> Work:
    layout = Layout16(numel, 1, dtype)
    values = torch.randn(numel, device=device)

    def check(payload: Tensor) -> None:
        back = wire16.decode16(payload[None], *layout.fields)[:CHECKED].double()
        exact = values[:CHECKED].double()
        assert ((back - exact).abs() <= epsilon * exact.abs() + 2.0**-30).all(), "errors"

    return Work(lambda: wire16.encode16(values, *layout.fields), (values,), check)


def _sealing(numel: int, device: torch.device) -> Work:
    payload = torch.randint(256, (numel // 8 * 8,), device=device, dtype=torch.uint8)

    def check(sealed: Tensor) -> None:
        assert not checksum.broken(sealed[None], 1).any(), "sealed, and broken"
        words = payload.view(torch.int32).double()
        rest = int(words.sum().item() - words[1].item()) & 0xFFFFFFFF
        assert int(sealed.view(torch.int32)[1]) & 0xFFFFFFFF == rest ^ 0xFFFFFFFF, "checksum"

    return Work(lambda: checksum.seal(payload, 1), (payload,), check)


def _unscaling(numel: int, device: torch.device) -> Work:
    values, factor = torch.randn(numel, device=device), torch.tensor(1 / 3, device=device)

    def check(results: tuple[Tensor, Tensor, Tensor]) -> None:
        exact = values.double() * factor.double()
        assert ((results[0] - exact).abs() <= 2.0**-24 * exact.abs()).all(), "products"
        assert results[1] == 0 and abs(results[2] / exact.norm() - 1) < 1e-6, "norm"

    def formula(x: Tensor, by: Tensor) -> tuple[Tensor, ...]:
        product = x * by
        return product, (~product.isfinite()).any().float(), torch.linalg.vector_norm(product)

    def run() -> tuple[Tensor, Tensor, Tensor]:
        return gradients.unscale(values, factor)

    return Work(run, (values, factor), check, None, formula)


def _striking(numel: int, device: torch.device) -> Work:
    values = torch.randn(numel, device=device)
    row = torch.tensor([1, 12345, 0, 7, 0], device=device)

    def check(results: tuple[Tensor, Tensor]) -> None:
        changed = (results[0] != values).nonzero().flatten().tolist()
        assert changed == [12345 % numel], "which element"

    return Work(lambda: faults.strike(values, row, 1), (values,), check)


def _half_a_scale(exact: Tensor, bits: int) -> Tensor:
    """[n] fp64: the largest error that rounding to a group's codes may make, scales being bf16."""
    largest = exact.abs().view(-1, GROUP).amax(1, keepdim=True)
    scale = 2 * largest / (2**bits - 2) * (1 + 2.0**-7) * (1 + 2.0**-13)
    return (scale / 2).expand(-1, GROUP).reshape(-1)


def _encoded(values: Any, bits: int, feedback: bool) -> tuple[Tensor, ...]:
    """Symmetric quantisation in ATen operators."""
    middle = 2 ** (bits - 1) - 1
    rows = values.view(-1, GROUP)
    scale = (rows.abs().amax(1, keepdim=True) / middle).clamp(min=2.0**-100).bfloat16()
    points = (rows * (1 / scale.float())).round()
    codes = (points + middle).to(torch.uint8)
    if bits == 4:
        codes = codes[:, : GROUP // 2] | codes[:, GROUP // 2 :] << 4
    lost = ((rows - points * scale.float()).flatten(),) if feedback else ()
    return scale, codes, *lost


def _decoded(payloads: Tensor, bits: int) -> Tensor:
    """The mean of payloads of `Layout`, in ATen operators."""
    groups = (payloads.shape[1] - 8) * 8 // (16 + GROUP * bits)
    scale = payloads[:, 8 : 8 + 2 * groups].view(torch.bfloat16).float()[:, :, None]
    codes = payloads[:, 8 + 2 * groups :][:, : groups * GROUP * bits // 8].unflatten(
        1, (groups, -1)
    )
    return ((codes.float() - (2 ** (bits - 1) - 1)) * scale).mean(0).flatten()
