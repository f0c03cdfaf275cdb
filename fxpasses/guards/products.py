"""Checksums of matrix products: a row's sum, computed in two ways.

    C = A B + D        sum_j C[i, j]   against   A[i, :] (sum_j B[:, j]) + sum_j D[i, j]

Algorithm-based fault tolerance after Huang and Abraham (IEEE Trans. Computers, 1984). What differs without a
fault are roundings, in the product and in the two sums, which are taken in fp32 at least. They add up like a
random walk (Higham and Mary, "A new approach to probabilistic rounding error analysis", SIAM J. Sci. Comput.
41(5), 2019: with probability 1 - 2 exp(-L^2 / 2) the constant n of the classical bound becomes L sqrt(n)).
With u the unit roundoff of the accumulation, u' that of the result, [M, K] and [K, N] the sizes of A and B,
b = B e, c = C e:

    |c_i - A_i b - d_i|  <=  L u (2 sqrt(K) + sqrt(N)) w_i
                             + L (u (sqrt(K) + sqrt(N)) + u') max(m_i, |c_i|)  +  tiny
    m_i = min(sqrt(N) max_j |C_ij|, sum_j |C_ij|)
    w_i^2 = sum_k A_ik^2 max(|B_k|^2, b_k^2)

The first term is the walk of partial sums around their mean, the second their drift and the last rounding;
the maxima cover columns that are alike, whose roundings are alike too. m_i is no less than the row's norm, and
no more than one element that a fault has made huge, of however many. L is 8. It splits mean and variance as
V-ABFT does (2026), whose factors are of the same size; it is a statement about roundings that are not
adversarial, not a proof. C, which a fault may have made huge, is not squared.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, fx

from fxpasses.graph import TrainingGraph
from fxpasses.precision import ALLOW, class_of, operator_name
from fxpasses.sizes import are_known, may_have_elements

DEVIATIONS = 8.0  # L
WIDE = torch.float64
CHECKED = {"mm": (0, 1), "addmm": (1, 2), "bmm": (0, 1), "baddbmm": (1, 2)}  # where A and B stand
_ADDED = ("addmm", "baddbmm")


def checkable(graph: TrainingGraph, among: set[fx.Node]) -> list[fx.Node]:
    """The products that have a checksum."""
    return [n for n in graph.walk() if n in among and operator_name(n) in CHECKED and _fits(n)]


def unchecked(graph: TrainingGraph, among: set[fx.Node]) -> list[fx.Node]:
    """The products that have none: convolutions, fused attention, matrices times vectors."""
    known = set(checkable(graph, among))
    return [n for n in graph.walk() if n in among and class_of(n) == ALLOW and n not in known]


def parts(node: fx.Node) -> tuple[fx.Node, fx.Node, fx.Node | None]:
    """A, B and D of a product."""
    first, second = CHECKED[operator_name(node)]
    added = node.args[0] if operator_name(node) in _ADDED else None
    return node.args[first], node.args[second], added  # type: ignore[return-value]


def is_wrong(c: Tensor, a: Tensor, b: Tensor, d: Tensor | None) -> Tensor:
    """Whether a row of C = A B + D is further from its checksum than roundings go. NaN and infinity are,
    unless they came in, or the product may be larger than its dtype holds.

    Args:
        c: [..., M, N]; a: [..., M, K]; b: [..., K, N]; d: broadcasts to c.

    Returns:
        bool, no dimensions.
    """
    b_wide = b.to(_wide(c))
    b_sums = b_wide.sum(-1)
    b_squares = torch.maximum(b_wide.square().sum(-1), b_sums.square())
    return disagrees(c, a, b_sums.unsqueeze(-2), b_squares.unsqueeze(-2), d)


def disagrees(
    c: Tensor,
    a: Tensor,
    b_sums: Tensor | float,
    b_squares: Tensor | float,
    d: Tensor | None = None,
    accumulator: torch.dtype = torch.float32,
    wide: torch.dtype | None = None,
) -> Tensor:
    """The same, with what it takes of B.

    Args:
        b_sums: row sums of B, broadcasts to a.
        b_squares: for each row of B the larger of its squared norm and its squared sum, broadcasts to a.
        accumulator: what partial sums are rounded to; c's own dtype if that is wider.
        wide: what the checksums are taken in; None: fp32 at least.
    """
    wide = wide or _wide(c)
    inner, outer = math.sqrt(a.shape[-1]), math.sqrt(c.shape[-1])
    a_wide = a.to(wide)
    expected = (a_wide * b_sums).sum(-1)
    walk = (a_wide.square() * b_squares).sum(-1).sqrt()
    c_wide = c.to(wide)
    found, sizes = c_wide.sum(-1), c_wide.abs()
    if d is not None:
        expected = expected + _row_sums(d, c.shape[-1])
    unit = torch.finfo(torch.promote_types(c.dtype, accumulator)).eps / 2
    rounding = 0.0 if c.dtype.itemsize >= 4 else torch.finfo(c.dtype).eps / 2
    # Factors first: what a fault has made as large as the dtype goes would be infinite if it were larger.
    share = DEVIATIONS * (unit * (inner + outer) + rounding)
    norm = torch.minimum(share * outer * sizes.amax(-1), share * sizes.sum(-1))
    drift = torch.maximum(norm, share * found.abs())
    bound = DEVIATIONS * unit * (2 * inner + outer) * walk + drift
    # What is so small that its square is none counts as that small, and no less.
    tiny = torch.finfo(c.dtype).tiny * c.shape[-1]
    tiny += unit * math.sqrt(torch.finfo(wide).tiny) * a.shape[-1] * c.shape[-1]
    agrees = (found - expected).abs() <= bound + tiny
    # What may overflow, or was not finite when it came in, is no fault of this product.
    may_overflow = ~(inner * walk < torch.finfo(c.dtype).max)
    return ~torch.where(found.isfinite(), agrees, may_overflow).all()


def _row_sums(d: Tensor, columns: int) -> Tensor:
    """Of a tensor that broadcasts to so many columns; what all rows share is added up once."""
    d = d.to(WIDE)
    if d.dim() and d.shape[-1] == columns:
        return d.sum(-1)
    return columns * d.squeeze(-1)


def _wide(c: Tensor) -> torch.dtype:
    return torch.promote_types(c.dtype, torch.float32)


def _fits(node: fx.Node) -> bool:
    value = node.meta["val"]
    a, b, _ = parts(node)
    same = all(n.meta["val"].dtype == value.dtype for n in (a, b) if isinstance(n, fx.Node))
    scaled = any(node.kwargs.get(key, 1) != 1 for key in ("alpha", "beta"))
    # What the bound depends on; there may be any number of rows.
    summed = (*a.meta["val"].shape[-1:], *value.shape[-1:])
    fits = same and not scaled and are_known(summed)
    return value.is_floating_point() and may_have_elements(value) and fits
