"""Rules about what steps do to the parameters."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from fxgrad.diagnosis import Thresholds
from fxgrad.schema import GradientFlow, OptimizerFacts, Update
from tests.diagnosis.making import Link, Setting, chain, found, gradient, lacking, linears, of_entries, parameter

# ---- update_size ---------------------------------------------------------------------------------------------------


def stepped(ratio: float, *, rms: float = 0.5, shape: tuple[int, ...] = (4, 4)) -> GradientFlow:
    """A weight that a step moved by so many times its norm."""
    weight = rms * math.sqrt(math.prod(shape))
    record = parameter("fc.weight", 1.0, shape=shape, rms=rms, update=Update(ratio * weight, weight, 0.1))
    return chain(Link("fc", gradient(1.0), parameters=("fc.weight",)), parameters=[record])


def steps(*ratios: float) -> list[GradientFlow]:
    """A step by each of these ratios, one behind the other."""
    return [numbered(stepped(ratio), at) for at, ratio in enumerate(ratios)]


def numbered(flow: GradientFlow, at: int) -> GradientFlow:
    event = replace(flow.event, backward=at, forward=at)
    return replace(flow, event=event, optimizer=OptimizerFacts("SGD", at))


def test_one_large_step_that_did_no_harm_is_information() -> None:
    (finding,) = found(steps(1.03, 1e-2, 1e-2), "update_size")
    assert (finding.severity, finding.evidence["steps"]) == ("info", 1)


@pytest.mark.parametrize("after", [0.0, 4.1, math.nan])
def test_one_large_step_that_did_harm_is_an_error(after: float) -> None:
    record = parameter("fc.weight", gradient(after) if after == after else of_entries([math.nan] * 16))
    later = numbered(chain(Link("fc", gradient(1.0), parameters=("fc.weight",)), parameters=[record]), 1)
    (finding,) = found([*steps(1.03), later], "update_size")
    assert finding.severity == "error"


def test_a_step_beyond_all_measure_needs_no_second_one() -> None:
    assert [f.severity for f in found(steps(11.0), "update_size")] == ["error"]


def test_a_step_of_exactly_nothing_is_below_the_usual() -> None:
    (finding,) = found(steps(*[0.0] * 20), "update_size")
    assert (finding.severity, finding.evidence["ratio"]) == ("info", 0.0)


def test_without_an_optimizer_it_is_not_checked() -> None:
    assert "optimizer" in lacking(linears([1.0]))["update_size"]
    assert "optimizer" in lacking(linears([1.0]))["optimizer_epsilon"]


@pytest.mark.parametrize(("ratio", "too_large"), [(0.9, False), (1.1, True)])
def test_a_step_by_its_ratio(ratio: float, too_large: bool) -> None:
    findings = found(steps(ratio, ratio), "update_size")
    assert [(f.severity, f.parameter) for f in findings] == ([("error", "fc.weight")] if too_large else [])
    assert found(steps(ratio, ratio), "update_size", Thresholds(update_large=2.0)) == ()


def test_vectors_and_weights_that_are_small_on_purpose_may_move() -> None:
    assert found(stepped(50.0, shape=(4,)), "update_size") == ()
    assert found(stepped(50.0, rms=1e-3), "update_size") == ()
    assert found(stepped(50.0, rms=1e-3), "update_size", Thresholds(throttle=1e-4))


@pytest.mark.parametrize(("ratio", "odd"), [(1e-3, False), (0.9e-5, True), (0.2, True), (0.05, False)])
def test_the_usual_size_over_many_steps(ratio: float, odd: bool) -> None:
    assert found([stepped(ratio)] * 19, "update_size") == ()
    assert [f.severity for f in found([stepped(ratio)] * 20, "update_size")] == (["info"] if odd else [])
    wide = Thresholds(update_low=1e-6, update_high=0.5)
    assert found([stepped(ratio)] * 20, "update_size", wide) == ()


# ---- optimizer_epsilon ---------------------------------------------------------------------------------------------


def swallowed(rms: float, scale: float | None = None) -> GradientFlow:
    """A weight whose gradient has this rms, under an optimizer with eps 1e-8."""
    record = parameter("fc.weight", gradient(rms * 4), update=Update(1e-3, 2.0, 1e-3, 1e-8))
    link = Link("fc", gradient(1.0), parameters=("fc.weight",))
    return chain(link, parameters=[record], setting=Setting(more={"loss_scale": scale}))


@pytest.mark.parametrize(("rms", "small"), [(1.1e-7, False), (0.9e-7, True), (0.0, False)])
def test_a_gradient_below_ten_epsilon(rms: float, small: bool) -> None:
    findings = found(swallowed(rms), "optimizer_epsilon")
    assert [(f.severity, f.parameter) for f in findings] == ([("warning", "fc.weight")] if small else [])
    assert found(swallowed(rms), "optimizer_epsilon", Thresholds(epsilon=1.0)) == ()
    assert found(swallowed(rms), "optimizer_epsilon", Thresholds(epsilon_share=1.0)) == ()


def test_the_loss_scale_is_divided_out() -> None:
    assert found(swallowed(1e-5, scale=1024.0), "optimizer_epsilon")
    assert found(swallowed(1e-5), "optimizer_epsilon") == ()


def test_a_fit_that_has_converged_is_no_fault() -> None:
    assert found([swallowed(1e-3), swallowed(1e-8)], "optimizer_epsilon") == ()
    assert found([swallowed(2e-8), swallowed(1e-8)], "optimizer_epsilon")


# ---- update_lost ---------------------------------------------------------------------------------------------------


def rounded(lost: float | None, rate: float = 1e-3, at: int = 0) -> GradientFlow:
    """A half precision weight of which a step left this share as it was."""
    update = Update(1e-3, 2.0, rate, lost=lost)
    record = replace(parameter("fc.weight", 1.0, update=update), dtype="bfloat16")
    return numbered(chain(Link("fc", gradient(1.0), parameters=("fc.weight",)), parameters=[record]), at)


@pytest.mark.parametrize(("lost", "severity"), [(None, None), (0.0, None), (0.79, None), (0.81, "warning")])
def test_the_share_that_is_lost(lost: float | None, severity: str | None) -> None:
    flows = [rounded(lost, at=at) for at in range(5)]
    assert [f.severity for f in found(flows, "update_lost")] == ([severity] if severity else [])
    assert found(flows, "update_lost", Thresholds(update_lost=0.9)) == ()


def test_few_steps_a_warm_up_and_a_rate_of_zero_are_no_fault() -> None:
    assert [f.severity for f in found([rounded(0.9, at=at) for at in range(4)], "update_lost")] == ["info"]
    rising = [rounded(0.9, rate=at * 1e-5 + 1e-6, at=at) for at in range(5)]
    assert [f.severity for f in found(rising, "update_lost")] == ["info"]
    assert found([rounded(1.0, rate=0.0, at=at) for at in range(5)], "update_lost") == ()


# ---- weight_decay --------------------------------------------------------------------------------------------------


def eaten(share: float, shrink: float | None, at: int = 0) -> GradientFlow:
    """A weight of which a step took this share away, along the weight by this cosine."""
    update = Update(2.0 * share, 2.0, 0.1, weight_decay=share / 0.1, shrink=shrink)
    record = parameter("fc.weight", 1.0, update=update)
    return numbered(chain(Link("fc", gradient(1.0), parameters=("fc.weight",)), parameters=[record]), at)


@pytest.mark.parametrize(
    ("share", "shrink", "bad"), [(0.1, 0.99, True), (0.04, 0.99, False), (0.1, 0.6, False), (0.1, None, False)]
)
def test_a_step_that_only_shrinks(share: float, shrink: float | None, bad: bool) -> None:
    flows = [eaten(share, shrink, at) for at in range(2)]
    assert [f.severity for f in found(flows, "weight_decay")] == (["error"] if bad else [])
    assert found(flows[:1], "weight_decay") == ()
    assert found(flows, "weight_decay", Thresholds(decay=0.2)) == ()
    assert found(flows, "weight_decay", Thresholds(shrink=1.0)) == ()
