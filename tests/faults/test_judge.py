"""The judge judges right: verdicts on made-up findings, and the tables made of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from fxgrad.schema import Diagnosis, Finding, Node
from tests.faults import judge as judging
from tests.faults.accuracy import END, START, table, written_into
from tests.faults.judge import Verdict, judge, rates, right_place
from tests.faults.program import Built, Program


def program(**answer: Any) -> Program:
    def make() -> Built:
        return Built(nn.Linear(2, 2), (torch.randn(3, 2),), lambda out: out.sum())

    return Program("toy", "toys", make, **{"expect": ("dead", "zero"), "culprits": ("act2", "block.3"), **answer})


def finding(rule: str = "dead", severity: str = "error", key: str | None = "net/act2", **fields: Any) -> Finding:
    op = fields.pop("op", "call_module")
    node = None if key is None else Node(key, key, op, key, key, "Toy", 0, None)
    return Finding(rule, severity, "message", "suggestion", node, key, **fields)  # type: ignore[arg-type]


def verdict(monkeypatch: pytest.MonkeyPatch, case: Program, *found: Finding) -> Verdict:
    monkeypatch.setattr(judging, "one_shot", lambda _: Diagnosis(found))
    return judge(case, 0, "one_shot")


def test_the_first_alarm_is_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = verdict(monkeypatch, program(), finding("frozen", "info"), finding(), finding("scale_break"))
    assert (seen.detected, seen.right_rule, seen.right_place, seen.alarms) == (True, True, True, 2)
    wrong = verdict(monkeypatch, program(), finding("scale_break"), finding())
    assert (wrong.detected, wrong.right_rule, wrong.right_place) == (True, False, True)
    assert "said scale_break" in wrong.line and "dead/zero" in wrong.line


def test_information_counts_only_where_it_may(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not verdict(monkeypatch, program(), finding(severity="info")).detected
    assert verdict(monkeypatch, program(info_ok=True), finding("frozen", "info"), finding(severity="info")).right_rule
    assert not verdict(monkeypatch, program(info_ok=True), finding("frozen", "info")).detected


def test_places() -> None:
    assert right_place(program(), finding(key="block.3/relu"))
    assert not right_place(program(), finding(key="block.31/relu"))
    assert not right_place(program(not_culprits=("head",)), finding(key="head/act2"))
    assert not right_place(program(), finding(key=None))
    assert right_place(program(), finding(key=None, parameter="block.3.weight"))


def test_the_outside_is_no_node_but_may_be_an_input_or_a_parameter() -> None:
    outside = program(outside=True, culprits=())
    assert right_place(outside, finding(key=None))
    assert right_place(outside, finding(key=None, parameter="a.weight"))
    assert right_place(outside, finding(key="input:x", op="placeholder"))
    assert not right_place(outside, finding())


def test_rates_and_table(monkeypatch: pytest.MonkeyPatch) -> None:
    healthy = program(expect=(), culprits=())
    seen = [
        verdict(monkeypatch, program(), finding()),
        verdict(monkeypatch, program(), finding(key="elsewhere")),
        verdict(monkeypatch, program()),
        verdict(monkeypatch, healthy),
        verdict(monkeypatch, healthy, finding("zero")),
    ]
    assert rates(seen) == {"detected": 2 / 3, "right_rule": 2 / 3, "right_place": 1 / 3, "false_alarms": 1}
    lines = table(seen).splitlines()
    assert lines[2] == "| `dead` | 1 | 3 | 2 (66.7%) | 2 (66.7%) | 1 (33.3%) | 0 |"
    assert lines[3].startswith("| `zero` |") and lines[3].endswith("| 1 |")
    assert lines[4].startswith("| all, and 2 healthy runs |")


def test_the_page_is_filled_between_its_markers() -> None:
    assert written_into(f"a\n{START}\nold\n{END}\nb", "new") == f"a\n{START}\n\nnew\n\n{END}\nb"
    with pytest.raises(ValueError, match="needs the lines"):
        written_into("no markers", "new")


def test_a_seed_is_all_that_a_program_depends_on() -> None:
    torch.manual_seed(3)
    first = program().build(0).model.weight
    torch.manual_seed(4)
    assert torch.equal(first, program().build(0).model.weight)
