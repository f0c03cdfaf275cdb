"""Low precision where the table allows it, with few casts."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

from fxpasses.graph import TrainingGraph
from fxpasses.inductor import decompositions
from fxpasses.observers import CheckRules
from fxpasses.passes.base import Report
from fxpasses.passes.cast import Cast
from fxpasses.pipeline import Pipeline
from fxpasses.precision import operator_name
from fxpasses.testing import capture
from tests.graphs import execute, mlp

LOW = {"bf16": torch.bfloat16, "fp16": torch.float16}


def joint_of(program, *args: torch.Tensor) -> TrainingGraph:
    return capture(program, *args).joint


def casts(graph: TrainingGraph) -> list[tuple[str, torch.dtype]]:
    """What each cast reads, and to what."""
    found = [n for n in graph.walk() if operator_name(n) in ("_to_copy", "convert_element_type")]
    return [(n.args[0].name, n.meta["val"].dtype) for n in found]


def dtypes_of(graph: TrainingGraph, operator: str) -> set[torch.dtype]:
    return {n.meta["val"].dtype for n in graph.walk() if operator_name(n) == operator}


def dtypes(node: fx.Node) -> set[torch.dtype]:
    value = node.meta["val"]
    values = value if isinstance(value, list | tuple) else [value]
    return {v.dtype for v in values if v is not None}


def checked(graph: TrainingGraph, current: Cast) -> Report:
    (done,) = Pipeline((current,)).run("joint", graph, [CheckRules()])
    return done.report


def cast(dtype: str = "bf16", rules: str = "") -> Cast:
    return Cast(dtype=dtype, rules=rules)


# What it does


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_products_run_low_and_outputs_keep_their_dtypes(dtype):
    model = mlp(4, 4, 2)
    graph = joint_of(lambda x: model(x).sum(), torch.randn(3, 4))
    checked(graph, cast(dtype))
    assert dtypes_of(graph, "mm") == dtypes_of(graph, "addmm") == {LOW[dtype]}
    assert {n.meta["val"].dtype for _, n, _ in graph.outputs() if n is not None} == {torch.float32}


def test_each_parameter_is_cast_once_for_forward_and_backward():
    model = mlp(4, 4, 4)
    graph = joint_of(lambda x: model(model(x)).sum(), torch.randn(3, 4))
    report = checked(graph, cast())
    parameters = {node.name for node, _ in graph.inputs("parameter")}
    down = [name for name, dtype in casts(graph) if dtype == torch.bfloat16]
    assert sorted(name for name in down if name in parameters) == sorted(parameters)
    assert report.counts["casts"] == len(casts(graph))


def test_no_cast_surrounds_what_lies_between_products():
    first, second = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
    graph = joint_of(lambda x: second(first(x).relu().mT.mT.clone()).exp(), torch.randn(3, 4))
    checked(graph, cast())
    up = [name for name, dtype in casts(graph) if dtype == torch.float32]
    gradients = len(graph.gradients())
    assert len(up) == gradients + 1, "one in front of exp, and the gradients"


def test_what_reduces_stays_fp32():
    layer = nn.Linear(4, 4)
    graph = joint_of(lambda x: F.layer_norm(layer(x), (4,)).softmax(-1).sum(), torch.randn(3, 4))
    checked(graph, cast())
    assert dtypes_of(graph, "_softmax") == {torch.float32}
    norms = [n for n in graph.walk() if operator_name(n) == "native_layer_norm"]
    assert norms and all(n.meta["val"][0].dtype == torch.float32 for n in norms)


def test_attention_runs_low_and_its_statistics_stay_fp32():
    layer = nn.Linear(8, 8)

    def program(x: torch.Tensor) -> torch.Tensor:
        q = layer(x).view(2, 5, 2, 4).transpose(1, 2)
        return F.scaled_dot_product_attention(q, q, q, is_causal=True).square().sum()

    graph = joint_of(program, torch.randn(2, 5, 8))
    checked(graph, cast())
    (attention,) = (
        n
        for n in graph.walk()
        if "attention_for_cpu" in str(n.target) and "backward" not in str(n.target)
    )
    assert [v.dtype for v in attention.meta["val"][:2]] == [torch.bfloat16, torch.float32]


def test_a_mixed_sum_promotes_without_a_cast():
    layer = nn.Linear(4, 4, bias=False)
    graph = joint_of(lambda x: (x + layer(x)).exp().sum(), torch.randn(3, 4))
    checked(graph, cast())
    (mixed,) = (n for n in graph.walk() if operator_name(n) == "add")
    assert {n.meta["val"].dtype for n in mixed.all_input_nodes} == {torch.float32, torch.bfloat16}
    assert mixed.meta["val"].dtype == torch.float32


# What it leaves alone


def test_fp32_changes_nothing():
    graph = joint_of(mlp(4, 4), torch.randn(3, 4))
    before = graph.fingerprint()
    assert cast("fp32").run(graph) == Report(changed=False)
    assert graph.fingerprint() == before


def test_a_graph_without_products_is_left_alone():
    scale = nn.Parameter(torch.ones(4))
    graph = joint_of(lambda x: (x * scale).exp().sum(), torch.randn(3, 4))
    before = graph.fingerprint()
    assert cast().run(graph) == Report(changed=False)
    assert graph.fingerprint() == before


def test_case_5_a_norm_that_is_low_already_gets_no_cast():
    norm = nn.RMSNorm(8, dtype=torch.bfloat16)
    graph = joint_of(norm, torch.randn(2, 8, dtype=torch.bfloat16))
    before, count = graph.fingerprint(), len(casts(graph))
    assert cast().run(graph) == Report(changed=False)
    assert graph.fingerprint() == before and len(casts(graph)) == count


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_what_the_program_computes_in_another_dtype_stays(dtype):
    layer = nn.Linear(4, 4, dtype=dtype)
    graph = joint_of(layer, torch.randn(3, 4, dtype=dtype))
    assert cast().run(graph) == Report(changed=False)


def test_the_programs_own_casts_stay():
    layer = nn.Linear(4, 4, bias=False)
    graph = joint_of(lambda x: layer(x).double().sum(), torch.randn(3, 4))
    checked(graph, cast())
    doubles = [
        n
        for n in graph.walk()
        if operator_name(n) == "_to_copy" and n.meta["val"].dtype == torch.float64
    ]
    assert [n.args[0].meta["val"].dtype for n in doubles] == [torch.bfloat16], "no detour over fp32"


def test_a_number_that_does_not_fit_keeps_its_operator_in_fp32():
    layer, mask = nn.Linear(4, 4), torch.ones(4, 4, dtype=torch.bool).triu(1)
    for dtype, expected in (("fp16", torch.float32), ("bf16", torch.bfloat16)):
        graph = joint_of(lambda x: layer(x).masked_fill(mask, -1e9) @ x, torch.randn(4, 4))
        checked(graph, cast(dtype))
        (filled,) = (n for n in graph.walk() if -1e9 in n.args)
        assert filled.meta["val"].dtype == expected


@pytest.mark.parametrize(
    "program",
    [
        lambda y: y @ torch.full((1, 1), 2.0),
        lambda y: torch.cat([y[0], torch.full((1,), 2.0)]) @ y[:2],
        lambda y: (y[0, 0] + torch.full((1,), 2.0)) @ y[:1],
    ],
)
def test_a_number_keeps_its_dimensions(program):
    layer = nn.Linear(4, 1)
    graph = joint_of(lambda x: program(layer(x)).sum(), torch.randn(3, 4))
    checked(graph, cast())
    assert dtypes_of(graph, "full") == {torch.bfloat16}


def test_a_backward_that_makes_no_gradient_of_its_input_is_counted():
    layer = nn.Conv1d(2, 2, 1, bias=False)
    graph = joint_of(lambda x: layer(x).sum(), torch.randn(2, 2, 4))
    report = checked(graph, cast())
    products = [n for n in graph.walk() if operator_name(n).startswith("convolution")]
    assert products[1].meta["val"][0] is None
    parts = [n for n in products[1].users if operator_name(n) == "getitem"]
    moved = [n for n in graph.walk() if operator_name(n) == "expand"]
    low = [n for n in (*products, *parts, *moved) if torch.bfloat16 in dtypes(n)]
    assert report.counts["lowered"] == len(low) >= 3


def test_a_mask_is_drawn_low_and_draws_what_it_drew():
    # Dropout of channels draws one number for each, which several values are multiplied with.
    low, wide = nn.Conv1d(4, 4, 1), nn.Dropout1d(0.4)
    x = torch.randn(3, 4, 5)
    graph = joint_of(lambda x: low(wide(low(x))).sum(), x)
    (mask,) = (n for n in graph.walk() if operator_name(n) == "bernoulli")
    torch.manual_seed(0)
    drawn = torch.bernoulli(torch.empty(mask.meta["val"].shape), 0.6)
    checked(graph, cast())
    assert dtypes_of(graph, "bernoulli") == {torch.bfloat16}
    (mask,) = (n for n in graph.walk() if operator_name(n) == "bernoulli")
    torch.manual_seed(0)
    again = torch.bernoulli(torch.empty(mask.meta["val"].shape, dtype=torch.bfloat16), 0.6)
    assert mask.args[1] == 0.6 and torch.equal(drawn, again.float())
    assert not any(name in ("bernoulli", "div") for name, _ in casts(graph))


def stream_of(norm: type[nn.Module], dtype: str, decomposed: bool) -> tuple[TrainingGraph, fx.Node]:
    """A residual network whose stream is read by a product, by the product's backward, and by a sum."""
    first, second = (nn.Sequential(nn.Linear(4, 4), norm(4)) for _ in range(2))

    def program(x):
        stream = first(x).abs()
        return second(stream) + stream

    table = decompositions() if decomposed else None
    graph = capture(program, torch.randn(3, 4), decompositions=table).joint
    checked(graph, cast(dtype))
    (stream,) = (n for n in graph.walk() if operator_name(n) == "abs")
    return graph, stream


