"""Low precision: what became zero, and what comes close to the end."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import fxgrad
from fxgrad.diagnosis import Thresholds
from fxgrad.schema import GradientFlow, Statistics
from tests.diagnosis.making import Link, chain, found, gradient, of_entries, parameter


def half(zeros: int, *, kind: str = "Linear", subnormal: int = 16, dtype: str = "float16") -> GradientFlow:
    """A node that got a gradient without zeros and sends back so many of 16."""
    sent: Statistics = gradient(1e-7, zero_count=zeros, subnormal_count=max(0, subnormal - zeros))
    return chain(
        Link("fc0", sent, parameters=("fc0.weight",), dtype=dtype),
        Link("act", gradient(1e-6), kind=kind, dtype=dtype, value=of_entries([1.0] * 16)),
        parameters=[parameter("fc0.weight", 1e-7)],
    )


@pytest.mark.parametrize(("zeros", "severity"), [(16, "warning"), (9, "warning"), (8, "info"), (2, "info"), (1, None)])
def test_underflow_by_the_share_that_became_zero(zeros: int, severity: str | None) -> None:
    findings = found(half(zeros), "underflow")
    assert [f.severity for f in findings] == ([severity] if severity else [])
    if severity:
        assert findings[0].site == "act"
        assert findings[0].evidence["share"] == pytest.approx(zeros / 16)


def test_its_thresholds() -> None:
    assert found(half(9), "underflow", Thresholds(underflow=0.6))[0].severity == "info"
    assert found(half(9), "underflow", Thresholds(underflow=0.6, underflow_info=0.6)) == ()


@pytest.mark.parametrize("kind", ["ReLU", "Dropout", "MaxPool2d", "Embedding", "Hardshrink"])
def test_what_makes_zeros_of_its_own_is_not_judged(kind: str) -> None:
    assert found(half(12, kind=kind), "underflow") == ()


def test_zeros_far_from_the_smallest_number_are_no_underflow() -> None:
    assert found(half(12, subnormal=0), "underflow") == ()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_wide_dtypes_are_not_judged(dtype: str) -> None:
    assert found(half(16, dtype=dtype), "underflow") == ()


def test_several_steps_take_the_median() -> None:
    assert found([half(9)] * 2 + [half(0)] * 3, "underflow") == ()
    assert found([half(0)] * 2 + [half(9)] * 3, "underflow")[0].confidence == "several steps"


def small(output: Tensor) -> Tensor:
    return output.float().square().mean() * 1e-5


def test_a_real_model_and_what_mends_it() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4)).half()
    x = torch.randn(16, 32).half()
    finding = found(fxgrad.gradient_flow(model, x, loss=small), "underflow")[0]
    assert (finding.severity, finding.site) == ("warning", "4")
    assert found(fxgrad.gradient_flow(model, x, loss=lambda output: small(output) * 65536), "underflow") == ()


def test_a_gradient_that_is_lost_in_the_loss_has_no_node() -> None:
    torch.manual_seed(0)
    model = nn.Linear(8, 4).half()
    flow = fxgrad.gradient_flow(model, torch.randn(4, 8).half(), loss=lambda h: h.float().sum() * 1e-9)
    (finding,) = found(flow, "underflow")
    assert finding.place == "outside the model"


@pytest.mark.parametrize(
    ("largest", "dtype", "risky"),
    [(20000.0, "float16", True), (16000.0, "float16", False), (20000.0, "float32", False),
     (20000.0, "bfloat16", False), (200.0, "float8_e4m3fn", True), (20000.0, "float8_e5m2", True)],
)  # fmt: skip
@pytest.mark.parametrize("where", ["value", "got"])
def test_headroom_of_values_and_gradients(largest: float, dtype: str, risky: bool, where: str) -> None:
    link = replace(Link("fc0", gradient(1.0), dtype=dtype), **{where: of_entries([largest, 0.5])})
    findings = found(chain(link), "overflow_risk")
    assert [(f.severity, f.site) for f in findings] == ([("info", "fc0")] if risky else [])
    assert found(chain(link), "overflow_risk", Thresholds(headroom=1.0)) == ()
