"""Where NaN and Inf come from."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import fxgrad
from fxgrad.diagnosis import Thresholds
from fxgrad.diagnosis.causes import BACKWARD, FORWARD, Cause, cause_of
from fxgrad.schema import Constant, GradientFlow, OptimizerFacts
from tests.diagnosis.making import Link, Setting, chain, found, gradient, linears, of_entries, parameter


class Head(nn.Module):
    """A linear layer and a function of its output."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 4)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.fc(x))


def flow_of(function: Callable[[Tensor], Tensor]) -> GradientFlow:
    torch.manual_seed(0)
    return fxgrad.gradient_flow(Head(function), torch.randn(6, 8))


TRAPS = (
    (lambda h: torch.relu(h).log().sum(), "/log", "log"),
    (lambda h: (h / torch.zeros(4)).sum(), "/div", "zero"),
    (lambda h: (h - h.detach()).sqrt().sum(), "/sqrt", "sqrt"),
    (lambda h: (h[:, None] - h[None]).square().sum(-1).sqrt().sum(), "/sqrt", "sqrt"),
    (lambda h: (h - h.detach()).pow(0.5).sum(), "/pow", "power"),
    (lambda h: (1000 * h.abs()).exp().sum(), "/exp", "exp"),
    (lambda h: h.masked_fill(torch.ones(6, 4) > 0, -torch.inf).softmax(-1).sum(), "/softmax", "masked"),
    (lambda h: torch.where(h > 0, (h * (h > 0)).sqrt(), 0.0).sum(), "/sqrt", "sqrt"),
    (lambda h: h[h > 100].mean(), "/mean", "no entries"),
    (lambda h: torch.acos(h / h.detach()).sum(), "/acos", "acos"),
)


@pytest.mark.parametrize(("function", "site", "word"), TRAPS)
def test_the_operation_is_named_with_its_usual_cause(
    function: Callable[[Tensor], Tensor], site: str, word: str
) -> None:
    finding = found(flow_of(function), "nonfinite")[0]
    assert (finding.severity, finding.site, finding.confidence) == ("error", site, "exact")
    assert word in finding.message
    assert finding.evidence["nan_count"] + finding.evidence["inf_count"] > 0


HARMLESS = (
    lambda h: h.masked_fill(torch.eye(6, 4) > 0, -torch.inf).softmax(-1).sum(),
    lambda h: (h + torch.full((4,), -torch.inf).where(torch.arange(4) > 0, 0.0)).logsumexp(-1).sum(),
    lambda h: torch.relu(h).sqrt().sum(),  # the ReLU selects, and lets no Inf through
    lambda h: h.norm(dim=-1).sum(),
    lambda h: nn.functional.normalize(h * 0).sum(),
    lambda h: (h.square() + 1e-12).sqrt().sum(),
)


@pytest.mark.parametrize("function", HARMLESS)
def test_infinite_masks_and_safe_idioms_are_no_fault(function: Callable[[Tensor], Tensor]) -> None:
    assert [f for f in found(flow_of(function), "nonfinite") if f.severity != "info"] == []


def test_nan_that_is_removed_again_is_information() -> None:
    flow = flow_of(lambda h: (h.detach() / 0).nan_to_num(0.0, 0.0, 0.0).sum() + h.sum())
    assert [f.severity for f in found(flow, "nonfinite")] == ["info"]


def test_the_loss_is_outside_of_the_model() -> None:
    torch.manual_seed(0)
    flow = fxgrad.gradient_flow(nn.Linear(8, 4), torch.randn(6, 8), loss=lambda h: (h * 0).sqrt().sum())
    (finding,) = found(flow, "nonfinite")
    assert finding.node is None
    assert finding.place == "outside the model"
    assert finding.affected == ("weight", "bias")


def test_a_parameter_that_was_bad_before_comes_first() -> None:
    flow = linears([1.0, 1.0])
    broken = replace(flow.parameters[1], value=of_entries([math.nan, 1.0]))
    (finding,) = found(replace(flow, parameters=(flow.parameters[0], broken)), "nonfinite")
    assert (finding.parameter, finding.node) == ("fc1.weight", None)


def test_an_input_that_was_bad_is_named() -> None:
    x = torch.randn(6, 8)
    x[2, 3] = math.nan
    (finding,) = found(fxgrad.gradient_flow(nn.Linear(8, 4), x), "nonfinite")
    assert finding.site == "input:input"