@pytest.mark.parametrize("decomposed", [False, True])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_what_commutes_with_rounding_is_cast_before_it(dtype, decomposed):
    graph, stream = stream_of(nn.BatchNorm1d, dtype, decomposed)
    assert stream.meta["val"].dtype == LOW[dtype]
    total = [n for n in stream.users if operator_name(n) == "add"][-1]
    assert total.meta["val"].dtype == torch.float32  # what it adds is not rounded before
    assert (stream.name, LOW[dtype]) not in casts(graph)


@pytest.mark.parametrize("decomposed", [False, True])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_a_stream_that_the_program_carries_in_fp32_is_rounded_for_products_only(dtype, decomposed):
    graph, stream = stream_of(nn.LayerNorm, dtype, decomposed)
    assert stream.meta["val"].dtype == torch.float32
    assert casts(graph).count((stream.name, LOW[dtype])) == 1


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_comparisons_read_what_was_not_low_before_unrounded(dtype):
    layer, gate = nn.Linear(4, 4), nn.Parameter(torch.full((4,), 1e-9))

    def program(x):
        size = (gate * x).abs()
        return layer(size) + (size > 0)  # in fp16 it would be 0

    graph = joint_of(program, torch.randn(3, 4))
    checked(graph, cast(dtype))
    (compared,) = (n.all_input_nodes[0] for n in graph.walk() if operator_name(n) == "gt")
    assert compared.meta["val"].dtype == torch.float32


