"""The twelve scalars the slow way: plain Python over the entries, in double precision."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from fxgrad.schema import Statistics

EXACT = ("nan_count", "inf_count", "zero_count", "flush_count", "subnormal_count", "overflow_count", "max_abs")


def by_hand(gradient: Tensor) -> dict[str, float | None]:
    """What each field should be."""
    values = [complex(v) for v in gradient.reshape(-1).tolist()]
    moduli = [abs(v) if not (math.isnan(v.real) or math.isnan(v.imag)) else math.nan for v in values]
    finite = [m for m in moduli if math.isfinite(m)]
    scale = max(finite, default=0.0) or 1.0
    tiny = torch.finfo(gradient.dtype).tiny
    return {
        "l2_norm": scale * math.sqrt(math.fsum((m / scale) ** 2 for m in finite)),
        "max_abs": max(finite, default=0.0),
        "min_abs_nonzero": min((m for m in finite if m > 0), default=None),
        "abs_sum": math.fsum(finite),
        "sum": math.fsum(v.real for v, m in zip(values, moduli, strict=True) if math.isfinite(m)),
        "nan_count": sum(math.isnan(m) for m in moduli),
        "inf_count": sum(math.isinf(m) for m in moduli),
        "zero_count": sum(m == 0 for m in moduli),
        "subnormal_count": sum(0 < m < tiny for m in moduli),
        "flush_count": sum(0 < m < 2.0**-25 for m in moduli),
        "overflow_count": sum(65504 < m < math.inf for m in moduli),
    }


def check(got: Statistics, gradient: Tensor) -> None:
    """Compare; counts and extrema exactly (a complex modulus is rounded), sums to the precision of their terms."""
    want = by_hand(gradient)
    assert got.numel == gradient.numel()
    for name, value in want.items():
        found = getattr(got, name)
        if name in EXACT and not gradient.is_complex():
            assert found == value, name
        elif name in ("sum", "abs_sum"):
            room = 1e-12 if not gradient.is_complex() else 1e-6
            assert found == pytest.approx(value, rel=room, abs=room * (want["abs_sum"] or 0.0) + 1e-300), name
        elif value is None:
            assert found is None, name
        else:
            assert found == pytest.approx(value, rel=1e-6, abs=1e-300), name


def troublesome(dtype: torch.dtype) -> list[Tensor]:
    """Gradients that reductions get wrong."""
    torch.manual_seed(0)
    real = dtype.to_real() if dtype.is_complex else dtype
    big, small = torch.finfo(real).max, torch.finfo(real).smallest_normal
    if real is torch.float64:
        big /= 4096  # the sum of moduli must stay in float64
    rows = [
        torch.randn(7, 11),
        torch.tensor(3.0),
        torch.empty(0),
        torch.empty(3, 0),
        torch.zeros(5),
        torch.full((3,), math.nan),
        torch.full((1500,), -math.inf),
        torch.tensor([1.0, math.nan, math.inf, -math.inf, 0.0, -0.0, 2.0]),
        torch.randn(6, 4).t()[::2],
        torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
        torch.ones(1).expand(40, 3),
        torch.randn(3000) * 2.0**-25,
        torch.randn(3000) * 65504,
        torch.full((100,), 300.0),
    ]
    found = [row.to(dtype) for row in rows]
    edges = torch.tensor([big, -big, small, small / 2, torch.finfo(real).tiny * torch.finfo(real).eps], dtype=real)
    found += [edges.to(dtype), torch.full((1025,), small / 4, dtype=real).to(dtype)]
    if not dtype.is_complex:
        found.append(torch.full((2000,), big, dtype=dtype))
    return found
