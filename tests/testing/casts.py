"""What `cast` promises: which operators run low, what they read, and that no cast is there for nothing.

Its bound is one for each operator (over inputs rounded once), so what is proved is the form of the graph: the
same operators, on the same values, in the dtypes that the table of operators calls for.
"""

from __future__ import annotations

import fnmatch
from typing import Any

import torch
from torch import fx

from fxpasses.graph import TrainingGraph
from fxpasses.passes.cast import Cast
from fxpasses.precision import TABLE
from fxpasses.rewrite import Provenance, model_line
from fxpasses.testing.oracles import Run

LOW = {"bf16": torch.bfloat16, "fp16": torch.float16}
CASTS = ("_to_copy", "convert_element_type")
# Statistics of attention: fp32 also where the operator runs low.
STATISTICS = {"_scaled_dot_product_flash_attention_for_cpu_backward": 5}
# Where something is drawn: their dtype is an argument.
MEMORY = ("empty", "new_empty", "empty_like")
COMMUTE = ("relu", "neg", "abs")  # rounded before or after: the same
MAY_MIX = ("add", "sub", "mul", "div", "maximum", "minimum", "where")
MAY_COMPARE = ("eq", "ne", "lt", "le", "gt", "ge", "isnan", "isinf", "isfinite")


class Casts:
    """A graph before and after the pass, side by side."""

    def __init__(self, run: Run) -> None:
        assert isinstance(run.current, Cast) and run.current.dtype is not None
        self.low, self.rules = LOW[run.current.dtype], run.current.rules or ""
        self.before = {n.name: n for n in run.before.graph.nodes}
        self.after = {n.name: n for n in run.after.graph.nodes}
        self.own = [self.after[n.name] for n in run.before.walk() if n.name in self.after]
        self.made = [n for n in run.after.walk() if n.name not in self.before]
        self.lowered = {n for n in self.own if dtype(n) != dtype(self.before[n.name])}
        self.made_of_low: set[fx.Node] = set()  # of the graph before
        for node in run.before.walk():
            if self._is_made_of_low(node):
                self.made_of_low.add(node)

    def origin(self, node: fx.Node) -> fx.Node:
        """What a node of the graph read before, by what it reads now."""
        if node.name in self.before:
            return self.before[node.name]
        return self.before[node.meta["provenance"].source]

    def _is_made_of_low(self, node: fx.Node) -> bool:
        """Whether no digits of it count that are lost if it is rounded: it is low, or made of such values
        alone; what a batch norm makes counts like what it reads.
        """
        if dtype(node) == self.low or self.after.get(node.name) in self.lowered:
            return True
        read = [n for n in node.all_input_nodes if dtype(n) in (torch.float32, self.low)]
        low = [n for n in read if n in self.made_of_low or dtype(n) == self.low]
        names = (name(node), str(node.meta.get("original_aten", "")))
        if any("batch_norm" in x and "backward" not in x for x in names) and not said(node):
            return bool(low)
        kind = "deny" if said(node) == "keep" else self.kind(node)
        stays = kind == "infer" and (said(node) or not fits(node, self.low))
        values = [n for n in read if not is_small(n, self.low)]
        return kind in ("infer", "clear") and not stays and bool(values) and set(values) <= set(low)

    def kind(self, node: fx.Node) -> str:
        """The class of an operator, by the rules of the option, else by the table."""
        stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
        modules = [path.partition(".")[2] for path, _ in stack.values()]  # L['program'].m0
        if name(node) == "getitem":
            return "clear"
        if "effect" in node.meta:
            return "deny"
        found = TABLE.get(name(node), "deny")
        for rule in filter(None, self.rules.split(";")):
            pattern, kind = rule.split("=")
            if pattern == f"aten.{name(node)}" or any(fnmatch.fnmatch(m, pattern) for m in modules):
                found = kind
        return found


def said(node: fx.Node) -> str | None:
    """What the program says about precision: `keep`, or `explicit` behind a `.float()`; of a part, what it says
    of the whole.
    """
    node = node.args[0] if name(node) == "getitem" else node  # type: ignore[assignment]
    return (node.meta.get("custom") or {}).get("precision")


def name(node: fx.Node) -> str:
    return str(
        getattr(node.target, "_opname", None) or getattr(node.target, "__name__", node.target)
    )


