"""Parameters without a gradient: cut off, unused, frozen."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import fxgrad
from fxgrad.schema import GradientFlow
from tests.diagnosis.making import found


def flow_of(model: nn.Module) -> GradientFlow:
    torch.manual_seed(0)
    return fxgrad.gradient_flow(model, torch.randn(16, 8))


class Cut(nn.Module):
    """An encoder whose result goes through a function."""

    def __init__(self, function: Callable[[Tensor], Tensor], width: int = 8) -> None:
        super().__init__()
        self.encoder, self.head = nn.Linear(8, 8), nn.Linear(width, 2)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.function(self.encoder(x)))


def without_gradient(h: Tensor) -> Tensor:
    with torch.no_grad():
        return h.tanh()


CUTS = (
    (lambda h: h.detach(), 8, "/detach"),
    (lambda h: (h > 0).float(), 8, "/gt"),
    (lambda h: nn.functional.one_hot(h.argmax(-1), 8).float(), 8, "/argmax"),
    (lambda h: h.long().float(), 8, "/long"),
    (without_gradient, 8, "/tanh"),
)


@pytest.mark.parametrize(("function", "width", "site"), CUTS)
def test_the_node_that_cuts_is_named(function: Callable[[Tensor], Tensor], width: int, site: str) -> None:
    (finding,) = found(flow_of(Cut(function, width)), "detached")
    assert (finding.severity, finding.site, finding.confidence) == ("error", site, "exact")
    assert finding.affected == ("encoder.weight", "encoder.bias")


WHOLE = (
    lambda h: h + (h.round() - h).detach(),  # straight through
    lambda h: h * torch.sigmoid(h).detach(),
    torch.tanh,
)


@pytest.mark.parametrize("function", WHOLE)
def test_a_detach_beside_the_way_is_no_fault(function: Callable[[Tensor], Tensor]) -> None:
    flow = flow_of(Cut(function))
    assert found(flow, "detached") == found(flow, "unused") == ()


class Spare(nn.Module):
    """One layer works, the result of another is dropped, a third is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.busy, self.dropped, self.idle = nn.Linear(8, 2), nn.Linear(8, 2), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        self.dropped(x)
        return self.busy(x)


def test_unused_parameters_with_the_node_that_was_dropped() -> None:
    findings = found(flow_of(Spare()), "unused")
    assert {(f.severity, f.place, f.affected) for f in findings} == {
        ("warning", "dropped", ("dropped.weight", "dropped.bias")),
        ("warning", "idle.weight", ("idle.weight", "idle.bias")),
    }


class Listed(nn.Module):
    """Runs some of a list of layers, in a row or side by side."""

    def __init__(self, used: tuple[int, ...], *, in_a_row: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.used, self.in_a_row = used, in_a_row

    def forward(self, x: Tensor) -> Tensor:
        if not self.in_a_row:
            return torch.stack([self.layers[n](x) for n in self.used]).sum(0)
        for n in self.used:
            x = torch.tanh(self.layers[n](x))
        return x


@pytest.mark.parametrize(
    ("used", "in_a_row", "severity"),
    [((0, 2), False, "info"), ((1,), False, "info"), ((0, 1), True, "warning"), ((0, 1, 3), True, "info")],
)
def test_idle_members_of_a_list_are_information_but_a_loop_that_ends_early_is_not(
    used: tuple[int, ...], in_a_row: bool, severity: str
) -> None:
    findings = found(flow_of(Listed(used, in_a_row=in_a_row)), "unused")
    assert [f.severity for f in findings] == [severity]


def test_parameters_that_get_a_gradient_in_any_step_are_used() -> None:
    torch.manual_seed(0)
    model = Listed((0, 1), in_a_row=True)
    flows = []
    for model.used in ((0, 1), (0, 1, 2, 3), (0, 1)):
        flows.append(fxgrad.gradient_flow(model, torch.randn(4, 8)))
    assert found(flows[-1], "unused")
    assert found(flows, "unused") == ()


def test_frozen_parameters_are_one_piece_of_information() -> None:
    model = Spare()
    model.requires_grad_(requires_grad=False)
    model.busy.requires_grad_()
    flow = flow_of(model)
    assert found(flow, "unused") == ()
    (finding,) = found(flow, "frozen")
    assert (finding.severity, finding.node) == ("info", None)
    assert finding.affected == ("dropped.weight", "dropped.bias", "idle.weight", "idle.bias")


@pytest.mark.parametrize(("taught", "severity"), [(True, "info"), (False, "error")])
def test_a_teacher_that_no_optimizer_has_is_information(taught: bool, severity: str) -> None:
    model = Cut(without_gradient)
    parameters = model.head.parameters() if taught else model.parameters()
    with fxgrad.watch(model, optimizer=torch.optim.SGD(parameters, 0.1)) as watch:
        model(torch.randn(16, 8)).square().mean().backward()
    (finding,) = found(watch.flow(), "detached")
    assert (finding.severity, finding.affected) == (severity, ("encoder.weight", "encoder.bias"))


@pytest.mark.parametrize(("steps", "severity"), [(9, "info"), (10, "warning")])
def test_a_member_that_idles_for_long_is_a_warning(steps: int, severity: str) -> None:
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = nn.ModuleList(nn.Linear(8, 2) for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            return self.experts[0](x)

    model = Experts()
    with fxgrad.watch(model) as watch:
        for _ in range(steps):
            model(torch.randn(4, 8)).sum().backward()
    (finding,) = found(watch.history, "unused")
    assert (finding.severity, finding.affected) == (severity, ("experts.1.weight", "experts.1.bias"))


def test_what_has_no_second_derivative_is_information() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
    with fxgrad.watch(model) as watch:
        x = torch.randn(4, 8, requires_grad=True)
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        slope.square().sum().backward()
    (finding,) = found(watch.flow(), "unused")
    assert (finding.severity, finding.affected) == ("info", ("2.bias",))


def cut_off(**options) -> fxgrad.Watch:
    """Two forward calls, whose loss is made anew of its number."""
    torch.manual_seed(0)
    model = nn.Linear(8, 3)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with fxgrad.watch(model, **({"optimizer": optimizer} if options.pop("known") else {})) as watch:
        for _ in range(2):
            torch.tensor(model(torch.randn(4, 8)).mean().item(), requires_grad=True).backward()
            if options.get("stepped", True):
                optimizer.step()
    return watch


def test_a_loss_that_never_reaches_the_model_is_a_finding_where_the_optimizer_stepped() -> None:
    watch = cut_off(known=True)
    for diagnosis in (watch.diagnose(), fxgrad.diagnose(watch.history)):
        (finding,) = diagnosis.findings
        assert (finding.rule, finding.severity, finding.node) == ("detached", "error", None)
        assert "stepped 2 times" in finding.message and "torch.tensor(loss)" in finding.suggestion
        assert diagnosis.checked == ("detached",)
    with pytest.raises(fxgrad.errors.NoFlowError):
        watch.flow()


@pytest.mark.parametrize("options", [{"known": False}, {"known": True, "stepped": False}])
def test_without_a_step_it_stays_an_error(options) -> None:
    watch = cut_off(**options)
    with pytest.raises(fxgrad.errors.NoFlowError, match="cut off"):
        watch.diagnose()
