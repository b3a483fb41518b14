"""The stock models."""

from __future__ import annotations

import pytest
import torch

import fxgrad
from fxgrad.demo import MODELS, ResidualCNN


@pytest.mark.parametrize("name", MODELS)
def test_same_parameters_each_time_and_random_stream_left_alone(name: str) -> None:
    before = torch.get_rng_state()
    first, second = MODELS[name].model(), MODELS[name].model()
    assert torch.equal(torch.get_rng_state(), before)
    for left, right in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(left, right)


@pytest.mark.parametrize("name", MODELS)
def test_same_inputs_each_time(name: str) -> None:
    for left, right in zip(MODELS[name].inputs(), MODELS[name].inputs(), strict=True):
        assert torch.equal(left, right)


def test_gradient_of_the_mlp_vanishes_towards_the_input() -> None:
    stock = MODELS["sigmoid_mlp"]
    flow = fxgrad.gradient_flow(stock.model(), stock.inputs())
    norms = [site.l2_norm for site in flow if site.op == "call_module"]
    assert norms[0] is not None
    assert norms[-2] is not None
    assert 0 < norms[0] < 1e-6 * norms[-2]


def test_gradient_of_the_cnn_lives() -> None:
    stock = MODELS["residual_cnn"]
    flow = fxgrad.gradient_flow(stock.model(), stock.inputs())
    norms = [site.l2_norm for site in flow if site.measured]
    assert len(norms) >= 20
    assert all(norm is not None and norm > 1e-3 for norm in norms)


def test_functional_and_in_place_calls_of_the_cnn_are_sites() -> None:
    stock = MODELS["residual_cnn"]
    measured = {site.key for site in fxgrad.gradient_flow(stock.model(), stock.inputs()) if site.measured}
    assert any(key.endswith("/relu") for key in measured)
    assert any("add_" in key for key in measured)


def test_other_sizes() -> None:
    model = ResidualCNN(width=4, blocks=1, classes=2)
    assert model(torch.zeros(1, 3, 8, 8)).shape == (1, 2)
