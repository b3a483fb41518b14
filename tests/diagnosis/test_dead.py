"""Dead units: with a cause in one step, by patience in several."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fxgrad
from fxgrad.diagnosis import Thresholds
from fxgrad.schema import Activity, GradientFlow
from tests.diagnosis.making import Link, chain, found, gradient, of_entries, parameter


def rectified(never: int, units: int = 32, samples: int = 256, bias: float = 0.0, kind: str = "ReLU") -> GradientFlow:
    """A linear layer of rms-1 inputs whose first ``never`` units have this bias and don't fire."""
    activity = Activity(1, units, samples, tuple(range(never)), (units - never) * samples)
    shift = of_entries([bias] * never + [0.0] * (units - never))
    return chain(
        Link("fc0", gradient(1.0), parameters=("fc0.weight", "fc0.bias"), value=of_entries([1.0, -1.0] * 8)),
        Link("act", gradient(1.0), kind=kind, activity=activity, value=of_entries([0.0, 1.0] * 8)),
        Link("fc1", gradient(1.0), parameters=("fc1.weight",)),
        parameters=[
            parameter("fc0.weight", 1.0, shape=(units, 4)),  # rms(weight) * sqrt(fan_in) is 1
            parameter("fc0.bias", 1.0, shape=(units,), rms=None, value=shift),
            parameter("fc1.weight", 1.0, shape=(4, units)),
        ],
    )


def test_silent_units_without_a_cause_are_no_finding_in_one_step() -> None:
    assert found(rectified(20), "dead") == ()


@pytest.mark.parametrize(("never", "severity"), [(32, "error"), (8, "warning"), (7, "info"), (0, None)])
def test_with_a_cause_the_share_decides(never: int, severity: str | None) -> None:
    findings = found(rectified(never, bias=-10.0), "dead")
    assert [f.severity for f in findings] == ([severity] if severity else [])
    if severity:
        assert findings[0].units == tuple(range(never))
        assert findings[0].evidence["dead_fraction"] == never / 32
        assert findings[0].confidence == "one step"


def test_a_bias_is_a_cause_from_its_margin_on() -> None:
    assert found(rectified(20, bias=-5.9), "dead") == ()
    assert found(rectified(20, bias=-6.1), "dead")
    assert found(rectified(20, bias=-6.1), "dead", Thresholds(dead_margin=7.0)) == ()


def test_a_whole_activation_needs_no_cause() -> None:
    assert [f.severity for f in found(rectified(16, units=16), "dead")] == ["error"]
    assert [f.severity for f in found(rectified(15, units=15), "dead")] == [
        "warning"
    ]  # all of the model goes through it
    assert found(rectified(3, units=3), "dead") == ()  # by chance


@pytest.mark.parametrize(("never", "severity"), [(23, "warning"), (22, "info"), (7, "info"), (6, None)])
def test_several_steps_need_no_cause(never: int, severity: str | None) -> None:
    findings = found([rectified(never)] * 5, "dead")
    assert [f.severity for f in findings] == ([severity] if severity else [])
    if severity:
        assert findings[0].confidence == "several steps"
        assert findings[0].evidence["samples"] == 5 * 256


def test_several_steps_need_enough_entries() -> None:
    assert found([rectified(20, samples=199)] * 5, "dead") == ()
    assert found([rectified(20, samples=199)] * 5, "dead", Thresholds(dead_samples=900))


def test_a_unit_that_fired_once_is_not_dead() -> None:
    assert found([rectified(20)] * 4 + [rectified(0)], "dead") == ()
    assert found([rectified(0)] + [rectified(20)] * 4, "dead") == ()


def test_its_thresholds_over_several_steps() -> None:
    flows = [rectified(20)] * 5
    assert found(flows, "dead", Thresholds(dead=0.7))[0].severity == "info"
    assert found(flows, "dead", Thresholds(dead=0.7, dead_info=0.65)) == ()
    caused = rectified(8, bias=-10.0)
    assert found(caused, "dead", Thresholds(dead_caused=0.3))[0].severity == "info"


def test_an_activation_without_a_flat_end_cannot_die() -> None:
    assert found(rectified(32, kind="LeakyReLU"), "dead") == ()


def test_weights_that_are_all_negative_on_a_positive_input() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.ReLU(), nn.Linear(8, 2))
    with torch.no_grad():
        model[0].weight.copy_(-model[0].weight.abs())
    (finding,) = found(fxgrad.gradient_flow(model, torch.rand(32, 8)), "dead")
    assert (finding.severity, finding.site) == ("error", "1")
    assert "0.weight is negative" in finding.message


def test_a_shift_behind_a_normalisation_is_a_cause() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 2))
    nn.init.constant_(model[1].bias, -20.0)
    (finding,) = found(fxgrad.gradient_flow(model, torch.randn(32, 8)), "dead")
    assert (finding.severity, finding.site) == ("error", "2")
    assert "1.bias" in finding.message
