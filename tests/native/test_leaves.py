"""Sites that are a leaf tensor: a parameter that a call returned as it is, a leaf that the forward makes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxgrad

pytestmark = pytest.mark.usefixtures("recorder")
Cast = Callable[[Tensor], Tensor]
CASTS: dict[str, Cast] = {
    "/to": lambda w: w.to(torch.float32),
    "/float": lambda w: w.float(),
    "/contiguous": lambda w: w.contiguous(),
    "/cpu": lambda w: w.cpu(),
    "/requires_grad_": lambda w: w.requires_grad_(),
}


class Norm(nn.Module):
    """As RMSNorm: the weight is cast to what it is already."""

    def __init__(self, cast: Cast, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(6, dtype=dtype))
        self.linear = nn.Linear(6, 6, dtype=dtype)
        self.cast = cast
        self.branch = False

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(self.cast(self.weight) * x)
        return torch.sin(out) if self.branch else out


def steps(model: Any, dtype: torch.dtype = torch.float32, **options: Any) -> list[tuple[Any, float]]:
    """The flow of each step, and what plain torch has in ``weight.grad``; one step takes another course."""
    found = []
    with fxgrad.watch(model, **options) as watch:
        for number in range(6):
            model.branch = number == 3
            model.zero_grad()
            model(torch.randn(4, 6, dtype=dtype)).abs().square().mean().backward()
            found.append((watch.flow(), torch.linalg.vector_norm(model.weight.grad).item()))
    return found


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("site", CASTS)
def test_a_call_that_returns_the_parameter_itself(site: str, fast: bool) -> None:
    torch.manual_seed(0)
    for flow, plain in steps(Norm(CASTS[site]), native=fast):
        parameter = next(one for one in flow.parameters if one.name == "weight")
        assert parameter.l2_norm == pytest.approx(plain, rel=1e-5)
        if any(one.id == site for one in flow.sites):
            assert flow.site(site).l2_norm == pytest.approx(plain, rel=1e-5), flow.capture
        else:  # a call that runs no operator cannot be seen in a course that is new
            assert flow.event.forward == 3
            assert fast
            assert flow.capture.reason.startswith("left the known courses")


@pytest.mark.parametrize("statistics", ["norm", "full"])
def test_a_complex_parameter(statistics: str) -> None:
    torch.manual_seed(0)
    model = Norm(lambda w: w.to(torch.cfloat), torch.cfloat)
    found = steps(model, torch.cfloat, statistics=statistics)
    assert [flow.capture.recorder for flow, _ in found][1] == "native"
    for flow, plain in found:
        assert flow.site("/to").l2_norm == pytest.approx(plain, rel=1e-5)
        assert flow.site("/to").shape == (6,)


class Forces(nn.Module):
    """Energies, and their gradient by the positions, which a later backward pass goes through."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 8), nn.Linear(8, 1)
        self.inner: list[float] = []

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        self.positions = positions.detach().requires_grad_()
        energy = self.b(torch.tanh(self.a(self.positions)))
        (force,) = torch.autograd.grad(energy.sum(), self.positions, create_graph=True)
        self.inner.append(force.detach().norm().item())
        return energy, -force


@pytest.mark.parametrize("fast", [True, False])
def test_a_leaf_in_a_backward_pass_inside_of_the_forward(fast: bool) -> None:
    torch.manual_seed(0)
    model, plain = Forces(), []
    with fxgrad.watch(model, native=fast) as watch:
        for _ in range(4):
            energy, force = model(torch.randn(5, 3))
            (energy.square().mean() + force.square().mean()).backward()
            plain += [model.inner[-1], model.positions.grad.norm().item()]  # type: ignore[union-attr]
        flows = watch.history
    assert [flow.site("/requires_grad_").l2_norm for flow in flows] == pytest.approx(plain, rel=1e-5)
    assert flows[-1].capture.recorder == ("native" if fast else "python")
