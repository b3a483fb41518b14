"""DOT text is compared with files in ``tests/golden``; FXGRAD_OVERWRITE_GOLDEN=1 writes them anew."""

from __future__ import annotations

import dataclasses
import os
import re
from pathlib import Path

import pytest

from fxgrad.errors import FlowFileError, OptionError
from fxgrad.schema import Consumer, Edge, Statistics
from tests import diagnoses, flows

GOLDEN = Path(__file__).parents[1] / "golden"
CASES = {
    "chain": (flows.chain(), {}),
    "residual_rms": (flows.residual(), {"norm": "rms"}),
    "special": (flows.special(), {}),
    "nested_folded": (flows.nested(4, 3), {"depth": 1}),
    "nested_clusters": (flows.nested(2, 2), {"depth": 2, "norm": "max_abs"}),
    "culprits": (flows.chain(3), {"findings": diagnoses.every()}),
}


def asked_for_edges(flow):
    return dataclasses.replace(flow, event=dataclasses.replace(flow.event, sites="edge"))


def test_lines_show_what_flows_back_by_width_and_colour() -> None:
    flow = asked_for_edges(flows.residual())
    edges = [dataclasses.replace(e, statistics=Statistics("norm", 4, 10.0**-n)) for n, e in enumerate(flow.edges)]
    text = dataclasses.replace(flow, edges=tuple(edges)).to_dot()
    assert "legend_edges" in text
    wide = {float(width) for width in re.findall(r"n\d+ -> n\d+ \[color=\"#\w+\" penwidth=([\d.]+)", text)}
    assert len(wide) > 2
    assert "legend_edges" not in flows.residual().to_dot()


def test_lines_without_an_ordinary_number_have_looks_of_their_own() -> None:
    flow = asked_for_edges(flows.residual())
    (first, second, *rest) = flow.edges
    zero = Statistics("full", 4, 0.0, max_abs=0.0, nan_count=0, inf_count=0, zero_count=4)
    bad = Statistics("full", 4, 1.0, max_abs=1.0, nan_count=1, inf_count=0, zero_count=0)
    edges = (dataclasses.replace(first, statistics=zero), dataclasses.replace(second, statistics=bad), *rest)
    text = dataclasses.replace(flow, edges=edges).to_dot()
    assert re.search(r"-> n\d+ \[color=\"#000000\" style=dotted", text)
    assert re.search(r"-> n\d+ \[color=\"#b30000\" penwidth=4", text)
    blank = tuple(dataclasses.replace(edge, statistics=None) for edge in flow.edges)
    assert re.search(r"-> n\d+ \[color=\"#999999\" style=dashed", dataclasses.replace(flow, edges=blank).to_dot())


@pytest.mark.parametrize("name", CASES)
def test_golden(name) -> None:
    flow, options = CASES[name]
    options = {"findings": ()} | options  # these files are about the picture and not about the rules
    text = flow.to_dot(**options)
    file = GOLDEN / f"{name}.dot"
    if os.environ.get("FXGRAD_OVERWRITE_GOLDEN"):
        file.write_text(text, encoding="utf-8")
    assert text == file.read_text(encoding="utf-8")
    assert flow.to_dot(**options) == text


def test_every_look_is_there_and_in_the_legend() -> None:
    text = flows.special().to_dot()
    for words in ("12 NaN", "3 NaN", "8 Inf", "0 (all zero)", "below float32's range", "above float32's range"):
        assert (words in text) == (words != "12 NaN")
    for look in ("legend_zero", "legend_nonfinite", "legend_outside_range", "legend_not_measured"):
        assert look in text


def test_labels_say_shape_dtype_norm_and_gain_and_tooltips_the_source() -> None:
    text = flows.chain(2).to_dot()
    assert r"/op1 (function)\n2x4 float32\nl2_norm 0.1, gain 0.1" in text
    assert "ratio to the sites nearer to the loss 0.1" in text
    assert "/home/user/net.py:4" in text
    assert "zero_count 0" in text


def test_a_collapsed_box_says_type_count_norm_and_gain() -> None:
    text = flows.nested(2, 10).to_dot(depth=1)
    assert r"body.0 (Block, 10 nodes)\nl2_norm 0.001, gain 1e+03" in text
    assert r"body.0 ... body.2\n3x Block, 6 nodes\nl2_norm " in flows.nested(3, 2).to_dot(depth=1)


