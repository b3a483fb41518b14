"""Random streams are given back as they were, and no other thread gets a number twice."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fxgrad
from fxgrad.torch_support import streams


class Noisy(nn.Module):
    """Draws in its forward, between operators that take a while."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(30):
            x = nn.functional.dropout(self.a(x), 0.1)
            x = x @ torch.ones(64, 64) * 0.01
        return x


@contextmanager
def drawing(draw: Any) -> Iterator[list[float]]:
    """A thread that draws all the time."""
    drawn: list[float] = []
    done, going = threading.Event(), threading.Event()

    def run() -> None:
        while not done.wait(1e-4):  # lets the other thread run
            drawn.append(draw())
            going.set()

    thread = threading.Thread(target=run)
    thread.start()
    assert going.wait(60)
    try:
        yield drawn
    finally:
        done.set()
        thread.join()


def torch_draw() -> float:
    return float(torch.rand((), dtype=torch.float64))


def measure(kind: str, model: nn.Module, x: Tensor) -> None:
    if kind == "one-shot":
        fxgrad.gradient_flow(model, x)
    elif kind == "symbolic":
        fxgrad.gradient_flow(model, x, capture="symbolic")
    elif kind == "function":
        fxgrad.instrument(model, engine="function")(x).sum().backward()
    elif kind == "watch":
        with fxgrad.watch(model):
            model(x).sum().backward()
    else:
        fxgrad.instrument(model)(x).sum().backward()


KINDS = ["one-shot", "symbolic", "instrument", "function", "watch"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_thread_that_draws_gets_no_number_twice(kind: str) -> None:
    model, x = Noisy(), torch.ones(64, 64)
    with drawing(torch_draw) as drawn:
        for _ in range(3):
            measure(kind, model, x)
    assert len(set(drawn)) == len(drawn)


@pytest.mark.parametrize("kind", ["symbolic", "instrument", "function"])
def test_a_thread_that_draws_is_no_reason_to_refuse_a_trace(kind: str) -> None:
    class Still(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            for _ in range(200):
                x = self.a(x).tanh()
            return x

    with drawing(torch_draw):
        measure(kind, Still(), torch.ones(2, 8))


def test_every_operator_that_draws_is_known_by_its_name() -> None:
    names = set()
    for name in dir(torch.ops.aten):
        packet = getattr(torch.ops.aten, name)
        for overload in packet.overloads() if hasattr(packet, "overloads") else ():
            if torch.Tag.nondeterministic_seeded in getattr(packet, overload).tags:
                names.add(name)
    assert len(names) > 30
    assert [name for name in names if streams._DRAWS.search(name) is None] == []


def states() -> list[Any]:
    return [torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()]


def same(one: list[Any], two: list[Any]) -> bool:
    return torch.equal(one[0], two[0]) and one[1:] == two[1:]


class Everywhere(Noisy):
    """Draws from all streams, and once more in the backward pass."""

    def forward(self, x: Tensor) -> Tensor:
        x = x * random.random() * float(np.random.rand())
        return checkpoint(super().forward, x, use_reentrant=False)


@pytest.mark.parametrize("idle", [False, True])
@pytest.mark.parametrize("kind", [Noisy, Everywhere])
def test_what_the_model_draws_is_given_back(kind: Any, idle: bool) -> None:
    """Also beside a thread that draws nothing."""
    model, x = kind(), torch.ones(64, 64)
    done = threading.Event()
    thread = threading.Thread(target=done.wait, args=(60,))
    if idle:
        thread.start()
    before = states()
    fxgrad.gradient_flow(model, x)
    after = states()
    done.set()
    if idle:
        thread.join()
    assert same(before, after)


@pytest.mark.parametrize("idle", [False, True])
def test_the_model_draws_what_it_would_have_drawn(idle: bool) -> None:
    model, x = Noisy(), torch.ones(64, 64)
    done = threading.Event()
    thread = threading.Thread(target=done.wait, args=(60,))
    if idle:
        thread.start()
    torch.manual_seed(3)
    flow = fxgrad.gradient_flow(model, x, loss=torch.sum)
    torch.manual_seed(3)
    model(x).sum().backward()
    done.set()
    if idle:
        thread.join()
    norms = {record.name: record.l2_norm for record in flow.parameters}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        assert norms[name] == pytest.approx(float(parameter.grad.norm()), rel=1e-5)


@pytest.mark.filterwarnings("ignore")  # of torch itself, on hooks around a compiled module
def test_a_compiled_part_beside_another_thread() -> None:
    model = nn.Sequential(nn.Linear(4, 4), torch.compile(nn.Linear(4, 4), backend="eager"))
    with drawing(random.random):
        flow = fxgrad.gradient_flow(model, torch.ones(2, 4))
    assert flow.site("0").measured


@pytest.mark.parametrize("draw", [random.random, lambda: float(np.random.rand())])
def test_other_streams_that_were_drawn_from_during_an_operator(draw: Any) -> None:
    class Slow(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(512, 512)

        def forward(self, x: Tensor) -> Tensor:
            for _ in range(10):
                x = self.a(x)
            return x

    with drawing(draw) as drawn:
        for _ in range(3):
            fxgrad.gradient_flow(Slow(), torch.ones(512, 512))
    assert len(set(drawn)) == len(drawn)