def test_what_commutes_with_rounding_stays_where_it_is_needed_in_fp32():
    layer = nn.Linear(4, 4)

    def program(x):
        y = x.abs()
        return layer(y), y.exp()

    graph = joint_of(program, torch.randn(4, 4))
    checked(graph, cast())
    assert dtypes_of(graph, "abs") == {torch.float32}


def test_a_mask_that_is_read_in_fp32_too_stays():
    layer = nn.Linear(4, 4)

    def program(x):
        mask = torch.empty_like(x).bernoulli_(0.5)
        return (layer(x) * mask) @ x.T, mask

    graph = joint_of(program, torch.randn(4, 4))
    checked(graph, cast())
    assert dtypes_of(graph, "bernoulli") == {torch.float32}


def test_memory_takes_no_cast_of_what_it_is_like():
    layer = nn.Linear(4, 4)

    def program(x):
        y = layer(x)
        mask = torch.empty_like(y).bernoulli_(0.5)
        return y @ y.T, mask, mask @ y

    graph = joint_of(program, torch.randn(4, 4))
    checked(graph, cast())
    (memory,) = (n for n in graph.walk() if operator_name(n) == "empty_like")
    assert memory.args[0].meta["val"].dtype == torch.bfloat16
    assert memory.meta["val"].dtype == memory.kwargs["dtype"] == torch.float32


# Idempotence, overrides, several users


@pytest.mark.parametrize(
    "program",
    [
        mlp(4, 4, 4),
        nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.LayerNorm(4), nn.Linear(4, 4)),
        nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 4), nn.Softmax(-1)),
    ],
)
def test_running_it_twice_changes_nothing_more(program):
    graph = joint_of(program, torch.randn(3, 4))
    assert cast().run(graph).changed
    once = graph.fingerprint()
    assert not cast().run(graph).changed
    assert graph.fingerprint() == once


def test_rules_override_the_table_by_operator():
    graph = joint_of(mlp(4, 4), torch.randn(3, 4))
    rules = "aten.mm=deny;aten.addmm=deny"
    assert cast(rules=rules).run(graph) == Report(changed=False)


def test_rules_override_the_table_by_module_in_the_backward_too():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    graph = joint_of(model, torch.randn(3, 4))
    checked(graph, cast(rules="1=deny"))
    products = [n for n in graph.walk() if operator_name(n) in ("mm", "addmm")]
    by_dtype = [n.meta["val"].dtype for n in products]
    assert by_dtype.count(torch.float32) == 3, "forward, and two gradients"
    assert by_dtype.count(torch.bfloat16) == len(products) - 3 > 0


