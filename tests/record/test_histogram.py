"""The histogram of exponents and what can be answered from it."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import fxgrad
from fxgrad import store
from fxgrad.errors import OptionError
from fxgrad.record.histogram import write_histogram
from fxgrad.schema import Statistics
from fxgrad.schema.histogram import BINS, LOWEST, RANGES
from tests.record.by_hand import troublesome

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64]


def histogram(gradient: Tensor) -> list[int]:
    slot = torch.zeros(BINS, dtype=torch.float64)
    write_histogram(gradient, slot)
    return [int(count) for count in slot.tolist()]


def naive(gradient: Tensor) -> list[int]:
    counts = [0] * BINS
    for value in gradient.reshape(-1).tolist():
        modulus = abs(value)
        if 0 < modulus < math.inf:
            place = 0 if modulus < 2.0**LOWEST else 1
            while place and place < BINS - 1 and modulus >= 2.0 ** (LOWEST + place):
                place += 1
            counts[place] += 1
    return counts


@pytest.mark.parametrize("dtype", DTYPES)
def test_counts(dtype: torch.dtype) -> None:
    edges = torch.tensor([2.0**e for e in range(LOWEST - 3, 20)], dtype=torch.float64).to(dtype)
    for gradient in [*troublesome(dtype), edges]:
        assert histogram(gradient) == naive(gradient)


@settings(deadline=None, max_examples=50)
@given(st.lists(st.floats(width=32), max_size=30), st.sampled_from(sorted(RANGES)), st.integers(-10, 40))
def test_shares_are_those_of_the_cast(values: list[float], dtype: str, exponent: int) -> None:
    gradient, scale = torch.tensor(values, dtype=torch.float32), 2.0**exponent
    flow = fxgrad.gradient_flow(Times(gradient), torch.ones(len(values), requires_grad=True), statistics="histogram")
    statistics = flow.site("input:x").statistics
    assert statistics is not None
    real = gradient[gradient.isfinite() & (gradient != 0)].double()
    low, high = RANGES[dtype]
    lost = (real.abs() * scale < low).sum().item() / (len(real) or 1)
    beyond = (real.abs() * scale >= high).sum().item() / (len(real) or 1)
    least, most = statistics.underflow_share(dtype, scale)  # type: ignore[misc]
    assert least <= lost <= most
    if 2.0**LOWEST <= low / scale <= 2.0**16:
        assert least == most
    least, most = statistics.overflow_share(dtype, scale)  # type: ignore[misc]
    assert least - 1e-12 <= beyond <= most + 1e-12


class Times(nn.Module):
    def __init__(self, factor: Tensor) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.factor).sum()


def test_ranges_are_those_of_torch() -> None:
    for name, (low, high) in RANGES.items():
        dtype = getattr(torch, name)
        assert torch.tensor(low * 1.01, dtype=torch.float64).to(dtype) != 0, name
        assert torch.tensor(low * 0.99, dtype=torch.float64).to(dtype) == 0, name
        assert torch.finfo(dtype).max < high <= torch.finfo(dtype).max * 1.08


def test_from_watch_to_file_and_back() -> None:
    model = nn.Sequential(nn.Linear(4, 200), nn.Tanh(), nn.Linear(200, 200))
    with fxgrad.watch(model, statistics="histogram") as watch:
        for _ in range(3):
            model.zero_grad()
            model(torch.randn(3, 4)).square().mean().backward()
        flow = watch.flow()
    for record, parameter in zip(flow.parameters, model.parameters(), strict=True):
        assert record.statistics is not None
        assert record.statistics.level == "histogram"
        assert record.statistics.exponent_histogram == tuple(naive(parameter.grad))  # type: ignore[arg-type]
        assert record.statistics.numel == parameter.numel()
    assert store.from_json(flow.to_json()) == flow
    assert "exponent_histogram" not in str(flow.to_networkx().nodes(data=True))
    flow.to_dot()


def test_without_a_histogram_and_without_entries() -> None:
    assert Statistics("full", 3, 1.0).underflow_share("float16") is None
    assert Statistics("full", 3, 1.0).overflow_share("float16") is None
    empty = Statistics("histogram", 3, 0.0, max_abs=0.0, exponent_histogram=(0,) * BINS)
    assert empty.underflow_share("float16") == (0.0, 0.0)
    assert empty.overflow_share("float16") == (0.0, 0.0)


def test_misuse_is_told() -> None:
    statistics = Statistics("full", 3, 1.0)
    with pytest.raises(OptionError, match=r"float64.*one of"):
        statistics.underflow_share("float64")
    for scale in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(OptionError, match="scale must be"):
            statistics.overflow_share("float16", scale)
