from __future__ import annotations

import dataclasses
import io
import math

import networkx as nx
import pytest

from fxgrad.errors import SiteNotFoundError
from fxgrad.graph import backward_order, biggest_drops, ratios
from fxgrad.schema import BlindSpot, Consumer, Edge, ModuleCall, Node, Statistics
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


def test_an_integer_output_is_told_from_the_measured_one_beside_it() -> None:
    top = flows.node("/max")
    spot = BlindSpot("/max", "[1]", "integer", "the value is an integer")
    data = flows.flow([top], [flows.site(top, flows.full(2.0), "[0]")], [], spots=(spot,)).to_networkx().nodes["/max"]
    assert (data["l2_norm"], data["[0].l2_norm"]) == (2.0, 2.0)
    assert (data["blind_spot"], data["[1].blind_spot"]) == ("integer", "integer")
    assert data["[1].blind_spot_detail"] == "the value is an integer"


def test_edges_carry_the_part_that_each_use_sends_back() -> None:
    made = flows.chain(2)
    once = Edge("/op0", "", Consumer("/op1", "args[0]"), flows.full(3.0, nan=1))
    again = Edge("/op0", "", Consumer("/op1", "kwargs['mask']"), flows.full(4.0))
    single = dataclasses.replace(made, edges=(once,)).to_networkx().edges["/op0", "/op1"]
    assert (single["l2_norm"], single["nan_count"], single["output_position"]) == (3.0, 1, "")
    both = dataclasses.replace(made, edges=(once, again)).to_networkx().edges["/op0", "/op1"]
    assert (both["args[0].l2_norm"], both["kwargs['mask'].l2_norm"], both["l2_norm"]) == (3.0, 4.0, 5.0)
    assert both["arguments"] == "args[0], kwargs['mask']"
    assert "l2_norm" not in made.to_networkx().edges["/op0", "/op1"]


def test_graphml_keeps_nan_and_infinity() -> None:
    made = flows.flow([flows.node("/a"), flows.node("/b")], [
        flows.site(flows.node("/a"), Statistics("norm", 8, math.nan)),
        flows.site(flows.node("/b"), Statistics("norm", 8, math.inf)),
    ], [])  # fmt: skip
    file = io.BytesIO()
    nx.write_graphml(made.to_networkx(), file)
    file.seek(0)
    found = nx.read_graphml(file)
    assert math.isnan(found.nodes["/a"]["l2_norm"])
    assert math.isinf(found.nodes["/b"]["rms"])


def test_sites_are_found_by_id_key_and_fx_name() -> None:
    flow = flows.residual()
    assert flow.site("/chunk[0]").id == "/chunk[0]"
    assert flow.site("/chunk").id == "/chunk[0]"
    assert flow.site("block_fc").key == "block.fc"
    with pytest.raises(SiteNotFoundError, match=r"'block\.fc'"):
        flow.site("block.f")
    with pytest.raises(SiteNotFoundError, match="its 0 sites"):
        flows.flow([], [], []).site("x")


def test_module_gains() -> None:
    calls = {call.path: call for call in flows.residual().modules()}
    assert calls["block"].gradient_in == 3.0
    assert calls["block"].gradient_out == 5.0
    assert calls["block"].gain == pytest.approx(5 / 3)
    leaf = calls["block.fc"]
    assert (leaf.gradient_in, leaf.gradient_out, leaf.gain) == (4.0, None, None)  # the skip uses its input too
    assert calls[""].gradient_out == 5.0


def calls_of(path: str, *consumers: Node) -> tuple[ModuleCall, ...]:
    return tuple(ModuleCall(path, "Block", n, ("input:x",), (c.key,)) for n, c in enumerate(consumers))


def test_calls_of_one_block_with_one_input_are_not_mixed_up() -> None:
    x = flows.node("input:x", "placeholder")
    first, second = flows.node("block/relu"), flows.node("block/relu#1", call_index=1)
    sites = [flows.site(x, flows.full(5.0)), flows.site(first, flows.full(1.0)), flows.site(second, flows.full(2.0))]
    uses = [("input:x", first.key, "args[0]"), ("input:x", second.key, "args[0]")]
    both = flows.flow([x, first, second], sites, uses, calls=calls_of("block", first, second)).modules()
    assert [(call.gradient_in, call.gradient_out) for call in both] == [(1.0, None), (2.0, None)]
    (alone,) = flows.flow([x, first], sites[:2], uses[:1], calls=calls_of("block", first)).modules()
    assert alone.gain == 5.0


