"""A custom autograd function belongs to the module and the line that applied it."""

from __future__ import annotations

import linecache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fxgrad
from fxgrad.schema import GradientFlow, Node


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 2 * grad


class ByNumpy(Double):
    """What it computes is out of torch's sight."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return torch.from_numpy(np.multiply(x.numpy(), 2))


class Pair(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return x + y, x - y

    @staticmethod
    def backward(ctx: Any, one: Tensor, two: Tensor) -> tuple[Tensor, Tensor]:
        return one + two, one - two


class Inner(nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function.apply(x)  # applied here


class Outer(nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.a, self.inner, self.b = nn.Linear(4, 4), Inner(function), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.inner(self.a(x))).exp()


def line_of(node: Node) -> str:
    file, _, line = str(node.source).rpartition(":")
    return linecache.getline(file, int(line)).strip()


def flow_of(model: nn.Module, native: bool | None) -> GradientFlow:
    x = torch.ones(2, 4)
    if native is None:
        return fxgrad.gradient_flow(model, x)
    with fxgrad.watch(model, native=native, sites="edge") as watch:
        for _ in range(3):
            model(x).sum().backward()
        return watch.flow()


any_recorder = pytest.mark.parametrize("native", [None, True, False])


@any_recorder
@pytest.mark.parametrize("function", [Double, ByNumpy])
def test_a_function_in_a_module_of_its_own(function: Any, native: bool | None) -> None:
    flow = flow_of(Outer(function), native)
    node = flow.site(f"inner/{function.__name__}").node
    assert (node.op, node.module_path, node.module_type) == ("external", "inner", "Inner")
    assert line_of(node) == "return self.function.apply(x)  # applied here"
    takes = [edge.producer for edge in flow.edges if edge.consumer.key == node.key]
    assert "a" in takes


@any_recorder
def test_results_that_are_used_in_another_order(native: bool | None) -> None:
    class Crossed(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            w = self.weight
            one = Double.apply(w * x)  # one
            two = Double.apply(w - x)  # two
            return two.exp() + one

        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4))

    flow = flow_of(Crossed(), native)
    lines = {node.key: line_of(node) for node in flow.nodes if node.op == "external"}
    assert [line.rpartition("# ")[2] for line in lines.values()] == ["two", "one"]
    takes = {e.consumer.key: e.producer for e in flow.edges if e.consumer.key in lines and "Double" not in e.producer}
    by_line = {lines[key].rpartition("# ")[2]: producer for key, producer in takes.items()}
    assert by_line["one"].startswith("/mul")
    assert by_line["two"].startswith("/sub")


@any_recorder
def test_several_results_belong_to_one_line(native: bool | None) -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            one, two = Pair.apply(self.a(x), self.b(x))
            h = one.exp()
            return h * two

    flow = flow_of(Both(), native)
    nodes = [node for node in flow.nodes if node.op == "external"]
    assert {line_of(node) for node in nodes} == {"one, two = Pair.apply(self.a(x), self.b(x))"}
    for node in nodes:
        assert {"a", "b"} <= {edge.producer for edge in flow.edges if edge.consumer.key == node.key}


def test_a_function_that_is_used_only_behind_the_model() -> None:
    class Last(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return Double.apply(self.a(x))  # last

    flow = flow_of(Last(), None)
    assert line_of(flow.site("/Double").node) == "return Double.apply(self.a(x))  # last"


class DoubleInPlace(Double):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.mul_(2)


class InPlace(nn.Module):
    """Hooks of plain torch on the value before and after a function that changes it."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.seen: dict[str, float] | None = None

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x) + 0
        if self.seen is not None:
            self.note("/add", x)
        x = DoubleInPlace.apply(x)
        if self.seen is not None:
            self.note("/DoubleInPlace", x)
        return self.b(x)

    def note(self, name: str, x: Tensor) -> None:
        x.register_hook(lambda grad: self.seen.update({name: float(grad.norm())}))


@pytest.mark.parametrize("native", [False, True])
def test_a_function_that_changes_its_argument(*, native: bool) -> None:
    torch.manual_seed(0)
    model, x = InPlace(), torch.randn(3, 4)
    model.seen = {}
    model(x).square().mean().backward()
    by_hooks, model.seen = model.seen, None
    with fxgrad.watch(model, native=native) as watch:
        for _ in range(3):
            model(x).square().mean().backward()
            norms = {site.key: site.l2_norm for site in watch.flow().sites}
            assert {key: norms[key] for key in by_hooks} == pytest.approx(by_hooks)
    assert by_hooks["/add"] == pytest.approx(2 * by_hooks["/DoubleInPlace"])
