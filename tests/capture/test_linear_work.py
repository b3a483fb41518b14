"""The work of the first call, and of a call that takes another way, grows with the number of calls and no faster."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxgrad

OURS = str(Path(fxgrad.__file__).parent)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        view = h.view(-1)
        return x + view.view_as(x)


class Deep(nn.Module):
    """``skipped`` blocks are left out, as stochastic depth does."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(count))
        self.skipped: set[int] = set()

    def forward(self, x: Tensor) -> Tensor:
        for number, block in enumerate(self.blocks):
            if number not in self.skipped:
                x = block(x)
        return x


class Doubling(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 2 * grad


class Custom(Deep):
    """A custom function in each block."""

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = Doubling.apply(block(x)) * 0.5
        return x


def work(step: Callable[[], object]) -> int:
    """How many lines of ours, and of torch's module trees under us, a step runs."""
    count = 0

    def trace(frame: Any, event: str, _: Any) -> Any:
        nonlocal count
        file = frame.f_code.co_filename
        if not (file.startswith(OURS) or file.endswith("modules/module.py")):
            return None
        count += event == "line"
        return trace

    outer = sys.gettrace()
    sys.settrace(trace)
    try:
        step()
    finally:
        sys.settrace(outer)
    return count


def step(model: nn.Module) -> None:
    model(torch.ones(3, 2)).sum().backward()


@pytest.mark.parametrize("kind", [Deep, Custom])
@pytest.mark.parametrize("sites", ["node", "edge"])
def test_the_first_step(kind: Any, sites: Any) -> None:
    def of(count: int) -> int:
        model = kind(count)
        with fxgrad.watch(model, sites=sites):
            return work(lambda: step(model))

    assert of(80) < 4.6 * of(20)  # four times the calls


@pytest.mark.parametrize("native", [True, False])
def test_a_step_that_takes_another_way(native: bool) -> None:
    def of(count: int) -> int:
        model = Deep(count)
        with fxgrad.watch(model, native=native):
            step(model)
            step(model)
            model.skipped = {1}
            return work(lambda: step(model))

    assert of(80) < 4.6 * of(20)


def test_reading_the_flow() -> None:
    def of(count: int) -> int:
        model = Deep(count)
        with fxgrad.watch(model) as watch:
            step(model)
            return work(watch.flow)

    assert of(80) < 4.6 * of(20)