def test_a_leaf_that_is_called_again_is_known_by_its_key() -> None:
    x = flows.node("input:x", "placeholder")
    first = flows.node("fc", "call_module", "Linear")
    second = flows.node("fc#1", "call_module", "Linear", call_index=1)
    sites = [flows.site(x, flows.full(6.0)), flows.site(first, flows.full(3.0)), flows.site(second, flows.full(2.0))]
    uses = [("input:x", "fc", "args[0]"), ("fc", "fc#1", "args[0]")]
    calls = (
        ModuleCall("fc", "Linear", 0, ("input:x",), ("fc",)),
        ModuleCall("fc", "Linear", 1, ("fc",), ("fc#1",)),
    )
    found = flows.flow([x, first, second], sites, uses, calls=calls).modules()
    assert [call.gain for call in found] == [2.0, 1.5]


def test_a_value_made_out_of_sight_belongs_to_the_module_around_it() -> None:
    x = flows.node("input:x", "placeholder")
    hidden = Node("block/Custom#1", "custom_1", "external", "Custom", "block", "Block", 1, None)
    sites = [flows.site(x, flows.full(4.0)), flows.site(hidden, flows.full(2.0))]
    made = flows.flow([x, hidden], sites, [("input:x", hidden.key, "args[0]")], calls=calls_of("block", hidden))
    assert made.modules()[0].gain == 2.0


@pytest.mark.parametrize(("bad", "check"), [("nan", math.isnan), ("inf", math.isinf)])
def test_a_broken_gradient_is_no_small_one(bad, check) -> None:
    x, fc = flows.node("input:x", "placeholder"), flows.node("block/op")
    sites = [flows.site(x, flows.full(0.0, **{bad: 8})), flows.site(fc, flows.full(2.0))]
    (call,) = flows.flow([x, fc], sites, [("input:x", "block/op", "args[0]")], calls=calls_of("block", fc)).modules()
    assert check(call.gradient_out)
    assert check(call.gain)


def test_nothing_arrived_means_no_gain() -> None:
    x, fc = flows.node("input:x", "placeholder"), flows.node("block/op")
    sites = [flows.site(x, flows.full(0.0, zero=8)), flows.site(fc, flows.full(0.0, zero=8))]
    (call,) = flows.flow([x, fc], sites, [("input:x", "block/op", "args[0]")], calls=calls_of("block", fc)).modules()
    assert (call.gradient_in, call.gradient_out, call.gain) == (0.0, 0.0, None)


def test_backward_order_starts_at_the_loss() -> None:
    assert [site.id for site in backward_order(flows.chain(2))] == ["/op1", "/op0", "input:x"]


def test_a_branch_is_measured_against_all_that_it_came_from() -> None:
    found = ratios(flows.residual())
    assert found["block.fc"] == pytest.approx(4 / 3)
    assert found["input:x"] == pytest.approx(5 / math.hypot(4, 3))


def test_a_norm_beyond_the_range_has_no_ratio() -> None:
    names = [flows.node(f"/op{n}") for n in range(3)]
    norms = [1.0, math.inf, 1.0]
    sites = [flows.site(n, Statistics("norm", 8, v)) for n, v in zip(names, norms, strict=True)]
    made = flows.flow(names, sites, [("/op0", "/op1", "args[0]"), ("/op1", "/op2", "args[0]")], level="norm")
    assert ratios(made) == {}


def test_ratios_look_past_what_was_not_measured() -> None:
    flow = flows.chain(3, factor=0.1)
    assert ratios(flow) == pytest.approx({"/op0": 0.1, "/op1": 0.1})
    gap = tuple(dataclasses.replace(s, statistics=None) if s.id == "/op1" else s for s in flow.sites)
    assert ratios(dataclasses.replace(flow, sites=gap)) == pytest.approx({"/op0": 0.01})
    assert "/nan" not in ratios(flows.special())  # the norm of the finite rest is no norm of the gradient


def test_the_biggest_drops_come_first() -> None:
    drops = biggest_drops(flows.chain(4, factor=0.25), count=2)
    assert [drop.ratio for drop in drops] == pytest.approx([0.25, 0.25])
    assert biggest_drops(flows.chain(4, factor=0.9)) == []


def test_a_number_is_no_key_and_the_error_says_what_is() -> None:
    with pytest.raises(SiteNotFoundError, match=r"a string such as 'input:x' .* not by 0; flow\.sites\[n\]"):
        flows.chain().site(0)  # type: ignore[arg-type]
