"""``diagnose``: which rules run, over which flows, with which numbers, and in which order."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from torch import nn

import fxgrad
from fxgrad.diagnosis import DEFAULT_CHECKS, Check, Draft, Evidence, LackingError, Thresholds, diagnose
from fxgrad.errors import OptionError
from fxgrad.schema import Finding, GradientFlow
from tests.diagnosis.making import Link, Setting, chain, found, gradient, lacking, linears, norm_only, parameter
from tests.test_packaging import modules_after

HEALTHY = [0.5, 0.7, 1.0]
VANISHING = [1e-8, 1e-4, 1.0]


def test_a_healthy_flow_has_no_findings() -> None:
    diagnosis = diagnose(linears(HEALTHY))
    assert diagnosis.findings == ()
    assert diagnosis.healthy


def test_a_flow_gives_what_diagnose_gives() -> None:
    flow = linears(VANISHING)
    assert flow.findings == diagnose(flow).findings
    assert flow.not_checked == diagnose(flow).not_checked
    assert flow.findings == diagnose([flow]).findings


@pytest.mark.parametrize("flows", [(), [1, 2], "flow", [linears(HEALTHY), None], None, 3, nn.ReLU()])
def test_what_is_no_series_of_flows_is_refused(flows: Any) -> None:
    with pytest.raises(OptionError, match="GradientFlow or a series"):
        diagnose(flows)


def test_the_refusal_names_what_was_given() -> None:
    with pytest.raises(OptionError, match="was given nothing"):
        diagnose([])
    with pytest.raises(OptionError, match="was given int"):
        diagnose([1])  # type: ignore[list-item]


def test_flows_of_different_models_are_no_series() -> None:
    flow = linears(HEALTHY)
    other = replace(flow, capture=replace(flow.capture, model="Other"))
    with pytest.raises(OptionError, match=f"flows of {flow.capture.model}, Other"):
        diagnose([flow, other])


# ---- thresholds and rules ------------------------------------------------------------------------------------------


def test_thresholds_can_be_changed() -> None:
    flow = linears([1e-3, 1e-1, 1.0])
    assert diagnose(flow).healthy
    assert [f.rule for f in diagnose(flow, Thresholds(vanishing=2.5)).findings] == ["vanishing"]
    assert diagnose(linears(VANISHING), Thresholds(vanishing=9.0, scale_break=9.0)).healthy


def test_thresholds_cannot_be_changed_by_accident() -> None:
    with pytest.raises(AttributeError):
        Thresholds().vanishing = 1.0  # type: ignore[misc]


@pytest.mark.parametrize("thresholds", [{"vanishing": 1.0}, 3.0, (), Thresholds])
def test_what_is_no_thresholds_is_refused(thresholds: Any) -> None:
    with pytest.raises(OptionError, match=r"takes fxgrad\.Thresholds"):
        diagnose(linears(VANISHING), thresholds)


@pytest.mark.parametrize(
    ("name", "value"),
    [("vanishing", "4"), ("vanishing", math.nan), ("dead", None), ("dead", True), ("steps", 0), ("spike_steps", 2.5)],
)
def test_a_threshold_that_nothing_compares_with_is_refused(name: str, value: Any) -> None:
    with pytest.raises(OptionError, match=f"{name} must be .* but is {value!r}"):
        Thresholds(**{name: value})


def every_node(evidence: Evidence) -> Iterator[Finding]:
    draft = Draft(evidence, "every_node", "warning", "here", "nothing", {"limit": evidence.thresholds.vanishing})
    for node in evidence.view.flow.nodes:
        yield draft.at(node)


def test_a_rule_of_ones_own_runs_beside_the_others() -> None:
    flow = linears(VANISHING)
    diagnosis = diagnose(flow, Thresholds(vanishing=3.0), checks=(*DEFAULT_CHECKS, Check("every_node", every_node)))
    own = [f for f in diagnosis.findings if f.rule == "every_node"]
    assert [f.node.key for f in own if f.node] == [node.key for node in flow.nodes]
    assert own[0].evidence == {"limit": 3.0}
    assert diagnosis.findings[0].rule == "vanishing"


def test_a_rule_of_ones_own_may_lack_something() -> None:
    def check(_: Evidence) -> list[Finding]:
        message = "the phase of the moon"
        raise LackingError(message)

    diagnosis = diagnose(linears(HEALTHY), checks=[Check("moon", check)])
    assert [(one.rule, one.reason) for one in diagnosis.not_checked] == [("moon", "the phase of the moon")]
    assert diagnosis.healthy


def test_a_rule_that_fails_takes_nothing_with_it() -> None:
    def check(_: Evidence) -> list[Finding]:
        message = "a fault of its own"
        raise ZeroDivisionError(message)

    diagnosis = diagnose(linears(VANISHING), checks=(Check("broken", check), *DEFAULT_CHECKS))
    assert diagnosis.findings[0].rule == "vanishing"
    assert {one.rule: one.reason for one in diagnosis.not_checked}["broken"].endswith("a fault of its own")


@pytest.mark.parametrize("given", [["dead"], None, 3, [Finding("mine", "fatal", "", "")]])  # type: ignore[arg-type]
def test_a_rule_that_gives_no_findings_takes_nothing_with_it(given: Any) -> None:
    diagnosis = diagnose(linears(VANISHING), checks=(*DEFAULT_CHECKS, Check("mine", lambda _: given)))
    assert [finding.rule for finding in diagnosis.findings] == ["vanishing"]
    assert {one.rule: one.reason for one in diagnosis.not_checked}["mine"].startswith("the check raised")


@pytest.mark.parametrize("checks", [None, "dead", ["dead"], [every_node]])
def test_what_is_no_check_is_refused(checks: Any) -> None:
    with pytest.raises(OptionError, match=r"checks= takes a series of fxgrad\.diagnosis\.Check"):
        diagnose(linears(HEALTHY), checks=checks)


def test_a_rule_that_is_left_out_is_neither_passed_nor_lacking() -> None:
    diagnosis = diagnose(linears(VANISHING, setting=Setting(values=False)), checks=())
    assert diagnosis.findings == diagnosis.not_checked == ()


# ---- what is not there is not passed -------------------------------------------------------------------------------


def test_a_one_shot_flow_lacks_history_and_optimizer_only() -> None:
    of_the_optimizer = {"update_size", "optimizer_epsilon", "optimizer_misses", "optimizer_idle", "zero_grad_missing",
                        "update_lost", "weight_decay"}  # fmt: skip
    assert set(lacking(linears(HEALTHY))) == {"spike", *of_the_optimizer}


def test_without_forward_statistics() -> None:
    lost = lacking(linears(HEALTHY, setting=Setting(values=False)))
    assert set(lost) >= {"dead", "saturated", "symmetry"}
    assert "forward=True" in lost["dead"]


def test_without_parts() -> None:
    lost = lacking(linears(HEALTHY, setting=Setting(sites="node")))
    assert "sites='edge'" in lost["starved"]


def test_at_level_norm() -> None:
    links = [Link(f"fc{n}", norm_only(1.0), parameters=(f"fc{n}.weight",)) for n in range(3)]
    lost = lacking(chain(*links, setting=Setting("norm", "node", values=False)))
    assert set(lost) >= {"underflow", "overflow_risk", "dead", "saturated", "starved"}
    assert "statistics='full'" in lost["underflow"]


def test_an_infinite_norm_may_be_the_accumulators() -> None:
    links = [Link("fc0", norm_only(float("inf"))), Link("fc1", norm_only(1.0))]
    assert "nonfinite" in lacking(chain(*links, setting=Setting("norm", "node", values=False)))
    links[0] = replace(links[0], got=norm_only(float("nan")))
    flow = chain(*links, setting=Setting("norm", "node", values=False))
    assert "nonfinite" not in lacking(flow)
    assert found(flow, "nonfinite")[0].site == "fc1"


def test_an_infinite_norm_that_nan_comes_of_is_followed_to_its_source() -> None:
    """``sqrt`` at 0 sends Inf, and ``h - h`` makes NaN of it: it is not the subtraction that is to blame."""
    norms = (float("nan"), float("inf"), 1.0, 1.0)
    flow = chain(
        *(Link(f"fc{n}", norm_only(norm)) for n, norm in enumerate(norms)),
        setting=Setting("norm", "node", values=False),
    )
    first = found(flow, "nonfinite")[0]
    assert (first.site, first.confidence, first.path) == ("fc2", "one step", ("fc2", "fc1", "fc0"))
    assert "into Inf" in first.message


def test_words_at_level_norm_are_those_of_what_was_measured() -> None:
    flow = chain(
        Link("fc0", norm_only(float("nan"))), Link("fc1", norm_only(1.0)), setting=Setting("norm", "node", values=False)
    )
    first = found(flow, "nonfinite")[0]
    assert "into NaN: entries are counted at statistics='full'" in first.message
    assert first.confidence == "exact"


# ---- one step or several -------------------------------------------------------------------------------------------


def series(*levels: list[float]) -> list[GradientFlow]:
    return [linears(level, setting=Setting(backward=n)) for n, level in enumerate(levels)]


def test_a_short_series_is_judged_by_its_last_flow() -> None:
    assert found(series(VANISHING, VANISHING, HEALTHY), "vanishing") == ()
    finding = found(series(HEALTHY, HEALTHY, VANISHING), "vanishing")[0]
    assert (finding.confidence, finding.backward) == ("one step", 2)


def test_a_long_series_is_judged_as_a_whole() -> None:
    assert found(series(*[HEALTHY] * 4, VANISHING), "vanishing") == ()
    finding = found(series(HEALTHY, *[VANISHING] * 4), "vanishing")[0]
    assert finding.confidence == "several steps"


def test_how_long_that_is_is_a_threshold() -> None:
    flows = series(HEALTHY, HEALTHY, VANISHING)
    assert found(flows, "vanishing", Thresholds(steps=3)) == ()
    assert found(flows, "vanishing", Thresholds(steps=4))


def test_only_the_latest_steps_count() -> None:
    assert found(series(*[VANISHING] * 20, *[HEALTHY] * 3), "vanishing") == ()
    assert found(series(*[HEALTHY] * 20, *[VANISHING] * 3), "vanishing")


# ---- order ---------------------------------------------------------------------------------------------------------


def test_findings_are_ranked_by_severity_then_by_rule() -> None:
    def rule(name: str, *severities: Any) -> Check:
        def check(evidence: Evidence) -> list[Finding]:
            return [Draft(evidence, name, severity, "", "").at(None) for severity in severities]

        return Check(name, check)

    checks = [rule("first", "info", "warning"), rule("second", "error", "info"), rule("third", "warning", "error")]
    ranked = [(f.severity, f.rule) for f in diagnose(linears(HEALTHY), checks=checks).findings]
    assert ranked == [
        ("error", "second"), ("error", "third"), ("warning", "first"), ("warning", "third"),
        ("info", "first"), ("info", "second"),
    ]  # fmt: skip


def test_information_is_no_illness() -> None:
    frozen = parameter("fc0.weight", None, requires_grad=False)
    flow = chain(Link("fc0", gradient(1.0), parameters=("fc0.weight",)), parameters=[frozen])
    diagnosis = diagnose(flow)
    assert [(f.severity, f.rule) for f in diagnosis.findings] == [("info", "frozen")]
    assert diagnosis.healthy


# ---- without torch -------------------------------------------------------------------------------------------------


def test_diagnosis_does_not_import_torch() -> None:
    assert "torch" not in modules_after("import fxgrad.diagnosis")


def test_a_saved_flow_is_judged_without_torch() -> None:
    code = (
        "from tests.diagnosis.making import linears\nfrom fxgrad.diagnosis import diagnose\n"
        "assert diagnose(linears([1e-8, 1e-4, 1.0])).findings"
    )
    assert "torch" not in modules_after(code)


def test_the_public_words_of_findings_are_fxgrads() -> None:
    assert fxgrad.schema.Finding is Finding
