"""The simulated world: collectives by hand, and what it refuses."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from fxpasses.graph import Role, TrainingGraph
from fxpasses.testing.world import World, WorldError, run_world

C10D = torch.ops._c10d_functional


def graph_of(fn, *examples) -> TrainingGraph:
    with FakeTensorMode():
        module = make_fx(fn)(*[torch.empty(x.shape, dtype=x.dtype) for x in examples])
    for node in module.graph.find_nodes(op="placeholder"):
        node.meta["role"] = Role("tangent", node.name)
    output = module.graph.output_node()
    output.args = ((output.args[0],),)
    output.meta["roles"] = (Role("output", "0"),)
    return TrainingGraph(module)


def over_ranks(fn, *values):
    """`fn` of one tensor, on as many ranks as there are values; what each returns."""
    rows = [torch.tensor(v) for v in values]
    return [out[0].tolist() for out in run_world(graph_of(fn, rows[0]), [[row] for row in rows])]


@pytest.mark.parametrize(
    ("operation", "expected"),
    [("sum", [6.0, -1.0]), ("avg", [2.0, -1.0 / 3]), ("max", [3.0, 1.0]), ("min", [1.0, -2.0])],
)
def test_all_reduce(operation, expected):
    found = over_ranks(
        lambda x: C10D.wait_tensor(C10D.all_reduce(x, operation, "w")),
        [1.0, 0.0],
        [2.0, -2.0],
        [3.0, 1.0],
    )
    assert found == [pytest.approx(expected)] * 3


def test_all_gather():
    found = over_ranks(
        lambda x: C10D.wait_tensor(C10D.all_gather_into_tensor(x, 2, "w")), [1.0, 2.0], [3.0, 4.0]
    )
    assert found == [[1.0, 2.0, 3.0, 4.0]] * 2


def test_reduce_scatter():
    found = over_ranks(
        lambda x: C10D.wait_tensor(C10D.reduce_scatter_tensor(x, "sum", 2, "w")),
        [1.0, 2.0],
        [10.0, 20.0],
    )
    assert found == [[11.0], [22.0]]


def test_all_to_all():
    found = over_ranks(
        lambda x: C10D.wait_tensor(C10D.all_to_all_single(x, [1, 1], [1, 1], "w")),
        [1.0, 2.0],
        [3.0, 4.0],
    )
    assert found == [[1.0, 3.0], [2.0, 4.0]]


def test_all_to_all_with_uneven_parts():
    graphs = [
        graph_of(
            lambda x: C10D.wait_tensor(C10D.all_to_all_single(x, [1, 2], [1, 1], "w")),
            torch.ones(2),
        ),
        graph_of(
            lambda x: C10D.wait_tensor(C10D.all_to_all_single(x, [1, 1], [2, 1], "w")),
            torch.ones(3),
        ),
    ]
    found = run_world(graphs, [[torch.tensor([1.0, 2.0])], [torch.tensor([3.0, 4.0, 5.0])]])
    assert [row[0].tolist() for row in found] == [[1.0, 3.0, 4.0], [2.0, 5.0]]


def test_broadcast():
    assert (
        over_ranks(lambda x: C10D.wait_tensor(C10D.broadcast(x, 1, "w")), [1.0], [2.0])
        == [[2.0]] * 2
    )


def test_sums_run_in_the_payload_dtype():
    rows = [
        [torch.tensor([256.0], dtype=torch.bfloat16)],
        *[[torch.tensor([1.0], dtype=torch.bfloat16)]] * 2,
    ]
    graph = graph_of(lambda x: C10D.wait_tensor(C10D.all_reduce(x, "sum", "w")), rows[0][0])
    assert [row[0].item() for row in run_world(graph, rows)] == [256.0] * 3


def test_ranks_share_no_memory():
    graph = graph_of(lambda x: C10D.wait_tensor(C10D.broadcast(x, 0, "w")), torch.ones(1))
    source = torch.ones(1)
    first, second = (row[0] for row in run_world(graph, [[source], [torch.zeros(1)]]))
    assert len({x.data_ptr() for x in (source, first, second)}) == 3


def test_launches_are_kept():
    graph = graph_of(lambda x: C10D.wait_tensor(C10D.all_reduce(x * 2, "sum", "w")), torch.ones(1))
    world = World(graph, [[torch.ones(1)], [torch.ones(1) * 2]])
    world.run()
    assert [[launch.payload.item() for launch in row] for row in world.launches] == [[2.0, 4.0]]


def test_each_run_draws_alike_and_each_rank_its_own():
    def fn(x):
        first = torch.bernoulli(x * 0 + 0.5)
        return C10D.wait_tensor(C10D.all_reduce(first, "sum", "w")), first, torch.rand_like(x)

    graph = graph_of(lambda x: torch.cat(fn(x)), torch.ones(64))
    state = torch.get_rng_state()
    one, other = (run_world(graph, [[torch.ones(64)]] * 2) for _ in range(2))
    assert torch.equal(state, torch.get_rng_state())
    for mine, again in zip(one, other, strict=True):
        assert torch.equal(mine[0], again[0])
    (sums, mine, _), (_, theirs, _) = (row[0].split(64) for row in one)
    assert torch.equal(sums, mine + theirs) and not torch.equal(mine, theirs)


DIFFERENT = {
    "operator": lambda x: C10D.broadcast(x, 0, "w"),
    "reduction": lambda x: C10D.all_reduce(x, "max", "w"),
    "dtype": lambda x: C10D.all_reduce(x.double(), "sum", "w"),
    "size": lambda x: C10D.all_reduce(torch.cat([x, x]), "sum", "w"),
    "none": lambda x: x,
}


@pytest.mark.parametrize("case", DIFFERENT)
def test_ranks_that_launch_different_things_are_refused(case):
    def other(x):
        y = DIFFERENT[case](x)
        return y if case == "none" else C10D.wait_tensor(y)

    graphs = [
        graph_of(lambda x: C10D.wait_tensor(C10D.all_reduce(x, "sum", "w")), torch.ones(2)),
        graph_of(other, torch.ones(2)),
    ]
    with pytest.raises(
        WorldError, match=r"collective 0: the ranks launch different things\n  rank 0: all_reduce"
    ):
        run_world(graphs, [[torch.ones(2)]] * 2)


@pytest.mark.parametrize(
    ("fn", "message"),
    [
        (lambda x: C10D.all_reduce(x, "sum", "w") * 2, "still in flight"),
        (lambda x: C10D.all_reduce(x, "sum", "w"), "still in flight"),
        (lambda x: (C10D.all_reduce(x, "sum", "w"), x * 2)[1], "nothing awaits"),
        (lambda x: C10D.wait_tensor(x), "awaits what is not in flight"),
        (lambda x: C10D.all_reduce(C10D.all_reduce(x, "sum", "w"), "sum", "w"), "no tensor"),
        (lambda x: C10D.wait_tensor(C10D.all_reduce(x, "bor", "w")), "no reduction 'bor'"),
        (
            lambda x: C10D.wait_tensor(C10D.all_gather_into_tensor(x, 3, "w")),
            "says 3 ranks, and there are 2",
        ),
    ],
)
def test_misuse_is_refused(fn, message):
    with pytest.raises(WorldError, match=message):
        run_world(graph_of(fn, torch.ones(2)), [[torch.ones(2)]] * 2)
