"""The answer on one screen: lines and widths that people can rely on."""

from __future__ import annotations

import dataclasses
from itertools import pairwise

import pytest
from rich.cells import cell_len
from rich.console import Console

from fxgrad.render.profile import LINES, profile
from fxgrad.render.report import Report, report_text
from fxgrad.schema import BlindSpot
from tests import diagnoses, flows

FLOWS = {
    "chain": flows.chain(4),
    "nested": flows.nested(12, 10),
    "many": flows.nested(2, 80),
    "flat": flows.chain(300, factor=0.9),
    "special": flows.special(),
    "residual": flows.residual(),
}


def text_of(flow, width=80, findings=(), **options) -> list[str]:
    return report_text(Report(flow, tuple(findings), **options), width).splitlines()


@pytest.mark.parametrize("width", [40, 57, 80, 160])
@pytest.mark.parametrize("name", FLOWS)
def test_no_line_is_wider_than_the_screen_and_a_profile_has_at_most_25(name, width) -> None:
    lines = text_of(FLOWS[name], width, diagnoses.every().findings)
    assert max(map(cell_len, lines)) <= width
    rows = profile(FLOWS[name], (), width)
    assert 1 <= len(rows) <= LINES == 25
    assert all(row.cell_len <= width for row in rows)


@pytest.mark.parametrize("word", flows.NASTY)
def test_names_neither_steer_the_terminal_nor_break_a_line(word) -> None:
    lines = text_of(flows.named(word), 60, diagnoses.named(word).findings)
    assert all(line.isprintable() and cell_len(line) <= 60 for line in lines)


def test_the_answer_comes_first() -> None:
    lines = text_of(flows.chain(3), findings=diagnoses.every().findings)
    assert lines[0] == "Net: 1 error, 1 warning: dead at /op1, and 1 more"
    assert lines[1].startswith("1. ERROR dead at /op1")
    assert lines[2].strip() == "16 of 16 units never fired"
    assert lines[3].strip() == "try: Start the bias at 0."
    assert lines[-1] == "4 values: flow.table()"


def test_a_healthy_flow_says_what_arrives() -> None:
    lines = text_of(flows.chain(2, factor=0.5), 200)
    assert lines[0] == "Net: nothing wrong found; the gradient is 0.5 at the loss side and 0.25 at /op0 (x0.5)"


def test_a_line_for_each_block_in_forward_order_with_a_bar_for_each_of_a_run() -> None:
    rows = [row.plain for row in profile(alternating(), (), 80)]
    assert [row.split()[0] for row in rows] == ["fc0", "head"]
    assert rows[0].split()[-2:] == ["0.5", "▁▁▁▁▁▁▁▁▁▁▁▂▂▂▃▃▄▄▄▅"]
    assert "20 × Linear, tanh" in rows[0]
    assert rows[1].split() == ["head", "Head", "1", "▅"]


def alternating():
    nodes = [flows.node("input:x", "placeholder")]
    for n in range(20):
        nodes += [flows.node(f"fc{n}", "call_module", "Linear"), flows.node(f"/tanh#{n}", call_index=n)]
    nodes += [flows.node("head", "call_module", "Head"), flows.node("output", "output")]
    sites = [flows.site(node, flows.full(0.5**n)) for n, node in enumerate(reversed(nodes[1:-1]))][::-1]
    sites = [flows.site(nodes[0], None), *sites]
    uses = [(one.key, two.key, "args[0]") for one, two in pairwise(nodes)]
    spot = BlindSpot("input:x", "", "no_grad_required", "nothing requires a gradient")
    return flows.flow(nodes, sites, uses, spots=(spot,))


def test_the_culprit_is_marked_by_the_number_of_its_finding() -> None:
    flow = alternating()
    node = next(node for node in flow.nodes if node.key == "fc7")
    rows = [row.plain for row in profile(flow, [diagnoses.dead("fc7", node=node)], 80)]
    assert rows[0].startswith("1> fc0")
    assert rows[1].startswith("   head")


def test_what_needs_no_gradient_is_no_gap() -> None:
    text = "\n".join(text_of(flows.chain(3)))
    assert "without a gradient" not in text
    assert "input:x" not in text
    assert "without a gradient: 1 frozen" in "\n".join(text_of(flows.special()))


def test_bars_have_the_colours_of_the_scale() -> None:
    console = Console(width=80, color_system="truecolor", force_terminal=True)
    with console.capture() as capture:
        console.print(Report(flows.chain(2, factor=1e-3), ()))
    assert "48;2;255;246;207" in capture.get()  # neutral
    assert "48;2;90;159;207" in capture.get()  # three decades below


def test_str_and_repr(monkeypatch) -> None:
    flow = flows.nested(12, 10)
    monkeypatch.setenv("COLUMNS", "40")
    assert max(map(len, str(flow).splitlines())) <= 40
    monkeypatch.setenv("COLUMNS", "100")
    assert str(flow) == report_text(Report(flow, flow.findings), 100).rstrip("\n")
    assert repr(flow) == "GradientFlow(Net: 121 of 121 values measured, backward 0)"
    long = dataclasses.replace(flow, capture=dataclasses.replace(flow.capture, model="M" * 500))
    assert len(repr(long)) <= 120
