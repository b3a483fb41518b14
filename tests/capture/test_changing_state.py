"""Python state that changes while a model is watched: each kind, at step 2, 3 and 50."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxgrad
from fxgrad.errors import CaptureError
from tests.runs import assert_same_run, plain_run

SCALE = 1.0
SETTINGS = {"power": 1.0}
CHANGES: dict[str, Callable[[nn.Module], object]] = {}


class Scaled(nn.Module):
    """An inner module whose forward is inlined and reads Python state of every kind."""

    factor = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.alpha = 1.0
        self.options = {"beta": 1.0, "names": ["a"]}
        self.fc = nn.Linear(4, 4)
        self.extra: nn.Module | None = None
        self.register_buffer("shift", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.fc(x) * self.alpha * self.factor * SCALE * SETTINGS["power"] + self.shift
        if self.extra is not None:
            x = self.extra(x)  # noqa: S610  # a module, no database
        if self.training:
            x = F.dropout(x, 0.2)
        return x * self.options["beta"] * len(self.options["names"])


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Scaled()
        self.depth = 1
        self.head = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.depth):
            x = torch.tanh(self.inner(x))
        return self.head(x)


def change(act: Callable[[Any], object]) -> Callable[[Any], object]:
    CHANGES[act.__name__] = act
    return act


@change
def a_float_attribute(model: Any) -> None:
    model.inner.alpha = 0.5


@change
def a_counter(model: Any) -> None:
    model.depth += 1


@change
def an_entry_of_a_dict(model: Any) -> None:
    model.inner.options["beta"] = 3.0


@change
def a_list_that_grows(model: Any) -> None:
    model.inner.options["names"].append("b")


@change
def a_class_attribute(_: Any) -> None:
    Scaled.factor = 2.0


@change
def a_global(_: Any) -> None:
    globals()["SCALE"] = 2.0


@change
def a_global_container(_: Any) -> None:
    SETTINGS["power"] = 2.0


@change
def a_frozen_submodule(model: Any) -> None:
    model.inner.fc.requires_grad_(False)


@change
def a_swapped_leaf(model: Any) -> None:
    model.inner.fc = nn.Linear(4, 4, bias=False)
    nn.init.ones_(model.inner.fc.weight)


@change
def a_swapped_inlined_module(model: Any) -> None:
    model.inner = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    nn.init.ones_(model.inner[0].weight)
    nn.init.zeros_(model.inner[0].bias)


@change
def an_added_submodule(model: Any) -> None:
    model.inner.extra = nn.Tanh()


@change
def a_rebound_buffer(model: Any) -> None:
    model.inner.shift = torch.ones(4)


@change
def a_rebound_parameter(model: Any) -> None:
    model.inner.fc.weight = nn.Parameter(torch.ones(4, 4))


@change
def a_hook_added_to_an_inlined_module(model: Any) -> None:
    model.inner.register_forward_hook(lambda _m, _i, out: out * 2)


@change
def a_hook_added_to_a_leaf(model: Any) -> None:
    model.head.register_forward_pre_hook(lambda _m, inputs: (inputs[0] * 2,))


@change
def an_inlined_part_in_eval_mode(model: Any) -> None:
    model.inner.eval()


@change
def the_whole_in_eval_mode(model: Any) -> None:
    model.eval()


@change
def a_replaced_forward(model: Any) -> None:
    own = model.inner.forward
    model.inner.forward = lambda x: own(x) * 3


@change
def a_patched_class(_: Any) -> None:
    Scaled.forward = lambda self, x: self.fc(x) * 5  # type: ignore[assignment]


@pytest.fixture(autouse=True)
def _restore() -> Any:
    forward = Scaled.forward
    yield
    Scaled.factor = 1.0
    Scaled.forward = forward  # type: ignore[method-assign]
    globals()["SCALE"] = 1.0
    SETTINGS["power"] = 1.0


def pair() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    one = Model()
    torch.manual_seed(0)
    return one, Model()


def loss(out: Tensor) -> Tensor:
    return out.square().mean()


@pytest.mark.parametrize("step", [2, 3, 50])
@pytest.mark.parametrize("kind", CHANGES)
def test_a_change_is_followed(kind: str, step: int) -> None:
    plain, watched = pair()
    x = torch.randn(3, 4)
    with fxgrad.watch(watched) as watch:
        for number in range(1, step + 3):
            if number == step:
                CHANGES[kind](plain)
                shared = kind in ("a_class_attribute", "a_global", "a_global_container", "a_patched_class")
                if not shared:
                    CHANGES[kind](watched)
            want = plain_run(plain, (x,), None, loss, seed=number)
            assert_same_run(plain_run(watched, (x,), None, loss, seed=number), want)
    assert watch.flow().site("head").measured


def test_a_hook_that_is_removed_again() -> None:
    plain, watched = pair()
    x = torch.randn(3, 4)
    handles: list[Any] = []
    with fxgrad.watch(watched) as watch:
        for number in range(8):
            if number == 3:
                handles = [m.inner.register_forward_hook(lambda _m, _i, out: out * 2) for m in (plain, watched)]  # type: ignore[union-attr,operator]
            if number == 5:
                for handle in handles:
                    handle.remove()
            assert_same_run(
                plain_run(watched, (x,), None, loss, seed=number), plain_run(plain, (x,), None, loss, seed=number)
            )
    assert watch.flow().sites


def test_a_global_hook_sees_every_module() -> None:
    _, watched = pair()
    x = torch.randn(3, 4)
    seen: list[str] = []
    with fxgrad.watch(watched):
        for _ in range(3):
            loss(watched(x)).backward()
        handle = nn.modules.module.register_module_forward_hook(lambda m, _i, _o: seen.append(type(m).__name__))
        loss(watched(x)).backward()
        handle.remove()
    assert seen == ["Linear", "Scaled", "Linear", "Model"]


class Counting(nn.Module):
    """Writes into itself."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.calls = 0
        self.seen: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.seen.append(0.0)
        return self.fc(x) * self.calls


def test_a_forward_that_writes_attributes_counts_right() -> None:
    model = Counting()
    with fxgrad.watch(model):
        for _ in range(4):
            model(torch.randn(2, 4)).sum().backward()
    assert (model.calls, len(model.seen)) == (4, 4)
    with pytest.raises(CaptureError, match="writes into the model"):
        fxgrad.instrument(model)
    assert (model.calls, len(model.seen)) == (4, 4)
