"""What one operation does to the gradient: scale, saturation, branches."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from fxgrad.diagnosis import Thresholds
from fxgrad.schema import Activity, Constant, Consumer, Edge, GradientFlow, Node, Site
from tests.diagnosis.making import Link, Setting, chain, found, gradient, of_entries, parameter

# ---- scale_break ---------------------------------------------------------------------------------------------------


def times(factor: float) -> GradientFlow:
    """A product with a constant."""
    constant = Constant("args[1]", str(factor), factor)
    first = Link("fc0", gradient(abs(factor)), parameters=("fc0.weight",))
    last = Link("fc1", gradient(1.0), parameters=("fc1.weight",))
    weights = [parameter(name, 1.0) for name in ("fc0.weight", "fc1.weight")]
    return chain(first, Link("/mul", gradient(1.0), constants=(constant,)), last, parameters=weights)


@pytest.mark.parametrize(
    ("factor", "severity"),
    [(1.0, None), (2e-3, None), (9e-4, "warning"), (1.1e3, "warning"), (9e-6, "error"), (2e5, "error")],
)
def test_a_constant_by_its_decades(factor: float, severity: str | None) -> None:
    findings = found(times(factor), "scale_break")
    assert [f.severity for f in findings] == ([severity] if severity else [])
    if severity:
        assert findings[0].site == "/mul"
        assert findings[0].evidence["gain"] == pytest.approx(factor)
        assert findings[0].evidence["constant"] == factor


def test_behind_all_weights_a_constant_may_be_the_unit_of_what_is_predicted() -> None:
    def units(factor: float) -> GradientFlow:
        first = Link("fc0", gradient(factor), parameters=("fc0.weight",))
        constant = Constant("args[1]", str(factor), factor)
        last = Link("/mul", gradient(1.0), constants=(constant,))
        return chain(first, last, parameters=[parameter("fc0.weight", 1.0)])

    assert found(units(1.1e3), "scale_break") == found(units(1.1e3), "exploding") == ()
    assert [f.severity for f in found(units(1e6), "scale_break")] == ["error"]


def test_its_threshold() -> None:
    assert found(times(1e-4), "scale_break", Thresholds(scale_break=4.5)) == ()


def test_the_median_of_several_steps_counts() -> None:
    usual, broken = times(1.0), times(1e-5)
    assert found([usual, usual, broken, broken, broken], "scale_break")[0].confidence == "several steps"
    assert found([usual, usual, usual, broken, broken], "scale_break") == ()


def test_operations_that_do_not_scale_are_not_judged() -> None:
    links = [Link("fc0", gradient(1e-6)), Link("/sum", gradient(1.0))]
    assert found(chain(*links), "scale_break") == ()


# ---- saturated -----------------------------------------------------------------------------------------------------


def activation(kind: str, entries: list[float], gain: float, activity: Activity | None = None) -> GradientFlow:
    """An activation with these outputs inside of a model."""
    return chain(
        Link("fc0", gradient(gain), parameters=("fc0.weight",), value=of_entries([9.0, -9.0] * 8)),
        Link("act", gradient(1.0), kind=kind, value=of_entries(entries), activity=activity),
        Link("fc1", gradient(1.0), parameters=("fc1.weight",)),
        parameters=[parameter("fc0.weight", gain), parameter("fc1.weight", 1.0)],
    )


FLAT = {
    "Sigmoid": ([0.999, 0.001] * 8, 0.001 * 0.999, "sigmoid"),
    "Tanh": ([0.99, -0.99] * 8, 1 - 0.99**2, "tanh"),
    "Softmax": ([0.99, 0.01] * 8, 1 - (0.99**2 + 0.01**2), "softmax"),
}


@pytest.mark.parametrize("kind", FLAT)
def test_an_activation_by_its_mean_slope_and_gain(kind: str) -> None:
    entries, slope, word = FLAT[kind]
    (finding,) = found(activation(kind, entries, 0.001), "saturated")
    assert (finding.severity, finding.site) == ("warning", "act")
    assert finding.evidence["slope"] == pytest.approx(slope, rel=1e-6)
    assert finding.evidence["gain"] == pytest.approx(0.001)
    assert finding.evidence["input_rms"] == pytest.approx(9.0)
    assert found(activation(kind, entries, 0.9), "saturated") == ()  # the gradient passes all the same
    lower = {f"{word}_slope": 0.0} if word != "softmax" else {"softmax_mass": 1.0}
    assert found(activation(kind, entries, 0.001), "saturated", Thresholds(**lower)) == ()  # type: ignore[arg-type]
    assert found(activation(kind, entries, 0.001), "saturated", Thresholds(**{f"{word}_gain": 0.0})) == ()  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", FLAT)
def test_an_activation_in_its_middle_is_fine(kind: str) -> None:
    entries = {"Sigmoid": [0.5] * 16, "Tanh": [0.1, -0.1] * 8, "Softmax": [0.5] * 16}[kind]
    assert found(activation(kind, entries, 0.001), "saturated") == ()


def test_a_clamp_by_the_share_between_its_limits() -> None:
    outside = Activity(1, 4, 4, (0, 1, 2, 3), 0)
    half = Activity(1, 4, 4, (), 8)
    entries = [1.0, -1.0] * 8
    assert found(activation("Hardtanh", entries, 0.0, outside), "saturated")[0].severity == "error"
    assert found(activation("Hardtanh", entries, 0.0, half), "saturated") == ()


def test_a_classifier_may_be_sure() -> None:
    flow = chain(
        Link("fc0", gradient(1e-3), parameters=("fc0.weight",)),
        Link("act", gradient(1.0), kind="Sigmoid", value=of_entries([0.999, 0.001] * 8)),
        parameters=[parameter("fc0.weight", 1e-3)],
    )
    assert [f.severity for f in found(flow, "saturated")] == ["info"]


# ---- starved -------------------------------------------------------------------------------------------------------


def fan_out(share: float, backward: int = 0) -> GradientFlow:
    """A value with two uses, of which one sends so much of what the other does."""
    x, stem, main, side = (
        Node(key, key, op, key, key, "Linear", 0, None)
        for key, op in (("input:x", "placeholder"), ("stem", "call_module"), ("main", "call_module"),
                        ("side", "call_module"))
    )  # fmt: skip
    out = Node("output", "output", "output", "output", "", "Net", 0, None)
    sites = [Site(node, "", (4, 4), "float32", "cpu", gradient(1.0)) for node in (stem, main, side)]
    edges = [
        Edge("input:x", "", Consumer("stem", "args[0]")),
        Edge("stem", "", Consumer("main", "args[0]"), gradient(2.0)),
        Edge("stem", "", Consumer("side", "args[0]"), gradient(2.0 * share)),
        Edge("main", "", Consumer("output", "args[0]")),
        Edge("side", "", Consumer("output", "args[1]")),
    ]
    flow = chain(setting=Setting(backward=backward))
    start = Site(x, "", (4, 4), "float32", "cpu", None)
    return replace(flow, nodes=(x, stem, main, side, out), sites=(start, *sites), edges=tuple(edges))


@pytest.mark.parametrize(("share", "starves"), [(1.0, False), (2e-4, False), (0.9e-4, True), (1e-9, True)])
def test_a_branch_by_its_share(share: float, starves: bool) -> None:
    findings = found(fan_out(share), "starved")
    assert [(f.severity, f.site) for f in findings] == ([("info", "side")] if starves else [])
    if starves:
        assert findings[0].evidence["share"] == pytest.approx(share)


def test_nothing_at_all_is_not_starved() -> None:
    assert found(fan_out(0.0), "starved") == ()


def test_its_thresholds() -> None:
    assert found(fan_out(1e-5), "starved", Thresholds(starved=1e-6)) == ()
    limits = Thresholds(starved_steps=7)
    assert found([fan_out(1e-5)] * 6, "starved", limits)[0].severity == "info"
    assert found([fan_out(1e-5)] * 7, "starved", limits)[0].severity == "warning"


def test_it_must_starve_in_each_of_the_latest_steps() -> None:
    assert found([fan_out(1e-5)] * 4 + [fan_out(1.0), fan_out(1e-5)], "starved") == ()
    assert found([fan_out(1.0)] * 4 + [fan_out(1e-5)] * 5, "starved")


def test_the_slopes_of_the_table_are_the_derivatives() -> None:
    """Against the derivatives, taken by differences."""
    for function, kind in ((lambda z: 1 / (1 + math.exp(-z)), "Sigmoid"), (math.tanh, "Tanh")):
        points = [5.0, -5.5, 6.0, -6.5] * 4
        numeric = sum((function(z + 1e-5) - function(z - 1e-5)) / 2e-5 for z in points) / len(points)
        (finding,) = found(activation(kind, [function(z) for z in points], 1e-3), "saturated")
        assert finding.evidence["slope"] == pytest.approx(numeric, rel=1e-3)
