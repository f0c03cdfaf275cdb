"""Mutants of `fxpasses.schedule.solve`: see `bench.mutations`."""

WRITTEN = (
    ("the first that was found", "best = min(found, key=lambda s: s.makespan)", "best = found[0]"),
    (
        "the worst",
        "best = min(found, key=lambda s: s.makespan)",
        "best = max(found, key=lambda s: s.makespan)",
    ),
    ("no improvement", "best = _improved(best, bound, memory_cap, placements)", "pass"),
    (
        "the cap is for the beginning",
        "best = _improved(best, bound, memory_cap, placements)",
        "best = _improved(best, bound, None, placements)",
    ),
    (
        "the bound is the schedule's",
        "return Solution(best, best.makespan if proven else min(bound, best.makespan), given)",
        "return Solution(best, best.makespan * 1.5, given)",
    ),
    ("postponed at any price", "tried.makespan <= schedule.makespan * (1 + 1e-12)", "True"),
    ("nothing is postponed", "if len(chosen) < 2:", "if True:"),
    ("shortest path", "nx.dag_longest_path(graph)", "nx.shortest_path(graph, 0, -1)"),
    ("each resource twice", "now += step", "now += 2 * step"),
)
_NEVER_EXACTLY = "no number that is drawn is exactly that"
EQUIVALENT: dict[str, str] = {
    "constant: 1 -> 2, in left[i] = -1": "any number below 0 says that a task has its place",
    "constant: 1 -> 2, in end = -1": "any number below 0 is no task's",
    "constant: 1 -> 2, in max(1, len(tasks))": "one task alone is at its bound",
    "comparison: dice.random() < _CRITICAL -> dice.random() <= _CRITICAL": _NEVER_EXACTLY,
    "comparison: dice.random() < math.exp(-worse / temperature) "
    "-> dice.random() <= math.exp(-worse / temperature)": _NEVER_EXACTLY,
}
