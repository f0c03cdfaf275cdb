"""The order of collectives among the products: on the graph, and in code as Inductor writes it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fxpasses.graph import TrainingGraph
from fxpasses.schedule.order import (
    Event,
    OrderError,
    check_emitted,
    emitted_events,
    events_of,
    is_heavy,
    links,
)
from tests.graphs import C10D, add_call, backward_of, doubled, mlp, reduced

aten = torch.ops.aten
PRODUCTS = frozenset({"mm", "mm_1", "mm_2"})


# On the graph


def synced(group: str, **options) -> TrainingGraph:
    graph = backward_of(mlp(8, 8, 8), torch.randn(2, 8))
    reduced(graph, group, 1e-4, **options)
    return graph


def kinds(events: tuple[Event, ...]) -> str:
    """One letter an event: c(ompute), l(aunch), w(ait)."""
    return "".join(event.kind[0] for event in events)


def test_events_of_a_graph_with_overlap(fake_world):
    events = events_of(synced(fake_world).graph)
    assert kinds(events) == "cclclww"
    assert [e.numel for e in events if e.kind == "launch"] == [64 + 8, 64 + 8]
    assert [e.of for e in events if e.kind == "wait"] == [
        e.name for e in events if e.kind == "launch"
    ]


def test_events_of_a_graph_without_overlap(fake_world):
    assert kinds(events_of(synced(fake_world, overlap=False).graph)) == "cclwclw"


def test_a_graph_that_launches_nothing_has_no_events():
    assert events_of(backward_of(mlp(8, 8), torch.randn(2, 8)).graph) == ()


def test_a_payload_whose_value_is_unknown_has_no_size(fake_world):
    graph = doubled((3,))
    tangent = graph.inputs()[0][0]
    launch = add_call(graph, C10D.all_reduce.default, tangent, "sum", fake_world)
    del tangent.meta["val"]
    assert events_of(graph.graph) == (Event("launch", launch.name, 0),)


@pytest.mark.parametrize(
    ("program", "example", "targets"),
    [
        (nn.Linear(3, 2), (4, 3), {aten.mm.default}),
        (nn.Conv2d(2, 2, 3), (1, 2, 5, 5), {aten.convolution_backward.default}),
        (lambda x: (x @ x.mT).sum(), (2, 3, 3), {aten.bmm.default}),
        (lambda x: (x.sin() * 2).sum(0).t(), (2, 3, 3), set()),
    ],
)
def test_heavy_operators(program, example, targets):
    graph = backward_of(program, torch.randn(*example, requires_grad=True))
    assert {node.target for node in graph.walk() if is_heavy(node)} == targets


@pytest.mark.parametrize(
    "target",
    [
        aten.addmm.default,
        aten.baddbmm.default,
        aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
        aten._thnn_fused_lstm_cell.default,
        aten.mkldnn_rnn_layer.default,
        aten.gru.input,
        aten._scaled_mm.default,
        aten._grouped_mm.default,
        aten._int_mm.default,
    ],
    ids=str,
)
def test_operators_that_are_heavy(target):
    assert is_heavy(torch.fx.Graph().call_function(target))


@pytest.mark.parametrize(
    "target",
    [aten.add.Tensor, aten.mul.Tensor, aten.sum.default, aten.squeeze.default, max],
    ids=str,
)
def test_operators_that_are_not_heavy(target):
    assert not is_heavy(torch.fx.Graph().call_function(target))


def compute(name: str) -> Event:
    return Event("compute", name)


def launch(name: str, numel: int = 0) -> Event:
    return Event("launch", name, numel)


def wait(name: str, of: str) -> Event:
    return Event("wait", name, of=of)


def test_links_tie_each_collective_to_its_neighbours():
    events = [compute("a"), launch("l"), compute("b"), compute("c"), wait("w", "l"), wait("v", "l")]
    assert set(links(events)) == {
        *(("a", "l"), ("l", "b"), ("l", "c")),
        *(("b", "w"), ("c", "w"), ("w", "v")),
    }


def test_links_of_little():
    assert links([]) == links([launch("l")]) == links([compute("a"), compute("b")]) == []


def orders_allowed(events: list[Event]) -> set[tuple[str, ...]]:
    """Every order of these events that keeps the links."""
    pairs = links(events)

    def extend(done: tuple[str, ...], left: frozenset[str]) -> set[tuple[str, ...]]:
        if not left:
            return {done}
        ready = {n for n in left if not any(b == n and a in left for a, b in pairs)}
        return set().union(*(extend((*done, n), left - {n}) for n in ready))

    return extend((), frozenset(e.name for e in events))


def test_links_keep_every_product_on_its_side_of_a_collective():
    events = [compute("a"), compute("b"), launch("l"), compute("c"), compute("d"), wait("w", "l")]
    for found in orders_allowed(events):
        at = {name: i for i, name in enumerate(found)}
        assert max(at["a"], at["b"]) < at["l"] < min(at["c"], at["d"])
        assert at["w"] == 5


# In generated code. The snippets have the form of Inductor's Python wrapper.

HEAD = """
cpp_fused_0 = async_compile.cpp_pybinding(['const float*', 'float*'], r'''
extern "C"  void  kernel(const float* in_ptr0, float* out_ptr0)
{
    auto tmp0 = at::vec::Vectorized<float>::loadu(in_ptr0 + static_cast<int64_t>(x0));
}
''')