def test_without_forward_statistics_the_backward_pass_tells() -> None:
    torch.manual_seed(0)
    model = Head(lambda h: (h[:, None] - h[None]).square().sum(-1).sqrt().sum())
    flow = fxgrad.gradient_flow(model, torch.randn(6, 8), forward=False)
    (finding,) = found(flow, "nonfinite")
    assert finding.site == "/sqrt"


def test_the_first_bad_step_of_a_series_is_reported() -> None:
    good = [linears([1.0, 1.0], setting=Setting(backward=n)) for n in range(12)]
    bad = chain(
        Link("fc0", gradient(1.0, nan_count=2), parameters=("fc0.weight",), value=of_entries([1.0] * 16)),
        Link("/sqrt", gradient(1.0), value=of_entries([0.0] * 16)),
        parameters=[parameter("fc0.weight", gradient(1.0, nan_count=2))], setting=Setting(backward=3),
    )  # fmt: skip
    (finding,) = found([*good[:3], bad, *good[4:]], "nonfinite")
    assert (finding.site, finding.backward) == ("/sqrt", 3)
    assert finding.path == ("/sqrt", "fc0")


@pytest.mark.parametrize(("steps", "severity"), [(1, "info"), (5, "info"), (6, "warning")])
def test_without_an_optimizer_the_steps_that_a_scaler_must_skip_are_counted(steps: int, severity: str) -> None:
    flow = chain(
        Link("fc1", gradient(math.nan), parameters=("fc1.weight",), dtype="float16"),
        Link("fc2", gradient(1.0), dtype="float16"),
        parameters=[parameter("fc1.weight", gradient(math.nan))],
        setting=Setting(more={"loss_scale": 65536.0}),
    )
    assert found([flow] * steps, "nonfinite")[0].severity == severity


@pytest.mark.parametrize(("skipped", "severity"), [(0, "info"), (5, "info"), (6, "warning")])
def test_a_scaler_may_skip_a_few_steps(skipped: int, severity: str) -> None:
    flow = chain(
        Link("fc0", gradient(1.0, inf_count=2), parameters=("fc0.weight",), value=of_entries([1.0] * 16)),
        Link("fc1", gradient(1.0), value=of_entries([1.0] * 16), dtype="float16"),
        parameters=[parameter("fc0.weight", gradient(1.0, inf_count=2))],
        setting=Setting(more={"loss_scale": 65536.0}),
    )
    flow = replace(flow, optimizer=OptimizerFacts("SGD", 7, skipped))
    assert [f.severity for f in found(flow, "nonfinite")] == [severity]
    assert found(flow, "nonfinite", Thresholds(skips=100))[0].severity == "info"


def test_infinity_that_was_written_is_a_mask_and_one_that_was_computed_is_not() -> None:
    infinite = of_entries([-math.inf, 1.0] * 8)

    def with_(link: Link) -> GradientFlow:
        bad = gradient(1.0, nan_count=1)
        return chain(
            Link("fc0", bad, parameters=("fc0.weight",), value=of_entries([1.0] * 16)), link,
            Link("fc1", bad, value=infinite),
            parameters=[parameter("fc0.weight", bad)],
        )  # fmt: skip

    computed = found(with_(Link("/log", gradient(1.0, nan_count=1), value=infinite)), "nonfinite")
    assert [f.site for f in computed] == ["/log"]
    constant = (Constant("args[2]", "-inf", -math.inf),)
    written = found(with_(Link("/masked_fill", gradient(1.0, nan_count=1), value=infinite, constants=constant)),
                    "nonfinite")  # fmt: skip
    assert [f.site for f in written] == [None]


# ---- words ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("table", [FORWARD, BACKWARD])
def test_every_cause_says_why_and_what_to_write(table: dict[str, Cause]) -> None:
    for kind, cause in table.items():
        assert cause_of(kind, "float32", forward=table is FORWARD, overflow=False) is cause
        assert cause.why
        assert cause.mend


def test_half_precision_that_overflowed_is_the_cause_of_any_kind() -> None:
    assert "dtype" in cause_of("linear", "float16", forward=True, overflow=True).why
    assert "dtype" not in cause_of("linear", "float32", forward=True, overflow=True).why
    assert cause_of("something", "float32", forward=True, overflow=False).mend
