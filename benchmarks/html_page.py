"""How fast the interactive page is, in a real browser: first paint, opening and closing, steps of the slider, sizes.

    python -m benchmarks.html_page

Made up flows, since only their size matters here.  Needs playwright and a Chromium on PATH.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any

from fxgrad.schema import (
    CaptureReport,
    Consumer,
    Edge,
    EventInfo,
    FlowSeries,
    GradientFlow,
    ModuleCall,
    Node,
    ParameterRecord,
    Site,
    Statistics,
)

_EVENTS = 10_000
_STEPS = 40
_LIBRARIES = files("fxgrad.render.page") / "assets" / "vendored.json"
_HISTOGRAM = tuple([0] * 20 + [5] * 30 + [0] * 14)


def flow(layers: int, blocks: int, values: int, event: int = 0) -> GradientFlow:
    """``layers`` of ``blocks`` of ``values`` linear modules in a row, each block with a skip around it."""
    nodes = [Node("input:x", "x", "placeholder", "x", "", "", 0, None)]
    calls: list[ModuleCall] = []
    uses: list[tuple[str, str, str]] = []
    last = "input:x"
    for layer in range(layers):
        before_layer = last
        for block in range(blocks):
            before = last
            for place in range(values):
                key = f"encoder.layers.{layer}.blocks.{block}.op{place}"
                nodes.append(
                    Node(key, key, "call_module", key, key, "Linear", 0, f"net.py:{place + 1}", (), (f"{key}.weight",))
                )
                uses.append((last, key, "args[0]"))
                last = key
            uses.append((before, last, "args[1]"))
            calls.append(ModuleCall(f"encoder.layers.{layer}.blocks.{block}", "Block", 0, (before,), (last,)))
        calls.append(ModuleCall(f"encoder.layers.{layer}", "Layer", 0, (before_layer,), (last,)))
    nodes.append(Node("output", "output", "output", "output", "", "", 0, None))
    uses.append((last, "output", "args[0]"))
    count = len(nodes) - 2
    sites = [
        Site(node, "", (8, 64), "float32", "cpu", _row(count - n, count, event)) for n, node in enumerate(nodes[:-1])
    ]
    return GradientFlow(
        tuple(nodes), tuple(sites),
        tuple(Edge(one, "", Consumer(two, argument), _row(1, 2, event)) for one, two, argument in uses),
        tuple(_weight(node, event) for node in nodes[1:-1]),
        (), CaptureReport("eager", "asked for", "Encoder", training=True, torch_version="2"),
        EventInfo(event, event, "made up", "histogram", "edge"), tuple(calls),
    )  # fmt: skip


def _weight(node: Node, event: int) -> ParameterRecord:
    row = _row(1, 3, event)
    return ParameterRecord(f"{node.key}.weight", (64, 64), "float32", "cpu", requires_grad=True, statistics=row)


def _row(place: int, count: int, event: int) -> Statistics:
    norm = 10 ** (-8 * place / count) * (1 + (event * 7919 % 1000) / 1000)
    return Statistics("histogram", 512, norm, norm / 3, norm / 1e6, norm / 7, norm * 8, 0, 0, 3, 1, 0, 0, _HISTOGRAM)


class MadeUpRun(FlowSeries):
    """Flows that are made when they are read."""

    def __init__(self, events: int) -> None:
        self._events = events
        self._flow = flow(3, 5, 10)

    def __len__(self) -> int:
        """How many."""
        return self._events

    def __getitem__(self, place: Any) -> Any:
        """One of them."""
        made = self._flow
        sites = tuple(
            replace(s, statistics=_row(len(made.sites) - n, len(made.sites), place)) for n, s in enumerate(made.sites)
        )
        return replace(made, sites=sites, event=replace(made.event, backward=place))


_TIMED = """async ([selector, count]) => {
    const told = [];
    for (let n = 0; n < count; n++) {
        const all = document.querySelectorAll(selector);
        if (all.length === 0) break;
        const from = performance.now();
        all[all.length - 1].dispatchEvent(new MouseEvent('click', { bubbles: true }));
        await new Promise((done) => requestAnimationFrame(() => setTimeout(done)));
        told.push(performance.now() - from);
    }
    return told;
}"""
_SLID = """async (count) => {
    const slider = document.querySelector('input[type=range]');
    const told = [];
    for (let n = 0; n < count; n++) {
        slider.value = String(Math.round((n + 0.5) * Number(slider.max) / count));
        const from = performance.now();
        slider.dispatchEvent(new Event('input'));
        await new Promise((done) => requestAnimationFrame(() => setTimeout(done)));
        told.push(performance.now() - from);
    }
    return told;
}"""
_PAINT = "performance.getEntriesByName('first-contentful-paint')[0].startTime"
_CLOSED = ".seen.box .toggle, .seen.strip .toggle"
_OPEN = ".seen.frame .toggle"


class _Processor:
    """Milliseconds that the page's main thread computed: what other programs do at the time does not count."""

    def __init__(self, page: Any) -> None:
        self._session = page.context.new_cdp_session(page)
        self._session.send("Performance.enable", {"timeDomain": "threadTicks"})

    @property
    def so_far(self) -> float:
        metrics = self._session.send("Performance.getMetrics")["metrics"]
        return 1000 * next(one["value"] for one in metrics if one["name"] == "TaskDuration")


