"""What Python writes into the page: looked at without a browser."""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import math
import re
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path

import pytest

from fxgrad.errors import FlowFileError, OptionError
from fxgrad.render.page.tree import tree_of
from fxgrad.render.scale import COLOURS, DECADES
from fxgrad.schema import Diagnosis, GradientFlow, History, Statistics
from tests import flows

ASSETS = files("fxgrad.render.page") / "assets"


def data_of(text: str) -> dict:
    return json.loads(re.search(r'id="data">(.*?)</script>', text, re.DOTALL).group(1))


def nodes_in(items: list) -> Iterator[int]:
    for item in items:
        if isinstance(item, int):
            yield item
        elif isinstance(item, list):
            yield from item
        else:
            yield from nodes_in(item.get("c") or item.get("r") or item.get("g"))


def widest(items: list) -> int:
    inner = [widest(item.get("c") or item.get("r") or item.get("g")) for item in items if isinstance(item, dict)]
    return max([len(items), *inner])


@pytest.mark.parametrize(
    "flow", [flows.chain(5), flows.chain(500), flows.residual(), flows.special(), flows.nested(30, 7)], ids=repr
)
def test_every_node_is_in_the_tree_once_and_no_level_is_long(flow: GradientFlow):
    tree = tree_of(flow)
    assert sorted(nodes_in(tree)) == list(range(len(flow.nodes)))
    assert widest(tree) <= 96


def test_equal_blocks_are_a_run_of_modules():
    (run,) = [item for item in tree_of(flows.nested(12, 3))[1]["c"] if isinstance(item, dict)]
    assert [block["m"] for block in run["r"]] == [f"body.{n}" for n in range(12)]


def test_numbers_come_with_six_digits_and_odd_ones_spelled():
    content = data_of(flows.special().to_html(findings=()))["flow"]
    table, sites = content["statistics"], content["sites"]
    norms = {content["nodes"]["key"][node]: row for node, row in zip(sites["node"], sites["statistics"], strict=True)}
    assert table["l2_norm"][norms["/huge"]] == "Infinity"
    assert table["nan_count"][norms["/nan"]] == 3
    assert norms["/blind"] == -1
    flow = flows.chain(1)
    made = Statistics("full", 8, math.pi * 1e-9, 1 / 3)
    odd = GradientFlow(
        flow.nodes, (flow.sites[0], flows.site(flow.nodes[1], made)), flow.edges, flow.parameters, flow.blind_spots,
        flow.capture, flow.event,
    )  # fmt: skip
    table = data_of(odd.to_html(findings=()))["flow"]["statistics"]
    assert 3.14159e-9 in table["l2_norm"] and 0.333333 in table["max_abs"]


def test_statistics_that_are_alike_are_written_once():
    content = data_of(flows.chain(4, factor=1.0).to_html(findings=()))["flow"]
    assert len(content["statistics"]["l2_norm"]) == 2  # the one of all values, and that of the parameter


def test_the_scale_is_that_of_every_picture():
    palette = data_of(flows.chain().to_html(findings=()))["palette"]
    assert tuple(palette["colours"]) == COLOURS and palette["decades"] == DECADES


def test_a_run_is_packed_by_site_and_event():
    runs = History([flows.chain(2, 0.1), flows.chain(2, 0.01)])
    series = data_of(runs.to_html(findings=()))["series"]
    packed = gzip.decompress(base64.b64decode(series["l2_norm"]))
    half = len(packed) // 2
    codes = [
        int.from_bytes(bytes(pair), "little", signed=True) for pair in zip(packed[:half], packed[half:], strict=True)
    ]
    assert codes == [-1400, -2800, -700, -1400]  # 700 to a decade: op0 at both events, then op1


def test_the_policy_names_this_script_and_this_style():
    text = flows.chain().to_html()
    for asset, tag in (("page.js", "script"), ("page.css", "style")):
        digest = hashlib.sha256((ASSETS / asset).read_bytes()).digest()
        assert f"{tag}-src &#x27;sha256-{base64.b64encode(digest).decode()}&#x27;" in text


def test_libraries_are_small_and_their_licences_are_there():
    listed = json.loads((ASSETS / "vendored.json").read_text())["libraries"]
    assert sum(one["bytes"] for one in listed) < 2_000_000
    for one in listed:
        assert one["license"] in ("MIT", "ISC", "BSD-3-Clause", "Apache-2.0")
        licence = (ASSETS / "LICENSES" / f"{one['name'].replace('/', '__')}.txt").read_text()
        assert "permission" in licence.lower()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"norm": "l3"}, "norm='l3' is not known"),
        ({"theme": "blue"}, "theme must be 'auto', 'light', 'dark', but is 'blue'"),
        ({"scale": "log"}, "scale must be"),
        ({"source": "yes"}, "source must be True or False"),
        ({"depth": 3}, "pages have no option 'depth'; they have norm, scale, theme, source, findings"),
        ({"findings": [3]}, "findings must be findings"),
    ],
)
def test_what_a_page_cannot_be_asked_for(options, words):
    with pytest.raises(OptionError, match=re.escape(words)):
        flows.chain().to_html(**options)


def test_a_page_that_cannot_be_written(tmp_path: Path):
    with pytest.raises(FlowFileError, match="cannot be written"):
        flows.chain().to_html(tmp_path / "no" / "x.html")


def test_findings_are_those_that_are_given():
    assert data_of(flows.chain(9, 0.01).to_html())["flow"]["findings"]
    assert data_of(flows.chain(9, 0.01).to_html(findings=Diagnosis(())))["flow"]["findings"] == []
