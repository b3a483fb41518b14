"""Rules at parameters in each backward pass: at its end on what it contributed, or as the gradient arrives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fxgrad
from fxgrad import rules
from fxgrad.rules import layers, parameters
from tests.rewriting.nets import Shared, Three, batch, fill_by_hand, grads, make, same, train

FILL = rules.fill_zero(where=layers(per="backward"))


@pytest.mark.parametrize("kind", [Three, Shared])
def test_at_the_end_of_each_pass(kind: type[nn.Module]) -> None:
    want = train(make(kind), hand=fill_by_hand)
    model = make(kind)
    with fxgrad.rewrite(model, FILL) as rewrite:
        assert same(train(model), want)
    assert {record.ran for record in rewrite.report().records} == {10}


def test_micro_batches_are_rewritten_one_by_one() -> None:
    def contributions(model: nn.Module, count: int) -> list[dict[str, Tensor | None]]:
        torch.manual_seed(5)
        found = []
        for _ in range(count):
            x, y = batch(model)
            model.zero_grad()
            F.mse_loss(model(x), y).backward()
            fill_by_hand(model)
            found.append({n: p.grad.clone() for n, p in model.named_parameters()})
        model.zero_grad()
        return found

    model = make(Three)
    parts = contributions(model, 4)
    torch.manual_seed(5)
    with fxgrad.rewrite(model, FILL):
        for _ in range(4):
            x, y = batch(model)
            F.mse_loss(model(x), y).backward()
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.grad, parts[0][name] + parts[1][name] + parts[2][name] + parts[3][name])


class Partly(nn.Module):
    """The bias of one layer, and all of another, never get a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(F.linear(x, self.used.weight)).sum()


def test_it_does_not_wait_for_parameters_without_gradient() -> None:
    model = Partly()
    x = -torch.ones(1, 2) @ model.used.weight.detach().pinverse().T  # every ReLU is off
    for _ in range(2):
        model.zero_grad()
        with fxgrad.rewrite(model, FILL):
            model(x).backward()
        assert torch.equal(model.used.weight.grad, torch.ones(2, 2))
        assert model.used.bias.grad is None
        assert model.unused.weight.grad is None


def test_several_backward_passes_through_one_graph_and_autograd_grad() -> None:
    model, (x, y) = make(Three), batch(make(Three))
    with fxgrad.rewrite(model, rules.scale(2.0, layers(per="backward"))):
        loss = F.mse_loss(model(x), y)
        found = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)  # .grad is not involved
        assert all(p.grad is None for p in model.parameters())
        loss.backward(retain_graph=True)
        loss.backward()
        torch.autograd.grad(F.mse_loss(model(x), y), list(model.parameters()))
    for gradient, parameter in zip(found, model.parameters(), strict=True):
        assert torch.equal(parameter.grad, 2 * gradient + 2 * gradient)


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = checkpoint(lambda v: F.relu(self.a(v)), x, use_reentrant=True)
        x = checkpoint(lambda v: F.relu(self.a(v)), x, use_reentrant=True)  # twice the same layer
        return checkpoint(self.b, x, use_reentrant=True).square().sum()


@pytest.mark.parametrize("accumulate", [False, True])
def test_reentrant_checkpoints_belong_to_the_outer_pass(accumulate: bool) -> None:
    model, x = make(Blocks), torch.randn(3, 2, requires_grad=True)
    want = grads(model, x)
    model.zero_grad()
    with fxgrad.rewrite(model, rules.custom(lambda g: g + 1, layers(per="backward"))) as rewrite:
        for _ in range(1 + accumulate):
            model(x).backward()
    for name, parameter in model.named_parameters():
        assert torch.allclose(parameter.grad, (want[name] + 1) * (1 + accumulate))
    assert {record.ran for record in rewrite.report().records} == {1 + accumulate}


def test_a_pass_that_raised_is_forgotten() -> None:
    model, (x, y) = make(Three), batch(make(Three))
    want = grads(model, x)

    def fails(g: Tensor) -> Tensor:
        raise ValueError("stop")  # noqa: EM101

    with fxgrad.rewrite(model, rules.scale(2.0, layers(per="backward"))):
        h = model.fc1.weight.register_hook(fails)
        with pytest.raises(ValueError, match="stop"):
            F.mse_loss(model(x), y).backward()
        h.remove()
        found = grads(model, x)
    assert all(torch.equal(found[name], 2 * want[name]) for name in want)


@pytest.mark.parametrize("capture", ["auto", "eager"])
def test_as_the_gradient_arrives(capture: Any) -> None:
    model, x = make(Three), torch.randn(4, 1)
    want = grads(model, x)
    model.zero_grad()
    rule = [
        rules.custom(lambda g: g + 1, parameters("fc*", per="arrival")),
        rules.scale(2.0, parameters(per="arrival")),
    ]
    with fxgrad.rewrite(model, rule, capture=capture):
        model(x).sum().backward()
        model(x).sum().backward()
    for name, parameter in model.named_parameters():
        assert torch.allclose(parameter.grad, 4 * (want[name] + 1))
    assert all(not p._backward_hooks for p in model.parameters())
