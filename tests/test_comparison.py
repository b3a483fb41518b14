"""Before and after, side by side."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import fxgrad
from fxgrad.cli import app
from fxgrad.errors import OptionError
from fxgrad.render.comparing import comparison_text
from fxgrad.render.scale import colour
from tests import flows


def net(act, depth=12):
    torch.manual_seed(0)
    blocks = [one for _ in range(depth) for one in (nn.Linear(16, 16), act())]
    return nn.Sequential(*blocks, nn.Linear(16, 4))


def pair():
    inputs = torch.randn(32, 16, generator=torch.Generator().manual_seed(0))
    return tuple(fxgrad.gradient_flow(net(act), inputs) for act in (nn.Sigmoid, nn.Tanh))


def test_a_fix_takes_the_finding_away() -> None:
    before, after = pair()
    found = fxgrad.compare(before, after)
    assert [one.rule for one in found.gone] == ["vanishing"]
    assert not found.new and not found.worse
    assert fxgrad.compare(after, before).worse
    lines = str(found).splitlines()
    assert lines[0].startswith("before: 1 error: vanishing at")
    assert lines[1].startswith("after:  nothing wrong found")
    assert any(line.startswith("ERROR vanishing at") and line.endswith(": gone") for line in lines)


def test_numbers_are_those_of_the_flows_and_the_largest_change_comes_first() -> None:
    before, after = pair()
    changes = fxgrad.compare(before, after).changes
    assert {change.id for change in changes} == {site.id for site in before.sites}
    known = [change for change in changes if change.ratio is not None]
    for change in known:
        assert (change.before, change.after) == (before.site(change.id).l2_norm, after.site(change.id).l2_norm)
        assert change.ratio == pytest.approx(change.after / change.before)
    assert max(known, key=lambda change: change.ratio) == known[0]


def test_a_flow_against_itself_has_no_change() -> None:
    flow = flows.special()
    found = fxgrad.compare(flow, flow)
    assert not (found.gone or found.new or found.removed or found.added)
    assert str(found).endswith(f"{len(flow.sites)} of {len(flow.sites)} values as before")


def test_what_is_only_in_one_is_named() -> None:
    found = fxgrad.compare(flows.chain(3), flows.chain(5))
    assert (found.removed, found.added) == ((), ("/op3", "/op4"))
    assert "2 only after: /op3, /op4" in str(found)


def changed(flow, key, **statistics):
    sites = tuple(
        dataclasses.replace(site, statistics=flows.full(**statistics)) if site.key == key else site
        for site in flow.sites
    )  # fmt: skip
    return dataclasses.replace(flow, sites=sites)


def test_nan_that_came_is_the_largest_change_and_has_no_ratio() -> None:
    flow = flows.chain(4)
    found = fxgrad.compare(flow, changed(flow, "/op1", norm=1.0, nan=2))
    assert found.changes[0].id == "/op1"
    assert found.changes[0].ratio is None
    assert "NaN" in str(found)


def test_the_picture_has_the_difference_on_the_scale() -> None:
    flow = flows.chain(4)  # /op1 has norm 1e-3
    svg = fxgrad.compare(flow, changed(flow, "/op1", norm=1.0)).to_svg(findings=())
    assert svg.count(f'fill="{colour(3)}"') == 2  # in the legend, and at /op1
    assert svg.count(f'fill="{colour(0)}"') == 1 + 3
    assert "0.001 → 1, x1e+03" in svg
    assert "larger" in svg and "exploding" not in svg


@pytest.mark.parametrize("width", [40, 80])
def test_it_fits_the_width(width) -> None:
    text = comparison_text(fxgrad.compare(flows.chain(40, factor=0.5), flows.chain(40, factor=0.9)), width)
    assert max(map(len, text.splitlines())) <= width
    assert len(text.splitlines()) <= 30


def test_misuse() -> None:
    with pytest.raises(OptionError, match="after must be a flow"):
        fxgrad.compare(flows.chain(), "flow.json")  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="no value in common"):
        fxgrad.compare(flows.chain(), flows.special())
    with pytest.raises(OptionError, match="'l2_norm', 'rms', 'max_abs'"):
        fxgrad.compare(flows.chain(), flows.chain(), norm="l1")  # type: ignore[arg-type]


def test_the_command_has_an_exit_code_for_ci(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    before, after = pair()
    before.to_json("a.json")
    after.to_json("b.json")
    for words, code in ((["a.json", "b.json"], 0), (["b.json", "a.json"], 1)):
        result = CliRunner().invoke(app, ["compare", *words, "--check", "-o", "diff.svg", "-o", "diff.txt"])
        assert result.exit_code == code, result.output
        assert result.output.endswith("wrote diff.svg\nwrote diff.txt\n")
    assert (tmp_path / "diff.svg").read_text(encoding="utf-8").startswith("<svg")
    assert CliRunner().invoke(app, ["compare", "b.json", "a.json"]).exit_code == 0
    assert CliRunner().invoke(app, ["compare", "a.json", "none.json"]).exit_code == 2
