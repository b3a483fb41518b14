"""What a one-shot call says where nothing is left to differentiate."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fxgrad
from fxgrad.errors import NothingToDifferentiateError


class Cut(nn.Module):
    def __init__(self, cut):
        super().__init__()
        self.first, self.cut = nn.Linear(4, 4), cut

    def forward(self, x):
        return 2.0 * self.cut(self, x)


def chosen(model, x):
    return nn.functional.one_hot(model.first(x).argmax(-1), 4).float()


def detached(model, x):
    return torch.tanh(model.first(x).detach())


def without_gradients(model, x):
    with torch.no_grad():
        return model.first(x)


@pytest.mark.parametrize("loss", [None, torch.sum])
@pytest.mark.parametrize(("cut", "key"), [(chosen, "/argmax"), (detached, "/detach"), (without_gradients, "first")])
def test_the_node_that_cuts_everything_off_is_named(cut, key, loss) -> None:
    with pytest.raises(
        NothingToDifferentiateError, match=rf"cuts the gradient off is {key} \(.*test_objective.py:\d+\)"
    ):
        fxgrad.gradient_flow(Cut(cut), torch.randn(3, 4), loss=loss)


class Casting(nn.Module):
    """A head that nothing uses, and a cast that asks for no value."""

    def __init__(self, asks):
        super().__init__()
        self.first, self.unused = nn.Linear(4, 4), nn.Linear(4, 4)
        self.asks = asks

    def forward(self, x):
        mask = (x > 0).float().bool().int().float()
        h = self.first(x) * mask
        return 2.0 * h if self.asks and bool(h.sum() > 0) else h


@pytest.mark.parametrize(("asks", "severity"), [(False, "warning"), (True, "info")])
def test_a_cast_asks_for_no_value_and_a_branch_does(asks, severity) -> None:
    torch.manual_seed(0)
    flow = fxgrad.gradient_flow(Casting(asks), torch.randn(3, 4))
    assert flow.capture.asked is asks
    assert [(f.severity, f.rule) for f in flow.findings] == [(severity, "unused")]


def test_a_frozen_model_has_no_such_node() -> None:
    model = nn.Linear(4, 4).requires_grad_(False)
    with pytest.raises(NothingToDifferentiateError, match="frozen") as error:
        fxgrad.gradient_flow(model, torch.randn(3, 4), loss=torch.sum)
    assert "cuts" not in str(error.value)
