"""Our passes on graphs that nobody wrote by hand. `make fuzz` shows each of them 10,000."""

import gc
from collections.abc import Iterator

import pytest

from fxpasses.testing.check import EXAMPLES_VARIABLE, count_of_examples
from tests.testing import (
    cast_graphs,
    clipping,
    exchanges,
    ordering,
    planning,
    properties,
    readers,
    refusals,
    scaling,
    scheduling,
    schemes,
    solving,
    splicing,
    statistics,
    tasks,
    variants,
)

# Further forms of one pass differ from the first in little: where waits stand, which codec. They, and what
# several passes promise together, get 30 examples where a pass gets 200.
FEW = -(-count_of_examples() * 30 // 200)


@pytest.fixture(autouse=True)
def collects_what_is_new() -> Iterator[None]:
    """Graphs are full of cycles; what is there before a test, programs above all, is not searched for them."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True)
def modules_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each trace of `make_fx` exchanges two methods of `nn.Module` for ones that do the same, and
    exchanges them back: a fifth of the time of a splice.
    """
    patcher = "torch.fx._symbolic_trace._Patcher.patch_method"
    monkeypatch.setattr(patcher, lambda *args, **kwargs: None)


@pytest.mark.timeout(0)
@pytest.mark.parametrize("name", sorted(properties.OWN))
def test_pass(name, monkeypatch):
    is_further = name.startswith(("gradient_sync_", "compress_")) and name != "compress_int4"
    makes_large_graphs = name.startswith(("inject", "check", "replay"))
    if is_further:
        monkeypatch.setenv(EXAMPLES_VARIABLE, str(FEW))
    properties.holds(name, 30 if makes_large_graphs else None)


@pytest.mark.timeout(0)
def test_schedule():
    scheduling.schedules(count_of_examples(30))


@pytest.mark.timeout(0)
@pytest.mark.parametrize(
    "search",
    [
        properties.pipelines_agree,
        properties.overlap_changes_nothing,
        variants.variants_as_promised,
        variants.buffers_of_others,
        splicing.splices_inline,
        properties.layouts,
        properties.bucket_limits,
        properties.bucket_layouts,
        scaling.overflow_of_buckets,
        clipping.clipping_by_bucket,
        clipping.as_torch_clips,
        exchanges.exchanges_as_promised,
        exchanges.seeds_differ,
        exchanges.bounds_are_reached,
        readers.readers_of_buckets,
        schemes.schemes_side_by_side,
        refusals.wrong_options,
        planning.plans_as_programs,
        ordering.events_as_promised,
        ordering.links_as_promised,
        ordering.order_as_promised,
        solving.all_orders,
        solving.bounds_as_promised,
        solving.lists_as_promised,
        solving.memory_is_spared,
        solving.moves_as_promised,
        solving.postponed_as_promised,
        solving.searches_in_bounds,
        solving.solutions,
        solving.swaps_as_promised,
        tasks.tasks_as_promised,
        cast_graphs.marked_operators,
        cast_graphs.streams,
        cast_graphs.some_of_it,
        statistics.statistics_of_whole_steps,
        statistics.statistics_of_many_buffers,
    ],
)
def test_several(search):
    search(FEW)


@pytest.mark.parametrize(
    "check",
    [
        properties.mean_keeps_large_numbers,
        variants.layout_of_a_variant,
        *splicing.SINGLE,
        *refusals.SINGLE,
        *scheduling.SINGLE,
        *tasks.SINGLE,
        *ordering.SINGLE,
        solving.all_orders_are_few,
        solving.search_comes_close,
        solving.search_finds_the_best,
        clipping.what_is_not_finite,
        *cast_graphs.SINGLE,
        *scaling.SINGLE,
    ],
)
def test_single(check):
    check()
