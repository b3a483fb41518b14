"""Parts that cancel: their sizes are those of autograd, and they must do so in every step."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fxgrad
from fxgrad.diagnosis import Thresholds, diagnose


class Ratio(nn.Module):
    """A gate divided by itself, as long as ``own`` says so."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.head = nn.Linear(6, 1), nn.Linear(6, 3)
        self.own = True

    def forward(self, x):
        gate = torch.exp(self.gate(x))
        return self.head(x) * (gate / (gate.sum(-1, keepdim=True) if self.own else gate.detach() + 1.0))


def found(diagnosis):
    return [f for f in diagnosis.findings if f.rule == "cancelled"]


def test_the_parts_are_those_of_autograd() -> None:
    torch.manual_seed(0)
    model, x = Ratio(), torch.randn(16, 6)
    (finding,) = found(fxgrad.gradient_flow(model, x, loss=lambda o: o.square().mean()).diagnosis)
    gate = torch.exp(model.gate(x)).detach()
    above, below = gate.clone().requires_grad_(), gate.clone().requires_grad_()
    (model.head(x) * (above / below.sum(-1, keepdim=True))).square().mean().backward()
    largest = max(above.grad.norm().item(), below.grad.norm().item())
    assert finding.evidence["largest_part"] == pytest.approx(largest, rel=1e-5)
    assert (above.grad + below.grad).norm() < 1e-5 * largest
    assert set(finding.affected) == {"gate.weight", "gate.bias"}
    assert finding.node is not None and finding.node.key == "/div"


def test_one_step_in_which_they_do_not_is_enough_to_be_silent() -> None:
    torch.manual_seed(0)
    model = Ratio()
    with fxgrad.watch(model, statistics="full", sites="edge", forward=True) as watch:
        for step in range(6):
            model.own = step > 0
            model(torch.randn(16, 6)).square().mean().backward()
    flows = watch.history
    assert found(diagnose(flows[1:]))
    assert not found(diagnose(flows))


def test_without_edges_it_is_not_checked() -> None:
    flow = fxgrad.gradient_flow(Ratio(), torch.randn(16, 6), sites="node")
    assert "cancelled" in {one.rule for one in flow.not_checked}


def test_a_threshold_of_zero_silences_it() -> None:
    flow = fxgrad.gradient_flow(Ratio(), torch.randn(16, 6))
    assert found(flow.diagnosis)
    assert not found(diagnose(flow, Thresholds(cancelled=0.0)))
