"""Mutants of `fxpasses.schedule.solve`: see `bench.mutations`."""

WRITTEN = (
    (
        "the first that was found",
        "best = min(found, key=lambda s: s.makespan, default=None)",
        "best = found[0] if found else None",
    ),
    (
        "the worst",
        "best = min(found, key=lambda s: s.makespan, default=None)",
        "best = max(found, key=lambda s: s.makespan, default=None)",
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
_SHORTER_TAIL = "what has ended and stays a moment has the shorter tail, and so does not count"
EQUIVALENT: dict[str, str] = {
    "constant: 1 -> 2, in left[i] = -1": "any number below 0 says that a task has its place",
    "constant: 1 -> 2, in end = -1": "any number below 0 is no task's",
    "constant: 1 -> 2, in max(1, len(tasks))": "one task alone is at its bound",
    "comparison: dice.random() < _CRITICAL -> dice.random() <= _CRITICAL": _NEVER_EXACTLY,
    "comparison: dice.random() < math.exp(-worse / temperature) "
    "-> dice.random() <= math.exp(-worse / temperature)": _NEVER_EXACTLY,
    "operator: left[i] <= 0 or step == 0.0 -> left[i] <= 0 and step == 0.0": _SHORTER_TAIL,
    "comparison: left[i] <= 0 -> left[i] < 0": _SHORTER_TAIL,
    "constant: 1 -> 2, in last.get(resource, -1)": "any number below 0 says that there is none",
}
_ANOTHER_SEARCH = "another search, which comes as close on what is drawn"
_NO_TIME = "where nothing takes any time, it does not matter when it stands"
_TO_BEGIN_WITH = "an order to begin with: where there is room is settled behind it"
KNOWN = {
    "constant: 0 -> 1, in [0]": "each place is written before it is read",
    "comparison: tried.makespan <= schedule.makespan * (1 + 1e-12) "
    "-> tried.makespan < schedule.makespan * (1 + 1e-12)": _NO_TIME,
    "branch: tasks[j].memory if left[j] == 0 else 0 -> tasks[j].memory": _TO_BEGIN_WITH,
    "constant: 0 -> 1, in tasks[j].memory if left[j] == 0 else 0": _TO_BEGIN_WITH,
    "operator: _WARMTH * best.makespan * (1 - _CYCLES * step / rounds % 1) ** 2 "
    "-> _WARMTH * best.makespan + (1 - _CYCLES * step / rounds % 1) ** 2": _ANOTHER_SEARCH,
    "constant: 2 -> 3, in (1 - _CYCLES * step / rounds % 1) ** 2": _ANOTHER_SEARCH,
    "constant: 0 -> 1, in worse <= 0": _ANOTHER_SEARCH,
    "operator: -worse / temperature -> -worse * temperature": _ANOTHER_SEARCH,
    "comparison: current.makespan < best.makespan "
    "-> current.makespan <= best.makespan": _ANOTHER_SEARCH,
    "constant: 3 -> 4, in dice.randrange(3)": _ANOTHER_SEARCH,
    "condition: if way == 0: priority = [0.0] * len(tasks) for place, i in enumerate(o "
    "-> if False: priority = [0.0] * len(tasks) for place, i in enumerate(orde": _ANOTHER_SEARCH,
    "constant: 0 -> 1, in way == 0": _ANOTHER_SEARCH,
    "branch: order if way == 1 else queued(tasks, order).order "
    "-> queued(tasks, order).order": _ANOTHER_SEARCH,
}
