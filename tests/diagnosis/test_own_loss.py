"""Models that return their loss, and losses that never reach the model."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxgrad
from fxgrad.errors import NoFlowError


class Own(nn.Module):
    """Returns its loss, as classifiers of Hugging Face do."""

    def __init__(self, loss: Callable[[Tensor, Tensor], Tensor], outputs: int, factor: float = 1.0) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, outputs))
        self.loss, self.factor = loss, factor

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.loss(self.body(x), y) * self.factor


def fitted(model: Own, y: Tensor, x: Tensor, steps: int = 60) -> tuple[float, fxgrad.schema.Diagnosis]:
    optimizer = torch.optim.Adam(model.parameters(), 2e-2)
    with fxgrad.watch(model, statistics="full", forward=True, optimizer=optimizer) as watch:
        for _ in range(steps):
            optimizer.zero_grad()
            loss = model(x, y)
            loss.backward()
            optimizer.step()
        return loss.item(), watch.diagnose()


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", ["cross_entropy", "mse_loss", "binary_cross_entropy_with_logits"])
def test_a_model_that_has_fitted_its_data_is_healthy(name: str, seed: int) -> None:
    """The gradient is small beside the scalar loss since the loss is met."""
    torch.manual_seed(seed)
    x = torch.randn(16, 8)
    y = x[:, :3].argmax(1) if name == "cross_entropy" else (x[:, :3] > 0).float()
    loss, found = fitted(Own(getattr(F, name), 3), y, x)
    assert loss < 0.02
    assert [f.rule for f in found.findings if f.severity != "info"] == []


def test_a_loss_that_is_scaled_to_nothing_is_told() -> None:
    torch.manual_seed(0)
    x = torch.randn(16, 8)
    flow = fxgrad.gradient_flow(Own(F.cross_entropy, 3, factor=1e-12), (x, x[:, :3].argmax(1)))
    assert {"vanishing", "scale_break"} & {f.rule for f in flow.findings if f.severity != "info"}


@pytest.mark.parametrize("loss", ["cross_entropy", "mse_loss"])
def test_a_constant_start_is_told_after_many_steps(loss: str) -> None:
    """The entries of the weights drift apart by then, the rows stay alike."""
    torch.manual_seed(0)
    model = Own(getattr(F, loss), 3)
    for layer in (model.body[0], model.body[2]):
        nn.init.constant_(layer.weight, 0.1)
        nn.init.zeros_(layer.bias)
    x = torch.randn(32, 8)
    _, found = fitted(model, x[:, :3].argmax(1) if loss == "cross_entropy" else x[:, :3], x, steps=25)
    first = model.body[0].weight
    assert torch.allclose(first, first[:1].expand_as(first), atol=1e-4)  # the fault is real
    assert "symmetry" in {f.rule for f in found.findings}


def test_a_loss_that_is_cut_off_from_the_model_is_said_where_no_flow_is() -> None:
    model = nn.Linear(4, 1)
    with fxgrad.watch(model) as watch:
        loss = model(torch.randn(3, 4)).sum()
        torch.tensor(loss.item(), requires_grad=True).backward()
        with pytest.raises(NoFlowError, match=r"the loss is cut off from the model: look for \.item\(\)"):
            watch.diagnose()
