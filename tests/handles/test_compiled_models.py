"""Several models under ``torch.compile(backend="fxgrad")``: each has its own flows, numbers, history and refusals."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fxgrad
from fxgrad.handles import dynamo_backend
from fxgrad.record.recorder import HISTORY

X = torch.linspace(-1, 1, 12).reshape(3, 4)


class Net(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.a, self.b = nn.Linear(4, 5), nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(self.a(x)))


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    dynamo_backend._observers.clear()
    yield
    torch._dynamo.reset()
    dynamo_backend._observers.clear()


def compiled(model: nn.Module) -> Any:
    return torch.compile(model, backend=dynamo_backend.backend)  # what the name "fxgrad" leads to


def step(call: Any, scale: float = 1.0) -> None:
    (call(X) * scale).sum().backward()


def check(model: nn.Module, flow: fxgrad.GradientFlow) -> None:
    """Against the gradients that plain torch left behind."""
    assert {record.name for record in flow.parameters} == {name for name, _ in model.named_parameters()}
    for record in flow.parameters:
        parameter = model.get_parameter(record.name)
        if parameter.grad is None:
            assert not record.measured, record.name
        else:
            assert record.l2_norm == pytest.approx(float(parameter.grad.norm())), record.name


def test_two_models_of_one_class() -> None:
    one, two = Net(1), Net(2)
    calls = [compiled(one), compiled(two)]
    for call, scale in zip(calls, (1.0, 3.0), strict=True):
        step(call, scale)
    for model, scale in ((one, 1.0), (two, 3.0)):
        flow = fxgrad.flow_of(model)
        check(model, flow)
        plain = fxgrad.gradient_flow(model, X, loss=lambda out, by=scale: (out * by).sum(), statistics="norm")
        assert flow.site("/tanh").l2_norm == pytest.approx(plain.site("/tanh").l2_norm)


def test_two_models_in_one_backward_pass() -> None:
    one, two = Net(1), Net(2)
    (compiled(one)(X).sum() + 3 * compiled(two)(X).sum()).backward()
    check(one, fxgrad.flow_of(one))
    check(two, fxgrad.flow_of(two))


def test_a_model_that_is_used_by_turns() -> None:
    one, two = Net(1), Net(2)
    first, second = compiled(one), compiled(two)
    for number in range(4):
        for model, call in ((one, first), (two, second)):
            model.zero_grad()
            step(call, number + 1.0)
            check(model, fxgrad.flow_of(model))


def test_a_model_after_one_that_is_gone() -> None:
    """The numbers of parameters do not come again."""
    for seed in range(3):
        model = Net(seed)
        step(compiled(model))
        del model
        gc.collect()
    half = Net(5)
    half.b.requires_grad_(False)
    other = Net(6)
    step(compiled(half))
    step(compiled(other))
    check(half, fxgrad.flow_of(half))
    check(other, fxgrad.flow_of(other))


def test_a_parameter_that_got_nothing_shows_nothing() -> None:
    class Partly(Net):
        def __init__(self, seed: int) -> None:
            super().__init__(seed)
            self.c = nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Any:
            beside = self.c(x)  # first, and not used by the loss
            return super().forward(x), beside

    class Kept(Net):
        def forward(self, x: Tensor) -> Tensor:
            return self.b(torch.sigmoid(self.a(x)))

    kept, gone = Kept(0), Net(1)
    step(compiled(gone))
    step(compiled(kept))
    del gone
    torch._dynamo.reset()
    gc.collect()
    model = Partly(2)
    out, _ = compiled(model)(X)
    (out.sum() + compiled(kept)(X).sum()).backward()
    check(model, fxgrad.flow_of(model))


def test_a_refusal_is_told_of_the_model_that_was_refused() -> None:
    class Reentrant(Net):
        def forward(self, x: Tensor) -> Tensor:
            return self.b(checkpoint(torch.tanh, self.a(x), use_reentrant=True))

    refused, fine = Reentrant(1), Net(2)
    step(compiled(refused))
    step(compiled(fine))
    assert fxgrad.flow_of(fine).capture.refused == ()
    assert dynamo_backend._observers["eager"].unobserved


def test_one_model_does_not_push_the_events_of_another_out() -> None:
    one, two = Net(1), Net(2)
    step(compiled(one))
    call = compiled(two)
    for _ in range(HISTORY + 2):
        two.zero_grad()
        step(call)
    check(one, fxgrad.flow_of(one))
    check(two, fxgrad.flow_of(two))
    observer = dynamo_backend._observers["eager"]
    assert len(observer.flows(two)) == HISTORY
    assert len(observer.flows(one)) == 1


def test_nothing_of_a_model_is_kept_alive() -> None:
    import weakref

    model = Net(1)
    step(compiled(model))
    fxgrad.flow_of(model)
    gone = weakref.ref(model.a.weight)
    del model
    torch._dynamo.reset()
    gc.collect()
    assert gone() is None
