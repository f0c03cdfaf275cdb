"""Mutants of `fxpasses.schedule.exact`: see `bench.mutations`."""

WRITTEN = (
    (
        "stops at the first",
        "            best = tried\n            continue",
        "            return tried, True",
    ),
    ("always a proof", "return best, not beginnings", "return best, True"),
    ("never a proof", "return best, not beginnings", "return best, False"),
    ("looks on and on", "        most -= 1\n", ""),
    (
        "the same tasks are enough to be passed over",
        "if any(all(a <= b for a, b in zip(other, left, strict=True)) for other in others):",
        "if others:",
    ),
    (
        "passed over by a later one",
        "all(a <= b for a, b in zip(other, left, strict=True))",
        "all(a >= b for a, b in zip(other, left, strict=True))",
    ),
    (
        "what runs counts for nothing",
        "*(max(now, begun.ends[i]) for i in sorted(begun.order))",
        "*(now for i in begun.order)",
    ),
    ("the cap is forgotten", "timed(tasks, order, memory_cap)", "timed(tasks, order, None)"),
    (
        "twice as late",
        "soonest = max(soonest, ends[i])",
        "soonest = max(soonest, 2 * ends[i])",
    ),
    (
        "work of other resources is counted",
        "first[resource] + work[resource] for resource in work",
        "first[resource] + sum(work.values()) for resource in work",
    ),
    (
        "what others hold is free",
        "start = max(now, free.get(task.resource, 0.0), *(ends[j] for j in task.after), 0.0)",
        "start = max(now, free.get(task.resource, 0.0), *(2 * ends[j] for j in task.after), 0.0)",
    ),
    ("first those with short ways", "key=lambda i: tails[i])", "key=lambda i: -tails[i])"),
)
EQUIVALENT: dict[str, str] = {}
