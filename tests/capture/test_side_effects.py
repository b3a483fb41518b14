"""What a forward does outside of the model happens as often as without fxgrad, and no proxy is left anywhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.modules.module as module_hooks
from torch import Tensor, nn

import fxgrad

COUNT = 0
SEEN: dict[str, Any] = {}
LOG: list[Any] = []


class Doing(nn.Module):
    def __init__(self, act: Callable[[Tensor], object]) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 3)
        self.act = act

    def forward(self, x: Tensor) -> Tensor:
        h = self.fc(x)
        self.act(h)
        return torch.tanh(h)


def counts(_: Tensor) -> None:
    global COUNT  # noqa: PLW0603  # what is tested
    COUNT += 1


def stores(h: Tensor) -> None:
    SEEN["h"] = h


def appends(h: Tensor) -> None:
    LOG.append(h)


def prints(_: Tensor) -> None:
    print("forward")  # noqa: T201  # what is tested


def closure() -> tuple[Callable[[Tensor], object], list[Any]]:
    kept: list[Any] = []
    return lambda h: kept.append(h), kept  # noqa: PLW0108  # Python code, which a trace sees


def counter() -> tuple[Callable[[Tensor], object], Callable[[], int]]:
    number = 0

    def act(_: Tensor) -> None:
        nonlocal number
        number += 1

    return act, lambda: number


def train(act: Callable[[Tensor], object], steps: int = 4) -> None:
    model = Doing(act)
    with fxgrad.watch(model) as watch:
        for _ in range(steps):
            model(torch.ones(2, 3)).sum().backward()
    assert watch.flow().capture.front_end == "eager"


def test_a_global_counter_counts_every_step() -> None:
    before = COUNT
    train(counts)
    assert before + 4 == COUNT


def test_a_global_dict_holds_tensors_only() -> None:
    train(stores)
    assert type(SEEN["h"]) is Tensor


def test_a_global_list_grows_by_one_a_step() -> None:
    LOG.clear()
    train(appends)
    assert [type(entry) for entry in LOG] == [Tensor] * 4


def test_closures() -> None:
    act, kept = closure()
    train(act)
    assert [type(entry) for entry in kept] == [Tensor] * 4
    act, number = counter()
    train(act)
    assert number() == 4


def test_prints(capsys: pytest.CaptureFixture[str]) -> None:
    train(prints)
    assert capsys.readouterr().out == "forward\n" * 4


def test_no_trace_of_our_module_hooks_stays_in_torch() -> None:
    train(counts)
    for name in ("_global_forward_hooks", "_global_forward_pre_hooks", "_global_forward_hooks_with_kwargs",
                 "_global_forward_hooks_always_called"):  # fmt: skip
        assert not getattr(module_hooks, name), name


class _Reverse(torch.autograd.Function):
    """Gradient reversal as it is usually written: the forward is a view."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return -gradient


class _Reversing(nn.Module):
    """A model that hooks the result of the function itself."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 2)
        self.seen = []

    def forward(self, x):
        value = _Reverse.apply(torch.tanh(self.first(x)))
        value.register_hook(lambda gradient: self.seen.append(gradient.norm().item()))
        return self.last(value)


def test_a_hook_on_the_view_that_a_custom_function_returned_fires() -> None:
    torch.manual_seed(0)
    model, x = _Reversing(), torch.randn(3, 4)
    model(x).square().sum().backward()
    with fxgrad.watch(model) as watch:
        model(x).square().sum().backward()
        flow = watch.flow()
    assert len(model.seen) == 2
    assert model.seen[0] == model.seen[1]
    assert flow.site("/_Reverse").l2_norm == pytest.approx(model.seen[0])
    assert next(s.reason for s in flow.blind_spots if s.key == "/view_as") == "no_grad_region"
