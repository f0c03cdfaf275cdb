"""Our passes on graphs that nobody wrote by hand. `make fuzz` runs these with 10,000 examples each."""

import pytest

from fxpasses.testing.check import count_of_examples
from tests.testing import (
    casts,
    clipping,
    properties,
    readers,
    refusals,
    scaling,
    scheduling,
    statistics,
)

FEW = count_of_examples(30)


@pytest.mark.timeout(0)
@pytest.mark.parametrize("name", sorted(properties.OWN))
def test_pass(name):
    # Further forms of one pass differ from the first in little: where waits stand, which codec. Faults and
    # checks make large graphs.
    is_further = name.startswith(("gradient_sync_", "compress_")) and name != "compress_int4"
    properties.holds(name, FEW if is_further or name.startswith(("inject", "check")) else None)


@pytest.mark.timeout(0)
@pytest.mark.parametrize(
    "search",
    [
        properties.pipelines_agree,
        properties.overlap_changes_nothing,
        properties.variants_as_promised,
        properties.splice_inlines,
        properties.layouts,
        properties.bucket_limits,
        properties.bucket_layouts,
        scaling.overflow_of_buckets,
        clipping.clipping_by_bucket,
        clipping.as_torch_clips,
        readers.readers_of_buckets,
        refusals.wrong_options,
        scheduling.schedules,
        scheduling.solutions,
        scheduling.tasks_as_promised,
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
        properties.layout_of_a_variant,
        properties.splice_refuses_tensors,
        properties.splice_takes_branches,
        properties.splice_takes_numbers,
        properties.splice_tells_arguments_apart,
        properties.model_lines,
        *refusals.SINGLE,
        *scheduling.SINGLE,
        clipping.what_is_not_finite,
        *casts.SINGLE,
        *scaling.SINGLE,
    ],
)
def test_single(check):
    check()
