from __future__ import annotations

import io
import math

import networkx as nx
import pytest

from fxgrad.errors import SiteNotFoundError
from fxgrad.graph import biggest_drops, ratios
from tests import flows


@pytest.mark.parametrize("flow", [flows.chain(), flows.residual(), flows.special(), flows.nested(3, 2)])
def test_graphml_takes_the_graph_as_it_is(flow) -> None:
    graph = flow.to_networkx()
    file = io.BytesIO()
    nx.write_graphml(graph, file)
    file.seek(0)
    assert set(nx.read_graphml(file)) == {node.key for node in flow.nodes}


def test_attributes_are_plain_and_what_was_not_measured_is_absent() -> None:
    graph = flows.special().to_networkx()
    values = [value for _, data in graph.nodes(data=True) for value in data.values()]
    assert all(isinstance(value, (str, int, float, bool)) for value in values)
    assert graph.nodes["/fine"]["l2_norm"] == 1.0
    assert graph.nodes["/nan"]["nan_count"] == 3
    assert "l2_norm" not in graph.nodes["/blind"]
    assert graph.nodes["/blind"]["blind_spot"] == "frozen"
    assert math.isinf(graph.nodes["/huge"]["l2_norm"])


def test_a_value_that_is_used_twice_keeps_both_uses() -> None:
    edge = flows.residual().to_networkx().edges["/chunk", "output"]
    assert edge["uses"] == 2
    assert edge["arguments"] == "[0]->args[0][0], [0]->args[0][1]"


def test_several_outputs_have_their_position_as_prefix() -> None:
    data = flows.residual().to_networkx().nodes["/chunk"]
    assert data["[0].l2_norm"] == 3.0
    assert data["l2_norm"] == 3.0
    assert data["[1].dtype"] == "float32"


def test_sites_are_found_by_id_key_and_fx_name() -> None:
    flow = flows.residual()
    assert flow.site("/chunk[0]").id == "/chunk[0]"
    assert flow.site("/chunk").id == "/chunk[0]"
    assert flow.site("block_fc").key == "block.fc"
    with pytest.raises(SiteNotFoundError, match=r"'block\.fc'"):
        flow.site("block.f")


def test_module_gains() -> None:
    calls = {call.path: call for call in flows.residual().modules()}
    assert calls["block"].gradient_in == 3.0
    assert calls["block"].gradient_out == 5.0
    assert calls["block"].gain == pytest.approx(5 / 3)
    leaf = calls["block.fc"]
    assert (leaf.gradient_in, leaf.gradient_out, leaf.gain) == (4.0, None, None)  # the skip uses its input too
    assert calls[""].gradient_out == 5.0


def test_ratios_look_past_what_was_not_measured() -> None:
    flow = flows.chain(3, factor=0.1)
    assert ratios(flow) == pytest.approx({"/op0": 0.1, "/op1": 0.1})
    assert "/nan" not in ratios(flows.special())  # the norm of the finite rest is no norm of the gradient


def test_the_biggest_drops_come_first() -> None:
    drops = biggest_drops(flows.chain(4, factor=0.25), count=2)
    assert [drop.ratio for drop in drops] == pytest.approx([0.25, 0.25])
    assert biggest_drops(flows.chain(4, factor=0.9)) == []