def dtype(node: fx.Node) -> torch.dtype | None:
    """Of several values, the first: of a backward that makes only some, the first of these."""
    value = node.meta.get("val")
    values = value if isinstance(value, list | tuple) else [value]
    found = [v.dtype for v in values if isinstance(v, torch.Tensor)]
    return found[0] if found else None


def is_tuple(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), list | tuple)


def is_one_number(node: fx.Node) -> bool:
    return name(node) in ("full", "scalar_tensor") and node.meta["val"].numel() == 1


def is_mask(node: fx.Node) -> bool:
    return name(node) in CASTS and dtype(node.all_input_nodes[0]) == torch.bool


def casts_as_promised(run: Run) -> None:
    if run.current.dtype == "fp32":  # type: ignore[attr-defined]
        assert not run.reports[0].changed
        return
    casts = some_casts_as_promised(run)
    low_where_allowed(casts)
    few_casts(casts)


def some_casts_as_promised(run: Run) -> Casts:
    """What holds whichever operators are lowered."""
    casts = Casts(run)
    for check in (same_operators, casts_in_place, reads_right):
        check(casts)
    number = [
        n for n in casts.made if name(n) in CASTS and dtype(n.all_input_nodes[0]) != torch.bool
    ]
    counts = {"lowered": len(casts.lowered), "casts": len(number)}
    assert run.reports[0].counts == (counts if casts.lowered else {}), run.reports[0]
    fakes_true(run.after, run)
    return casts


def same_operators(casts: Casts) -> None:
    """Each operator of the program is there, in order, on the values that it had, cast or not; a number or
    a mask may have been replaced.
    """
    for new in [*casts.own, next(n for n in casts.after.values() if n.op == "output")]:
        old = casts.before[new.name]
        assert new.target is old.target
        args, kwargs = fx.map_arg((new.args, new.kwargs), lambda n: casts.origin(n).name)
        expected = fx.map_arg((old.args, old.kwargs), lambda n: n.name)
        if name(new) in MEMORY:
            kwargs, expected = dict(kwargs), (expected[0], dict(expected[1]))
            assert kwargs.pop("dtype", dtype(new)) == dtype(new)
            expected[1].pop("dtype", None)
        assert (args, kwargs) == expected, f"{new.name} reads {args}, not {expected[0]}"
    gone = [n for n in casts.before.values() if n.name not in casts.after]
    replaced = {n.meta["provenance"].source for n in casts.made}
    assert all((is_mask(n) or is_one_number(n)) and n.name in replaced for n in gone), gone
    order = [name for name in casts.after if name in casts.before]
    assert order == [x for x in casts.before if x in casts.after], "operators have moved"


def casts_in_place(casts: Casts) -> None:
    """A cast reads the value that it says, stands right behind it, and is the only one to its dtype."""
    order = list(casts.after.values())
    seen = set()
    for node in casts.made:
        why = node.meta["provenance"]
        source = casts.after.get(why.source, casts.before[why.source])
        assert why == Provenance("cast", "cast", source.name, model_line(source))
        assert (source, dtype(node)) not in seen, f"{source.name} is cast twice to {dtype(node)}"
        seen.add((source, dtype(node)))
        assert dtype(node) == (torch.float32 if dtype(source) == casts.low else casts.low)
        if name(node) in CASTS:
            read = source.all_input_nodes[0] if is_mask(source) else source
            assert node.all_input_nodes[0].name == read.name
            fits_low = is_one_number(source) and has(casts.low, number(source))
            assert not fits_low, f"{source.name} is a number, and cast"
        else:
            assert is_one_number(source) and number(node) == number(source)
            assert node.meta["val"].shape == source.meta["val"].shape, f"{source.name} is stretched"
        if source.name in casts.after:
            between = order[order.index(source) + 1 : order.index(node)]
            assert all(n in casts.made or n.op == "placeholder" for n in between), (
                "stands elsewhere"
            )


def number(node: fx.Node) -> float:
    return node.args[1] if name(node) == "full" else node.args[0]  # type: ignore[return-value]


