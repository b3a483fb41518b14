"""What is known of the weights that a node works with."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

import fxgrad
from fxgrad.diagnosis import FlowView
from fxgrad.diagnosis.weights import factor, main_weight, scale, throttled
from fxgrad.schema import GradientFlow
from tests.diagnosis.making import Link, chain, gradient, parameter


def test_the_scale_of_a_weight_is_its_rms_times_the_root_of_its_fan_in() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(8 * 4, 16))
    for layer in (model[0], model[2]):
        nn.init.kaiming_normal_(layer.weight)
    flow = fxgrad.gradient_flow(model, torch.randn(2, 3, 4, 4))
    scales = {r.name: scale(r) for r in flow.parameters}
    for name, weight in model.named_parameters():
        fan_in = weight[0].numel() if weight.dim() > 1 else 1
        wanted = weight.double().square().mean().sqrt().item() * math.sqrt(fan_in)
        assert scales[name] == pytest.approx(wanted)
    assert scales["0.weight"] == pytest.approx(math.sqrt(2), rel=0.15)  # He


def test_without_forward_statistics_it_is_unknown() -> None:
    assert scale(parameter("fc.weight", 1.0, rms=None)) is None


def view_of(model: nn.Module) -> FlowView:
    torch.manual_seed(0)
    return FlowView(fxgrad.gradient_flow(model, torch.randn(4, 8)))


class Gated(nn.Module):
    """A residual branch behind a scale that reaches the product through views."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.branch, self.head = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 2)
        self.gamma = nn.Parameter(torch.full((8, 1), 1e-5))

    def forward(self, x: Tensor) -> Tensor:
        h = self.stem(x)
        return self.head(h + self.branch(h) * self.gamma.squeeze(-1).unsqueeze(0))


def test_the_factor_of_a_product_is_found_behind_views() -> None:
    view = view_of(Gated())
    found = factor(view, "/mul")
    assert found is not None
    assert found.name == "gamma"
    assert throttled(view, view.nodes["/mul"], 0.1) is found
    assert throttled(view, view.nodes["/mul"], 1e-6) is None
    assert factor(view, "/add") is None


def test_the_weight_of_a_layer_is_its_matrix() -> None:
    view = view_of(Gated())
    record = main_weight(view, view.nodes["stem"])
    assert record is not None
    assert record.name == "stem.weight"
    assert main_weight(view, view.nodes["/add"]) is None


def two(first: float, last: float) -> GradientFlow:
    """Two linear layers, with weights of these rms."""
    links = [Link(key, gradient(1.0), parameters=(f"{key}.weight",)) for key in ("fc0", "fc1")]
    return chain(*links, parameters=[parameter("fc0.weight", 1.0, rms=first), parameter("fc1.weight", 1.0, rms=last)])


def test_a_small_matrix_is_on_purpose_at_the_end_only() -> None:
    view = FlowView(two(1e-4, 1e-4))
    assert throttled(view, view.nodes["fc1"], 0.1) is not None
    assert throttled(view, view.nodes["fc0"], 0.1) is None
    view = FlowView(two(0.0, 0.5))
    assert throttled(view, view.nodes["fc0"], 0.1) is not None  # zero is never an accident
