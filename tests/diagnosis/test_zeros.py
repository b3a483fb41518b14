"""Exact zeros: faults, and what is zero by design."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import fxgrad
from fxgrad.diagnosis import FlowView, diagnose, zeros
from fxgrad.schema import GradientFlow
from tests.diagnosis.making import Link, chain, found, gradient, parameter


class Between(nn.Module):
    """Two linear layers with something between them."""

    def __init__(self, function: Callable[[Tensor], Tensor], width: int = 8) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, width), nn.Linear(width, 2)
        self.function = function
        self.register_buffer("mask", torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        return self.last(h * self.mask if self.function is None else self.function(h))


def flow_of(model: nn.Module) -> GradientFlow:
    torch.manual_seed(0)
    return fxgrad.gradient_flow(model, torch.randn(16, 8))


def zero_gradients(model: nn.Module) -> set[str]:
    """The parameters whose gradient is exactly zero, in plain torch."""
    model.zero_grad()
    model(torch.randn(16, 8)).square().mean().backward()
    return {name for name, p in model.named_parameters() if p.grad is not None and not p.grad.any()}


ZEROS = torch.zeros(8)  # made once, outside of the model
BLOCKING = (
    (torch.round, "/round"),
    (torch.sign, "/sign"),
    (torch.floor, "/floor"),
    (torch.trunc, "/trunc"),
    (lambda h: h * 0, "/mul"),
    (lambda h: h * ZEROS, "/mul"),
    (None, "/mul"),
)


@pytest.mark.parametrize(("function", "site"), BLOCKING)
def test_what_lets_nothing_through(function: Callable[[Tensor], Tensor], site: str) -> None:
    torch.manual_seed(0)
    model = Between(function)
    (finding,) = found(flow_of(model), "zero")
    assert (finding.severity, finding.site) == ("error", site)
    assert set(finding.affected) == zero_gradients(model)
    assert finding.evidence["parameters"] == 2
    assert finding.evidence["received"] > 0


def test_a_softmax_over_single_entries() -> None:
    torch.manual_seed(0)
    (finding,) = found(flow_of(Between(lambda h: h.softmax(-1), width=1)), "zero")
    assert (finding.severity, finding.site) == ("error", "/softmax")


PASSING = (
    lambda h: h + (h.round() - h).detach(),  # straight through
    torch.relu,
    lambda h: nn.functional.dropout(h, 0.9),
    lambda h: h * (h.detach() > 0),
    lambda h: torch.cat([h[:, :4], torch.zeros(16, 4)], 1),
)


@pytest.mark.parametrize("function", PASSING)
def test_what_lets_something_through(function: Callable[[Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    assert found(flow_of(Between(function)), "zero") == ()


def test_a_weight_that_begins_at_zero_is_information_in_the_first_step_and_nothing_later() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
    nn.init.zeros_(model[2].weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with fxgrad.watch(model, statistics="full", sites="edge", forward=True) as watch:
        for _ in range(5):
            optimizer.zero_grad()
            (model(torch.randn(16, 8)) - 1).square().mean().backward()
            optimizer.step()
        flows = watch.history
    assert [(f.severity, f.site) for f in found(flows[0], "zero")] == [("info", "2")]
    assert found(flows, "zero") == ()


def test_two_factors_that_both_begin_at_zero_never_leave_it() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 2))
    for layer in model[1:]:
        nn.init.zeros_(layer.weight)
        nn.init.zeros_(layer.bias)
    (finding,) = found(flow_of(model), "zero")
    assert finding.severity == "error"
    assert finding.site in {"1", "2"}


def test_several_steps_need_zeros_in_each() -> None:
    torch.manual_seed(0)
    blocked, free = flow_of(Between(torch.round)), flow_of(Between(lambda h: h))
    assert found([blocked] * 5, "zero")[0].confidence == "several steps"
    assert found([free, *[blocked] * 4], "zero") == ()


class Choosing(nn.Module):
    """Takes the first branch only."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(8, 4), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.where(x[:, :1] < 100, self.one(x), self.two(x))


def test_a_branch_that_was_not_chosen_is_information() -> None:
    torch.manual_seed(0)
    (finding,) = found(flow_of(Choosing()), "zero")
    assert (finding.severity, finding.site) == ("info", "/where")
    assert finding.affected == ("two.weight", "two.bias")


def test_who_passes_nothing_back_is_worked_out_once_a_flow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a flow with hundreds of such nodes takes seconds."""
    seen: list[FlowView] = []
    work = zeros._blockers
    monkeypatch.setattr(zeros, "_blockers", lambda view: seen.append(view) or work(view))
    links = [Link(f"fc{n}", gradient(float(n % 2)), parameters=(f"fc{n}.weight",)) for n in range(20)]
    records = [parameter(f"fc{n}.weight", gradient(0.0)) for n in range(20)]
    flows = [chain(*links, parameters=records)] * 5
    assert len(zeros.blockers(FlowView(flows[0]))) == 10
    seen.clear()
    diagnose(flows)
    assert len(seen) == len({id(view) for view in seen}) == 5
