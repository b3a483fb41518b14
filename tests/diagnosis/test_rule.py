"""What rules are given, and what findings are made of."""

from __future__ import annotations

import pytest

from fxgrad.diagnosis import Draft, Evidence, FlowView, LackingError, Thresholds
from fxgrad.diagnosis.rule import listed, number
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
    assert (finding.confidence, finding.backward, finding.docs) == ("several steps", 4, "rules/mine.md")
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
