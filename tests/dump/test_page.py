"""The page: its data, and what a browser makes of it."""

from __future__ import annotations

import itertools
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from bench.pipeline import chain
from fxpasses.config import Hardening
from fxpasses.dump.chart import chart_of
from fxpasses.dump.figures import figures_of
from fxpasses.dump.page import Page
from fxpasses.observers import GraphName
from fxpasses.pipeline import build
from fxpasses.schedule.machine import Machine
from fxpasses.schedule.plan import plan_step
from fxpasses.trace import trace
from tests.golden.model import TwoHeads
from tests.graphs import doubled, mlp

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
BROWSER = next(filter(None, map(shutil.which, BROWSERS)), None)
needs_browser = pytest.mark.skipif(
    BROWSER is None, reason=f"needs one of {', '.join(BROWSERS)} on PATH"
)
MACHINE = Machine(bandwidth=3e6)
OPTIONS = {"precision": "bf16", "compression": "int8"}


def page_of_two_heads() -> Page:
    page = Page(Machine())
    trace(TwoHeads(), (torch.ones(3, 4),), OPTIONS, world=2, watcher=lambda n: [page.watch(n)])
    return page


@pytest.fixture(scope="module")
def html() -> str:
    return page_of_two_heads().html()


def data_in(html: str) -> dict:
    found = re.search(r'<script id="data" type="application/json">(.*?)</script>', html, re.DOTALL)
    assert found is not None
    return json.loads(found[1])


def test_the_data_tells_what_each_pass_did(html):
    joint, backward = data_in(html)["graphs"]
    assert [g["name"] for g in (joint, backward)] == ["rank0/g0.joint", "rank0/g0.backward"]
    moments = backward["moments"]
    assert [m["title"].split()[1] for m in moments] == [
        "input",
        "participation",
        "running_stats",
        "bucketing",
        "compress",
    ]
    assert moments[0]["figures"]["wire_bytes"] == 0 < moments[-1]["figures"]["codec_bytes"]
    for before, after in itertools.pairwise(moments):
        assert patched(before["lines"], after["lines"], after["changes"]) == after["lines"]
    cat = backward["nodes"]["bucket0_cat"]
    assert (cat["pass"], cat["rule"], cat["kind"]) == ("bucketing", "flatten", "pass")
    assert "left.weight" in cat["parameters"] and cat["line"].startswith("tests/golden/model.py:")


def patched(old: list[int], new: list[int], changes: list[list[int]]) -> list[int]:
    result, at = [], 0
    for a, b, c, d in changes:
        result += [*old[at:a], *new[c:d]]
        at = b
    return result + old[at:]


def test_schedules_are_those_of_the_plan():
    graphs = trace(TwoHeads(), (torch.ones(3, 4),), OPTIONS, world=2)
    plan = plan_step(graphs, MACHINE, 2)
    agreement = sum(t.duration for t in plan.program.tasks if t.name == "agreement")
    charts = [chart_of(graph.after, graph.name, MACHINE, 2) for graph in graphs]
    ends = [max(start + length for _, start, length, *_ in chart["bars"]) for chart in charts]
    assert sum(ends) == pytest.approx(1e6 * (plan.step_s - agreement), rel=1e-4)
    assert all(chart["ranks"] == 2 and chart["rates"] == "bandwidth=3000000.0" for chart in charts)
    nodes = [node for *_, names in charts[1]["bars"] for node in names]
    assert set(nodes) <= {node.name for node in graphs[1].after.graph.nodes}


def test_a_pass_that_changes_nothing_has_no_schedule(html):
    for moment in data_in(html)["graphs"][1]["moments"]:
        assert ("chart" in moment) == moment["changed"]


def test_the_page_needs_nothing_else(html):
    assert not re.search(r"(?:src|href)\s*=|https?://|@import|url\(", html)


def test_the_data_can_not_end_the_script():
    page = Page(Machine())
    graph = doubled((3,))
    graph.inputs()[0][0].meta["role"] = type(graph.inputs()[0][1])("tangent", "</script><b>")
    page.watch(GraphName(0, 0, "backward"))(None, None, graph)
    html = page.html()
    assert html.count("</script>") == 2 and "</script><b>" in str(data_in(html))


def test_figures(fake_world):
    graph = doubled((320,))
    assert vars(figures_of(graph)) == {
        "nodes": 1,
        "casts": 0,
        "collectives": 0,
        "wire_bytes": 0,
        "codec_bytes": 0,
    }
    build(Hardening(reduce_dtype="bf16"), fake_world, 4, 0).run("backward", graph)
    figures = figures_of(graph)
    assert figures.collectives == 1 and figures.wire_bytes == 2 * 320 and figures.casts >= 2


