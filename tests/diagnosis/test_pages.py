"""Every rule has a page that says all there is to say, and every threshold is on one of them as it is."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest

from fxgrad.diagnosis import DEFAULT_CHECKS, Thresholds
from fxgrad.schema import RULES
from tests.diagnosis.making import found, linears

DOCS = Path(__file__).resolve().parents[2] / "docs"
_ROW = re.compile(r"^\| `(?P<name>\w+)` \| (?P<default>[-+.\de]+) \|", re.MULTILINE)
_SECTIONS = ("Example", "Why it happens", "How it is measured", "One step and several steps", "False alarms",
             "What to do", "How to silence")  # fmt: skip


def page_of(rule: str) -> str:
    return (DOCS / "findings" / f"{rule}.md").read_text(encoding="utf-8")


def test_the_rules_that_run_are_the_public_ones() -> None:
    assert {rule.name for rule in DEFAULT_CHECKS} == set(RULES)


@pytest.mark.parametrize("rule", RULES)
def test_a_page_has_every_section_and_an_example(rule: str) -> None:
    text = page_of(rule)
    assert text.startswith(f"# {rule}: ")
    assert tuple(re.findall(r"^## (.+)$", text, re.MULTILINE)) == _SECTIONS
    assert "**What you see.**" in text
    example = text.partition("## Example")[2].partition("\n## ")[0]
    assert "fxgrad." in example
    assert re.search(rf"```text\n.*{rule}", example)


def test_no_page_is_of_a_rule_that_does_not_exist() -> None:
    pages = {page.stem for page in (DOCS / "findings").glob("*.md")} - {"README", "accuracy"}
    assert pages == set(RULES)


@pytest.mark.parametrize("rule", RULES)
def test_the_index_says_what_the_schema_says(rule: str) -> None:
    assert f"| [`{rule}`]({rule}.md) | {RULES[rule]} |" in page_of("README")


def test_every_threshold_is_documented_with_its_default() -> None:
    documented: dict[str, set[float]] = {}
    others = {DOCS / "findings" / "accuracy.md"}  # whose tables are no thresholds
    for page in {*(DOCS / "findings").glob("*.md")} - others:
        for match in _ROW.finditer(page.read_text(encoding="utf-8")):
            documented.setdefault(match["name"], set()).add(float(match["default"]))
    assert documented == {one.name: {float(getattr(Thresholds(), one.name))} for one in fields(Thresholds)}


def test_findings_name_their_page() -> None:
    finding = found(linears([1e-8, 1e-4, 1.0]), "vanishing")[0]
    assert finding.docs == "findings/vanishing.md"
    assert (DOCS / finding.docs).is_file()
