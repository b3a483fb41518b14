"""Rules at leaf tensors, whose hooks outlive the autograd graph: they act once for each backward pass."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import fxgrad
from fxgrad import rules


class OwnTensor(nn.Module):
    """A parameter that is a value of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.l = nn.Linear(4, 4)
        self.i = nn.Identity()
        self.p = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.l(x + self.i(self.p))


def dropped_forwards(model: nn.Module, x: Tensor) -> None:
    for _ in range(3):
        model(x)
    model(x).sum().backward()


def two_losses(model: nn.Module, x: Tensor) -> None:
    (0.5 * model(x).sum() + 0.5 * model(x).sum()).backward()


def twice_with_a_forward_between(model: nn.Module, x: Tensor) -> None:
    loss = 0.5 * model(x).sum()
    loss.backward(retain_graph=True)
    model(x)
    loss.backward()


STEPS = {"dropped": dropped_forwards, "two losses": two_losses, "retained": twice_with_a_forward_between}


def gradients(steps: Callable[[nn.Module, Tensor], None], where: str | None, *, watched: bool) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model, x = OwnTensor(), torch.randn(3, 4, requires_grad=True)
    watch = fxgrad.watch(model) if watched else None
    handle = fxgrad.rewrite(model, rules.scale(0.5, where=rules.nodes(where))) if where is not None else None
    steps(model, x)
    assert x.grad is not None and model.p.grad is not None
    found = {"x": x.grad.clone(), "p": model.p.grad.clone()}
    if handle is not None:
        handle.remove()
    if watch is not None:
        watch.remove()
    assert not x._backward_hooks
    return found


@pytest.mark.parametrize("watched", [False, True])
@pytest.mark.parametrize("name", STEPS)
def test_a_rule_at_a_leaf_acts_once_a_backward(name: str, watched: bool) -> None:
    steps = STEPS[name]
    plain = gradients(steps, None, watched=watched)
    torch.testing.assert_close(gradients(steps, "input:x", watched=watched)["x"], plain["x"] * 0.5)
    torch.testing.assert_close(gradients(steps, "i", watched=watched)["p"], plain["p"] * 0.5)


def test_a_front_end_that_cannot_rewrite_is_refused() -> None:
    with pytest.raises(fxgrad.errors.OptionError, match="dynamo"):
        fxgrad.rewrite(OwnTensor(), rules.scale(0.5, where=rules.nodes("i")), capture="dynamo")
