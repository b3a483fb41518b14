"""One cause, one finding: what belongs to whom."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

import fxgrad
from fxgrad.diagnosis import Check, Draft, Evidence, diagnose
from fxgrad.schema import Constant, Finding, Update
from tests.diagnosis.making import Link, Setting, chain, gradient, linears, of_entries, parameter


def test_a_dead_relu_is_the_only_finding_and_names_who_suffers() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 2))
    nn.init.constant_(model[2].bias, -50.0)
    (finding,) = fxgrad.gradient_flow(model, torch.randn(32, 8)).findings
    assert (finding.severity, finding.rule, finding.site) == ("error", "dead", "3")
    assert set(finding.affected) == {"0.weight", "0.bias", "2.weight", "2.bias", "4.weight"}
    assert finding.path[:3] == ("3", "2", "1")


def test_what_lies_behind_a_dead_relu_is_its_consequence() -> None:
    """All is constant there, so that units which never fire are no surprise."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 2))
    nn.init.constant_(model[0].bias, -50.0)
    flow = fxgrad.gradient_flow(model, torch.randn(32, 8))
    assert [(f.rule, f.site) for f in flow.findings if f.severity != "info"] == [("dead", "1")]


class Roots(nn.Module):
    """NaN comes out of the root, and everything before it gets it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.second(torch.relu(self.first(x)) * 1e-6))
        return (h - h.detach()).square().sum(-1).sqrt().sum()


def test_everything_numeric_belongs_to_the_origin_of_a_nan() -> None:
    torch.manual_seed(0)
    flow = fxgrad.gradient_flow(Roots(), torch.randn(4, 8))
    (finding,) = [f for f in flow.findings if f.severity != "info"]
    assert (finding.rule, finding.site) == ("nonfinite", "/sqrt")
    assert set(finding.affected) == {"first.weight", "first.bias", "second.weight", "second.bias"}


def test_a_constant_explains_the_vanishing_that_it_makes() -> None:
    links = [
        Link("fc0", gradient(1e-5), parameters=("fc0.weight",)),
        Link("/mul", gradient(1.0), constants=(Constant("args[1]", "1e-05", 1e-5),)),
        Link("fc1", gradient(1.0), parameters=("fc1.weight",)),
    ]
    records = [parameter("fc0.weight", 1e-5), parameter("fc1.weight", 1.0)]
    (finding,) = diagnose(chain(*links, parameters=records)).findings
    assert (finding.rule, finding.site) == ("scale_break", "/mul")
    assert [f.rule for f in finding.consequences] == ["vanishing"]


def test_a_weight_is_a_consequence_of_the_path_that_it_lies_on() -> None:
    (finding,) = diagnose(linears([1e-6, 1.0, 1.0])).findings
    assert (finding.rule, finding.site) == ("vanishing", "fc1")
    assert [f.rule for f in finding.consequences] == ["scale_break"]


def test_a_too_large_step_explains_what_comes_after_it() -> None:
    moved = parameter("fc0.weight", 1.0, update=Update(100.0, 2.0, 8.0))
    link = Link("fc0", gradient(1.0), parameters=("fc0.weight",), value=of_entries([1.0, -1.0] * 8))
    flows = [chain(link, parameters=[moved], setting=Setting(backward=0))]
    flows.append(
        chain(
            Link("fc0", gradient(1.0, nan_count=3), parameters=("fc0.weight",), value=of_entries([math.nan] * 16)),
            parameters=[parameter("fc0.weight", gradient(1.0, nan_count=3))],
            setting=Setting(backward=1),
        )
    )
    (finding,) = diagnose(flows).findings
    assert (finding.rule, finding.parameter, finding.backward) == ("update_size", "fc0.weight", 0)
    assert [(f.rule, f.backward) for f in finding.consequences] == [("nonfinite", 1)]


def test_information_explains_no_warning() -> None:
    def check(evidence: Evidence) -> list[Finding]:
        node = evidence.view.flow.nodes[1]
        info = Draft(evidence, "zero", "info", "", "").at(node)
        return [info, Draft(evidence, "starved", "warning", "", "").at(node)]

    diagnosis = diagnose(linears([1.0, 1.0]), checks=[Check("both", check)])
    assert [f.rule for f in diagnosis.findings] == ["starved", "zero"]


@pytest.mark.parametrize("count", [2, 5])
def test_no_finding_is_lost_or_told_twice(count: int) -> None:
    """Of several saturated activations the first stands for all."""

    class Flat(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(count))

        def forward(self, x: Tensor) -> Tensor:
            return torch.stack([torch.tanh(30 * layer(x)) for layer in self.layers]).sum()

    torch.manual_seed(0)
    findings = diagnose(fxgrad.gradient_flow(Flat(), 30 * torch.randn(8, 8))).findings
    saturated = [f for f in findings if f.rule == "saturated"]
    assert len(saturated) == 1
    told = [saturated[0].site, *(f.site for f in saturated[0].consequences)]
    assert sorted(map(str, told)) == ["/tanh", *(f"/tanh#{n}" for n in range(1, count))]


def test_gradients_that_are_never_cleared_explain_steps_that_are_too_large() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=3.0)
    with fxgrad.watch(model, optimizer=optimizer) as watch:
        for _ in range(8):
            (model(torch.randn(32, 8)) - 1).square().mean().backward()
            optimizer.step()
        (finding,) = (one for one in watch.diagnose().findings if one.severity != "info")
    assert finding.rule == "zero_grad_missing"
    assert "update_size" in {one.rule for one in finding.explained}


class Convolved(nn.Module):
    """Two graph convolutions that divide by the root of a degree, which is 0 for the last node."""

    def __init__(self, least: float) -> None:
        super().__init__()
        self.first, self.last, self.least = nn.Linear(4, 8), nn.Linear(8, 3), least

    def spread(self, h: Tensor) -> Tensor:
        degree = torch.arange(len(h) - 1, -1, -1.0).clamp(min=self.least).pow(-0.5)
        return h.cumsum(0) * degree[:, None]

    def forward(self, x: Tensor) -> Tensor:
        return self.spread(self.last(self.spread(self.first(x)).relu()))


def test_one_line_that_runs_twice_is_one_finding() -> None:
    found = fxgrad.gradient_flow(Convolved(0.0), torch.randn(6, 4)).findings
    (finding,) = [one for one in found if one.rule == "nonfinite"]
    assert finding.node is not None and finding.node.key == "/pow"
    mended = fxgrad.gradient_flow(Convolved(1.0), torch.randn(6, 4)).findings
    assert not [one for one in mended if one.severity == "error"]