def test_nan_inside_of_a_collapsed_box_shows_outside() -> None:
    flow = flows.nested(2, 4)
    bad = flow.sites[2]
    sites = tuple(dataclasses.replace(s, statistics=flows.full(1.0, nan=3)) if s == bad else s for s in flow.sites)
    text = dataclasses.replace(flow, sites=sites).to_dot(depth=1)
    assert r"3 NaN at op1" in text
    assert "octagon" in text


def test_steep_drops_are_marked_and_mild_ones_are_not() -> None:
    steep = flows.chain(3, 0.01)
    text = steep.to_dot(findings=flows.lost(steep))
    assert r"DROP x0.01" in text
    assert "legend_drop" in text
    mild = flows.chain(3, 0.1)
    assert "DROP" not in mild.to_dot(findings=flows.lost(mild))


def test_without_a_finding_no_drop_is_marked() -> None:
    assert "DROP" not in flows.chain(3, 0.01).to_dot(findings=())


def test_in_a_large_flow_far_uses_are_named_and_not_drawn_through() -> None:
    def text(blocks):
        flow = flows.nested(blocks, 10)
        uses = tuple(Edge("input:x", "", Consumer(node.key, "args[1]")) for node in flow.nodes[20::20])
        return dataclasses.replace(flow, edges=flow.edges + uses).to_dot(depth=9, fold=False)

    large = text(30)
    assert "n0 -> n40 " in large
    assert "from0_60 -> n60 " in large and "n0 -> n60 " not in large
    assert 'from0_60 [label="from input:x"' in large
    assert "from0_" not in text(10)


def dense(layers):
    """Functions of which each takes the values of all before it, as in a DenseNet."""
    nodes = [flows.node(f"/op{n}") for n in range(layers)]
    uses = [(a.key, b.key, f"args[{n}]") for m, b in enumerate(nodes) for n, a in enumerate(nodes[:m])]
    return flows.flow(nodes, [flows.site(node, flows.full(1.0)) for node in nodes], uses)


def test_many_edges_make_a_flow_large_and_the_longest_are_named() -> None:
    assert "from0_" not in dense(20).to_dot(fold=False)
    text = dense(60).to_dot(fold=False)  # 1,770 edges, that cross 35,990 ranks
    assert 'splines="line"' in text or "splines=line" in text
    cut = {(int(a), int(b)) for a, b in re.findall(r"from(\d+)_(\d+) -> n", text)}
    drawn = {(int(a), int(b)) for a, b in re.findall(r"\tn(\d+) -> n(\d+) ", text)}
    assert len(cut) + len(drawn) == 60 * 59 // 2
    assert max(b - a for a, b in drawn) < min(b - a for a, b in cut)
    assert sum(b - a for a, b in drawn) <= 8000


def test_outputs_share_one_norm_and_say_what_is_special() -> None:
    flow = flows.residual()
    split = flow.sites[3:]

    def text(*statistics):
        sites = (
            *flow.sites[:3],
            *(dataclasses.replace(s, statistics=t) for s, t in zip(split, statistics, strict=True)),
        )
        return dataclasses.replace(flow, sites=sites).to_dot(fold=False)

    assert "l2_norm 5" in text(flows.full(3.0), flows.full(4.0))
    assert "0 (all zero)" in text(flows.full(0.0, zero=8), flows.full(0.0, zero=8))
    assert "2 NaN, 1 Inf" in text(flows.full(3.0, nan=2), flows.full(3.0, inf=1))
    assert "part outside float32's range" in text(Statistics("norm", 8, 0.0), Statistics("norm", 8, 1.0))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"norm": "l3"}, "'l2_norm', 'rms', 'max_abs'"),
        ({"depth": -1}, "at least 0"),
        ({"depth": True}, "at least 0"),
        ({"fold": 1}, "True or False"),
        ({"theme": "blue"}, "'light' or 'dark'"),
        ({"scale": "log"}, "'relative' or 'absolute'"),
        ({"direction": "up"}, "'down' or 'right'"),
        ({"colour": "red"}, "no option 'colour'; they have norm, depth, fold"),
    ],
)
def test_bad_options(options, said) -> None:
    with pytest.raises(OptionError, match=said):
        flows.chain().to_dot(**options)


def test_a_norm_that_was_not_measured() -> None:
    with pytest.raises(OptionError, match="statistics='full'"):
        flows.chain(level="norm").to_dot(norm="max_abs")


def test_writing(tmp_path) -> None:
    path = tmp_path / "flow.dot"
    assert flows.chain().to_dot(path) == path.read_text(encoding="utf-8")
    with pytest.raises(FlowFileError):
        flows.chain().to_dot(tmp_path / "none" / "flow.dot")
