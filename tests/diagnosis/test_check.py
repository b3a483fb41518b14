"""What rules are given, and what findings are made of."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fxgrad
from fxgrad.diagnosis import Draft, Evidence, FlowView, LackingError, Thresholds
from fxgrad.diagnosis.check import listed, number
from tests.diagnosis.making import Setting, linears


def evidence(count: int, **setting: object) -> Evidence:
    flows = [linears([1.0, 1.0], setting=Setting(backward=n, **setting)) for n in range(count)]  # type: ignore[arg-type]
    return Evidence([FlowView(flow) for flow in flows], Thresholds())


@pytest.mark.parametrize(
    ("count", "recent", "confidence"),
    [(1, 1, "one step"), (4, 1, "one step"), (5, 5, "several steps"), (9, 5, "several steps")],
)
def test_how_many_flows_a_rule_looks_at(count: int, recent: int, confidence: str) -> None:
    given = evidence(count)
    assert [view.flow.event.backward for view in given.recent] == list(range(count - recent, count))
    assert given.view.flow.event.backward == count - 1
    assert given.confidence == confidence


def test_a_draft_fills_what_all_findings_have() -> None:
    given = evidence(5)
    draft = Draft(given, "mine", "warning", "what", "mend", {"factor": 2.0})
    finding = draft.at(given.view.nodes["fc1"], affected=("fc1.weight",))
    assert (finding.rule, finding.severity, finding.message, finding.suggestion) == ("mine", "warning", "what", "mend")
    assert (finding.site, finding.place, finding.source) == ("fc1", "fc1", "net.py:3")
    assert (finding.confidence, finding.backward, finding.docs) == ("several steps", 4, "findings/mine.md")
    assert (finding.evidence, finding.affected) == ({"factor": 2.0}, ("fc1.weight",))


def test_places_without_a_node() -> None:
    draft = Draft(evidence(1), "mine", "info", "", "")
    assert draft.at(None).place == "outside the model"
    assert draft.at(None, parameter="fc0.weight").place == "fc0.weight"
    output = draft.evidence.view.nodes["output"]
    assert draft.at(output).place == "output"  # it returned no site


def test_needs() -> None:
    evidence(1).need_values()
    evidence(1).need_counts()
    with pytest.raises(LackingError, match="forward=True"):
        evidence(1, values=False).need_values()
    with pytest.raises(LackingError, match="statistics='full'"):
        evidence(1, level="norm").need_counts()


def test_words() -> None:
    assert number(0.000123456) == "0.000123"
    assert listed(["a", "b", "c"]) == "a, b, c"
    assert listed(["a", "b", "c", "d", "e"]) == "a, b, c and 2 more"


class Twice(nn.Module):
    """A value with two uses, one of them scaled."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x):
        h = self.first(x)
        return self.last(torch.sigmoid(h * 2.0) + h)


@pytest.mark.parametrize(("sites", "lacking"), [("node", True), ("edge", False)])
def test_what_needs_the_parts_of_a_fan_out_says_so(sites: str, lacking: bool) -> None:
    torch.manual_seed(0)
    flow = fxgrad.gradient_flow(Twice(), torch.randn(8, 4), sites=sites)
    missing = {one.rule: one.reason for one in flow.not_checked}
    assert ("scale_break" in missing) == lacking
    if lacking:
        assert missing["scale_break"].startswith("1 operations take values with several uses")
        assert "saturated" not in missing  # its input has one use


def test_an_outputs_zero_norm_is_not_checked() -> None:
    torch.manual_seed(0)
    flow = fxgrad.gradient_flow(nn.Linear(4, 2), torch.randn(8, 4), loss=lambda out: (0 * out).sum(), statistics="norm")
    assert "loss_seed" in {one.rule for one in flow.not_checked}
    full = fxgrad.gradient_flow(nn.Linear(4, 2), torch.randn(8, 4), loss=lambda out: (0 * out).sum())
    assert [(f.severity, f.rule) for f in full.findings] == [("warning", "loss_seed")]
