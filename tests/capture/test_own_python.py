"""Whatever a forward does, it does when watched as it does when not: six steps, the state changing in the middle."""

from __future__ import annotations

import cProfile
import logging
import os
import pstats
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import fxgrad
from tests.runs import assert_same_run, plain_run

Kind = tuple[Callable[[Any, Tensor], Tensor], Callable[[Any, int], object], Callable[[Any], object]]
KINDS: dict[str, Kind] = {}
LOG = logging.getLogger("tests.own_python")


class Meter:
    def __init__(self) -> None:
        self.count = 0

    def update(self, by: int) -> None:
        self.count += by


class Model(nn.Module):
    def __init__(self, act: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.act = act
        self.fc, self.bn, self.drop = nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Dropout(0.1)
        self.register_buffer("n", torch.zeros(()))
        self.alpha = 1.0
        self.seen: deque[Any] = deque(maxlen=3)
        self.meter = Meter()
        self.options = {"table": {4: 1.0, 5: 2.0}}

    def scale(self) -> float:
        return self.alpha

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self, self.fc(x))


def kind(
    change: Callable[[Any, int], object] = lambda _m, _s: None, state: Callable[[Any], object] = lambda _m: None
) -> Callable[[Callable[[Any, Tensor], Tensor]], Any]:
    def register(act: Callable[[Any, Tensor], Tensor]) -> Any:
        KINDS[act.__name__] = (act, change, state)
        return act

    return register


def anneal(model: Any, step: int) -> None:
    model.alpha = 1.0 if step < 3 else 0.25


@kind(state=lambda m: float(m.n))
def a_buffer_rebound(m: Any, h: Tensor) -> Tensor:
    m.n = m.n + 1
    return h * m.n


@kind(state=lambda m: m.bn.training)
def batch_norm_put_into_eval(m: Any, h: Tensor) -> Tensor:
    m.bn.train(m.n < 3)
    m.n += 1
    return m.bn(h)


@kind(state=lambda m: m.drop.p)
def an_attribute_of_a_leaf_written(m: Any, h: Tensor) -> Tensor:
    m.drop.p += 0.1
    return m.drop(h)


@kind(anneal)
def requires_grad_around_a_call(m: Any, h: Tensor) -> Tensor:
    m.fc.weight.requires_grad = m.alpha == 1.0
    try:
        return m.fc(h)
    finally:
        m.fc.weight.requires_grad = True


@kind(anneal)
def a_backend_of_attention(m: Any, h: Tensor) -> Tensor:
    q = h.view(1, 1, -1, 6)
    with sdpa_kernel(SDPBackend.MATH if m.alpha == 1.0 else SDPBackend.FLASH_ATTENTION):
        return F.scaled_dot_product_attention(q, q, q).view(-1, 6)


@kind(anneal)
def weight_data_assigned(m: Any, h: Tensor) -> Tensor:
    m.fc.weight.data = m.fc.weight.data * m.alpha
    return m.fc(h)


@kind(lambda m, s: m.double() if s == 3 else None)
def the_dtype_of_a_parameter(m: Any, h: Tensor) -> Tensor:
    return h.to(next(m.parameters()).dtype) * 2


@kind(anneal)
def a_bound_method(m: Any, h: Tensor) -> Tensor:
    return h * m.scale()


@kind(lambda _m, s: os.environ.__setitem__("FXGRAD_TEST", str(s // 3)))
def the_environment(_: Any, h: Tensor) -> Tensor:
    return h * (1.0 + float(os.environ["FXGRAD_TEST"]))


@kind(state=lambda m: [type(v) for v in m.seen])
def a_memory_of_values(m: Any, h: Tensor) -> Tensor:
    m.seen.append(h.detach())
    return h + torch.stack(list(m.seen)).mean(0)


@kind(state=lambda m: m.meter.count)
def a_meter(m: Any, h: Tensor) -> Tensor:
    m.meter.update(h.shape[0])
    return h * m.meter.count


@kind()
def a_table_keyed_by_shapes(m: Any, h: Tensor) -> Tensor:
    return h * m.options["table"].get(h.shape[0], 7.0)


@kind(lambda m, s: m.fc.bias.requires_grad_(s < 3))
def whether_any_parameter_requires_grad(m: Any, h: Tensor) -> Tensor:
    return h * (1.0 if all(p.requires_grad for p in m.parameters()) else 3.0)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("capture", ["auto", "eager"])
@pytest.mark.parametrize("name", KINDS)
def test_it_does_what_it_does_unwatched(name: str, capture: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FXGRAD_TEST", "0")
    act, change, state = KINDS[name]
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(Model(act))
    plain, watched = models
    with fxgrad.watch(watched, capture=capture):
        for step in range(6):
            change(plain, step)
            change(watched, step)
            x = torch.linspace(-1, 1, 6 * (4 + step % 2), dtype=plain.fc.weight.dtype).view(-1, 6)
            want = plain_run(plain, (x,), None, lambda out: out.square().mean(), seed=step)
            assert_same_run(plain_run(watched, (x,), None, lambda out: out.square().mean(), seed=step), want)
            assert state(watched) == state(plain)


class Counted(nn.Module):
    """Everything of the user's that is called, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 3)
        self.calls: list[str] = []
        self.fc.register_forward_hook(lambda *_: self.calls.append("hook"))
        self.fc.register_forward_pre_hook(lambda *_: self.calls.append("pre hook"))
        self.fc.register_full_backward_hook(lambda *_: self.calls.append("backward hook"))

    @property
    def factor(self) -> float:
        self.calls.append("property")
        return 2.0

    def forward(self, x: Tensor) -> Tensor:
        self.calls.append("forward")
        LOG.warning("forward")
        return self.fc(x) * self.factor


def counted(act: Callable[[nn.Module], Any] | None) -> tuple[list[str], int]:
    model, handler = Counted(), logging.Handler()
    handler.emit = lambda _: model.calls.append("handler")  # type: ignore[method-assign]
    LOG.addHandler(handler)
    LOG.propagate = False
    profile = cProfile.Profile()
    guest = None if act is None else act(model)
    try:
        for _ in range(6):
            profile.enable()
            out = model(torch.ones(2, 3, requires_grad=True))
            profile.disable()
            out.sum().backward()
    finally:
        LOG.removeHandler(handler)
        if guest is not None:
            guest.remove()
    stats: Any = pstats.Stats(profile)
    found = [count for (file, _, name), (count, *_) in stats.stats.items() if file == __file__ and name == "forward"]
    return model.calls, sum(found)


@pytest.mark.parametrize("act", [
    fxgrad.watch, lambda m: fxgrad.watch(m, sites="edge", statistics="full", forward=True),
    lambda m: fxgrad.rewrite(m, fxgrad.rules.scale(1.0, fxgrad.rules.nodes())),
], ids=["watch", "everything", "rewrite"])  # fmt: skip
def test_nothing_of_the_users_is_called_more_often(act: Any) -> None:
    assert counted(act) == counted(None)
