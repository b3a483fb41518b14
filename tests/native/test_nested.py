"""Several observed calls of one thread, inside of each other: none sees what another does for itself."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import fxgrad
from fxgrad.schema import GradientFlow

pytestmark = pytest.mark.usefixtures("recorder")


def what(flow: GradientFlow) -> dict[str, float | None]:
    return {site.id: None if site.l2_norm is None else pytest.approx(site.l2_norm, rel=1e-5) for site in flow.sites}


class Tree(nn.Module):
    """Calls itself."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, depth: int) -> Tensor:
        y = self.linear(x).tanh()
        return y if depth == 0 else self(y, depth - 1)


def nested(*, native: bool) -> list[tuple[GradientFlow, GradientFlow]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.Sequential(nn.ReLU(), nn.Linear(6, 2)))
    x, found = torch.randn(3, 6), []
    with fxgrad.watch(model, native=native, forward=True) as outer:
        for _ in range(3):  # the outer one knows its course before the inner one learns
            model(x).square().mean().backward()
        with fxgrad.watch(model[1], native=native, forward=True) as inner:
            for _ in range(4):
                model(x).square().mean().backward()
                found.append((outer.flow(), inner.flow()))
    return found


def test_a_watch_inside_of_a_watch() -> None:
    for step, (mine, theirs) in enumerate(zip(nested(native=True), nested(native=False), strict=True)):
        for flow, wanted in zip(mine, theirs, strict=True):
            assert what(flow) == what(wanted), step
    assert [flow.capture.recorder for flow in mine] == ["native", "native"]
    assert "every operator" in mine[0].capture.reason


def recursion(*, native: bool) -> list[GradientFlow]:
    torch.manual_seed(0)
    model = Tree()
    with fxgrad.watch(model, native=native, forward=True) as watch:
        for _ in range(6):
            for depth in (1, 2):
                model(torch.randn(3, 4), depth).sum().backward()
        return watch.history


def test_a_model_that_calls_itself() -> None:
    mine, theirs = recursion(native=True), recursion(native=False)
    assert [what(flow) for flow in mine] == [what(flow) for flow in theirs]
    assert mine[-1].capture.recorder == "native"
