"""A call that left the known courses may get better names later: never those under which its numbers were not read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxgrad
from fxgrad.schema import GradientFlow

pytestmark = pytest.mark.usefixtures("recorder")

# By call, the expert of each row: the second call leaves the known courses, the third is learnt behind it.
COURSES = [[0, 0, 2, 0], [1, 0, 1, 2], [1, 2, 0, 2], [1, 0, 1, 2]]


class Experts(nn.Module):
    """Runs those experts only that have rows."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(6, 6)
        self.experts = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.of_rows = torch.zeros(4)

    def forward(self, x: Tensor) -> Tensor:
        x = x + torch.relu(self.gate(x))
        gate, y = self.gate(x).softmax(-1), torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = (self.of_rows == number).nonzero()[:, 0]
            if len(rows):
                y = y.index_add(0, rows, expert(x[rows]) * gate[rows, number : number + 1])
        return x + y


def norms(flow: GradientFlow) -> dict[str, float]:
    """Of what each expert returned."""
    return {s.id: s.l2_norm for s in flow.sites if s.id.startswith("experts.") and s.l2_norm is not None}


def trained(read: Callable[[Any], object], **options: Any) -> tuple[list[GradientFlow], list[dict[str, float]]]:
    """The flows as they are read at the end, and the norms as torch's own hooks see them."""
    torch.manual_seed(0)
    model, truth = Experts(), []

    def hook(name: str) -> Callable[[Any, Any, Tensor], None]:
        def put(module: Any, args: Any, result: Tensor) -> None:
            result.register_hook(lambda gradient: truth[-1].__setitem__(name, float(gradient.norm())))

        return put

    for number, expert in enumerate(model.experts):
        expert.register_forward_hook(hook(f"experts.{number}"))
    with fxgrad.watch(model, **options) as watch:
        for course in COURSES:
            truth.append({})
            model.of_rows = torch.tensor(course)
            model(torch.randn(4, 6)).square().mean().backward()
            read(watch)
    return list(watch.history), truth


def nothing(_: Any) -> None:
    """Read at the end only."""


def test_with_a_run_file(tmp_path: Path) -> None:
    flows, truth = trained(nothing, run_file=tmp_path / "run.fxgrad")
    assert [norms(flow) for flow in flows] == [pytest.approx(one, rel=1e-4) for one in truth]
    run = fxgrad.open_run(tmp_path / "run.fxgrad")
    assert [norms(run.flow(step)) for step in run.steps] == [pytest.approx(one, rel=1e-4) for one in truth]
    assert [flow.capture.reason for flow in flows] == [run.flow(step).capture.reason for step in run.steps]


def test_read_at_the_end() -> None:
    flows, truth = trained(nothing)
    assert [norms(flow) for flow in flows] == [pytest.approx(one, rel=1e-4) for one in truth]
    assert "learnt by a later call" in flows[1].capture.reason


def test_read_in_each_step() -> None:
    flows, truth = trained(lambda watch: watch.flow())
    assert [norms(flow) for flow in flows] == [pytest.approx(one, rel=1e-4) for one in truth]
    assert "left the known courses" in flows[1].capture.reason
