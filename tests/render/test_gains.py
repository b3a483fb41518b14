from __future__ import annotations

import dataclasses
import math

import pytest

from fxgrad.render.gains import Gains
from tests import flows


def gain(flow, *keys):
    """The gain of the nodes ``keys``, whose last one has the outputs."""
    return Gains(flow).of(set(keys), [site for site in flow.sites if site.key == keys[-1]])


def test_a_node_and_a_group_of_nodes() -> None:
    flow = flows.chain(4, 0.1)
    assert gain(flow, "/op2") == pytest.approx(0.1)
    assert gain(flow, "/op1", "/op2", "/op3") == pytest.approx(1e-3)


def test_it_is_that_of_the_module_flows() -> None:
    flow = flows.nested(3, 4)
    for call in flow.modules():
        if call.path and call.gain is not None:
            keys = [node.key for node in flow.nodes if node.module_path.startswith(call.path)]
            assert gain(flow, *keys) == pytest.approx(call.gain)


def test_none_where_another_user_shares_the_input() -> None:
    flow = flows.residual()
    assert gain(flow, "block.fc") is None
    assert gain(flow, "block.fc", "block/add") == pytest.approx(5.0 / 3.0)


def test_parts_that_were_measured_at_the_edges_are_told_apart() -> None:
    flow = flows.residual()
    edges = tuple(dataclasses.replace(edge, statistics=flows.full(2.0)) for edge in flow.edges)
    assert gain(dataclasses.replace(flow, edges=edges), "block.fc") == pytest.approx(2.0 / 4.0)


def test_none_where_a_number_is_missing() -> None:
    flow = flows.special()
    for node in flow.nodes:
        assert gain(flow, node.key) is None
    assert gain(flows.chain(), "input:x") is None
    assert gain(flows.chain(), "/op0") is None
    huge = dataclasses.replace(flows.chain(2), sites=tuple(
        dataclasses.replace(site, statistics=dataclasses.replace(flows.full(1.0), level="norm", l2_norm=math.inf))
        for site in flows.chain(2).sites
    ))  # fmt: skip
    assert gain(huge, "/op1") is None