def low_where_allowed(casts: Casts) -> None:
    """What makes fp32 may be lowered, by its class; a product is, wherever the program doesn't say no."""
    for node in casts.own:
        old = casts.before[node.name]
        kind = casts.kind(old)
        if node in casts.lowered:
            assert dtype(old) == torch.float32 and dtype(node) == casts.low
            assert kind != "deny" and said(old) != "keep", f"{node.name} is lowered"
            assert kind != "infer" or (said(old) != "explicit" and fits(old, casts.low))
            if kind in ("infer", "clear"):
                _follows_low(casts, node)
        elif kind == "allow" and dtype(old) == torch.float32 and said(old) != "keep":
            raise AssertionError(f"{node.name} is a product in fp32")


def fits(node: fx.Node, low: torch.dtype) -> bool:
    return all(has(low, a) for a in node.args if isinstance(a, float))


def has(low: torch.dtype, number: float) -> bool:
    """Whether a number is in the range of a dtype."""
    return abs(number) <= torch.finfo(low).max or abs(number) == float("inf")


def _follows_low(casts: Casts, node: fx.Node) -> None:
    """It reads something low, and no value for the first time: but for what only moves values to products, and
    what commutes with rounding, which the value would have been cast behind.
    """
    cast_for_it = [
        n
        for n in node.all_input_nodes
        if n in casts.made and dtype(n) == casts.low and not is_small(casts.origin(n), casts.low)
    ]
    to_products = casts.kind(casts.before[node.name]) == "clear" and len(node.all_input_nodes) <= 1
    is_chosen = name(node) == "bernoulli" and name(node.all_input_nodes[0]) not in MEMORY
    if to_products and not is_chosen and all(user in casts.lowered for user in node.users):
        return
    if cast_for_it and name(node) in COMMUTE and node.users.keys() & casts.lowered:
        others = [user for user in node.users if user not in casts.lowered]
        assert all(name(user) in (*MAY_COMPARE, *MAY_MIX) for user in others)
        assert not any(map(said, others)), f"{others} read {node.name} where they are pinned"
        streams = [n for n in cast_for_it if casts.origin(n) not in casts.made_of_low]
        assert not (others and streams), f"{others} read {streams} rounded"
        return
    assert not cast_for_it, f"{[n.name for n in cast_for_it]} for {node.name}, which is no product"


def is_small(node: fx.Node, low: torch.dtype) -> bool:
    """A number that fits, or a mask as numbers (or a multiple of one): no cast of a value."""
    if name(node) in ("mul", "div") and len(node.all_input_nodes) == 1:
        return is_small(node.all_input_nodes[0], low)
    fits_low = is_one_number(node) and has(low, number(node))
    return is_mask(node) or fits_low or name(node) == "bernoulli"


def reads_right(casts: Casts) -> None:
    """What is lowered reads low values, but for statistics; what is not reads what it did, or widens itself."""
    for node in casts.own:
        old = casts.before[node.name]
        read = [n for n in node.all_input_nodes if not is_tuple(n)]
        if name(node) in MEMORY:
            assert node not in casts.lowered or all(name(u) == "bernoulli" for u in node.users)
            assert not any(n in casts.made for n in read), f"{read} for the shape of {node.name}"
        elif node in casts.lowered:
            kept = old.args[STATISTICS[name(old)]].name if name(old) in STATISTICS else ""  # type: ignore[union-attr]
            wide = [n for n in read if dtype(n) == torch.float32 and n.name != kept]
            assert not wide or is_tuple(read[0]), f"{node.name} is low and reads {wide}"
            assert not kept or dtype(casts.after[kept]) == torch.float32
        elif name(node) not in CASTS:
            changed = [n for n in read if dtype(n) != dtype(casts.origin(n))]
            assert not changed or _widens(casts, node), f"{node.name} reads {changed} low"


def _widens(casts: Casts, node: fx.Node) -> bool:
    """Whether it makes the same of low values as if they had been cast."""
    if name(node) in MAY_COMPARE:
        return _compares_exactly(casts, node) and all(
            dtype(n) == casts.low for n in node.all_input_nodes
        )
    return name(node) in MAY_MIX and dtype(node) == torch.float32


def _compares_exactly(casts: Casts, node: fx.Node) -> bool:
    numbers = [a for a in node.args if isinstance(a, int | float)]
    return all(torch.tensor(a, dtype=casts.low).double().item() == a for a in numbers)


