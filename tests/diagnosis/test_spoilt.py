"""The step that makes weights non-finite is found where it happens."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from fxgrad.schema import GradientFlow, Update
from tests.diagnosis.making import Link, chain, found, gradient, of_entries, parameter


def flow(change: float, *, got: float = 1.0, dtype: str = "float32", epsilon: float | None = None) -> GradientFlow:
    """A weight that a step changed by this."""
    update = Update(change, 2.0, 1e-3, epsilon)
    statistics = gradient(got) if math.isfinite(got) else of_entries([got] * 16)
    record = replace(parameter("fc.weight", statistics, update=update), dtype=dtype)
    return chain(Link("fc", gradient(1.0), parameters=("fc.weight",)), parameters=[record])


@pytest.mark.parametrize("change", [math.nan, math.inf])
def test_a_step_that_is_not_finite(change: float) -> None:
    (finding,) = found(flow(change), "nonfinite")
    assert (finding.severity, finding.parameter, finding.confidence) == ("error", "fc.weight", "exact")
    assert "the optimizer did it" in finding.message
    assert found(flow(1.0), "nonfinite") == ()


def test_a_gradient_that_was_not_finite_is_the_cause_itself() -> None:
    for finding in found(flow(math.nan, got=math.nan), "nonfinite"):
        assert "the optimizer did it" not in finding.message


@pytest.mark.parametrize(("dtype", "epsilon", "zero"), [
    ("float16", 1e-8, True), ("float16", 1e-4, False), ("bfloat16", 1e-8, False), ("float32", 1e-8, False),
])  # fmt: skip
def test_an_epsilon_that_is_zero_in_the_dtype(dtype: str, epsilon: float, zero: bool) -> None:
    (finding,) = found(flow(math.nan, dtype=dtype, epsilon=epsilon), "nonfinite")
    assert (f"is 0 in {dtype}" in finding.message) is zero
