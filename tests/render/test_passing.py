from __future__ import annotations

import pytest
import torch
from torch import nn

import fxgrad
from fxgrad.render.boxes import boxes_of
from fxgrad.render.passing import pass_through


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.same = nn.Identity()
        self.drop = nn.Dropout(0.5)
        self.last = nn.Linear(3, 2)

    def forward(self, x):
        h = self.same(self.first(x)).view(-1, 2, 3).transpose(0, 1)
        left, right = h.unbind(0)
        return self.last(self.drop(left) * right.sigmoid())


def flow_of(train, **options):
    torch.manual_seed(0)
    return fxgrad.gradient_flow(Net().train(train), torch.randn(5, 4), **options)


@pytest.mark.parametrize("options", [{}, {"sites": "node", "statistics": "norm"}])
def test_what_hands_its_gradient_on_folds_into_what_it_was_made_of(options) -> None:
    flow = flow_of(False, **options)
    passing = pass_through(flow)
    assert {"same", "/view", "/transpose", "/unbind", "drop"} <= passing
    assert not passing & {"first", "last", "/sigmoid", "/mul", "input:x"}
    boxes, number = boxes_of(flow, None, fold=True)
    assert [box.nodes[0].key for box in boxes] == ["input:x", "first", "/sigmoid", "/mul", "last", "output"]
    assert number["/unbind"] == number["first"] == 1
    assert len(boxes_of(flow, None, fold=False)[0]) == len(flow.nodes)


def test_dropout_that_drops_something_stays() -> None:
    assert "drop" not in pass_through(flow_of(True))


class Broadcast(nn.Module):
    def __init__(self):
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(4))

    def forward(self, x):
        return (x.expand(5, 4) + self.shift).mean(0)


def test_what_sums_or_adds_a_parameter_stays() -> None:
    """The gradient of the addition is handed on as it is, but the parameter is a place to look at."""
    flow = fxgrad.gradient_flow(Broadcast(), torch.ones(1, 4, requires_grad=True))
    assert not pass_through(flow)