def test_parts_go_with_the_whole_whatever_rules_say_of_them():
    layer = nn.Linear(4, 4)

    def program(x):
        a, b = layer(x).split(2, dim=1)
        return (a @ b.T).sum()

    graph = joint_of(program, torch.randn(3, 4))
    checked(graph, cast(rules="aten.getitem=deny"))
    assert dtypes_of(graph, "getitem") == {torch.bfloat16}


def test_the_last_rule_wins():
    graph = joint_of(mlp(4, 4), torch.randn(3, 4))
    assert cast(rules="aten.addmm=deny;aten.addmm=allow").run(graph).changed


@pytest.mark.parametrize("rules", ["aten.exp", "aten.exp=low", "=deny"])
def test_a_wrong_rule_is_refused(rules):
    with pytest.raises(ValueError, match="option 'precision_rules': got"):
        cast(rules=rules)


def test_a_wrong_dtype_is_refused():
    with pytest.raises(ValueError, match="did you mean 'bf16'"):
        cast("bf61")


def test_a_value_with_several_users_is_cast_once():
    first, second, third = (nn.Linear(4, 4, bias=False) for _ in range(3))
    graph = joint_of(
        lambda x: (second(first(x)) + third(first(x))).exp() + first(x).exp(), torch.randn(3, 4)
    )
    checked(graph, cast())
    assert len(set(casts(graph))) == len(casts(graph))


# Numerics


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_numerics_are_within_the_bound_of_low_products(dtype):
    torch.manual_seed(0)
    model = mlp(16, 16, 8)
    x = torch.randn(5, 16)
    exact, graph = (joint_of(lambda x: model(x).square().mean(), x) for _ in range(2))
    checked(graph, cast(dtype))
    inputs = [*model.parameters(), x]
    values = {p.shape: p.detach() for p in inputs}
    arguments = [
        values.get(n.meta["val"].shape, torch.ones(n.meta["val"].shape)) for n, _ in graph.inputs()
    ]
    eps = torch.finfo(LOW[dtype]).eps
    for ours, theirs in zip(execute(graph, arguments), execute(exact, arguments), strict=True):
        if isinstance(theirs, torch.Tensor):
            # Four products on the longest way, each with two rounded inputs and one rounded output.
            assert (ours - theirs).norm() <= 12 * eps * theirs.norm()


# How casts are spared


def test_a_comparison_reads_low_values_as_they_are():
    first, second = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
    graph = joint_of(lambda x: second(torch.where(first(x) > 0, first(x), 0.0)), torch.randn(3, 4))
    checked(graph, cast())
    compared = [n for n in graph.walk() if operator_name(n) == "gt"]
    assert compared and all(n.args[0].meta["val"].dtype == torch.bfloat16 for n in compared)


def test_a_comparison_with_a_number_that_bf16_rounds_is_done_in_fp32():
    first, second = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
    graph = joint_of(
        lambda x: second(torch.where(first(x) > 0.1, first(x), 0.0)), torch.randn(3, 4)
    )
    checked(graph, cast())
    compared = [n for n in graph.walk() if operator_name(n) == "gt"]
    assert compared and all(n.args[0].meta["val"].dtype == torch.float32 for n in compared)


def test_parts_of_one_value_are_cast_together():
    layer = nn.Linear(4, 6, bias=False)

    def program(x: torch.Tensor) -> torch.Tensor:
        a, b, c = layer(x).split(2, dim=1)
        return (a.exp() + b.exp() + c.exp()).sum()

    graph = joint_of(program, torch.randn(3, 4))
    checked(graph, cast())
    forward = [name for name, dtype in casts(graph) if dtype == torch.float32 and "mm" in name]
    assert len(forward) == 1


def test_a_pool_that_tells_places_as_well_counts_as_one_part():
    layer = nn.Conv1d(2, 2, 1, bias=False)

    def program(x: torch.Tensor) -> torch.Tensor:
        y = layer(x)
        values, places = torch.ops.aten.max_pool2d_with_indices(y, [1, 2])
        return (values.exp() * places).sum() + y.exp().sum()

    graph = joint_of(program, torch.randn(2, 2, 4))
    checked(graph, cast())
    up = [name for name, dtype in casts(graph) if name == "convolution" and dtype == torch.float32]
    assert len(up) == 1 and dtypes_of(graph, "exp") == {torch.float32}
    (pool,) = (n for n in graph.walk() if operator_name(n) == "max_pool2d_with_indices")
    assert pool.meta["val"][0].dtype == torch.float32, "both parts would have been cast"


def test_elementwise_code_that_only_leads_to_fp32_computes_in_it():
    layer = nn.Linear(4, 4, bias=False)
    graph = joint_of(lambda x: (layer(x) * 2.0).exp().sum(), torch.randn(3, 4))
    checked(graph, cast())
    assert dtypes_of(graph, "mul") == {torch.float32}