def call(self, args):
    primals_3, tangents_1 = args
    assert_size_stride(tangents_1, (16, 64), (64, 1), 'input')
"""


def mm(name: str, out: str, comment: str = "Topologically Sorted") -> str:
    return (
        f"    {out} = empty_strided_cpu((4, 2), (2, 1), torch.float32)\n"
        f"    # {comment} Source Nodes: [permute, {name}], Original ATen: [aten.t, aten.mm]\n"
        f"    extern_kernels.mm(reinterpret_tensor(buf9, (4, 2), (1, 4), 0), primals_3, out={out})"
    )


def allocate(buffer: str, numel: int) -> str:
    return f"    {buffer} = empty_strided_cpu(({numel}, ), (1, ), torch.float32)"


def fill(buffer: str) -> str:
    return f"    cpp_fused_0(primals_3, {buffer})\n    del primals_3"


def start(buffer: str) -> str:
    return (
        "    # Unsorted Source Nodes: [], Original ATen: []\n"
        f"    torch.ops._c10d_functional.all_reduce_.default({buffer}, 'sum', '0')"
    )


def finish(buffer: str) -> str:
    return (
        "    # Unsorted Source Nodes: [], Original ATen: []\n"
        f"    torch.ops._c10d_functional.wait_tensor.default({buffer})"
    )


def code(*lines: str) -> str:
    return (
        HEAD + "\n".join(lines) + "\n    return (reinterpret_tensor(buf1, (4, 2), (2, 1), 0), )\n"
    )


FIRST = (allocate("buf1", 8), fill("buf1"), start("buf1"))
SECOND = (allocate("buf3", 4), fill("buf3"), start("buf3"))
GOOD = (mm("mm", "buf0"), *FIRST, mm("mm_1", "buf2"), *SECOND, finish("buf1"), finish("buf3"))
PLANNED = (
    compute("mm"),
    launch("ar0", 8),
    compute("mm_1"),
    launch("ar1", 4),
    wait("w0", "ar0"),
    wait("w1", "ar1"),
)


def emitted(*lines: str) -> list[Event]:
    return emitted_events(code(*lines), PRODUCTS)


def refused(*lines: str, planned: tuple[Event, ...] = PLANNED) -> str:
    with pytest.raises(OrderError) as caught:
        check_emitted(planned, code(*lines))
    return str(caught.value)


def test_events_of_code():
    assert emitted(*GOOD) == [
        compute("mm"),
        launch("buf1", 8),
        compute("mm_1"),
        launch("buf3", 4),
        wait("buf1", "buf1"),
        wait("buf3", "buf3"),
    ]


def test_code_without_events():
    assert emitted(allocate("buf0", 3), fill("buf0")) == []


def test_only_the_products_asked_for_are_events():
    assert emitted(mm("mm", "buf0"), mm("mm_9", "buf1")) == [compute("mm")]


def test_names_in_any_kind_of_comment_and_beside_others():
    line = "    # Unsorted Source Nodes: [mm_1, where_2, mm_default], Original ATen: [aten.mm]"
    kernel = "    extern_kernels.mm(buf15, primals_4, out=buf16)"
    assert emitted(line, kernel) == [compute("mm_1")]


def test_a_kernel_that_fuses_two_products_runs_both():
    line = "    # Topologically Sorted Source Nodes: [mm, mm_1], Original ATen: [aten.mm]"
    assert emitted(line, "    cpp_fused_mm_1(buf0, buf1)") == [compute("mm"), compute("mm_1")]


def test_a_product_is_an_event_once():
    assert emitted(mm("mm", "buf0"), mm("mm", "buf1")) == [compute("mm")]


def test_allocations_and_assertions_between_comment_and_kernel_do_not_run_it():
    comment, kernel = mm("mm", "buf0").splitlines()[1:]
    between = [
        "    buf9 = empty_strided_cpu((4, 2), (2, 1), torch.float32)",
        "    assert_size_stride(primals_8, (64, 64), (64, 1), 'input')",
        "    del primals_8",
    ]
    assert emitted(comment, *between, start("buf9").splitlines()[1], kernel) == [
        launch("buf9", 8),
        compute("mm"),
    ]


@pytest.mark.parametrize(
    ("lines", "numel"),
    [
        (["    buf9 = empty_strided_cpu((8256, ), (1, ), torch.float32)"], 8256),
        (["    buf9 = empty_strided_cuda((4, 2), (2, 1), torch.bfloat16)"], 8),
        (["    buf9 = empty_strided((), (), device='cpu', dtype=torch.float32)"], 1),
        (["    buf9 = reinterpret_tensor(buf10, (64, ), (1, ), 4096)  # alias"], 64),
        (["    buf9 = reinterpret_tensor(buf7, (16, ), (1, ), 0); del buf7  # reuse"], 16),
        ([allocate("buf7", 12), "    buf9 = buf7; del buf7  # reuse"], 12),
        (["    buf9 = primals_3; del primals_3  # reuse"], 0),
        ([], 0),
    ],
)
def test_the_size_of_a_payload(lines, numel):
    assert emitted(*lines, start("buf9")) == [launch("buf9", numel)]


@pytest.mark.parametrize(
    "call",
    [
        "torch.ops._c10d_functional.all_reduce.default(buf1, 'sum', '0')",
        "torch.ops._c10d_functional.all_gather_into_tensor.default(buf1, 4, '0')",
        "torch.ops._c10d_functional.all_to_all_single.default(buf1, [4, 4], [4, 4], '0')",
    ],
)
def test_a_launch_out_of_place_is_named_by_its_result(call):
    lines = (allocate("buf1", 8), f"    buf2 = {call}", finish("buf2"))
    assert emitted(*lines) == [launch("buf2", 8), wait("buf2", "buf2")]


def test_the_planned_order_is_accepted():
    check_emitted(PLANNED, code(*GOOD))


def test_launches_out_of_place_are_accepted():
    lines = (
        *(mm("mm", "buf0"), allocate("buf1", 8)),
        "    buf4 = torch.ops._c10d_functional.all_reduce.default(buf1, 'sum', '0')",
        *(mm("mm_1", "buf2"), allocate("buf3", 4)),
        "    buf5 = torch.ops._c10d_functional.all_reduce.default(buf3, 'sum', '0')",
        *(finish("buf4"), finish("buf5")),
    )
    check_emitted(PLANNED, code(*lines))


def test_a_product_that_was_renamed_or_fused_away_is_left_out():
    check_emitted(
        PLANNED, code(*FIRST, mm("mm_1", "buf2"), *SECOND, finish("buf1"), finish("buf3"))
    )
    check_emitted(PLANNED, code(*FIRST, *SECOND, finish("buf1"), finish("buf3")))


def test_a_payload_of_unknown_size_is_accepted():
    lines = [line for line in GOOD if "empty_strided" not in line or "mm" in line]
    check_emitted(PLANNED, code(*lines))


def said(want: str, got: str) -> str:
    return f"the generated code does not keep the planned order: expected {want}, found {got}"


# Collectives against each other.


def test_swapped_waits_are_refused():
    found = refused(*GOOD[:-2], finish("buf3"), finish("buf1"))
    assert found.startswith(said("the wait for 'ar0'", "the wait for 'ar1'"))


def test_a_wait_moved_ahead_of_a_launch_is_refused():
    lines = (mm("mm", "buf0"), *FIRST, finish("buf1"), mm("mm_1", "buf2"), *SECOND, finish("buf3"))
    assert refused(*lines).startswith(
        said("launch 'ar1' of 4 elements", "the wait for 'ar0'"),
    )


def test_a_missing_launch_is_refused():
    found = refused(mm("mm", "buf0"), *FIRST, mm("mm_1", "buf2"), finish("buf1"))
    assert found.startswith(said("launch 'ar1' of 4 elements", "the wait for 'ar0'"))


@pytest.mark.parametrize("lines", [(), (mm("mm", "buf0"),)])
def test_no_launch_at_all_is_refused(lines):
    assert refused(*lines).startswith(said("launch 'ar0' of 8 elements", "nothing"))


def test_a_missing_wait_is_refused():
    assert refused(*GOOD[:-1]).startswith(said("the wait for 'ar1'", "nothing"))


def test_one_launch_or_wait_too_many_is_refused():
    more = (allocate("buf9", 3), start("buf9"))
    assert refused(*GOOD, *more).startswith(said("nothing", "launch 'buf9' of 3 elements"))
    assert refused(*GOOD, finish("buf1")).startswith(said("nothing", "the wait for 'ar0'"))


def test_a_wait_for_something_else_is_refused():
    found = refused(*GOOD[:-1], finish("buf7"))
    assert found.startswith(said("the wait for 'ar1'", "the wait for 'buf7'"))


def test_a_payload_of_another_size_is_refused():
    other = (allocate("buf1", 9), fill("buf1"), start("buf1"))
    found = refused(mm("mm", "buf0"), *other, *GOOD[4:])
    assert found.startswith(said("launch 'ar0' of 8 elements", "launch 'ar0' of 9 elements"))


def test_swapped_launches_are_refused_by_their_size():
    lines = (mm("mm", "buf0"), *SECOND, mm("mm_1", "buf2"), *FIRST, *GOOD[-2:])
    found = refused(*lines)
    assert found.startswith(said("launch 'ar0' of 8 elements", "launch 'ar0' of 4 elements"))


# Products against collectives.


def beside(name: str, side: str, collective: str) -> str:
    return said(f"{name!r} {side} {collective}", "it on the other side")


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (
            (*FIRST, mm("mm", "buf0"), mm("mm_1", "buf2"), *SECOND, *GOOD[-2:]),
            beside("mm", "before", "launch 'ar0' of 8 elements"),
        ),
        (
            (mm("mm", "buf0"), mm("mm_1", "buf2"), *FIRST, *SECOND, *GOOD[-2:]),
            beside("mm_1", "behind", "launch 'ar0' of 8 elements"),
        ),
        (
            (mm("mm", "buf0"), *FIRST, *SECOND, mm("mm_1", "buf2"), *GOOD[-2:]),
            beside("mm_1", "before", "launch 'ar1' of 4 elements"),
        ),
        (
            (*FIRST, *SECOND, mm("mm_1", "buf2"), finish("buf1"), mm("mm", "buf0"), finish("buf3")),
            beside("mm", "before", "launch 'ar0' of 8 elements"),
        ),
    ],
    ids=["launch too early", "launch too late", "product too late", "product between waits"],
)
def test_a_product_on_the_wrong_side_of_a_collective_is_refused(lines, message):
    assert refused(*lines) == message


def test_a_wait_moved_ahead_of_a_product_is_refused():
    planned = (launch("ar0", 8), compute("mm"), wait("w0", "ar0"))
    found = refused(*FIRST, finish("buf1"), mm("mm", "buf0"), planned=planned)
    assert found == beside("mm", "before", "the wait for 'ar0'")


def test_products_without_a_collective_between_them_may_change_places():
    planned = (compute("mm"), compute("mm_1"), launch("ar0", 8), wait("w0", "ar0"))
    check_emitted(planned, code(mm("mm_1", "buf2"), mm("mm", "buf0"), *FIRST, finish("buf1")))


# Forms that the reader does not know.


def test_payloads_that_are_views_are_told_apart():
    first, second = (f"reinterpret_tensor({b}, (8, ), (1, ), 0)" for b in ("buf1", "buf3"))
    planned = (launch("ar0", 8), launch("ar1", 8), wait("w0", "ar0"), wait("w1", "ar1"))
    check_emitted(planned, code(start(first), start(second), finish(first), finish(second)))


def test_a_comment_in_front_of_a_kernels_source_runs_nothing():
    """As for Triton, where the comment stands at the definition and at the call."""
    comment = "# Topologically Sorted Source Nodes: [mm], Original ATen: [aten.mm]"
    definition = (
        comment,
        "# Graph fragment:",
        "#   %mm : [num_users=1] = call_function[target=torch.ops.aten.mm.default](args = (%a,))",
        "triton_poi_fused_mm_0 = async_compile.triton('triton_poi_fused_mm_0', '''",
        "''', device_str='cuda')",
        HEAD,
    )
    call = (f"    {comment}", "    triton_poi_fused_mm_0.run(buf0, buf1, 8, stream=stream0)")
    found = emitted_events("\n".join((*definition, *FIRST, *call)), PRODUCTS)
    assert found == [launch("buf1", 8), compute("mm")]
