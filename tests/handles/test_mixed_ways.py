"""Passes inside of passes, and several front ends at work in several threads at once."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxgrad
from fxgrad.handles.dynamo_backend import backend

X = torch.linspace(-1, 1, 12).reshape(3, 4)


class Net(nn.Module):
    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.a, self.b = nn.Linear(4, 5), nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(self.a(x)))


@pytest.mark.parametrize("engine", ["hook", "function"])
def test_a_backward_inside_of_a_backward_is_one_event(engine: Any) -> None:
    """The pass inside goes through another call of the same model."""
    module = fxgrad.instrument(Net(), engine=engine)
    out = module(X)

    def inside(_: Tensor) -> None:
        with torch.enable_grad():
            module(3 * X).sum().backward()

    out.register_hook(inside)
    out.sum().backward()
    flows = module.history
    assert [flow.event.backward for flow in flows] == [0, 0]
    assert [flow.event.forward for flow in flows] == [0, 1]
    for flow, scale in zip(flows, (1.0, 3.0), strict=True):
        plain = fxgrad.gradient_flow(Net(), scale * X, loss=torch.sum, statistics="norm")
        for site in plain.sites:
            if site.measured:
                assert flow.site(site.id).l2_norm == pytest.approx(site.l2_norm), site.id


def by_watch(model: nn.Module) -> tuple[Any, Callable[[], fxgrad.GradientFlow]]:
    watch = fxgrad.watch(model)
    return model, watch.flow


def by_python(model: nn.Module) -> tuple[Any, Callable[[], fxgrad.GradientFlow]]:
    watch = fxgrad.watch(model, capture="eager", statistics="full", sites="edge")
    return model, watch.flow


def by_graph(model: nn.Module) -> tuple[Any, Callable[[], fxgrad.GradientFlow]]:
    module = fxgrad.instrument(model)
    return module, module.flow


def by_slots(model: nn.Module) -> tuple[Any, Callable[[], fxgrad.GradientFlow]]:
    module = fxgrad.instrument(model, engine="function")
    return module, module.flow


def by_dynamo(model: nn.Module) -> tuple[Any, Callable[[], fxgrad.GradientFlow]]:
    return torch.compile(model, backend=backend), lambda: fxgrad.flow_of(model)


def one_shot(model: nn.Module) -> tuple[Any, Callable[[], fxgrad.GradientFlow]]:
    return model, lambda: fxgrad.gradient_flow(model, X, loss=torch.sum)


WAYS = [by_watch, by_python, by_graph, by_slots, by_dynamo, one_shot]


@pytest.mark.filterwarnings("ignore")  # of torch: dynamo meets the module hooks of another thread
def test_front_ends_mixed_over_threads() -> None:
    """Each thread has a model and a way of its own; all run at once, several times."""
    together = threading.Barrier(len(WAYS))
    failures: list[Any] = []

    def work(number: int, way: Any) -> None:
        try:
            model = models[number]  # made before: the seed is that of all threads
            call, flow = ready[number]
            for step in range(1, 9):
                together.wait(120)
                model.zero_grad()
                (call(X).sum() * step).backward()
                check(plain[number], flow(), 1 if way is one_shot else step)
        except BaseException as error:  # noqa: BLE001  # shown by the main thread
            failures.append((way.__name__, error))
            together.abort()

    models = [Net(number) for number in range(len(WAYS))]
    plain = [Net(number) for number in range(len(WAYS))]
    ready = [way(model) for way, model in zip(WAYS, models, strict=True)]
    for call, _ in ready:  # compiled and traced one after the other
        call(X).sum().backward()
    threads = [threading.Thread(target=work, args=entry) for entry in enumerate(WAYS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    torch._dynamo.reset()


def check(plain: nn.Module, flow: fxgrad.GradientFlow, scale: float) -> None:
    plain.zero_grad()
    (plain(X).sum() * scale).backward()
    for record in flow.parameters:
        grad = plain.get_parameter(record.name).grad
        assert grad is not None
        assert record.l2_norm == pytest.approx(float(grad.norm()), rel=1e-5), record.name
    assert flow.event.failed is None
