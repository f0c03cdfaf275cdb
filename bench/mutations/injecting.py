"""Mutants of `fxpasses.faults.injecting`: see `bench.mutations`."""

WRITTEN = (
    (
        "readers see what was",
        "            reader.replace_input_with(node, struck)\n",
        "            pass\n",
    ),
    ("row of another fault", "rows[shot.number]", "rows[0]"),
    ("number of another site", "fault, site.number),", "fault, 0),"),
    ("news is not written", "        graph.write_state(news.name, told)\n", ""),
    ("news of the last site alone", "found[number].append(heard)", "found[number] = [heard]"),
    (
        "one fault a site",
        "            for number in site.faults:\n",
        "            for number in site.faults[:1]:\n",
    ),
    (
        "struck at the end",
        "self.write(graph, graph.behind(node), node, shot)",
        "self.write(graph, graph.output_node, node, shot)",
    ),
    ("a fault is no effect", '        struck.meta["effect"] = f"fault at {site}"\n', ""),
    ("news has no site", "        heard.meta[FAULT_NEWS] = site\n", ""),
)
EQUIVALENT = {
    "branch: select(graph, self.sites(graph), faults) if faults else [] -> "
    "select(graph, self.sites(graph), faults)": "without faults none is selected",
}
