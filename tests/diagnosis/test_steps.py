"""Rules about the loss and symmetry."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import nn

import fxgrad
from fxgrad.diagnosis import Thresholds
from fxgrad.schema import GradientFlow
from tests.diagnosis.making import Setting, found, linears, of_entries

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