def measure(page: Any, path: Path) -> Iterator[tuple[str, float, float, int]]:
    """What was measured: milliseconds on the clock, of them computed (a mean), and the goal."""
    processor = _Processor(page)
    page.goto(path.as_uri())
    page.wait_for_selector("html[data-ready]", timeout=60_000)
    began = processor.so_far
    yield "first paint", page.evaluate(_PAINT), began, 2000
    for what, script, argument, goal in (
        ("open", _TIMED, [_CLOSED, 8], 500),
        ("close", _TIMED, [_OPEN, 8], 500),
        ("slider step", _SLID, _STEPS, 50),
    ):
        if script == _SLID and not page.locator("input[type=range]").is_visible():
            continue
        before = processor.so_far
        told = page.evaluate(script, argument)
        yield what, statistics.median(told), (processor.so_far - before) / len(told), goal


def main() -> None:
    from playwright.sync_api import sync_playwright

    chromium = shutil.which("chromium")
    if chromium is None:
        sys.exit("no chromium on PATH")
    libraries = sum(one["bytes"] for one in json.loads(_LIBRARIES.read_text())["libraries"])
    print(f"load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores; median on the clock, mean computed")
    print(f"libraries: {libraries / 1e6:.2f} MB (goal 2)")
    cases = {
        "5,000 nodes": lambda: flow(10, 10, 50),
        "5,000 nodes in one module": lambda: flow(1, 1, 5000),
        "20,000 nodes": lambda: flow(20, 20, 50),
        f"{_EVENTS:,} events of 150 nodes": lambda: MadeUpRun(_EVENTS),
        "500 events of 5,000 nodes": lambda: _Large(500),
    }
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        for number, (name, make) in enumerate(cases.items()):
            shown = make()
            path = Path(folder) / f"{number}.html"
            began = time.perf_counter()
            size = (len(shown.to_html(path, findings=())) - libraries) / 1e6
            seconds = time.perf_counter() - began
            print(f"\n{name}: {size:.2f} MB beside the libraries (goal 5), written in {seconds:.1f} s")
            page = browser.new_page(viewport={"width": 1366, "height": 768})
            for what, clock, computed, goal in measure(page, path):
                verdict = "met" if clock < goal else "met without other load" if computed < goal else "MISSED"
                print(f"  {what:<12} {clock:6.0f} ms, {computed:6.0f} ms computed (goal {goal}: {verdict})")
            page.close()
        browser.close()


class _Large(MadeUpRun):
    """A run of a large model."""

    def __init__(self, events: int) -> None:
        super().__init__(events)
        self._flow = flow(10, 10, 50)


if __name__ == "__main__":
    main()
