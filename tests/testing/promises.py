"""Which properties say what a module promises: all of them are tests, and its mutants are tried by them."""

from __future__ import annotations

from collections.abc import Callable

from tests.testing import (
    cast_graphs,
    checksums,
    clipping,
    complexes,
    compression,
    exchanges,
    faults,
    guards,
    norms,
    ordering,
    planning,
    properties,
    readers,
    refusals,
    regions,
    scaling,
    scheduling,
    schemes,
    solving,
    splicing,
    statistics,
    tasks,
    variants,
)

Search = Callable[[int], None]  # draws so many examples
Single = Callable[[], None]  # of chosen cases

_SYNCHRONISED = (
    *("gradient_sync", "gradient_sync_at_once"),
    *("gradient_sync_in_order", "gradient_sync_in_order_at_once"),
)
_EXCHANGED = (
    exchanges.exchanges_as_promised,
    exchanges.seeds_differ,
    exchanges.bounds_are_reached,
)
_OF_BUCKETS = (properties.overlap_changes_nothing, readers.readers_of_buckets)

# By module: passes whose runs show what it does (`properties.OWN`).
PASSES: dict[str, tuple[str, ...]] = {
    **{
        name: (name,)
        for name in (
            *("bucketing", "participation", "running_stats", "cast"),
            *("loss_scale", "overflow", "clip_norm"),
        )
    },
    "gradient_sync": _SYNCHRONISED,
    "reduction": (*_SYNCHRONISED, "compress_int4"),
    "compress": (
        *("compress_int4", "compress_bf16", "compress_powersgd"),
        "compress_int4:stochastic=true:feedback=ef21",
    ),
    **dict.fromkeys(("exchange", "codecs", "feedback"), ("compress_int4",)),
    "powersgd": ("compress_powersgd",),
    **{
        name: (name,)
        for name in ("check_values", "check_gradients", "settle_checks", "check_payloads")
    },
    "finite": ("overflow", "check_values"),
    **dict.fromkeys(("check_sums", "sums"), ("check_sums",)),
    "check_products": ("check_gradient_products", "check_products"),
    "agree_alarms": ("agree_alarms",),
    **dict.fromkeys(("inject", "injecting"), ("inject", "inject_forward", "inject_payload")),
    "replay": ("replay_forward", "replay_backward"),
    "products": ("check_gradient_products", "check_sums"),
    "rewrite": ("bucketing",),
}

# By module: what holds of all that can be drawn for it.
DRAWN: dict[str, tuple[Search, ...]] = {
    "bucketing": (properties.bucket_layouts, properties.bucket_limits, properties.layouts),
    "gradient_sync": _OF_BUCKETS,
    "reduction": (*_OF_BUCKETS, clipping.clipping_by_bucket),
    "participation": (properties.layouts,),
    "running_stats": (
        statistics.statistics_of_many_buffers,
        statistics.statistics_of_whole_steps,
    ),
    "cast": (cast_graphs.marked_operators, cast_graphs.streams, cast_graphs.some_of_it),
    "overflow": (scaling.overflow_of_buckets,),
    "clip_norm": (clipping.clipping_by_bucket, clipping.as_torch_clips),
    "compress": (schemes.schemes_side_by_side, complexes.complex_gradients),
    **dict.fromkeys(("check_values", "finite"), (complexes.complex_gradients,)),
    "check_payloads": (guards.payloads_of_all_ways_to_send,),
    "inject": (faults.faults_of_all_ways_to_send,),
    "measure_norms": (norms.norms_of_what_adapts,),
    **dict.fromkeys(("exchange", "codecs", "feedback", "powersgd"), _EXCHANGED),
    "rewrite": (splicing.splices_inline,),
    "schedule": (planning.plans_as_programs, scheduling.schedules),
    "tasks": (tasks.tasks_as_promised,),
    "solve": (
        solving.solutions,
        solving.bounds_as_promised,
        solving.lists_as_promised,
        solving.memory_is_spared,
        solving.moves_as_promised,
        solving.postponed_as_promised,
        solving.swaps_as_promised,
        solving.searches_in_bounds,
    ),
    "exact": (solving.all_orders,),
    "order": (
        ordering.order_as_promised,
        ordering.links_as_promised,
        ordering.events_as_promised,
    ),
    "variants": (variants.variants_as_promised, variants.buffers_of_others),
}
# Of small graphs of tasks, drawn in no time.
QUICK = ("tasks", "solve", "exact", "order")

# By module: what holds of cases that were chosen.
SINGLE: dict[str, tuple[Single, ...]] = {
    **dict.fromkeys(("gradient_sync", "reduction"), (properties.mean_keeps_large_numbers,)),
    "cast": cast_graphs.SINGLE,
    **dict.fromkeys(("loss_scale", "overflow"), scaling.SINGLE),
    "finite": (*scaling.SINGLE, *complexes.SINGLE),
    **dict.fromkeys(
        ("check_values", "check_gradients", "check_payloads", "settle_checks"),
        guards.SINGLE,
    ),
    **dict.fromkeys(("check_sums", "check_products"), (*guards.SINGLE, *checksums.SINGLE)),
    **dict.fromkeys(("sums", "products"), checksums.SINGLE),
    **dict.fromkeys(("inject", "injecting"), faults.SINGLE),
    "replay": regions.SINGLE,
    "measure_norms": norms.SINGLE,
    "clip_norm": (clipping.what_is_not_finite,),
    "compress": compression.SINGLE,
    "rewrite": splicing.SINGLE,
    "schedule": scheduling.SINGLE,
    "tasks": tasks.SINGLE,
    "solve": (solving.search_finds_the_best, solving.search_comes_close),
    "exact": (solving.all_orders_are_few,),
    "order": ordering.SINGLE,
    "variants": (variants.layout_of_a_variant,),
}

# What any module has to leave as it is, and what no module promises alone.
ANYWHERE: tuple[Search, ...] = (refusals.wrong_options,)
ANYWHERE_SINGLE: tuple[Single, ...] = refusals.SINGLE
TOGETHER: tuple[Search, ...] = (properties.pipelines_agree,)
