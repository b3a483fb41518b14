"""Reductions: a gradient to scalars, on its own device, without a host sync.

Sources of the formulas: the twelve scalars and their traps are those of TheDeepChecker and SageMaker Debugger
style monitors, put so that micro-batches and ranks merge by add, max and min; scaling by the largest entry before
squaring is the usual safe two-norm (as in BLAS ``nrm2``).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fxgrad.schema import Statistics

#: Order of the scalars in a ``full`` slot.
FIELDS = (
    "numel",
    "sum",
    "abs_sum",
    "scaled_square_sum",
    "max_abs",
    "min_abs_nonzero",
    "nan_count",
    "inf_count",
    "zero_count",
    "flush_count",
    "subnormal_count",
    "overflow_count",
)
_FLUSH = 2.0**-25  # half of float16's smallest number: rounds to zero, ties to even
_OVERFLOW = 65504.0  # float16's largest number


def dense(gradient: Tensor) -> Tensor:
    """The entries of ``gradient`` as a strided tensor: a sparse gradient's coalesced values, a nested one's values.

    Entries that a sparse gradient doesn't store are exact zeros of the gradient; see ``implicit_zeros``.
    """
    if gradient.layout is torch.sparse_coo:
        return gradient.coalesce().values()
    if gradient.layout is not torch.strided and hasattr(gradient, "values"):
        values: Tensor = gradient.values()
        return values
    return gradient


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """Dtype that norms of a gradient of ``dtype`` are accumulated in: float64 for doubles, else float32."""
    return torch.float64 if dtype in (torch.float64, torch.complex128) else torch.float32


def write_norm(gradient: Tensor, slot: Tensor) -> None:
    """Write the l2 norm of ``gradient`` into the 0-d ``slot``: one reduction kernel, no new tensor.

    ``slot`` has the dtype ``accumulator(gradient.dtype)``; half precision is widened before squaring.
    """
    if gradient.dtype in (torch.float32, torch.float64, torch.complex64, torch.complex128):
        torch.linalg.vector_norm(gradient, out=slot)
    else:
        torch.linalg.vector_norm(gradient, dtype=slot.dtype, out=slot)


def write_full(gradient: Tensor, slot: Tensor, implicit_zeros: int = 0) -> None:
    """Write the twelve scalars of ``FIELDS`` into the float64 ``slot`` of shape (12,).

    Sums, norms and extrema are over the finite entries.  The squares are summed after division by the largest
    modulus, so that neither 1e-30 nor 1e30 leaves float32.
    """
    wide = gradient.to(torch.promote_types(gradient.dtype, torch.float32))
    modulus = wide.abs()
    finite = torch.isfinite(modulus)
    values = torch.where(finite, modulus, 0)
    zeros = values.new_zeros(())
    largest = values.max() if values.numel() else zeros
    nonzero = values > 0
    smallest = torch.where(nonzero, values, math.inf).min() if values.numel() else zeros
    scaled = values / torch.where(largest > 0, largest, 1)
    # A subnormal divisor may be flushed to zero on some devices, which makes the quotient infinite or NaN.
    real = wide.real if wide.is_complex() else wide
    tiny = torch.finfo(gradient.dtype).tiny
    nan = torch.isnan(modulus)
    scalars = (
        torch.full_like(zeros, gradient.numel() + implicit_zeros, dtype=torch.float64),
        torch.where(finite, real, 0).sum(dtype=torch.float64),
        values.sum(dtype=torch.float64),
        scaled.square().sum(dtype=torch.float64),
        largest,
        smallest,
        nan.sum(),
        (~finite).sum() - nan.sum(),
        (modulus == 0).sum() + implicit_zeros,
        (nonzero & (modulus < _FLUSH)).sum(),
        (nonzero & (modulus < tiny)).sum(),
        (finite & (modulus > _OVERFLOW)).sum(),
    )
    slot.copy_(torch.stack([scalar.to(torch.float64) for scalar in scalars]))


def from_norm(value: float, numel: int) -> Statistics:
    """Statistics of level ``norm`` from a slot's value."""
    return Statistics("norm", numel, value)


def from_full(values: list[float]) -> Statistics:
    """Statistics of level ``full`` from a slot's twelve values."""
    row = dict(zip(FIELDS, values, strict=True))
    counts = {name: int(row[name]) for name in FIELDS if name.endswith("_count")}
    smallest = row["min_abs_nonzero"]
    return Statistics(
        level="full",
        numel=int(row["numel"]),
        l2_norm=row["max_abs"] * math.sqrt(row["scaled_square_sum"]),
        max_abs=row["max_abs"],
        min_abs_nonzero=smallest if 0 < smallest < math.inf else None,
        sum=row["sum"],
        abs_sum=row["abs_sum"],
        **counts,
    )
