"""What a fault does to a tensor: tensor code for `splice`, steered by one row of integers.

    row [5] int64     site, index, keep, flip, key         all zero: nothing happens
    news [4] int64    how many elements were hit, index of the first, its bits before, its bits after

A row is state: which site of a graph, which element and which bits are armed changes from step to step, the
graph does not. `keep` and `flip` say what becomes of the bits of an element: `(bits & keep) ^ flip`. That
covers flips, stuck bits, zeros, signs, NaN and infinity in each dtype.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from custom_ops.noise import key_of, uniform
from fxpasses.faults.spec import Fault

SITE, INDEX, KEEP, FLIP, KEY = range(5)
ROW = 5
HITS, AT, BEFORE, AFTER = range(4)
NEWS = 4


class Form(NamedTuple):
    """Bits of a dtype: the integer type of the same size, and how many of them are mantissa."""

    integer: torch.dtype
    width: int
    mantissa: int


FORMS = {
    torch.float64: Form(torch.int64, 64, 52),
    torch.float32: Form(torch.int32, 32, 23),
    torch.float16: Form(torch.int16, 16, 10),
    torch.bfloat16: Form(torch.int16, 16, 7),
    torch.int8: Form(torch.int8, 8, 0),
    torch.uint8: Form(torch.uint8, 8, 0),
}


def check_dtype(fault: Fault, dtype: torch.dtype) -> None:
    """
    Raises:
        ValueError: for a bit outside of the dtype, or a model that it has no meaning for.
    """
    form = FORMS[dtype]
    name = str(dtype).removeprefix("torch.")
    if any(bit >= form.width for bit in fault.bit):
        raise ValueError(
            f"option 'faults': {fault.text!r}: bit {max(fault.bit)} is outside of {name}, which has bits 0 to "
            f"{form.width - 1}"
        )
    most = {"truncate": form.mantissa, "bitflip": form.width}.get(fault.model)
    if most is not None and form.mantissa and fault.bits > most:
        raise ValueError(
            f"option 'faults': {fault.text!r}: got {fault.bits} bits; {name} has {most} to choose from"
        )
    if not form.mantissa and fault.model in ("truncate", "sign", "nan", "inf", "scale"):
        raise ValueError(
            f"option 'faults': {fault.text!r}: {fault.model!r} has no meaning for {name}; use bitflip, "
            "stuck or zero there"
        )


def row_of(fault: Fault, site: int, dtype: torch.dtype, draw: int) -> list[int]:
    """The row that arms a fault at a site.

    Args:
        draw: the number that all that is drawn comes from.
    """
    keep, flip = masks(fault, dtype, draw)
    index = drawn(draw, "index") if fault.index is None else fault.index
    width = FORMS[dtype].width
    return [site, index, _signed(keep, width), _signed(flip, width), key_of(drawn(draw, "key"))]


def masks(fault: Fault, dtype: torch.dtype, draw: int) -> tuple[int, int]:
    """What to keep and what to flip of an element's bits, as unsigned numbers."""
    _, width, mantissa = FORMS[dtype]
    everything, sign = (1 << width) - 1, 1 << (width - 1)
    exponent = (sign - 1) >> mantissa << mantissa
    if fault.model in ("bitflip", "stuck"):
        mask = sum(1 << bit for bit in fault.bit or drawn_bits(draw, fault.bits, width))
        if fault.model == "bitflip":
            return everything, mask
        return everything ^ mask, mask if fault.value else 0
    if fault.model == "truncate":
        return everything ^ ((1 << fault.bits) - 1), 0
    return {
        "zero": (0, 0),
        "sign": (everything, sign),
        "inf": (0, exponent),
        "nan": (0, exponent | (1 << (mantissa - 1) if mantissa else 0)),
    }.get(fault.model, (everything, 0))


