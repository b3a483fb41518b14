"""Nothing of a forward call outlives its autograd graph, whatever observed the call and however it ended."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxgrad

pytestmark = pytest.mark.usefixtures("recorder")
OPTIONS = [
    {"native": native, "sites": sites, **more}
    for native in (True, False)
    for sites in ("node", "edge")
    for more in ({}, {"statistics": "full", "forward": True})
]


class Token:
    """What hangs on an autograd node, and goes with it."""


class Net(nn.Module):
    """A value that is used twice, a branch, and an error when asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 5), nn.Linear(5, 5)
        self.tokens: list[weakref.ref[Token]] = []
        self.branch = self.failing = False

    def _mark(self, value: Tensor) -> Tensor:
        token = Token()
        self.tokens.append(weakref.ref(token))
        assert value.grad_fn is not None
        value.grad_fn.metadata["token"] = token
        return value

    def forward(self, x: Tensor) -> Tensor:
        x = self._mark(torch.tanh(self.a(x)))
        if self.branch:
            x = self._mark(torch.sin(x) * x.mean())
        if self.failing:
            raise ArithmeticError
        return self._mark(x + self.b(x))


def step(model: Net, number: int) -> None:
    """Known courses, one that is new, one that fails, one whose backward pass never runs."""
    model.branch, model.failing = number == 3, number == 5
    x = torch.randn(3, 4)
    if model.failing:
        with pytest.raises(ArithmeticError):
            model(x)
        return
    out = model(x)
    if number != 6:
        out.square().mean().backward()


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_the_graph_of_a_step_goes_with_it(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = Net()
    with fxgrad.watch(model, **options) as watch:
        for number in range(9):
            step(model, number)
            living = [token for token in model.tokens if token() is not None]
            assert not living, f"after step {number}: {len(living)} autograd nodes"
        assert watch.flow().capture.recorder == ("native" if options["native"] else "python")


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_tied_weight_gets_more_rows(options: dict[str, Any]) -> None:
    """As when a vocabulary grows: autograd keeps what it knows of a parameter for as long as any graph lives."""
    torch.manual_seed(0)
    emb, head = nn.Embedding(30, 8), nn.Linear(8, 30, bias=False)
    head.weight = emb.weight
    model = nn.Sequential(emb, head)
    with fxgrad.watch(model, **options):
        for number in range(6):
            if number == 4:
                emb.weight.data = torch.cat([emb.weight.data, torch.zeros(3, 8)])
            emb.weight.grad = None
            model(torch.randint(0, 30, (2, 5))).square().mean().backward()
    assert emb.weight.grad is not None
    assert emb.weight.grad.shape == (33, 8)
