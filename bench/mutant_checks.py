"""Which properties a mutant of a module has to survive: those that say what the module promises."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

Drawn = Callable[[int, int], None]  # how many graphs are drawn, and how many programs
Single = Callable[[], None]


def checks_of(module: str) -> tuple[Sequence[Drawn], Sequence[Single]]:
    """Properties that concern a module: those that draw what they are tried on, and those that don't."""
    from tests.testing import (
        cast_graphs,
        clipping,
        exchanges,
        ordering,
        planning,
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
    from tests.testing import properties as p

    def holds(*names: str) -> list[Drawn]:
        return [functools.partial(p.holds, name) for name in names]

    def searches(*found: Callable[[int], None]) -> list[Drawn]:
        return [lambda examples, _, search=search: search(examples) for search in found]  # type: ignore[misc]

    def often(*found: Callable[[int], None]) -> list[Drawn]:
        return [lambda examples, _, search=search: search(5 * examples) for search in found]  # type: ignore[misc]

    synchronised = [
        *holds(
            "gradient_sync",
            "gradient_sync_at_once",
            "gradient_sync_in_order",
            "gradient_sync_in_order_at_once",
        ),
        *searches(p.overlap_changes_nothing, readers.readers_of_buckets),
    ]
    exchanged = searches(
        exchanges.exchanges_as_promised, exchanges.seeds_differ, exchanges.bounds_are_reached
    )
    sent = [*exchanged, *holds("compress_int4")]
    clipped = searches(clipping.clipping_by_bucket)
    drawn: dict[str, list[Drawn]] = {
        "bucketing": [
            *holds("bucketing"),
            *searches(p.bucket_layouts, p.bucket_limits, p.layouts),
        ],
        "gradient_sync": synchronised,
        "reduction": [*synchronised, *holds("compress_int4"), *clipped],
        "participation": [*holds("participation"), *searches(p.layouts)],
        "running_stats": [
            *holds("running_stats"),
            *searches(statistics.statistics_of_many_buffers, statistics.statistics_of_whole_steps),
        ],
        "cast": [
            *holds("cast"),
            *searches(cast_graphs.marked_operators, cast_graphs.streams, cast_graphs.some_of_it),
        ],
        "loss_scale": holds("loss_scale"),
        "overflow": [*holds("overflow"), *searches(scaling.overflow_of_buckets)],
        "clip_norm": [*holds("clip_norm"), *clipped, *searches(clipping.as_torch_clips)],
        "compress": [
            *holds("compress_int4", "compress_bf16", "compress_powersgd"),
            *searches(schemes.schemes_side_by_side),
        ],
        **dict.fromkeys(("exchange", "codecs", "feedback"), sent),
        "powersgd": [*exchanged, *holds("compress_powersgd")],
        "rewrite": [*searches(splicing.splices_inline), *holds("bucketing")],
        "schedule": searches(planning.plans_as_programs, scheduling.schedules),
        "tasks": often(tasks.tasks_as_promised),
        "solve": often(
            solving.solutions,
            solving.bounds_as_promised,
            solving.lists_as_promised,
            solving.memory_is_spared,
            solving.moves_as_promised,
            solving.postponed_as_promised,
            solving.swaps_as_promised,
            solving.searches_in_bounds,
        ),
        "exact": often(solving.all_orders),
        "order": [
            *often(ordering.order_as_promised, ordering.links_as_promised),
            *searches(ordering.events_as_promised),
        ],
        "variants": searches(variants.variants_as_promised, variants.buffers_of_others),
    }
    single: dict[str, Sequence[Single]] = {
        **dict.fromkeys(("gradient_sync", "reduction"), (p.mean_keeps_large_numbers,)),
        "cast": cast_graphs.SINGLE,
        **dict.fromkeys(("loss_scale", "overflow"), scaling.SINGLE),
        "clip_norm": [clipping.what_is_not_finite],
        "rewrite": splicing.SINGLE,
        "schedule": scheduling.SINGLE,
        "tasks": tasks.SINGLE,
        "solve": [solving.search_finds_the_best, solving.search_comes_close],
        "exact": [solving.all_orders_are_few],
        "order": ordering.SINGLE,
        "variants": [variants.layout_of_a_variant],
    }  # fmt: skip
    return [*drawn[module], *searches(refusals.wrong_options)], [
        *single.get(module, ()),
        *refusals.SINGLE,
    ]
