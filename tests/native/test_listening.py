"""Operators inside of operators: nobody of ours is told of them, and all others are as without us."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

import fxgrad
from fxgrad.schema import GradientFlow

pytestmark = pytest.mark.usefixtures("recorder")


def small() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 1))


def norms(flow: GradientFlow) -> dict[str, float | None]:
    return {site.id: None if site.l2_norm is None else pytest.approx(site.l2_norm, rel=1e-5) for site in flow.sites}


def profiled(model: nn.Module) -> Counter[str]:
    """How often each operator ran in the third step, as a profiler of the user's saw it."""
    x = torch.ones(3, 4)
    for _ in range(2):
        model(x).square().mean().backward()  # without an expanded gradient, which we would copy
    with profile(activities=[ProfilerActivity.CPU]) as found:
        model(x).square().mean().backward()
    return Counter({event.key: event.count for event in found.key_averages() if event.key.startswith("aten::")})


def test_a_profiler_sees_the_operators_inside_of_others() -> None:
    plain = profiled(small())
    assert plain["aten::linear"] == plain["aten::addmm"] == 2
    watched = small()
    with fxgrad.watch(watched) as watch:
        seen = profiled(watched)
        assert watch.flow().capture.recorder == "native"
    assert seen == plain


def test_a_profiler_that_is_switched_on_inside_of_the_forward() -> None:
    class Profiled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = small()
            self.seen: list[Counter[str]] = []

        def forward(self, x: Tensor) -> Tensor:
            h = self.inner(x)
            with profile(activities=[ProfilerActivity.CPU]) as found:
                y: Tensor = self.inner(h.expand(-1, 4)) + 1
            self.seen.append(Counter({event.key: event.count for event in found.key_averages()}))
            return y

    def steps(model: Profiled) -> list[Counter[str]]:
        for _ in range(3):
            model(torch.ones(3, 4)).square().mean().backward()
        return model.seen

    plain, model = steps(Profiled()), Profiled()
    with fxgrad.watch(model) as watch:
        assert steps(model) == plain
        assert watch.flow().capture.recorder == "native"


@pytest.fixture
def op() -> Iterator[torch.library.Library]:
    """An operator that is written in Python and calls a model."""
    with torch.library._scoped_library("fxgrad_listening", "FRAGMENT") as library:  # goes with the test
        library.define("twice(Tensor x) -> Tensor")
        library.impl("twice", _twice, "CompositeImplicitAutograd")
        yield library


_inside: list[nn.Module] = []


def _twice(x: Tensor) -> Tensor:
    h = (x * 2).relu()
    y: Tensor = _inside[0](h)
    return _inside[0](y.expand(-1, 4) + h)


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.last = nn.Linear(1, 2)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.ops.fxgrad_listening.twice(self.first(x))
        return self.last(y).tanh()


def flows(*, native: bool) -> list[GradientFlow]:
    torch.manual_seed(0)
    outer, inner, found = Outer(), small(), []
    _inside[:] = [inner]
    with fxgrad.watch(outer, native=native) as one, fxgrad.watch(inner, native=native) as two:
        for _ in range(4):
            outer(torch.ones(3, 4)).square().mean().backward()
            found = [one.flow(), *two.history[-2:]]
    return found


@pytest.mark.usefixtures("op")
def test_a_watched_model_that_an_operator_calls() -> None:
    for flow, wanted in zip(flows(native=True), flows(native=False), strict=True):
        assert flow.capture.recorder == "native"
        assert "every operator" in flow.capture.reason
        assert norms(flow) == norms(wanted)


def test_an_operator_that_raises() -> None:
    class Fails(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(4, 4)
            self.last = nn.Linear(4, 1)

        def forward(self, x: Tensor) -> Tensor:
            h = self.first(x)
            try:
                nn.functional.linear(h, h.t())  # has operators inside, the last of which raises
            except RuntimeError:
                pass
            else:
                pytest.fail("it did not raise")
            return self.last(h).tanh()

    def flow(*, native: bool) -> GradientFlow:
        torch.manual_seed(0)
        with fxgrad.watch(model := Fails(), native=native) as watch:
            for _ in range(3):
                model(torch.ones(3, 4)).square().mean().backward()
            return watch.flow()

    found, wanted = flow(native=True), flow(native=False)
    assert found.capture.recorder == "native"
    assert norms(found) == norms(wanted)
