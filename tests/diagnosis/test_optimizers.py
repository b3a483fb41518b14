"""Rules about what the optimizer never did."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from fxgrad.diagnosis import Thresholds
from fxgrad.schema import GradientFlow, OptimizerFacts, StepFacts, Update
from tests.diagnosis.making import Link, chain, found, gradient, lacking, linears, parameter


def flow(at: int, step: StepFacts | None, facts: OptimizerFacts | None = None, rms: float = 0.5) -> GradientFlow:
    """A backward pass that brought a gradient of norm 1, and the step behind it."""
    update = None if step is None or not step.parameters else Update(1e-3, 2.0, 0.1)
    record = parameter("fc.weight", 1.0, rms=rms, update=update)
    made = chain(Link("fc", gradient(1.0), parameters=("fc.weight",)), parameters=[record])
    facts = facts or OptimizerFacts("SGD")
    facts = replace(facts, step=None if step is None else step.number, steps=() if step is None else (step,))
    event = replace(made.event, backward=at, forward=at, accumulating=False)
    return replace(made, event=event, optimizer=facts)


def took(at: int, **given: float | None) -> StepFacts:
    """Step number ``at``."""
    facts = {"gradient_norm": 1.0, "carried_norm": 0.0, "rate": 0.1, **given}
    parameters = 1 if facts["gradient_norm"] else 0
    return StepFacts("SGD", 0, at, parameters, facts["gradient_norm"], facts["carried_norm"], (facts["rate"],))


def severities(flows: Sequence[GradientFlow], rule: str, thresholds: Thresholds | None = None) -> list[str]:
    return [finding.severity for finding in found(flows, rule, thresholds)]


def test_without_an_optimizer_they_are_not_checked() -> None:
    assert {"optimizer_misses", "optimizer_idle", "zero_grad_missing"} <= set(lacking(linears([1.0])))


# ---- optimizer_misses ----------------------------------------------------------------------------------------------

MISSING = OptimizerFacts("SGD", missing=("fc.weight",))


def test_a_parameter_in_no_group_that_nothing_moves() -> None:
    flows = [flow(at, took(at), MISSING) for at in range(5)]
    (finding,) = found(flows, "optimizer_misses")
    assert (finding.severity, finding.parameter, finding.affected) == ("error", "fc.weight", ("fc.weight",))
    assert severities(flows[:4], "optimizer_misses") == []


def test_what_another_hand_moves_is_not_missed() -> None:
    moved = replace(MISSING, moved=("fc.weight",))
    assert severities([flow(at, took(at), moved) for at in range(5)], "optimizer_misses") == []
    grows = [flow(at, took(at), MISSING, rms=0.5 + at * 1e-3) for at in range(5)]
    assert severities(grows, "optimizer_misses") == []


def test_without_a_gradient_nothing_is_missed() -> None:
    flows = [flow(at, took(at), MISSING) for at in range(5)]
    quiet = [replace(f, parameters=(parameter("fc.weight", 0.0),)) for f in flows]
    assert severities(quiet, "optimizer_misses") == []


# ---- optimizer_idle ------------------------------------------------------------------------------------------------


def test_a_rate_of_zero_in_every_step() -> None:
    assert severities([flow(at, took(at, rate=0.0)) for at in range(5)], "optimizer_idle") == ["error"]
    assert severities([flow(at, took(at, rate=0.0)) for at in range(4)], "optimizer_idle") == []
    warm = [flow(at, took(at, rate=0.0 if at == 0 else 0.1)) for at in range(5)]
    assert severities(warm, "optimizer_idle") == []


def test_one_group_of_rate_zero_is_information() -> None:
    two = [replace(took(at), learning_rates=(0.1, 0.0)) for at in range(5)]
    assert severities([flow(at, step) for at, step in enumerate(two)], "optimizer_idle") == ["info"]


def test_never_stepped() -> None:
    assert severities([flow(at, None) for at in range(5)], "optimizer_idle") == ["error"]
    assert severities([flow(at, None) for at in range(4)], "optimizer_idle") == []
    assert severities([flow(at, None, rms=0.5 + at) for at in range(5)], "optimizer_idle") == []


@pytest.mark.parametrize(("count", "said"), [(19, []), (20, ["info"]), (100, ["warning"])])
def test_many_backward_passes_without_a_step_may_be_one_accumulation(count: int, said: list[str]) -> None:
    flows = [flow(at, None) for at in range(count)]
    adds_up = [replace(f, event=replace(f.event, accumulating=True)) for f in flows]
    assert severities(adds_up, "optimizer_idle") == said


@pytest.mark.parametrize(("skipped", "asked", "said"), [(10, 10, ["error"]), (9, 9, []), (9, 10, [])])
def test_steps_that_a_scaler_skips(skipped: int, asked: int, said: list[str]) -> None:
    flows = [flow(at, None, OptimizerFacts("SGD", skipped=skipped, asked=asked)) for at in range(5)]
    assert severities(flows, "optimizer_idle") == said
    if said:
        (finding,) = found(flows, "optimizer_idle")
        assert "skipped 10 of 10" in finding.message
        assert severities(flows, "optimizer_idle", Thresholds(idle=11)) == []


def test_nothing_in_grad_when_the_steps_begin() -> None:
    flows = [flow(at, took(at, gradient_norm=0.0)) for at in range(5)]
    (finding,) = found(flows, "optimizer_idle")
    assert finding.severity == "error" and "zero_grad()" in finding.message
    assert severities([*flows[:4], flow(4, took(4))], "optimizer_idle") == []


@pytest.mark.parametrize(("left", "change", "said"), [(1e-5, 1e-7, ["warning"]), (1e-5, 1e-3, []), (0.5, 1e-7, [])])
def test_next_to_nothing_is_left_by_clipping(left: float, change: float, said: list[str]) -> None:
    flows = []
    for at in range(5):
        made = flow(at, took(at, gradient_norm=left))
        record = replace(made.parameters[0], update=Update(change, 2.0, 0.1))
        flows.append(replace(made, parameters=(record,)))
    assert severities(flows, "optimizer_idle") == said


# ---- zero_grad_missing ---------------------------------------------------------------------------------------------


def test_what_a_step_used_is_still_there() -> None:
    flows = [flow(at, took(at, gradient_norm=1.0 + at, carried_norm=float(at))) for at in range(5)]
    assert severities(flows, "zero_grad_missing") == ["error"]
    assert severities(flows[:4], "zero_grad_missing") == []


def test_cleared_once_is_no_fault() -> None:
    flows = [flow(at, took(at, carried_norm=1.0 if at not in {0, 3} else 0.0)) for at in range(6)]
    assert severities(flows, "zero_grad_missing") == []


def test_other_gradients_than_those_of_the_step_before_are_no_fault() -> None:
    """As where a watch looks into the middle of an accumulation."""
    flows = [flow(at, took(at, gradient_norm=2.0, carried_norm=1.0)) for at in range(6)]
    assert severities(flows, "zero_grad_missing") == []


def test_unknown_is_no_fault() -> None:
    flows = [flow(at, took(at, gradient_norm=None, carried_norm=None)) for at in range(6)]
    assert severities(flows, "zero_grad_missing") == severities(flows, "optimizer_idle") == []
