"""Culprits and the way of a fault in the picture."""

from __future__ import annotations

import dataclasses
import re
import sys

import pytest

from fxgrad import presenter
from fxgrad.errors import OptionError
from fxgrad.render.palette import CULPRIT, CULPRIT_SHAPE, EDGES, LOOKS, WAY, contrast
from fxgrad.schema import Diagnosis, GradientFlow
from tests import diagnoses, flows


def drawn(flow: GradientFlow, *findings, **options) -> str:
    return flow.to_dot(findings=findings, **options)


def box(text: str, name: str) -> str:
    """The line of the box whose label has this name."""
    (line,) = [
        one for one in text.splitlines() if re.match(r"\t+n\d+ \[label=", one) and name in one.split("tooltip")[0]
    ]
    return line


def ways(text: str) -> set[tuple[int, int]]:
    return {
        (int(a), int(b)) for a, b in re.findall(r"n?(?:from)?(\d+)(?:_\d+)? -> n(\d+) \[color=\"#a3007c:white", text)
    }


def test_a_culprit_has_a_border_a_shape_and_words() -> None:
    text = drawn(flows.chain(3), diagnoses.dead())
    line = box(text, "/op1")
    assert r'label="1 ERROR dead\n/op1 (function)' in line
    assert "doubleoctagon" in line and CULPRIT["color"] in line
    assert "ERROR dead at /op1 (/home/user/net.py:4): 16 of 16 units never fired" in line.partition("tooltip")[2]
    assert "try: Start the bias at 0." in line
    assert "doubleoctagon" not in box(text, "/op0")
    assert "legend_culprit" in text


def test_the_way_is_a_double_line_whichever_way_the_fault_went() -> None:
    flow = flows.chain(3)  # boxes: input:x, /op0, /op1, /op2, output
    assert ways(drawn(flow, diagnoses.dead())) == {(0, 1), (1, 2)}
    forward = drawn(flow, diagnoses.dead(path=("/op1", "/op2", "output")))
    assert ways(forward) == {(2, 3), (3, 4)}
    assert "legend_way" in forward
    assert "on the path of 1 ERROR dead" in forward
    nowhere = drawn(flow, diagnoses.dead(path=("/op1", "unknown", "input:x")))
    assert ways(nowhere) == set()
    assert "legend_way" not in nowhere


def test_the_way_shows_where_lines_tell_parts_apart() -> None:
    flow = flows.chain(3)
    flow = dataclasses.replace(flow, event=dataclasses.replace(flow.event, sites="edge"))
    assert ways(drawn(flow, diagnoses.dead())) == {(0, 1), (1, 2)}


def test_in_collapsed_and_folded_boxes_the_one_that_holds_the_culprit_is_marked() -> None:
    way = ("body.1.op1", "body.1.op0", "body.0.op1", "body.0.op0", "input:x")
    text = drawn(flows.nested(2, 2), diagnoses.dead("body.1.op1", path=way), depth=1)
    line = box(text, "body.1 (Block")
    assert r'label="1 ERROR dead at op1\nbody.1 (Block' in line
    assert CULPRIT["color"] in line and "shape=folder" in line
    assert ways(text) == {(0, 1), (1, 2)}
    folded = drawn(flows.nested(5, 2), diagnoses.dead("body.3.op1"), depth=1)
    assert "1 ERROR dead at body.3.op1" in box(folded, "5x Block")
    clusters = drawn(flows.nested(2, 2), diagnoses.dead("body.1.op1"), depth=2)
    assert "doubleoctagon" in box(clusters, "body.1.op1")


def test_a_culprit_full_of_nan_keeps_its_look_and_is_marked() -> None:
    line = box(drawn(flows.special(), diagnoses.dead("/nan")), "/nan")
    assert LOOKS["nonfinite"]["fillcolor"] in line
    assert "doubleoctagon" in line


def test_several_findings_keep_the_numbers_of_the_list() -> None:
    flow = flows.chain(3)
    text = drawn(flow, diagnoses.frozen(), diagnoses.dead(), diagnoses.dead(rule="zero", severity="warning"))
    assert r'label="2 ERROR dead\n3 WARNING zero\n/op1' in text
    many = drawn(flow, *[diagnoses.dead()] * 9)
    assert r"... and 6 findings more\n/op1" in many
    assert r"... and 6 findings more\l" in many  # in the title


def test_a_parameter_is_marked_at_the_node_that_takes_it() -> None:
    flow = flows.residual()
    nodes = tuple(
        dataclasses.replace(n, parameters=("block.fc.weight",)) if n.key == "block.fc" else n for n in flow.nodes
    )
    sites = tuple(dataclasses.replace(s, node=next(n for n in nodes if n.key == s.key)) for s in flow.sites)
    flow = dataclasses.replace(flow, nodes=nodes, sites=sites)
    found = diagnoses.dead(node=None, site=None, parameter="block.fc.weight", rule="update_size", path=())
    assert "1 ERROR update_size" in box(drawn(flow, found, depth=9), "block.fc (")
    assert "<- 1 ERROR update_size" in "".join(str(c) for c in flow.table(findings=[found]).columns[0].cells)


def test_what_lies_outside_of_the_model_is_in_the_title_and_information_in_tooltips() -> None:
    info = dataclasses.replace(diagnoses.dead(), severity="info")
    text = drawn(flows.chain(3), diagnoses.outside(), info)
    assert r"1 WARNING loss_seed outside the model: the gradient was NaN when it entered\l" in text
    assert "doubleoctagon" not in text and not ways(text)
    assert "INFO dead at /op1" in box(text, "/op1")


def test_the_findings_of_the_flow_are_the_default(monkeypatch) -> None:
    monkeypatch.setattr(presenter, "diagnose", lambda flow: diagnoses.every())
    flow = flows.chain(3)
    for text in (flow.to_dot(), flow.to_svg(), flow._repr_html_()):
        assert "1 ERROR dead" in text
    assert flow.to_dot(findings=()) == drawn(flow)
    assert "ERROR" not in flow.to_svg(findings=())
    assert "<- 1 ERROR dead" in "".join(str(cell) for cell in flow.table().columns[0].cells)
    assert "ERROR" not in "".join(str(cell) for cell in flow.table(findings=()).columns[0].cells)
    monkeypatch.setitem(sys.modules, "pygraphviz", None)
    monkeypatch.setenv("PATH", "")
    assert "ERROR dead" in flow._repr_html_()


def test_a_diagnosis_of_a_series_can_be_given() -> None:
    flow = flows.chain(3)
    assert flow.to_dot(findings=diagnoses.every()) == drawn(flow, *diagnoses.every().findings)
    assert flow.to_dot(findings=Diagnosis(())) == drawn(flow)


@pytest.mark.parametrize("given", ["dead", 7, [1], diagnoses.dead])
def test_findings_of_something_else(given) -> None:
    with pytest.raises(OptionError, match=r"such as flow\.findings, or a diagnosis, but holds"):
        flows.chain().to_dot(findings=given)


@pytest.mark.parametrize("word", flows.NASTY)
def test_names_cannot_inject_anything(word) -> None:
    text = flows.named(word).to_svg(findings=diagnoses.named(word), depth=9)
    assert "<script>" not in text
    assert "href" not in text


def test_marks_differ_from_everything_else_without_colour() -> None:
    assert CULPRIT_SHAPE["shape"] not in {look.get("shape") for look in LOOKS.values()}
    assert ":" in WAY["color"] and not any(":" in look["color"] for look in EDGES.values())
    assert contrast(CULPRIT["color"], "#ffffff") >= 4.5
