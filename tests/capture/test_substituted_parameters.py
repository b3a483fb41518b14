"""Tensors that stand in for parameters during a call: the parameter is the one that was registered."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

import fxgrad

X = torch.linspace(-1, 1, 12).reshape(3, 4)


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))


def scaled(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter * 1.5 for name, parameter in model.named_parameters()}


def others(model: nn.Module) -> dict[str, Tensor]:
    return {name: nn.Parameter(parameter.detach() * 1.5) for name, parameter in model.named_parameters()}


def one_of_them(model: nn.Module) -> dict[str, Tensor]:
    return {"0.weight": model.get_parameter("0.weight") * 1.5}


def themselves(model: nn.Module) -> dict[str, Tensor]:
    return dict(model.named_parameters())


def check(model: nn.Module, flow: fxgrad.GradientFlow) -> None:
    """Against what plain torch left in ``.grad``."""
    assert [record.name for record in flow.parameters] == [name for name, _ in model.named_parameters()]
    for record in flow.parameters:
        grad = model.get_parameter(record.name).grad
        if grad is None:
            assert not record.measured, record.name
        else:
            assert record.l2_norm == pytest.approx(float(grad.norm())), record.name


@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("substitutes", [scaled, others, one_of_them, themselves])
def test_the_gradient_of_a_parameter_is_its_own(
    substitutes: Callable[[nn.Module], dict[str, Tensor]], *, native: bool
) -> None:
    model = net()
    with fxgrad.watch(model, native=native) as watch:
        for step in range(7):
            model.zero_grad()
            plain = step in {0, 1, 4}
            result = model(X) if plain else functional_call(model, substitutes(model), (X,))
            result.square().mean().backward()
            check(model, watch.flow())


@pytest.mark.parametrize("native", [False, True])
def test_a_watch_that_begins_with_substitutes(*, native: bool) -> None:
    model = net()
    with fxgrad.watch(model, native=native) as watch:
        for _ in range(3):
            model.zero_grad()
            functional_call(model, scaled(model), (X,)).square().mean().backward()
            check(model, watch.flow())


@pytest.mark.parametrize("native", [False, True])
def test_an_inner_step_and_the_outer_loss_behind_it(*, native: bool) -> None:
    model = net()
    own = dict(model.named_parameters())
    with fxgrad.watch(model, native=native) as watch:
        for _ in range(4):
            model.zero_grad()
            inner = functional_call(model, own, (X,)).square().mean()
            gradients = torch.autograd.grad(inner, list(own.values()), create_graph=True)
            fast: Any = {name: p - 0.1 * g for (name, p), g in zip(own.items(), gradients, strict=True)}
            functional_call(model, fast, (X,)).square().mean().backward()
            check(model, watch.history[-1])  # what this pass gave the parameters, through both calls


def test_a_parameter_that_was_replaced_for_good() -> None:
    model = net()
    with fxgrad.watch(model) as watch:
        model(X).sum().backward()
        model[0].weight = nn.Parameter(torch.ones(6, 4))
        model.zero_grad()
        model(X).sum().backward()
        check(model, watch.flow())
