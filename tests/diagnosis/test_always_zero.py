"""Who gets exact zeros in every flow is named, once, by what keeps it there."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fxgrad
from fxgrad.diagnosis import diagnose
from fxgrad.schema import Diagnosis, Finding, GradientFlow


def exact_zeros(model: nn.Module, x: Tensor) -> set[str]:
    """In plain torch."""
    model.zero_grad()
    model(x).square().mean().backward()
    found = {name for name, p in model.named_parameters() if p.grad is not None and not p.grad.any()}
    model.zero_grad()
    return found


def names(diagnosis: Diagnosis) -> list[str]:
    """Whom the findings name, as often as they do."""
    everything = [f for finding in diagnosis.findings for f in (finding, *finding.explained)]
    return [name for finding in everything for name in finding.affected]


def trained(model: nn.Module, x: Tensor, steps: int) -> tuple[GradientFlow, ...]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with fxgrad.watch(model, statistics="full", sites="edge", forward=True) as watch:
        for _ in range(steps):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
        return watch.history


class Net(nn.Module):
    """``last(relu(first(x)) * scale)`` beside a skip."""

    def __init__(self, *, scale: float = 1.0, zero: bool = False) -> None:
        super().__init__()
        self.first, self.last, self.skip = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.scale = scale
        if zero:
            nn.init.zeros_(self.first.weight)
            nn.init.zeros_(self.first.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.skip(x) + self.last(F.relu(self.first(x)) * self.scale)


@pytest.fixture
def x() -> Tensor:
    torch.manual_seed(0)
    return torch.randn(16, 8)


@pytest.mark.parametrize("model", [{"zero": True}, {"scale": 0.0}])
@pytest.mark.parametrize("steps", [None, 1, 6])
def test_everybody_is_named_once_and_nobody_else(model: dict[str, float], steps: int | None, x: Tensor) -> None:
    net = Net(**model)  # type: ignore[arg-type]
    flows = fxgrad.gradient_flow(net, x) if steps is None else trained(net, x, steps)
    want = exact_zeros(net, x)
    assert sorted(names(diagnose(flows))) == sorted(want) and want


def one(finding: tuple[Finding, ...]) -> Finding:
    (found,) = finding
    return found


def test_a_weight_at_zero_before_a_relu_never_leaves(x: Tensor) -> None:
    finding = one(fxgrad.gradient_flow(Net(zero=True), x).findings)
    assert (finding.severity, finding.rule, finding.site) == ("error", "zero", "first")
    assert "never leaves" in finding.message and "derivative 0 at 0" in finding.message


def test_inputs_that_are_all_zero(x: Tensor) -> None:
    finding = one(fxgrad.gradient_flow(nn.Linear(8, 2), x * 0).findings)
    assert (finding.severity, finding.rule, finding.affected) == ("warning", "zero", ("weight",))
    assert finding.node is not None and finding.node.op == "placeholder"


class Pair(nn.Module):
    """Of two experts only the first is chosen."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        chosen = [x, x[:0], x[:0]]
        return torch.cat([expert(rows) for expert, rows in zip(self.experts, chosen, strict=True)])


@pytest.mark.parametrize(("steps", "severity"), [(1, "info"), (9, "info"), (10, "warning")])
def test_members_that_get_no_input_are_one_finding(steps: int, severity: str, x: Tensor) -> None:
    finding = one(diagnose(trained(Pair(), x, steps)).findings)
    assert (finding.severity, finding.rule, len(finding.affected)) == (severity, "zero", 4)


class Coder(nn.Module):
    """A code that leaves the graph in the middle."""

    def __init__(self, cut: bool) -> None:
        super().__init__()
        self.code, self.decode, self.cut = nn.Linear(8, 4), nn.Linear(4, 8), cut

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        code = self.code(x)
        return self.decode(code.detach() if self.cut else code), code


@pytest.mark.parametrize("cut", [True, False])
def test_a_cut_beside_a_term_of_weight_zero(cut: bool, x: Tensor) -> None:
    flow = fxgrad.gradient_flow(Coder(cut), x, loss=lambda out: out[0].square().mean() + 0 * out[1].square().mean())
    assert [(f.severity, f.rule, f.site) for f in flow.findings] == ([("error", "detached", "/detach")] if cut else [])


def test_a_task_that_the_loss_leaves_out_is_information(x: Tensor) -> None:
    class Tasks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(8, 2), nn.Linear(8, 2)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.one(x), self.two(x)

    flow = fxgrad.gradient_flow(Tasks(), x, loss=lambda out: out[0].square().mean() + 0 * out[1].mean())
    finding = one(flow.findings)
    assert (finding.severity, finding.rule, finding.affected) == ("info", "zero", ("two.weight", "two.bias"))


def test_unwritten_memory_has_no_values(x: Tensor) -> None:
    class Filled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            memory = x.new_empty(x.shape)
            return self.body(x) + memory.zero_()

    flow = fxgrad.gradient_flow(Filled(), x)
    assert [site.value for site in flow.sites if site.key == "/new_empty"] == [None]
    assert flow.findings == ()