def few_casts(casts: Casts) -> None:
    """No cast is idle, and none could be spared: see below."""
    for node in casts.made:
        assert node.users, f"{node.name} is for nothing"
    for node in casts.own:
        kind = casts.kind(casts.before[node.name])
        if node in casts.lowered and kind == "infer" and not is_tuple(node):
            readers = [u for u in node.users if u in casts.lowered]
            low = [n for n in node.all_input_nodes if dtype(n) == casts.low and n in casts.own]
            assert readers or len(low) != 1, f"{node.name} is low and only leads to fp32"
        if node in casts.lowered and not is_tuple(node):
            _parts_cast_together(casts, node)
        if dtype(node) == torch.float32 and kind == "clear" and not said(node):
            _part_cast_behind(casts, node)
        _drawn_low(casts, node)
        _streams_exist_once(casts, node)
        if dtype(node) == torch.float32 and kind in ("infer", "clear") and not is_tuple(node):
            _not_up_and_down(casts, node, kind)
        _no_cast_to_mix(casts, node)


def _not_up_and_down(casts: Casts, node: fx.Node, kind: str) -> None:
    """What reads low values only does not stand in fp32 between two casts; what moves one value to products
    only does not stand in front of the cast.
    """
    if said(node) == "keep" or is_small(node, casts.low) or not fits(node, casts.low):
        return
    down = [n for n in casts.made if n.meta["provenance"].source == node.name]
    down = [n for n in down if dtype(n) == casts.low]
    values = [n for n in node.all_input_nodes if not is_small(casts.origin(n), casts.low)]
    values = [n for n in values if dtype(n) in (torch.float32, casts.low)]
    origins = [casts.after.get(casts.origin(n).name) for n in values]
    all_low = bool(values) and all(n is not None and dtype(n) == casts.low for n in origins)
    if said(node) != "explicit" or kind == "clear":
        assert not (down and all_low), f"{node.name} stands between casts"
        up = [n for n in values if n in casts.made]
        together = kind == "infer" and all_low and len(up) > 1
        assert not together, f"{node.name} reads {up}, and only its result had to be cast"
    only_down = all(user in down for user in node.users)
    moves = kind == "clear" and len(node.all_input_nodes) == 1 and name(node) != "getitem"
    assert not (moves and down and only_down), f"{node.name} is cast behind what moves it"


def _streams_exist_once(casts: Casts, node: fx.Node) -> None:
    """What commutes with rounding is cast in front, not behind, where it is read low and whoever else reads it
    takes a low value as well, of what is made of low values.
    """
    old = casts.before[node.name]
    free = name(node) in COMMUTE and casts.kind(old) == "infer" and not said(old)
    if not free or dtype(node) != torch.float32:
        return
    down = [n for n in node.users if n in casts.made and dtype(n) == casts.low]
    others = [n for n in node.users if n not in down]
    takes_low = all(_takes_low(casts, user, node) for user in others)
    spared = takes_low and (old in casts.made_of_low or not others)
    assert not (down and spared), f"{node.name} is there twice, in fp32 for {others}"


def _takes_low(casts: Casts, user: fx.Node, node: fx.Node) -> bool:
    """Whether it compares with a number that the low dtype has, or adds to a value that stays fp32 for sure."""
    if said(user) or name(user) not in (*MAY_COMPARE, *MAY_MIX):
        return False
    others = [n for n in user.all_input_nodes if n is not node]
    if name(user) in MAY_COMPARE:
        return not others and _compares_exactly(casts, user)
    wide = [casts.origin(n) for n in others if n not in casts.lowered and n.meta["val"].dim()]
    wide = [n for n in wide if dtype(n) == torch.float32]
    return any(
        n.op == "placeholder" or name(n) == "getitem" or casts.kind(n) == "deny" for n in wide
    )


