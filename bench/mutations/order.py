"""Mutants of `fxpasses.schedule.order`: see `bench.mutations`."""

WRITTEN = (
    (
        "waits are launches",
        'return Event("wait", node.name, of=launch.name)',
        'return Event("launch", node.name)',
    ),
    ("waits for themselves", "of=launch.name)", "of=node.name)"),
    ("events of graphs that send nothing", 'if any(e.kind == "launch" for e in found) else ()', ""),
    ("codecs are light", "target.namespace == CODECS or ", ""),
    (
        "a product in front of a collective is free",
        "pairs += [(earlier.name, event.name) for earlier in before]",
        "pairs += [(earlier.name, event.name) for earlier in before[:1]]",
    ),
    (
        "a product behind a collective is free",
        "pairs += [(last.name, event.name)] if last else []",
        "pairs += []",
    ),
    ("collectives are free", "before = segment or ([last] if last else [])", "before = segment"),
    (
        "waits are not looked at",
        'if want.kind == "wait":\n        return want.of == got.of',
        'if want.kind == "wait":\n        return True',
    ),
    ("any size", "or want.numel == got.numel", "or True"),
    (
        "collectives are not counted",
        "for position in range(max(len(planned), len(emitted))):",
        "for position in range(len(planned)):",
    ),
    (
        "what is missing is fine",
        "if want is None or got is None or not _same(want, got):",
        "if want and got and not _same(want, got):",
    ),
    ("products are not looked at", "        if found != expected:\n", "        if False:\n"),
    ("kernels' sources are read", "for line in lines[entry:]:", "for line in lines:"),
    ("partitions are not read", "(call|partition_\\d+)", "(call)"),
    ("a product runs again and again", "self._unseen.difference_update(here)", "pass"),
    ("assertions run products", ' and "assert_" not in line', ""),
    ("allocations run products", ' and "empty_strided" not in line', ""),
    (
        "reused buffers have no size",
        "self._numels[match[1]] = self._numels.get(match[2], 0)",
        "pass",
    ),
    (
        "views have no size",
        "for pattern in (_ALLOCATED, _NAMED_VIEW):",
        "for pattern in (_ALLOCATED,):",
    ),
    ("brackets are not counted", '{"(": 1, ")": -1}.get(character, 0)', "0"),
    ("sizes are added", "total *= int(size)", "total += int(size)"),
)
EQUIVALENT: dict[str, str] = {
    "comparison: found > expected -> found >= expected": "they are not equal",
    "arguments: _same(want, got) -> _same(got, want)": "either way round it says the same",
}
