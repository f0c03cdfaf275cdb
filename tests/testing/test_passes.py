"""Our passes on graphs that nobody wrote by hand. `make fuzz` runs these with 10,000 examples each."""

import gc
from collections.abc import Iterator

import pytest

from fxpasses.testing.check import count_of_examples
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
    solving,
    splicing,
    statistics,
    tasks,
    variants,
)

FEW = count_of_examples(30)


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
def test_pass(name):
    # Further forms of one pass differ from the first in little: where waits stand, which codec. Faults and
    # checks make large graphs.
    is_further = name.startswith(("gradient_sync_", "compress_")) and name != "compress_int4"
    properties.holds(
        name, FEW if is_further or name.startswith(("inject", "check", "replay")) else None
    )


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
        refusals.wrong_options,
        planning.plans_as_programs,
        scheduling.schedules,
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
