"""Modules that sit in plain lists and dicts: named as written, and measured like any other."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxgrad
from fxgrad.errors import CaptureError


class Listed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.head = nn.Linear(4, 2)
        self.blocks = [nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.LeakyReLU())]
        self.heads = {"cls": nn.Linear(4, 4)}
        self.scales = [nn.Parameter(torch.ones(4))]

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(self.heads["cls"](x) * self.scales[0])


OUTSIDE = {
    "blocks[0].weight", "blocks[0].bias", "blocks[1].0.weight", "blocks[1].0.bias", "heads['cls'].weight",
    "heads['cls'].bias", "scales[0]",
}  # fmt: skip
X = torch.linspace(-1, 1, 12).reshape(3, 4)


def of(model: Listed, name: str) -> Tensor:
    found: Any = eval(f"model.{name}".replace(".0.", "[0]."))  # noqa: S307  # the name is how one writes it
    return found


def check(model: Listed, flow: fxgrad.GradientFlow) -> None:
    records = {record.name: record for record in flow.parameters}
    assert {name for name, record in records.items() if not record.registered} == OUTSIDE
    assert {name for name, record in records.items() if record.registered} == {"head.weight", "head.bias"}
    plain = Listed()
    plain(X).sum().backward()
    for name, record in records.items():
        grad = of(plain, name).grad
        assert grad is not None
        assert record.l2_norm == pytest.approx(float(grad.norm())), name
    assert flow.site("blocks[0]").node.module_type == "Linear"
    assert flow.site("blocks[1].1").node.module_path == "blocks[1].1"


@pytest.mark.parametrize("options", [{}, {"native": False}, {"statistics": "full", "forward": True, "sites": "edge"}])
def test_a_watch_names_and_measures_them(options: Any) -> None:
    model = Listed()
    with fxgrad.watch(model, **options) as watch:
        for _ in range(3):
            model.zero_grad()
            model(X).sum().backward()
        check(model, watch.flow())
    assert all(not of(model, name)._backward_hooks for name in OUTSIDE)


def test_a_one_shot_call() -> None:
    model = Listed()
    flow = fxgrad.gradient_flow(model, X, loss=torch.sum)
    check(model, flow)
    assert not {finding.rule for finding in flow.findings} & {"unused", "detached"}
    assert all(of(model, name).grad is None for name in OUTSIDE)


def test_a_one_shot_call_gives_their_state_back() -> None:
    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = [nn.BatchNorm1d(4), nn.Linear(4, 4)]

        def forward(self, x: Tensor) -> Tensor:
            return self.layers[1](self.layers[0](x))

    model = Normed()
    weight = model.layers[1].weight
    weight.grad = torch.ones(4, 4)
    fxgrad.gradient_flow(model, X)
    assert torch.equal(weight.grad, torch.ones(4, 4))
    assert int(model.layers[0].num_batches_tracked) == 0
    assert torch.equal(model.layers[0].running_mean, torch.zeros(4))


def test_modules_that_come_later() -> None:
    model = Listed()
    with fxgrad.watch(model) as watch:
        model(X).sum().backward()
        model.blocks.append(nn.Linear(4, 4))
        model(X).sum().backward()
        assert "blocks[2].weight" in {record.name for record in watch.flow().parameters}


def test_a_parent_in_a_list_is_no_part_of_the_model() -> None:
    class Child(nn.Module):
        def __init__(self, parent: nn.Module) -> None:
            super().__init__()
            self.parent = [parent]
            self.a = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.a(x)

    parent = nn.Module()
    parent.child = Child(parent)
    parent.other = nn.Linear(4, 4)
    flow = fxgrad.gradient_flow(parent.child, X)
    assert [record.name for record in flow.parameters] == ["a.weight", "a.bias"]


def test_a_teacher_that_is_hidden_on_purpose_is_no_fault() -> None:
    class Student(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(4, 4)
            self.teacher = [nn.Linear(4, 4)]

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                target = self.teacher[0](x)
            return (self.a(x) - target).square().mean()

    flow = fxgrad.gradient_flow(Student(), X)
    assert not {finding.rule for finding in flow.findings} & {"unused", "detached"}
    assert [record.measured for record in flow.parameters if not record.registered] == [False, False]


def test_a_graph_module_refuses_them_by_name() -> None:
    with pytest.raises(CaptureError, match=r"blocks\[0\] \(Linear\) is in a plain Python list or dict.*ModuleList"):
        fxgrad.instrument(Listed())


def test_a_module_made_in_forward_is_refused_as_that() -> None:
    class Making(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return nn.ReLU()(x)

    with pytest.raises(CaptureError, match="made in forward"):
        fxgrad.instrument(Making())
