"""What lies between a model's outputs and the loss, in every way a backward pass is started."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fxgrad
from fxgrad.record.loss import ops_of_the_loss


def watched(loss, *, native=True, start=lambda loss, _: loss.backward(), steps=2):
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(6, 4), nn.Softmax(-1)), torch.randn(5, 6)
    with fxgrad.watch(model, native=native) as watch:
        for _ in range(steps):
            start(loss(model(x)), model)
    return [[(op.name, op.takes, op.reduction) for op in flow.event.loss_ops] for flow in watch.history]


CROSS_ENTROPY = [("nll_loss", ("log_softmax",), "mean"), ("log_softmax", ("model.softmax",), "")]


def cross_entropy(out):
    return F.cross_entropy(out.view(5, 4), torch.tensor([0, 1, 2, 3, 0]))


@pytest.mark.parametrize("native", [True, False])
def test_every_flow_of_a_graph_has_them(native) -> None:
    assert watched(cross_entropy, native=native, steps=4) == [CROSS_ENTROPY] * 4


@pytest.mark.parametrize(
    "start",
    [
        lambda loss, _: torch.autograd.backward(loss),
        lambda loss, _: torch.autograd.backward([loss]),
        lambda loss, model: torch.autograd.grad(loss, list(model.parameters())),
        lambda loss, _: loss.backward(torch.tensor(2.0)),
        lambda loss, _: torch.amp.GradScaler("cpu", enabled=False).scale(loss).backward(),
    ],
)
def test_however_the_pass_is_started(start) -> None:
    assert watched(cross_entropy, start=start)[0] == CROSS_ENTROPY


def test_names_and_reductions() -> None:
    assert watched(lambda out: F.mse_loss(torch.ones(5, 4), out, reduction="sum"))[0] == [
        ("mse_loss", ("model.softmax",), "sum")
    ]
    assert watched(lambda out: ((1 - out) ** 2).mean())[0] == [
        ("mean", ("pow",), ""), ("pow", ("rsub",), ""), ("rsub", ("model.softmax",), ""),
    ]  # fmt: skip


def test_a_model_that_returns_its_loss_has_none_behind_it() -> None:
    model = nn.Sequential(nn.Linear(6, 4), nn.Flatten(0), nn.Linear(20, 1))
    with fxgrad.watch(model) as watch:
        model(torch.randn(5, 6)).backward()
    assert watch.history[0].event.loss_ops == ()


def test_another_model_behind_it_is_no_loss() -> None:
    behind = nn.Sequential(*(nn.Tanh() for _ in range(80)))
    assert watched(lambda out: behind(out).sum())[0] == []


def test_outside_of_a_backward_pass_nothing_is_known() -> None:
    assert ops_of_the_loss(0) == ()


def test_the_one_shot_call_sees_its_loss() -> None:
    model = nn.Linear(6, 4)
    flow = fxgrad.gradient_flow(model, torch.randn(5, 6), loss=cross_entropy)
    assert [op.name for op in flow.event.loss_ops] == ["nll_loss", "log_softmax"]
    assert flow.event.loss_ops[1].takes == ("model.addmm",)
