"""Edges of a value that is a parameter: a cast to what it is returns the parameter itself, without an operator."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import fxgrad
from fxgrad.schema import GradientFlow

pytestmark = pytest.mark.usefixtures("recorder")


class Decays(nn.Module):
    """As a state space model does it: a parameter, cast to what it is, is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.rate = nn.Parameter(torch.linspace(0.1, 0.5, 4))
        self.linear = nn.Linear(4, 4)
        self.deep = False

    def forward(self, x: Tensor) -> Tensor:
        rate = self.rate.float()
        h = self.linear(x) * -torch.exp(rate)
        if self.deep:
            h = h.sin()
        return h + rate


def flows(*, native: bool, deep: bool) -> list[GradientFlow]:
    torch.manual_seed(0)
    with fxgrad.watch(model := Decays(), native=native, sites="edge") as watch:
        for step in range(4):
            model.deep = deep and step == 3  # a call that leaves the known courses
            model.zero_grad()
            model(torch.ones(3, 4)).square().mean().backward()
        return [*watch.history]


def edges(flow: GradientFlow) -> dict[tuple[str, str], object]:
    return {
        (edge.producer, edge.consumer.key): None
        if edge.statistics is None
        else pytest.approx(edge.statistics.l2_norm, rel=1e-5)
        for edge in flow.edges
    }


@pytest.mark.parametrize("deep", [False, True])
def test_the_edges_of_a_parameter_are_measured(deep: bool) -> None:
    found, wanted = flows(native=True, deep=deep), flows(native=False, deep=deep)
    assert found[2].capture.recorder == "native"
    assert sum(key[0] == "/float" for key in edges(wanted[2])) == 2
    for one, other in zip(found[:3], wanted[:3], strict=True):
        assert edges(one) == edges(other)
    measured = [edge for edge in found[3].edges if edge.producer == "/float"]
    assert len(measured) == 2 or deep
    assert all(edge.statistics is not None for edge in measured)


def test_they_are_those_of_plain_torch() -> None:
    torch.manual_seed(0)
    model = Decays()
    one, two = (model.rate.detach().clone().requires_grad_() for _ in range(2))
    out = model.linear(torch.ones(3, 4)) * -torch.exp(one) + two
    out.square().mean().backward()
    found = edges(flows(native=True, deep=False)[2])
    assert one.grad is not None and two.grad is not None
    assert found["/float", "/exp"] == one.grad.norm().item()
    assert found["/float", "/add"] == two.grad.norm().item()
