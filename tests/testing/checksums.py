"""What holds of the checksums of products and sums: what is further off than their bound is told."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor, fx, nn

from fxpasses import inductor
from fxpasses.graph import ancestors
from fxpasses.guards.products import CHECKED, is_wrong, parts
from fxpasses.passes.check_products import CheckGradientProducts, CheckProducts
from fxpasses.passes.check_sums import CheckSums
from fxpasses.precision import ALLOW, class_of, operator_name
from fxpasses.rewrite import origin_of
from fxpasses.testing.capture import capture
from fxpasses.testing.check import check_run, run_over
from fxpasses.testing.operators import OPERATORS, PRODUCTS
from fxpasses.testing.oracles import Run
from fxpasses.testing.program import Layer, Program
from fxpasses.testing.synthetic import LAYOUTS, GradientGraph, Leaf, Step
from tests.testing.strikes import Damage, copied, increase, place_in, silent, struck, told_by


def checksums_as_promised(run: Run) -> None:
    """A product or sum that is far off is told, once, by its rank alone, whatever is computed from it."""
    nodes = _with_checksum(run)
    names = {n.name for n in nodes}
    assert {n.name for n in _own_nodes(run) if _has_to_have_one(run, n)} <= names
    assert names <= {n.name for n in _own_nodes(run)}
    if nodes:
        rest = run.reports[0].counts["unchecked"]
        assert run.reports[0].counts == {"checked": len(nodes), "unchecked": rest}
        if run.current.name != CheckSums.name:
            others = [n for n in _own_nodes(run) if n.name not in names]
            assert rest == sum(class_of(n) == ALLOW for n in others)
        _far_off_is_told(run)


def _far_off_is_told(run: Run) -> None:
    nodes = _with_checksum(run)
    node = nodes[run.seed % len(nodes)]
    (source, *rest) = node.all_input_nodes
    is_part = node.target is operator.getitem
    by = source.all_input_nodes if is_part else [source, *rest]
    found = struck(run, node, list(node.users), _far_off(run.seed), by)
    told_by(run, found, {run.seed % run.world}, _kind(run))


def _kind(run: Run) -> str:
    return "sum: " if run.current.name == CheckSums.name else "product: "


def bounds_as_promised(run: Run) -> None:
    """What is further off than the bound is told, and what is a little nearer is not."""
    nodes = [n for n in _with_checksum(run) if operator_name(n) in ("sum", *CHECKED)]
    if nodes:
        node = nodes[run.seed // 3 % len(nodes)]
        is_sum = operator_name(node) == "sum"
        by = node.all_input_nodes if is_sum else [n for n in parts(node) if n is not None]
        dims = node.args[1] if is_sum and len(node.args) > 1 else None
        for wanted in (0.85, 1.2):
            shares: list[float] = []
            near = _near_the_bound(run.seed, wanted, shares, dims, is_sum)
            found = struck(run, node, list(node.users), near, by)
            if shares and not 0.9 < shares[0] < 1.15:
                ranks = {run.seed % run.world} if shares[0] > 1 else set()
                told_by(run, found, ranks, _kind(run))


def _own_nodes(run: Run) -> list[fx.Node]:
    """The nodes of the forward or of the backward, whose products or sums the pass checks."""
    outputs = [n for _, n, role in run.before.outputs() if role.kind in ("output", "mutation")]
    forward = ancestors(n for n in outputs if n is not None)
    is_forward = run.current.stage == "joint"
    return [n for n in run.before.walk() if (n in forward) == is_forward]


def _with_checksum(run: Run) -> list[fx.Node]:
    checked = {origin_of(n).source for n in run.after.walk() if origin_of(n).rule == "checksum"}
    return [n for n in run.after.walk() if n.name in checked]


def _has_to_have_one(run: Run, node: fx.Node) -> bool:
    """A product of matrices of one dtype; a gradient that is a sum."""
    if run.current.name != CheckSums.name:
        is_one = operator_name(node) in ("mm", "bmm", "addmm", "baddbmm")
        is_one = is_one and all(x == 1 for x in node.kwargs.values())
    else:
        is_gradient = any(g.node is node for g in run.before.gradients())
        is_one = is_gradient and operator_name(node) == "sum"
    if not is_one:
        return False
    values = [n.meta["val"] for n in (node, *node.all_input_nodes)]
    static = all(isinstance(size, int) for value in values for size in value.shape)
    is_real = values[0].is_floating_point() and values[0].numel() != 0
    return is_real and static and len({value.dtype for value in values}) == 1


def product_graphs(forward: bool = False) -> st.SearchStrategy[GradientGraph]:
    """A product and sums, of matrices that are large enough for roundings to add up, among other operators.

    Args:
        forward: whether the program makes the product, of its inputs.
    """
    sizes = st.sampled_from((1, 2, 3, 7, 40))
    saved = ("neg", "exp", "large", "sin", "relu", "double", "bfloat16", "transpose")
    positions = st.integers(0, 12)
    others = st.builds(Step, st.sampled_from(OPERATORS), positions, positions)
    return st.builds(
        _product,
        st.tuples(sizes, sizes, sizes),
        st.sampled_from(("float32", "bfloat16", "float64")),
        st.tuples(st.sampled_from(LAYOUTS), st.sampled_from(LAYOUTS)),
        st.sampled_from((0, 0, 1, 10)),
        st.tuples(st.sampled_from(saved), st.sampled_from(PRODUCTS)),
        st.lists(others, max_size=4),
        st.lists(positions, max_size=2),
        st.just(forward),
    )


def _product(
    sizes: tuple[int, int, int],
    dtype: str,
    layouts: tuple[str, str],
    doubled: int,
    operators: tuple[str, str],
    others: list[Step],
    gradients: list[int],
    forward: bool,
) -> GradientGraph:
    """Args: doubled: how often the tangent is, before the product is made of it."""
    rows, columns, inner = sizes
    first = Step(operators[0], 1)
    large = tuple(Step("double", 2 + at if at else 0) for at in range(doubled))
    a, product = 2 + doubled if doubled else 0, 3 + doubled
    made = (Step(operators[1], a, 2), Step("sum", a), Step("sum", product))
    left, right = Leaf((inner, rows), dtype, layouts[0]), Leaf((inner, columns), dtype, layouts[1])
    return GradientGraph(
        tangents=() if forward else (left,),
        saved=(left, right) if forward else (right,),
        steps=(first, *large, *made, *others),
        gradients=(product, product + 1, product + 2, *gradients),
        outputs=(product, *gradients) if forward else (),
    )


def products_of_layers() -> None:
    """What has no checksum is counted, of the backward and of the forward."""
    matrix = torch.randn(3, 3, requires_grad=True)
    for scaled in (
        capture(lambda x: torch.addmm(x, x, x, alpha=2.0), matrix),
        capture(lambda x: torch.addmm(x, x, x, beta=2.0), matrix),
    ):
        assert not CheckProducts().run(scaled.joint).changed
    # The inner size of the gradient of the input is known, that of the weight's is the batch.
    dynamic = Program((Layer("linear"),), batch=3, dynamic=True).captured().backward.copy()
    assert CheckGradientProducts().run(dynamic).counts == {"checked": 1, "unchecked": 1}
    model = nn.Sequential(nn.Conv2d(2, 3, 2), nn.Flatten(), nn.Linear(27, 5))
    captured = capture(model, torch.randn(2, 2, 4, 4))
    for current, graph, count in (
        (CheckGradientProducts(), captured.backward, 2),
        (CheckProducts(), captured.joint, 1),
    ):
        run = run_over(current, graph, {"world": 2}, count)
        assert run.reports[0].counts == {"checked": count, "unchecked": 1}
        silent(run)
        _far_off_is_told(run)


def sums_of_layers() -> None:
    """Each kind of sum that layers make of gradients, as torch writes it and as Inductor takes it apart."""
    ids = torch.tensor([[0, 1, 2], [2, 2, 5]])
    layers: dict[str, tuple[nn.Module, Tensor, int]] = {
        "linear": (nn.Linear(5, 4), torch.randn(3, 5), 1),
        "norm": (nn.LayerNorm(6), torch.randn(2, 2, 6), 2),
        "convolution": (nn.Conv2d(2, 3, 2), torch.randn(2, 2, 4, 4), 1),
        "embedding": (nn.Embedding(6, 4), ids, 1),
        "padded": (nn.Embedding(6, 4, padding_idx=0), ids, 1),
    }
    for decompositions in (None, inductor.decompositions()):
        for kind, (layer, x, count) in layers.items():
            graph = capture(layer, x, decompositions=decompositions).backward
            for seed in range(4):
                run = run_over(CheckSums(), graph, {"world": 1 + seed % 2}, seed)
                assert run.reports[0].counts.get("checked", 0) == count, kind
                silent(run)
                checksums_as_promised(run)


def chosen_products() -> None:
    """What is added in each of its forms; one element that all others are small beside; and overflow."""
    a, b = torch.randn(3, 4), torch.randn(4, 5)
    for shape in ((5,), (3, 5), (1, 5), (3, 1), (1,), ()):
        d = torch.randn(shape)
        c = torch.addmm(d, a, b)
        assert not is_wrong(c, a, b, d) and is_wrong(c + c.new_tensor([0, 0, 0, 0, 1e-3]), a, b, d)
    row = torch.zeros(1, 16)
    row[0, 0] = 1.0
    assert not is_wrong(row * (1 + 4e-6), torch.ones(1, 1), row, None)
    assert is_wrong(row * (1 + 8e-6), torch.ones(1, 1), row, None)
    ones, inner = torch.ones(1, 100, dtype=torch.float16), torch.arange(100).unsqueeze(1)
    large = torch.full((100, 1), 1000.0, dtype=torch.float16)
    infinite = torch.full((1, 1), torch.inf, dtype=torch.float16)
    assert not is_wrong(infinite, ones, large, None), "its terms add up to more than there is"
    assert is_wrong(infinite, ones, large / 100, None)
    cancelling = torch.where(inner % 2 == 0, large, -large)
    assert is_wrong(infinite.new_full((1, 1), 3e4), ones, cancelling, None)
    assert not is_wrong(infinite.new_zeros((1, 1)), ones, cancelling, None)


def chosen_sums() -> None:
    """What nothing makes, or is empty, counts nowhere; what is summed to another dtype has no checksum."""
    source = GradientGraph(
        (Leaf((2, 3)), Leaf((0, 3))), (Step("sum", 0), Step("neg", 1), Step("neg", 0)), (0, 2, 3, 4)
    )
    assert CheckSums().run(source.build()).counts == {"checked": 1, "unchecked": 1}
    steps = (Step("product", 0, 1), Step("sum", 0))
    both = GradientGraph((Leaf((3, 2)),), steps, (2, 3), saved=(Leaf((3, 4)),))
    assert CheckSums().run(both.build()).counts == {"checked": 1, "unchecked": 0}
    low = GradientGraph((Leaf((2, 3), "bfloat16"),), (Step("sum", 0),), gradients=(1,)).build()
    (total,) = (n for n in low.walk())
    total.kwargs = {"dtype": torch.float32}
    with low.fake_mode:
        total.meta["val"] = total.meta["val"].float()
    assert not CheckSums().run(low).changed
    by_frequency = nn.Embedding(6, 4, scale_grad_by_freq=True)
    assert not CheckSums().run(capture(by_frequency, torch.tensor([0, 1])).backward).changed
    for kind in ("linear", "layer_norm"):
        dynamic = Program((Layer(kind),), batch=3, dynamic=True).captured().backward.copy()
        assert not CheckSums().run(dynamic).changed, "how many are added up is not known"


def columns_that_vary() -> None:
    """The bound of a product depends on how many there are: they were burnt in. The sums of such a product that
    go over what is known are checked.
    """
    program = Program((Layer("linear", 2), Layer("over_batch")), batch=3, dynamic=True)
    for current in (CheckProducts(), CheckGradientProducts()):
        run = check_run(current, program, {"world": 1, "group": "world"})
        counts = run.reports[0].counts
        assert run.other_sizes and counts["checked"] and counts["unchecked"]


SINGLE = (sums_of_layers, products_of_layers, chosen_products, chosen_sums, columns_that_vary)


def _far_off(seed: int) -> Damage:
    """Add more to one element than all that a product or sum of these can be, where that fits its dtype."""

    def add(value: Tensor, *by: Any) -> Tensor | None:
        floats = [x for x in by if isinstance(x, Tensor) and x.is_floating_point()]
        size = math.prod(1 + float(x.double().abs().sum()) for x in floats)
        fits = size < torch.finfo(value.dtype).max / 1e3 and bool(value.isfinite().all())
        return increase(seed, size)(value) if fits else None

    return add


def _near_the_bound(
    seed: int, share: float, shares: list[float], dims: Sequence[int] | None, is_sum: bool
) -> Damage:
    """Let one row's checksum be so much of its bound away: the formula of `guards/products.py`, in fp64.

    Args:
        share: how much of it.
        shares: takes in how much it is, as the operator's dtype has it.
        dims: of a sum; None: all.
    """

    def add(value: Tensor, *by: Tensor) -> Tensor | None:
        if is_sum:
            c, a = _as_rows(value, by[0], dims)
            b_sums = b_squares = torch.ones((), dtype=torch.float64)
            d = None
        else:
            c, (a, b, *added) = value, by
            b_sums = b.double().sum(-1).unsqueeze(-2)
            b_squares = torch.maximum(b.double().square().sum(-1), b.double().sum(-1) ** 2)
            b_squares, d = b_squares.unsqueeze(-2), added[0] if added else None
        at = place_in(seed // 7, c)
        row, wide = at[:-1], c.double()
        a = a.double()
        expected = (a * b_sums).sum(-1)
        if d is not None:
            expected = expected + (d.double() + torch.zeros_like(wide)).sum(-1)
        walk = (a.square() * b_squares).sum(-1).sqrt()
        for _ in range(30):
            bound = _bound(wide, c.dtype, a.shape[-1], walk, is_sum)
            wide[at] += expected[row] + share * bound[row] - wide.sum(-1)[row]
        wide[at] = wide[at].to(c.dtype).double()
        bound = _bound(wide, c.dtype, a.shape[-1], walk, is_sum)[row]
        largest = max(float(wide.abs().sum()), float(walk.max()) * a.shape[-1])
        if not largest < torch.finfo(c.dtype).max / 1e3:
            return None
        shares.append(float((wide.sum(-1)[row] - expected[row]).abs() / bound))
        other = copied(value)
        assert other is not None, "what operators make has memory for each element"
        other.reshape(c.shape)[at] = wide[at].to(c.dtype)
        return other

    return add


def _as_rows(value: Tensor, x: Tensor, dims: Sequence[int] | None) -> tuple[Tensor, Tensor]:
    """A sum and its terms: [M, 1] and [M, K]."""
    gone = {d % x.dim() for d in (range(x.dim()) if dims is None else dims)} if x.dim() else set()
    kept = [d for d in range(x.dim()) if d not in gone]
    return value.reshape(-1, 1), x.permute([*kept, *sorted(gone)]).reshape(value.numel(), -1)


def _bound(c: Tensor, dtype: torch.dtype, inner: int, walk: Tensor, is_sum: bool) -> Tensor:
    """By row, how far a checksum may be off.

    Args:
        c: [..., M, N] fp64, what the operator returned in `dtype`.
        walk: [..., M], w of the formula.
    """
    wide = torch.promote_types(dtype, torch.float32)
    unit = torch.finfo(wide).eps / 2
    last = torch.finfo(dtype).eps / 2 if dtype.itemsize < 4 else 0.0
    outer = c.shape[-1]
    m = torch.minimum(math.sqrt(outer) * c.abs().amax(-1), c.abs().sum(-1))
    drift = unit * (math.sqrt(inner) + math.sqrt(outer)) + last
    bound = 8 * unit * (2 * math.sqrt(inner) + math.sqrt(outer)) * walk
    checked_in = torch.float64 if is_sum else wide
    tiny = torch.finfo(dtype).tiny * outer
    tiny += unit * math.sqrt(torch.finfo(checked_in).tiny) * inner * outer
    return bound + 8 * drift * torch.maximum(m, c.sum(-1).abs()) + tiny
