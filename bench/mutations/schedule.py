"""Mutants of `fxpasses.passes.schedule`: see `bench.mutations`."""

WRITTEN = (
    ("waits stand where they are planned", "order = held_back(program, order, cap)", "pass"),
    ("moves where ranks differ", "if self.layout is not None:", "if False:"),
    ("no cap", "else int(self.memory_mb * 2**20)", "else None"),
    (
        "moves what is no better",
        "return order if better else as_it_is",
        "return order",
    ),
    ("waits are not postponed", "postponed(best, late, cap)", "best"),
    (
        "nodes of no task stay",
        "task = task_of.get(node, task)",
        "task = task_of.get(node, len(order))",
    ),
    ("inputs are not waited for", "elif missing:", "elif False:"),
    ("says it changed nothing", "Report(changed=bool(moved),", "Report(changed=False,"),
    ("counts all nodes", "a is not b for a, b in", "True for a, b in"),
    ("launches as they become ready", "while begins and begins[0] in ready:", "while False:"),
)
EQUIVALENT: dict[str, str] = {}
