"""What is recorded is the gradient as it arrives: hooks of the user's own act behind ours."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxgrad

X = torch.linspace(-1, 1, 12).reshape(3, 4)


class Arrivals:
    """A hook that notes what arrived, and hands on three times as much."""

    def __init__(self) -> None:
        self.norms: list[float] = []

    def __call__(self, gradient: Tensor) -> Tensor:
        self.norms.append(float(gradient.norm()))
        return gradient * 3


def linear() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(4, 2)


def _paused(watch: fxgrad.Watch, step: int) -> None:
    if step == 3:
        watch.pause()
    if step == 4:
        watch.resume()


def _nothing(watch: fxgrad.Watch, step: int) -> None:
    del watch, step


@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("put_at", [-1, 1])
@pytest.mark.parametrize(("options", "between"), [({}, _paused), ({"every": 3}, _nothing), ({"every": 2}, _paused)])
def test_on_a_parameter(
    options: dict[str, Any], between: Callable[[fxgrad.Watch, int], None], put_at: int, *, native: bool
) -> None:
    model, arrivals = linear(), Arrivals()
    if put_at < 0:
        model.weight.register_hook(arrivals)
    checked = 0
    with fxgrad.watch(model, native=native, **options) as watch:
        for step in range(8):
            if step == put_at:
                model.weight.register_hook(arrivals)
            between(watch, step)
            before = len(watch.history)
            model.zero_grad()
            model(X * (step + 1)).square().mean().backward()
            if len(watch.history) > before and arrivals.norms:
                weight = next(record for record in watch.flow().parameters if record.name == "weight")
                assert weight.l2_norm == pytest.approx(arrivals.norms[-1])
                assert float(model.weight.grad.norm()) == pytest.approx(3 * arrivals.norms[-1])
                checked += 1
    assert checked >= 2


class ByLeaf(nn.Module):
    """Uses a tensor that carries a hook of the user's before it is seen."""

    def __init__(self, hook: Arrivals) -> None:
        super().__init__()
        self.a, self.hook = linear(), hook

    def forward(self, x: Tensor, own: Tensor) -> Tensor:
        return self.a(x) * own


@pytest.mark.parametrize("computed", [False, True])
@pytest.mark.parametrize("native", [False, True])
def test_on_an_argument(*, computed: bool, native: bool) -> None:
    arrivals = Arrivals()
    model = ByLeaf(arrivals)
    with fxgrad.watch(model, native=native) as watch:
        for _ in range(3):
            own = torch.full((3, 2), 0.5, requires_grad=True)
            own = own * 2 if computed else own
            own.register_hook(arrivals)
            model(X, own).square().sum().backward()
            site = next(site for site in watch.flow().sites if site.key == "input:own")
            assert site.l2_norm == pytest.approx(arrivals.norms[-1])


def halved(module: nn.Module, args: tuple[Tensor]) -> tuple[Tensor]:
    del module
    return (args[0] * 0.5,)


@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("put_at", [0, 2])
def test_a_module_consumes_what_it_was_given_whenever_a_hook_replaced_it(put_at: int, *, native: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2))
    arrived: list[float] = []
    with fxgrad.watch(model, native=native, sites="edge") as watch:
        for step in range(5):
            if step == put_at:
                model[2].register_forward_pre_hook(halved)
            model(X).square().mean().backward()
    with torch.enable_grad():
        hidden = model[1](model[0](X))
        hidden.register_hook(lambda gradient: arrived.append(float(gradient.norm())))
        model[2](hidden).square().mean().backward()
    edges = {(edge.producer, edge.consumer.key): edge.l2_norm for edge in watch.flow().edges}
    assert list(edges) == [("input:input", "0"), ("0", "1"), ("1", "2"), ("2", "output")]
    assert edges["1", "2"] == pytest.approx(arrived[0])
