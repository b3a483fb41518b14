"""What can be looked up in a flow."""

from __future__ import annotations

import math

import pytest

from fxgrad.diagnosis import FlowView
from fxgrad.diagnosis.view import decades, joint
from fxgrad.schema import Edge, GradientFlow
from tests.diagnosis.making import Link, chain, gradient, linears, parameter
from tests.flows import residual


def test_norms_of_a_node() -> None:
    view = FlowView(linears([0.25, 1.0, 2.0]))
    assert view.received("fc1") == 1.0
    assert view.sent("fc1") == 0.25
    assert view.gain("fc1") == 0.25
    assert view.gain("fc2") == 0.5
    assert view.received("input:x") is None
    assert view.gain("fc0") is None  # the input takes no gradient


def test_a_gain_of_nothing_or_of_nan_is_none() -> None:
    view = FlowView(chain(Link("fc0", gradient(1.0)), Link("fc1", gradient(0.0))))
    assert view.gain("fc1") is None
    view = FlowView(chain(Link("fc0", gradient(math.nan)), Link("fc1", gradient(1.0))))
    assert view.gain("fc1") is None


def test_several_outputs_count_together() -> None:
    assert joint([gradient(3.0), gradient(4.0)]) == pytest.approx(5.0)
    assert joint([gradient(3.0), None]) is None
    assert joint([]) is None


def test_a_value_of_two_uses_has_no_part_of_its_own() -> None:
    view = FlowView(residual())
    edges = {(edge.producer, edge.consumer.key): edge for edge in view.flow.edges}
    assert view.part(edges["input:x", "block.fc"]) is None
    part = view.part(edges["block.fc", "block/add"])
    assert part is not None
    assert part.l2_norm == 4.0


def test_a_measured_part_comes_before_the_value() -> None:
    flow = linears([1.0, 1.0])
    edges = [Edge(e.producer, "", e.consumer, gradient(0.5) if e.producer == "fc0" else None) for e in flow.edges]
    view = FlowView(GradientFlow(flow.nodes, flow.sites, tuple(edges), flow.parameters, (), flow.capture, flow.event))
    assert view.sent("fc1") == 0.5


def test_before_and_behind() -> None:
    view = FlowView(residual())
    assert set(view.before("block/add")) == {"input:x", "block.fc"}
    assert set(view.behind("block.fc")) == {"block/add", "/chunk", "output"}
    assert not view.before("input:x")


def test_records_by_any_name() -> None:
    flow = chain(
        Link("fc0", gradient(1.0), parameters=("tied.weight", "fc0.mask")),
        parameters=[parameter("fc0.weight", 1.0, aliases=("tied.weight",))],
    )
    view = FlowView(flow)
    assert [record.name for record in view.records(flow.nodes[1])] == ["fc0.weight"]
    assert view.owners == {"fc0.weight": ["fc0"]}


def test_words_name_the_file_without_its_folder() -> None:
    view = FlowView(linears([1.0]))
    assert view.source_words("fc0") == "fc0 (net.py:3)"
    assert view.source_words("output") == "output"


@pytest.mark.parametrize(("ratio", "wanted"), [(100.0, 2.0), (0.001, -3.0), (0.0, -math.inf)])
def test_decades(ratio: float, wanted: float) -> None:
    assert decades(ratio) == pytest.approx(wanted)


def test_ways_back_as_bits() -> None:
    view = FlowView(residual())
    for node in view.flow.nodes:
        assert view.bits_back(node.key) == view.bits(view.way_back(node.key))
    first, second, *_ = view.order
    assert view.bits([first, second, first]) == 0b11
    assert view.bits([]) == 0
