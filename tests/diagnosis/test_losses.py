"""What is worked out of a loss agrees with plain torch; what is bounded by an activation is told exactly."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fxgrad
from fxgrad.diagnosis import Thresholds, diagnose

FAR = 1e5


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 3))


TARGET = FAR * torch.linspace(-1, 1, 24).view(8, 3)
FORMS = {
    "mean": lambda o: F.mse_loss(o, TARGET),
    "sum": lambda o: F.mse_loss(o, TARGET, reduction="sum"),
    "by hand": lambda o: ((TARGET - o) ** 2).mean(),
    "over samples": lambda o: (o - TARGET).pow(2).sum(-1).mean(),
    "with another term": lambda o: F.mse_loss(o, TARGET) + 1e-3 * o.abs().mean(),
}


@pytest.mark.parametrize("name", FORMS)
def test_the_difference_is_that_of_output_and_target(name: str) -> None:
    net, x = model(), torch.randn(8, 6)
    want = (net(x) - TARGET).double().square().mean().sqrt().item()
    found = [f for f in fxgrad.gradient_flow(net, x, loss=FORMS[name]).findings if f.rule == "target_range"]
    assert [f.evidence["difference_rms"] for f in found] == [pytest.approx(want, rel=1e-4)]


def test_a_loss_scale_is_divided_out() -> None:
    net, x = model(), torch.randn(8, 6)
    scaler = torch.amp.GradScaler("cpu", init_scale=512.0)
    with fxgrad.watch(net, forward=True, scaler=scaler) as watch:
        scaler.scale(FORMS["mean"](net(x))).backward()
    (found,) = [f for f in diagnose(watch.history).findings if f.rule == "target_range"]
    want = (net(x) - TARGET).double().square().mean().sqrt().item()
    assert found.evidence["difference_rms"] == pytest.approx(want, rel=1e-4)


def test_other_losses_are_not_judged() -> None:
    for loss in (lambda o: F.l1_loss(o, TARGET), lambda o: 1e4 * F.mse_loss(o, TARGET), lambda o: (o * TARGET).sum()):
        flow = fxgrad.gradient_flow(model(), torch.randn(8, 6), loss=loss)
        assert not [f for f in flow.findings if f.rule == "target_range"]


def test_the_threshold_is_the_share() -> None:
    flow = fxgrad.gradient_flow(model(), torch.randn(8, 6), loss=FORMS["mean"])
    (found,) = [f for f in flow.findings if f.rule == "target_range"]
    ratio = found.evidence["ratio"]
    for limit, severity in ((ratio * 0.99, "warning"), (ratio * 1.01, "info")):
        again = diagnose(flow, Thresholds(target_range=limit)).findings
        assert [f.severity for f in again if f.rule == "target_range"] == [severity]


@pytest.mark.parametrize("classes", [2, 5, 10])
def test_the_largest_probability_behind_two_softmaxes(classes: int) -> None:
    net = nn.Sequential(nn.Linear(6, classes), nn.Softmax(-1))
    target = torch.zeros(8, dtype=torch.long)
    flow = fxgrad.gradient_flow(net, torch.randn(8, 6), loss=lambda o: F.cross_entropy(o, target))
    (found,) = [f for f in flow.findings if f.rule == "double_activation"]
    best = torch.softmax(F.one_hot(torch.tensor(0), classes).double(), -1).max().item()
    assert found.evidence["largest_probability"] == pytest.approx(best)
    assert found.confidence == "exact"


def test_both_activations_in_the_model() -> None:
    net = nn.Sequential(nn.Linear(6, 3), nn.Sigmoid(), nn.Sigmoid())
    flow = fxgrad.gradient_flow(net, torch.randn(8, 6), loss=lambda o: o.square().mean())
    (found,) = [f for f in flow.findings if f.rule == "double_activation"]
    assert found.node is not None and found.node.key == "1"
    assert found.evidence["largest_probability"] == pytest.approx(1 / (1 + math.exp(-1)))


def test_one_activation_inside_of_another_gate_is_meant() -> None:
    net = nn.Sequential(nn.Linear(6, 3), nn.Sigmoid(), nn.Sigmoid(), nn.Linear(3, 2))
    flow = fxgrad.gradient_flow(net, torch.randn(8, 6), loss=lambda o: o.square().mean())
    assert not [f for f in flow.findings if f.rule == "double_activation"]
