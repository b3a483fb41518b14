"""What is found in the public bug reports of ``tests/cases``, held against the answer that each of them gives."""

from __future__ import annotations

import pytest

import fxgrad
from fxgrad.schema import Finding
from tests.test_cases import NAMES, load

pytestmark = pytest.mark.filterwarnings("ignore")  # some reports are about the very things that torch warns of
KNOWN = {"error", "none"}  # of EXPECT["finding"]: no rule of ours


def findings(name: str, **options) -> tuple[Finding, ...]:
    model, inputs, loss = load(name).build()
    return fxgrad.gradient_flow(model, inputs, loss=loss, **options).findings


def everything(found: tuple[Finding, ...]) -> list[Finding]:
    return [one for finding in found for one in (finding, *everything(finding.consequences))]


def alarms(found: tuple[Finding, ...]) -> list[Finding]:
    return [finding for finding in found if finding.severity != "info"]


def names_of(finding: Finding) -> str:
    node = finding.node
    return "" if node is None else f"{node.key} {node.name} {node.op} {node.target} {node.module_path}"


def starts(names: tuple[str, ...], prefix: str) -> bool:
    return any(name.split(".")[: len(prefix.split("."))] == prefix.split(".") for name in names)


@pytest.mark.parametrize("name", NAMES)
def test_the_first_finding_is_the_right_one(name: str) -> None:
    expect = load(name).EXPECT
    found = alarms(findings(name))
    rule = expect.get("finding")
    if rule in {None, "none"} or expect.get("healthy"):
        assert [f.message for f in found] == []
        return
    if rule not in KNOWN:
        assert found[0].rule in {rule, *expect.get("finding_also_ok", ())}
        words = expect.get("culprit_contains", ())
        assert not words or any(word in names_of(found[0]) for word in words)
        assert not any(word in names_of(found[0]).split() for word in expect.get("not_culprit", ()))


@pytest.mark.parametrize("name", NAMES)
def test_what_must_not_be_raised_is_not_raised(name: str) -> None:
    expect = load(name).EXPECT
    raised = {f.rule for f in everything(findings(name)) if f.severity != "info"}
    assert not raised & set(expect.get("not_finding", ()))


@pytest.mark.parametrize("name", [n for n in NAMES if "dead" in load(n).EXPECT])
def test_dead_units_are_told_by_call(name: str) -> None:
    expect = load(name).EXPECT
    found = [f for f in everything(findings(name)) if f.rule == "dead"]
    dead = {f.node.name: f for f in found if f.node is not None}
    assert set(expect["dead"]) <= dead.keys()
    top = {f.node.name for f in alarms(findings(name)) if f.rule == "dead" and f.node is not None}
    assert not top & set(expect.get("not_dead", ()))
    for site, share in expect.get("dead_fraction", {}).items():
        assert dead[site].evidence["dead_fraction"] == pytest.approx(share)
    for site, units in expect.get("dead_units", {}).items():
        assert list(dead[site].units) == units
    for word, index in expect.get("dead_call_index", {}).items():
        assert next(f.node.call_index for f in found if f.node is not None and word in f.node.key) == index


@pytest.mark.parametrize("name", NAMES)
def test_parameters_without_gradient_are_explained(name: str) -> None:
    expect = load(name).EXPECT
    found = findings(name)
    for rule in ("detached", "frozen", "unused"):
        affected = tuple(p for f in found if f.rule == rule for p in f.affected)
        rules = {rule, *expect.get("finding_also_ok", ())} & {"detached", "frozen", "unused"}
        told = tuple(p for f in found if f.rule in rules for p in f.affected)
        assert all(starts(told, prefix) for prefix in expect.get(rule, ()))
        assert not any(starts(affected, prefix) for prefix in expect.get(f"not_{rule}", ()))


def test_underflow_names_the_dtype() -> None:
    model, inputs, loss = load("42_fp16_underflow").build()
    flow = fxgrad.gradient_flow(model, inputs, loss=loss)
    first = flow.findings[0]
    assert flow.site(first.site).dtype == "float16"
    assert "float16" in first.message


def test_the_vanishing_stack_names_its_smallest_parameters() -> None:
    first = findings("13_deep_sigmoid_vanish")[0]
    assert "layers.0.weight" in first.affected
    assert first.path[-1] == "layers.0"