def _no_cast_to_mix(casts: Casts, node: fx.Node) -> None:
    """An operator that widens low values by itself is given no casts, nor is a cast of the program."""
    up = [n for n in node.all_input_nodes if n in casts.made and dtype(n) == torch.float32]
    if not up or node in casts.lowered:
        return
    assert name(node) not in CASTS, f"{node.name} casts {up}"
    if name(node) in MAY_COMPARE:
        low = all(
            dtype(casts.after[casts.origin(n).name]) == casts.low for n in node.all_input_nodes
        )
        assert not (low and _compares_exactly(casts, node)), f"{up} for a comparison"
    if name(node) in MAY_MIX:
        others = [n for n in node.all_input_nodes if n not in up and dtype(n) == torch.float32]
        assert not any(n.meta["val"].dim() for n in others), f"{up} for {node.name}, which widens"


def _parts_cast_together(casts: Casts, node: fx.Node) -> None:
    """Of one low value that is moved in several ways, to fp32 only, or is read itself in fp32, it is the value
    that is cast.
    """
    moved = [user for user in node.users if _only_leads_up(casts, user)]
    parts = sum(len(_low_parts(casts, user)) for user in moved)
    direct = any(user not in casts.lowered for user in node.users)
    assert parts + direct < 2 or not moved, f"{moved} of {node.name} are cast one by one"


def _only_leads_up(casts: Casts, node: fx.Node) -> bool:
    """Whether it moves a low value that then is only read in fp32."""
    if node not in casts.lowered or casts.kind(casts.before[node.name]) != "clear":
        return False
    readers = {user for part in _low_parts(casts, node) for user in part.users}
    return bool(readers) and not readers & casts.lowered


def _low_parts(casts: Casts, node: fx.Node) -> list[fx.Node]:
    """The value itself; of several those that are low."""
    return [n for n in (node.users if is_tuple(node) else (node,)) if n in casts.lowered]


def _part_cast_behind(casts: Casts, node: fx.Node) -> None:
    """Of a low value that is read in fp32 only where it is moved, in one way, it is what was moved that is
    cast: it may be less.
    """
    parts = [n for n in node.users if dtype(n) == torch.float32] if is_tuple(node) else [node]
    if len(node.all_input_nodes) != 1 or len(parts) != 1:
        return
    (up,) = node.all_input_nodes
    source = casts.after.get(casts.origin(up).name) if up in casts.made else None
    if source is None or dtype(source) != casts.low or name(node) == "getitem":
        return
    others = [user for user in (*source.users, *up.users) if user not in casts.lowered]
    assert set(others) != {up, node}, f"{source.name} is cast in front of {node.name}"


def _drawn_low(casts: Casts, node: fx.Node) -> None:
    """A mask drawn with one probability, and a multiple of it, are drawn low where they are read low only; then
    so is the memory that it is drawn in, in place of a cast.
    """
    low = {n for n in casts.made if dtype(n) == casts.low}
    old = casts.before[node.name]
    if name(node) in MEMORY and all(name(user) == "bernoulli" for user in old.users):
        is_free = casts.kind(old) in ("infer", "clear") and said(old) != "keep"
        assert not is_free or not node.users or not node.users.keys() <= low, f"{node.name} is cast"
    drawn = node
    while name(drawn) in ("mul", "div") and len(drawn.all_input_nodes) == 1:
        (drawn,) = drawn.all_input_nodes
    if name(drawn) != "bernoulli" or name(drawn.all_input_nodes[0]) not in MEMORY:
        return
    free = [n for n in (node, drawn, *drawn.all_input_nodes) if casts.kind(n) in ("infer", "clear")]
    if len(free) < 3 or any(map(said, free)) or not fits(node, casts.low):
        return
    assert not node.users or not node.users.keys() <= low, f"{node.name} is drawn in fp32"


def fakes_true(graph: TrainingGraph, run: Run) -> None:
    """Every value has the dtype and shape that its fake one says, for those behind it go by that."""
    from fxpasses.testing.values import random_inputs

    class Checks(fx.Interpreter):
        def run_node(self, n: fx.Node) -> Any:
            value, fake = super().run_node(n), n.meta.get("val")
            if isinstance(value, torch.Tensor) and isinstance(fake, torch.Tensor):
                assert value.dim() == fake.dim(), n.name
                # The mask of a dropout of nothing is none of bools, on a CPU.
                assert value.dtype == fake.dtype or not value.numel(), n.name
                assert n.meta.get("tensor_meta", fake).dtype == fake.dtype, n.name
            return value

    Checks(graph.module).run(*random_inputs(graph, run.seed * 97))
