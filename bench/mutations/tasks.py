"""Mutants of `fxpasses.schedule.tasks`: see `bench.mutations`."""

WRITTEN = (
    ("a resource runs two at once", "start = free.get(task.resource, 0.0)", "start = 0.0"),
    ("dependencies ignored", "            if ends[j] > start:\n", "            if False:\n"),
    ("released at its own end", "released[j] = max(released[j], self.ends[i])", "pass"),
    ("what starts comes first", "return sorted(changes)", "return changes"),
    ("room is not waited for", "or held + task.memory > memory_cap):", "or False):"),
    ("the last release counts", "released[j] = max(released[j], end)", "released[j] = end"),
    ("held for ever", "held -= tasks[j].memory\n    return peak", "pass\n    return peak"),
)
EQUIVALENT: dict[str, str] = {
    "comparison: ends[j] > start -> ends[j] >= start": "the same moment, once more",
    "comparison: ends[j] > now -> ends[j] >= now": "the same moment, once more",
    "comparison: releases[0][0] <= now -> releases[0][0] < now": (
        "what is released now is released as soon as room is needed"
    ),
    "condition: if memory_cap is not None: _release(tasks, i, readers, released, ends[ "
    "-> if True: _release(tasks, i, readers, released, ends[i], releases)": (
        "without a cap nobody reads what is released"
    ),
}