def drawn(*of: object) -> int:
    """A number of 62 bits that looks random and is the same for the same words everywhere."""
    digest = hashlib.sha256("/".join(map(str, of)).encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 2


def drawn_bits(draw: int, count: int, width: int) -> list[int]:
    """Different positions below `width`."""
    left = list(range(width))
    return [left.pop(drawn(draw, "bit", i) % len(left)) for i in range(min(count, width))]


def strike(x: Tensor, row: Tensor, fault: Fault, site: int) -> tuple[Tensor, Tensor]:
    """A tensor after a fault, if that is armed here.

    Args:
        x: any shape, a dtype of `FORMS`.
        row: [5] int64.
        site: number of this site.

    Returns:
        The tensor, and the news: [4] int64.
    """
    armed = row[SITE] == site
    if fault.model == "truncate":
        return _strike_some(x, row, armed, fault.probability)
    if fault.model not in ("bitflip", "stuck", "zero", "sign", "nan", "inf", "scale"):
        return _disturb(x, row, site, fault)
    integer = FORMS[x.dtype].integer
    at = torch.where(armed, row[INDEX] % x.numel(), -1)
    place = _place(x, at)
    # Not in brackets: Python's indexing asks a tensor without dimensions for its number.
    old = torch.ops.aten.index.Tensor(x, place) if place else x
    bits = old.view(integer)
    if fault.model == "scale":
        wide = old.float() if x.dtype.itemsize < 4 else old
        struck = (wide * fault.factor).to(x.dtype).view(integer)
    else:
        struck = (bits & row[KEEP].to(integer)) ^ row[FLIP].to(integer)
    new = torch.where(armed, struck, bits)
    written = _write(x, place, at, new)
    return written, _news(armed.long(), at, bits.reshape(()), new.reshape(()))


def _write(x: Tensor, place: list[Tensor], at: Tensor, new: Tensor) -> Tensor:
    """One element is written, whether there is a fault or not: compilers do that in place. Not where several
    have one place in memory (a sum's gradient, expanded).
    """
    if not place:
        return new.view(x.dtype)
    if any(isinstance(stride, int) and stride == 0 for stride in x.stride()):
        return _where(_positions(x) == at, new, x.view(new.dtype)).view(x.dtype)
    return torch.ops.aten.index_put(x, place, new.view(x.dtype))


def _strike_some(
    x: Tensor, row: Tensor, armed: Tensor, probability: float
) -> tuple[Tensor, Tensor]:
    integer = FORMS[x.dtype].integer
    bits, positions = x.view(integer), _positions(x)
    hit = armed & (uniform(row[KEY], positions) < probability)  # type: ignore[arg-type]
    new = _where(hit, (bits & row[KEEP].to(integer)) ^ row[FLIP].to(integer), bits)
    first = torch.where(hit, positions, x.numel()).amin()
    hits = hit.long().sum()
    at = torch.where(hits > 0, first, -1)
    return new.view(x.dtype), _news(hits, at, _element(bits, at), _element(new, at))


def _disturb(x: Tensor, row: Tensor, site: int, fault: Fault) -> tuple[Tensor, Tensor]:
    """What does not touch the values: they wait for it, though."""
    amount = {"delay": fault.seconds, "exit": float(fault.code)}.get(fault.model, 0.0)
    nothing = torch.ops.fxpasses.disturb(row, site, fault.model, amount)
    integer = FORMS[x.dtype].integer
    new = x.view(integer) ^ nothing.to(integer)
    armed = (row[SITE] == site).long()
    return new.view(x.dtype), torch.stack([armed, *[torch.zeros_like(armed)] * 3])


def _where(hit: Tensor, struck: Tensor, bits: Tensor) -> Tensor:
    """`torch.where`, in the layout of `bits`: what adds up afterwards adds in the same order as before."""
    return bits ^ torch.where(hit, struck ^ bits, 0)


def _positions(x: Tensor) -> Tensor:
    """Of each element in the flattened tensor."""
    return torch.arange(x.numel(), device=x.device).view(x.shape)


def _news(hits: Tensor, at: Tensor, before: Tensor, after: Tensor) -> Tensor:
    """Where and what, if there was a hit; bits before and after without dimensions."""
    return torch.where(hits > 0, torch.stack([hits, at, before.long(), after.long()]), 0)


def _place(x: Tensor, at: Tensor) -> list[Tensor]:
    """The index in each dimension, [1], of a position in the flattened tensor; of the first for -1."""
    place, below, first = [], 1, at.clamp(min=0)
    for size in reversed(x.shape):
        place.append((first // below % size).reshape(1))
        below = below * size
    return place[::-1]


def _element(bits: Tensor, at: Tensor) -> Tensor:
    place = _place(bits, at)
    return torch.ops.aten.index.Tensor(bits, place).reshape(()) if place else bits


@torch.library.custom_op("fxpasses::disturb", mutates_args=())
def disturb(row: Tensor, site: int, model: str, amount: float) -> Tensor:
    """Delay the process, end it, or refuse to take part, if that is armed here; returns 0, int64.

    Raises:
        RuntimeError: for an armed `missing`.
    """
    if int(row[SITE]) == site:
        if model == "delay":
            time.sleep(amount)
        elif model == "exit":
            os._exit(int(amount))
        elif model == "missing":
            raise RuntimeError("injected fault: this rank does not take part in a collective")
    return row.new_zeros(())


@disturb.register_fake
def _(row: Tensor, site: int, model: str, amount: float) -> Tensor:
    return row.new_empty(())


def value_of(bits: int, dtype: torch.dtype) -> float:
    """The number that some bits mean."""
    return torch.tensor(bits, dtype=torch.int64).to(FORMS[dtype].integer).view(dtype).item()


def together(news: Sequence[Sequence[Tensor]], old: Tensor) -> Tensor:
    """The news of all sites, by fault; what was there stays where nothing happened.

    Args:
        news: for each fault those of its sites.
        old: [faults, 4] int64.
    """
    total = torch.stack([torch.stack([*of]).sum(0) if of else old.new_zeros(NEWS) for of in news])
    return torch.where(total[:, HITS : HITS + 1] > 0, total, old)


def _signed(value: int, width: int) -> int:
    """The number whose two's complement these bits are; 8-bit ones stay as they are, for uint8."""
    return value - (1 << width) if width > 8 and value >> (width - 1) else value
