"""Rules about steps, the loss and symmetry."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import nn

import fxgrad
from fxgrad.diagnosis import Thresholds
from fxgrad.schema import GradientFlow
from tests.diagnosis.making import Setting, found, lacking, linears, of_entries

# ---- spike ---------------------------------------------------------------------------------------------------------


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
    assert finding.severity == "warning" and "suspect the batch" in finding.message


def test_a_swing_at_the_end_of_a_fit_is_information() -> None:
    (finding,) = found(history([200.0, *noise(24), 100.0]), "spike")
    assert finding.severity == "info" and "overshoot" in finding.message


# ---- loss_seed -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rms", "severity"), [(1.0, None), (1e-8, "info"), (1e5, "info"), (0.0, "warning"), (5e10, "info")]
)
def test_what_the_loss_sends(rms: float, severity: str | None) -> None:
    """16 entries of 4 samples: 4 entries each."""
    flow = linears([rms * 4, rms * 4])
    findings = found(flow, "loss_seed")
    assert [f.severity for f in findings] == ([severity] if severity else [])
    assert all(f.node is None for f in findings)
    if severity == "info":
        assert findings[0].evidence["size"] == pytest.approx(4 * rms)
        assert found(flow, "loss_seed", Thresholds(seed_low=1e-12, seed_high=1e12)) == ()


def test_a_loss_scale_that_was_told_is_no_large_loss() -> None:
    flow = linears([65536.0 * 4] * 2, setting=Setting(more={"loss_scale": 65536.0}))
    assert found(flow, "loss_seed") == ()
    assert found(linears([65536.0 * 4] * 2), "loss_seed")


# ---- symmetry ------------------------------------------------------------------------------------------------------


def filled(entries: Sequence[float], count: int = 2) -> GradientFlow:
    """Linear layers whose weights have these entries."""
    flow = linears([1.0] * 3)
    value = of_entries(entries)
    same = tuple(replace(r, value=value) if n < count else r for n, r in enumerate(flow.parameters))
    return replace(flow, parameters=same)


def test_weights_that_are_filled_with_one_number() -> None:
    (finding,) = found(filled([0.1] * 16), "symmetry")
    assert (finding.severity, finding.site) == ("warning", "fc0")
    assert finding.affected == ("fc0.weight", "fc1.weight")
    assert found(filled([0.1] * 16, count=1), "symmetry")[0].severity == "info"


def test_weights_that_are_not() -> None:
    assert found(filled([0.1] * 15 + [0.11]), "symmetry") == ()
    assert found(filled([0.1] * 15 + [0.11]), "symmetry", Thresholds(symmetry=0.1))
    assert found(filled([1.01e-4, 0.99e-4] * 8), "symmetry") == ()  # relative to their size
    assert found(filled([0.0] * 16), "symmetry") == ()


def test_units_whose_gradients_are_alike_are_told_by_channels() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
    with torch.no_grad():
        model[0].weight.copy_(torch.randn(6).expand(8, 6))
        model[0].bias.zero_()
        model[2].weight.fill_(0.3)
    x = torch.randn(16, 6)
    found = fxgrad.gradient_flow(model, x, loss=torch.sum, channels=True).findings
    assert [(f.rule, f.affected) for f in found] == [("symmetry", ("0.weight",))]
    assert fxgrad.gradient_flow(model, x, loss=torch.sum).findings == ()


class Throttled(nn.Module):
    """Branches under a LayerScale of a millionth, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.scale = nn.Parameter(torch.full((8,), 1e-6))
        self.head = nn.Linear(8, 2)

    def forward(self, x):
        for branch in self.branches:
            x = x + self.scale * branch(x)
        return self.head(x)


@pytest.mark.parametrize(("times", "severity"), [(1.0, "info"), (1e-7, "warning")])
def test_branches_that_begin_small_are_no_fault_of_the_epsilon(times: float, severity: str) -> None:
    torch.manual_seed(0)
    model = Throttled()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-9)
    with fxgrad.watch(model, optimizer=optimizer) as watch:
        for _ in range(6):
            optimizer.zero_grad()
            (times * model(torch.randn(16, 8)).square().mean()).backward()
            optimizer.step()
        findings = [f for f in watch.diagnose().findings if f.rule == "optimizer_epsilon"]
    assert [f.severity for f in findings] == [severity]
