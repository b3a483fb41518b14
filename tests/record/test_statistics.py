"""The twelve scalars and the norm, on the tensors that reductions get wrong."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from fxgrad.record.statistics import FIELDS, accumulator, from_full, from_norm, write_full, write_norm
from fxgrad.schema import Statistics

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128]


def full(gradient: Tensor) -> Statistics:
    slot = torch.zeros(len(FIELDS), dtype=torch.float64)
    write_full(gradient, slot)
    return from_full(slot.tolist())


def norm(gradient: Tensor) -> Statistics:
    slot = torch.zeros((), dtype=accumulator(gradient.dtype))
    write_norm(gradient, slot)
    return from_norm(slot.item(), gradient.numel())


def by_hand(gradient: Tensor) -> dict[str, float]:
    """Plain Python over the entries, in double precision."""
    values = [complex(v) for v in gradient.reshape(-1).tolist()]
    moduli = [abs(v) if not (math.isnan(v.real) or math.isnan(v.imag)) else math.nan for v in values]
    finite = [m for m in moduli if math.isfinite(m)]
    scale = max(finite, default=0.0) or 1.0
    tiny = torch.finfo(gradient.dtype).tiny
    return {
        "l2_norm": scale * math.sqrt(sum((m / scale) ** 2 for m in finite)),
        "max_abs": max(finite, default=0.0),
        "abs_sum": math.fsum(finite),
        "sum": math.fsum(v.real for v, m in zip(values, moduli, strict=True) if math.isfinite(m)),
        "nan_count": sum(math.isnan(m) for m in moduli),
        "inf_count": sum(math.isinf(m) for m in moduli),
        "zero_count": sum(m == 0 for m in moduli),
        "subnormal_count": sum(0 < m < tiny for m in moduli),
        "flush_count": sum(0 < m < 2.0**-25 for m in moduli),
        "overflow_count": sum(65504 < m < math.inf for m in moduli),
    }


def check(gradient: Tensor) -> None:
    got, want = full(gradient), by_hand(gradient)
    assert got.numel == gradient.numel()
    for name, value in want.items():
        assert getattr(got, name) == pytest.approx(value, rel=1e-5, abs=1e-300), name


@pytest.mark.parametrize("dtype", DTYPES)
def test_ordinary_values_of_every_dtype(dtype: torch.dtype) -> None:
    gradient = torch.randn(7, 11).to(dtype) if not dtype.is_complex else torch.randn(7, 11, dtype=dtype)
    gradient[0, :3] = 0
    check(gradient)
    assert norm(gradient).l2_norm == pytest.approx(full(gradient).l2_norm, rel=1e-4)


@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_and_inf_are_counted_and_left_out(dtype: torch.dtype) -> None:
    gradient = torch.tensor([1.0, math.nan, math.inf, -math.inf, 0.0, 2.0]).to(dtype)
    check(gradient)
    assert full(gradient).nonfinite
    assert math.isnan(norm(gradient).l2_norm)


@pytest.mark.parametrize("value", [1e-30, 1e-38, 1e30, 3e38])
def test_squares_that_leave_float32(value: float) -> None:
    gradient = torch.full((100,), value)
    assert full(gradient).l2_norm == pytest.approx(value * 10, rel=1e-6)
    assert norm(gradient).outside_range


def test_squares_that_leave_float64() -> None:
    for value in (1e-200, 1e200):
        assert full(torch.full((4,), value, dtype=torch.float64)).l2_norm == pytest.approx(2 * value)


def test_subnormals_count_as_such() -> None:
    gradient = torch.tensor([1e-40, 0.0, 1.0])
    check(gradient)
    assert full(gradient).subnormal_count == 1
    assert full(torch.tensor([1e-40])).l2_norm > 0


def test_half_precision_is_widened_before_squaring() -> None:
    gradient = torch.full((10,), 300.0, dtype=torch.float16)  # 300 squared is beyond float16
    assert norm(gradient).l2_norm == pytest.approx(300 * math.sqrt(10))
    assert full(gradient).l2_norm == pytest.approx(300 * math.sqrt(10))


@pytest.mark.parametrize(
    "gradient",
    [torch.tensor(3.0), torch.empty(0), torch.full((3,), math.nan), torch.zeros(5), torch.randn(6, 4).t()[::2]],
    ids=["0-d", "empty", "all NaN", "zeros", "non-contiguous"],
)
def test_unusual_shapes(gradient: Tensor) -> None:
    check(gradient)
    assert full(gradient).rms == pytest.approx(full(gradient).l2_norm / math.sqrt(gradient.numel() or 1))


def test_all_zero_and_undecided() -> None:
    assert full(torch.zeros(3)).all_zero is True
    assert norm(torch.zeros(3)).all_zero is None
    assert norm(torch.ones(3)).all_zero is False


def test_min_of_the_nonzero_entries() -> None:
    assert full(torch.tensor([0.0, -0.5, 3.0])).min_abs_nonzero == 0.5
    assert full(torch.zeros(2)).min_abs_nonzero is None