def shown(html: str, folder: Path, address: str = "", script: str = "") -> str:
    """What the page is once the browser has run it, and then a script of ours."""
    assert BROWSER is not None
    path = folder / "page.html"
    path.write_text(html.replace("</html>", f"<script>{script}</script></html>"))
    flags = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder / 'profile'}"]
    done = subprocess.run(
        [BROWSER, *flags, "--window-size=1400,800", "--dump-dom", f"{path.as_uri()}#{address}"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "data-ready" in done.stdout, "the page's script did not end"
    return done.stdout


def press(*keys: str) -> str:
    presses = (
        f"document.dispatchEvent(new KeyboardEvent('keydown', {{key: {key!r}}}));" for key in keys
    )
    return "".join(presses)


def items(dom: str) -> list[tuple[str, str]]:
    """The list of passes: attributes and text of each."""
    passes = dom[dom.index('<ol id="passes">') : dom.index("</ol>")]
    return re.findall(r"<li([^>]*)>([^<]*)", passes)


def here(dom: str) -> str:
    (found,) = [text for attributes, text in items(dom) if "here" in attributes]
    return found


@needs_browser
def test_an_address_leads_to_a_pass_and_a_node(html, tmp_path):
    dom = shown(html, tmp_path, "graph=rank0/g0.backward&pass=05+compress&node=bucket0_cat")
    assert here(dom) == "05 compress" and "<dd>bucketing / flatten</dd>" in dom
    assert "<dt>stands in</dt><dd>04 bucketing, 05 compress</dd>" in dom
    assert '<span class="n hit" data-node="bucket0_cat">' in dom
    holding = [text for attributes, text in items(dom) if "holds" in attributes]
    assert holding == ["04 bucketing", "05 compress"]


@needs_browser
def test_the_keyboard_walks_through_passes_and_graphs(html, tmp_path):
    assert here(shown(html, tmp_path)) == "01 cast"
    for keys, expected in (
        ("k", "00 input"),
        ("]", "02 participation"),
        ("]jj", "04 bucketing"),
        ("]jjjjjj", "05 compress"),
        ("][", "01 cast"),
    ):
        assert here(shown(html, tmp_path, script=press(*keys))) == expected


@needs_browser
def test_the_schedule_is_drawn_and_shows_the_node(html, tmp_path):
    address = "graph=rank0/g0.backward&pass=05+compress&node="
    dom = shown(html, tmp_path, f"{address}bucket0_quantise")
    (track,) = [y for kind, y in bars(dom) if "hit" in kind]
    assert track == "22"  # the second of three
    assert {kind for kind, _ in bars(dom)} >= {"bar compute", "bar launch", "bar link", "bar wait"}
    assert re.search(r"<dt>runs</dt><dd>codec, from [\d.]+ µs for [\d.]+ µs, bucket 0", dom)
    assert re.search(r"predicted schedule: [\d.]+ (µs|ms) on 2 ranks", dom)
    before = shown(html, tmp_path, "graph=rank0/g0.backward&pass=00+input")
    assert {kind for kind, _ in bars(before)} == {"bar compute"}


@needs_browser
def test_a_click_on_a_bar_selects_its_node_and_hovering_marks_it(html, tmp_path):
    bar = "document.querySelector('.bar.link[data-node=bucket0_all_gather_into_tensor]')"
    event = "new MouseEvent('{}', {{bubbles: true}})"
    address = "graph=rank0/g0.backward&pass=05+compress"
    dom = shown(html, tmp_path, address, f"{bar}.dispatchEvent({event.format('click')});")
    assert "<dd>compress / launch</dd>" in dom
    assert re.search(r'<span class="n hit" data-node="bucket0_all_gather_into_tensor">', dom)
    name = "document.querySelector('.n[data-node=bucket0_quantise]')"
    script = f"{name}.dispatchEvent({event.format('mouseover')});"
    dom = shown(html, tmp_path, f"{address}&node=bucket0_quantise", script)
    assert [kind for kind, _ in bars(dom) if "near" in kind] == ["bar codec hit near"]


@needs_browser
def test_the_schedule_is_zoomed(html, tmp_path):
    dom = shown(html, tmp_path, "graph=rank0/g0.backward", press("+", "+", "-"))
    assert '<svg id="bars" width="200%">' in dom


def bars(dom: str) -> list[tuple[str, str]]:
    """Class and vertical place of each bar of the schedule."""
    found = re.findall(r'<rect [^>]*y="(\d+)"[^>]*class="([^"]*)"', dom)
    return [(kind, y) for y, kind in found]


@needs_browser
def test_unchanged_passes_are_dimmed(tmp_path):
    page = Page(Machine())
    trace(mlp(4, 2), (torch.ones(3, 4),), world=2, watcher=lambda n: [page.watch(n)])
    dom = shown(page.html(), tmp_path, "graph=rank0/g0.backward")
    dimmed = [text for attributes, text in items(dom) if "same" in attributes]
    assert dimmed == ["01 participation", "02 running_stats"] and here(dom) == "03 bucketing"


@needs_browser
def test_search_finds_passes_and_nodes(html, tmp_path):
    for words, expected in (("bucketing", ["04 bucketing"]), ("quantise", ["05 compress"])):
        script = f"document.getElementById('search').value = {words!r}; drawPasses();"
        dom = shown(html, tmp_path, "graph=rank0/g0.backward", script)
        assert [text for attributes, text in items(dom) if "hidden" not in attributes] == expected


@needs_browser
def test_a_click_selects_a_node(html, tmp_path):
    script = "document.querySelector('.n').click();"
    dom = shown(html, tmp_path, script=script)
    assert "<dt>node</dt>" in dom and "n hit" in dom


@needs_browser
def test_graphs_of_5000_nodes_open_in_three_seconds(fake_world, tmp_path):
    graph, page = chain(5000), Page(Machine())
    options = Hardening(bucket_mb=1, compression="int8", clip_norm=1.0, loss_scale="dynamic")
    passes = build(options, fake_world, 4, 0)
    passes.run("backward", graph, [page.watch(GraphName(0, 0, "backward"))])
    assert len(data_in(page.html())["graphs"][0]["moments"][-1]["lines"]) > 5000
    for address in ("", "only=0"):
        dom = shown(page.html(), tmp_path, address)
        milliseconds = re.search(r'data-ready="(\d+)"', dom)
        assert milliseconds is not None and int(milliseconds[1]) < 3000
        assert dom.count('class="row') < 200  # only what is in sight
