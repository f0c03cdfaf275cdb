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
        "views stay behind",
        "task = task_of.get(node, task)",
        "task = task_of.get(node, len(order))",
    ),
    (
        "views bring what they read",
        "if node in task_of or placed.keys() >= set(node.all_input_nodes):",
        "if True:",
    ),
    ("inputs are not waited for", "if missing:", "if False:"),
    ("says it changed nothing", "Report(changed=bool(moved),", "Report(changed=False,"),
    ("counts all nodes", "a is not b for a, b in", "True for a, b in"),
    (
        "neighbours are not looked at again",
        "keep_below(cap, graph, before, program, self._program(graph))",
        "pass",
    ),
    ("nodes are not put back", "_arrange(graph, nodes_before)", "pass"),
    ("launches as they become ready", "while begins and begins[0] in ready:", "while False:"),
)
_NO_NODE_IN_FRONT = "inputs have their places, and the output stays behind everything"
_NOTHING_TO_MOVE = "where nothing is awaited there is nothing to move"
EQUIVALENT: dict[str, str] = {
    "condition: if any((work.kind == WAIT for work in program.works)): order = self._o "
    "-> if True: order = self._order(program, cap) if list(order) != list(rang": _NOTHING_TO_MOVE,
    "comparison: work.kind == WAIT -> work.kind != WAIT": _NOTHING_TO_MOVE,
    "constant: 'placeholder' -> 'placeholderx', in ('placeholder', 'output')": _NO_NODE_IN_FRONT,
    "constant: 'output' -> 'outputx', in ('placeholder', 'output')": _NO_NODE_IN_FRONT,
    "condition: if list(order) != list(range(len(order))): reorder(graph, program, ord "
    "-> if True: reorder(graph, program, order)": "the order that is there moves nothing",
    "arguments: zip(before, graph.graph.nodes, strict=True) "
    "-> zip(graph.graph.nodes, before, strict=True)": "either way round they are told apart",
    "comparison: after.makespan < before.makespan * (1 - _WORTH_IT) "
    "-> after.makespan <= before.makespan * (1 - _WORTH_IT)": "no prediction is exactly that",
    "condition: if node is not graph.output_node: graph.output_node.prepend(node) "
    "-> if True: graph.output_node.prepend(node)": "torch puts no node in front of itself",
}
_SHOWN_ELSEWHERE = "that waits are as late as costs nothing is asked of `postponed` itself"
_NO_OTHER_LOSS = "what the host loses by another launch does not stand there"
_BEFORE_ITS_READER = "a view of inputs stands in front of what reads it, whatever task is behind it"
KNOWN = {
    "constant: 'placeholder' -> 'placeholderx', in node.op == 'placeholder'": _BEFORE_ITS_READER,
    "comparison: placed.keys() >= set(node.all_input_nodes) "
    "-> placed.keys() > set(node.all_input_nodes)": _BEFORE_ITS_READER,
    "operator: launch + 2 -> launch - 2": _NO_OTHER_LOSS,
    "constant: 3 -> 4, in launch + 3": _NO_OTHER_LOSS,
    "by hand: waits are not postponed": _SHOWN_ELSEWHERE,
    "comparison: work.kind in (WAIT, CODEC) -> work.kind not in (WAIT, CODEC)": _SHOWN_ELSEWHERE,
    "operator: found.index(above) - (program.works[above].kind == LINK) "
    "-> found.index(above) + (program.works[above].kind == LINK)": (
        "no graph is drawn in which a wait makes room for what a launch has on its way"
    ),
}
