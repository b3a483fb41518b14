"""A module that is of another class from one call to the next: names, types and sites follow."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import fxgrad

X = torch.linspace(-1, 1, 12).reshape(3, 4)


class Rectified(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(super().forward(x)) * 2


class Other(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).tanh()


Other.__name__ = "Linear"  # another class of the same name


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4), nn.ReLU())


def becomes(kind: type[nn.Module]) -> Callable[[nn.Sequential], None]:
    def change(model: nn.Sequential) -> None:
        model[1].__class__ = kind

    return change


def swapped(model: nn.Sequential) -> None:
    model[2] = nn.GELU()


def activation(model: nn.Sequential) -> None:
    model[2].__class__ = nn.SiLU


def seen(flow: fxgrad.GradientFlow) -> tuple[list[str], list[tuple[str, str]], dict[str, float | None]]:
    calls = [(call.path, call.type) for call in flow.calls]
    return [node.key for node in flow.nodes], calls, {site.key: site.l2_norm for site in flow.sites}


@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("change", [becomes(Rectified), becomes(Other), swapped, activation])
def test_what_is_told_is_that_of_a_fresh_watch(change: Callable[[nn.Sequential], None], *, native: bool) -> None:
    model, back = net(), net()
    change(back)
    with fxgrad.watch(back, native=False) as fresh:
        back(X).square().sum().backward()
    with fxgrad.watch(model, native=native) as watch:
        for step in range(5):
            if step == 2:
                change(model)
            model(X).square().sum().backward()
            if step >= 2:
                keys, calls, norms = seen(watch.flow())
                expected = seen(fresh.flow())
                assert (keys, calls) == expected[:2]
                assert norms == pytest.approx(expected[2])


@pytest.mark.parametrize("native", [False, True])
def test_and_back(*, native: bool) -> None:
    model = net()
    with fxgrad.watch(model, native=native) as watch:
        for step in range(8):
            model[1].__class__ = Rectified if 2 <= step < 5 else nn.Linear
            model(X).sum().backward()
            inner = ["1/linear", "1/relu", "1/mul"] if 2 <= step < 5 else ["1"]
            assert [site.key for site in watch.flow().sites] == ["input:input", "0", *inner, "2"]
