"""Spikes, and what is odd in the batch of one."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from fxgrad.diagnosis import Thresholds, diagnose
from fxgrad.schema import GradientFlow, Update
from tests.diagnosis.making import Setting, found, lacking, linears, of_entries


def history(norms: Sequence[float], *, scales: Sequence[float] | None = None) -> list[GradientFlow]:
    """Flows whose gradients have these norms everywhere."""
    scales = scales or [1.0] * len(norms)
    return [
        linears([norm, norm], setting=Setting(backward=n, more={"loss_scale": scale}))
        for n, (norm, scale) in enumerate(zip(norms, scales, strict=True))
    ]


def noise(count: int) -> list[float]:
    dice = random.Random(0)  # noqa: S311  # no secret
    return [math.exp(dice.gauss(0.0, 0.1)) for _ in range(count)]


def test_a_step_that_stands_out() -> None:
    norms = noise(40)
    norms[30] *= 100
    (finding,) = found(history(norms), "spike")
    assert (finding.severity, finding.backward, finding.place) == ("warning", 30, "outside the model")
    middle = sorted(norms[:30])
    assert finding.evidence["factor"] == pytest.approx(norms[30] / math.sqrt(middle[14] * middle[15]), rel=1e-6)
    assert found(history(norms), "spike", Thresholds(spike_factor=200.0)) == ()
    assert found(history(norms), "spike", Thresholds(spike_sigma=1e4)) == ()


def test_noise_and_trends_do_not_stand_out() -> None:
    assert found(history(noise(120)), "spike") == ()
    assert found(history([1.02**n for n in range(120)]), "spike") == ()
    assert found(history([0.9**n for n in range(120)]), "spike") == ()


def test_a_change_of_the_loss_scale_does_not_either() -> None:
    scales = [1.0] * 30 + [1024.0] * 10
    norms = [n * s for n, s in zip(noise(40), scales, strict=True)]
    assert found(history(norms, scales=scales), "spike") == ()
    assert found(history(norms), "spike")


def test_it_needs_a_history() -> None:
    assert "spike" in lacking(history(noise(20)))
    assert "spike" not in lacking(history(noise(21)))
    assert found(history(noise(9)), "spike", Thresholds(spike_steps=8)) == ()


def test_the_node_whose_gain_jumped_is_blamed() -> None:
    flows = history([1.0] * 30)
    flows[25] = linears([1000.0, 1.0], setting=Setting(backward=25))
    (finding,) = found(flows, "spike")
    assert finding.site == "fc1"  # fc0 gets what fc1 sends back
    assert finding.evidence["gain_factor"] == pytest.approx(1000.0)


def given(flow: GradientFlow, *entries: float) -> GradientFlow:
    """The same with these numbers as the model's input."""
    first = replace(flow.sites[0], value=of_entries(entries))
    return replace(flow, sites=(first, *flow.sites[1:]))


def test_on_the_same_inputs_the_steps_overshoot() -> None:
    flows = history([2.0, *noise(24)[1:], 100.0])
    (finding,) = found(flows, "spike")
    assert finding.severity == "warning" and "the inputs are those of the step before" in finding.message
    fresh = [given(flow, 1.0, float(at)) for at, flow in enumerate(flows)]
    (finding,) = found(fresh, "spike")
    assert finding.severity == "warning" and "look at the labels" in finding.message


def test_a_swing_at_the_end_of_a_fit_is_information() -> None:
    (finding,) = found(history([200.0, *noise(24), 100.0]), "spike")
    assert finding.severity == "info" and "overshoot" in finding.message


def test_an_input_that_is_out_of_the_usual() -> None:
    flows = [given(flow, 1.0, float(at % 2)) for at, flow in enumerate(history([*noise(24), 100.0]))]
    flows[24] = given(flows[24], 300.0, 1.0)
    (finding,) = found(flows, "spike")
    assert finding.severity == "warning" and "the input x has rms" in finding.message
    assert finding.evidence["batch_factor"] == pytest.approx(300.0 / math.sqrt(1.5), rel=0.3)


def test_a_gradient_that_grows_for_some_time_is_no_spike() -> None:
    flows = history([*noise(25), *(1.5**n for n in range(1, 9))])
    assert found(flows, "spike") == ()


def stepped(flow: GradientFlow, change: float) -> GradientFlow:
    """The same, behind which a step changed every parameter by so many times its norm."""
    records = [
        replace(r, update=Update(change * r.value.l2_norm, r.value.l2_norm, 16.0)) if r.value else r
        for r in flow.parameters
    ]
    return replace(flow, parameters=tuple(records))


def test_a_batch_that_is_odd_leads_where_its_step_did_harm() -> None:
    flows = [given(flow, 1.0, float(at % 2)) for at, flow in enumerate(history([*noise(6), 500.0, 400.0]))]
    flows = [*[stepped(flow, 1e-3) for flow in flows[:6]], stepped(given(flows[6], 900.0, 1.0), 40.0), flows[7]]
    (finding,) = [f for f in diagnose(flows).findings if f.severity != "info"]
    assert (finding.rule, finding.backward, finding.severity) == ("spike", 6, "error")
    assert "it is the batch" in finding.message
    assert [f.rule for f in finding.consequences] == ["update_size"]


def test_a_step_that_is_too_large_leads_where_the_batch_is_as_ever() -> None:
    flows = [given(flow, 1.0, float(at % 2)) for at, flow in enumerate(history([1.0, 3.0, 9.0, 30.0, 90.0, 300.0]))]
    flows = [stepped(flow, 0.1 * 3**at) for at, flow in enumerate(flows)]
    assert diagnose(flows).findings[0].rule == "update_size"
