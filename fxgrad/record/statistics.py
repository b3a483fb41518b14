"""Reductions in plain torch: a gradient to scalars, on its own device, without a host sync.

Sources of the formulas: the twelve scalars and their traps are those of TheDeepChecker and SageMaker Debugger
style monitors, put so that micro-batches and ranks merge by add, max and min; scaling by the largest entry before
squaring is the usual safe two-norm (as in BLAS ``nrm2``).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fxgrad.schema import Statistics

#: Order of the scalars in a ``full`` slot.  ``numel`` is the twelfth; the host knows it.
COLUMNS = (
    "sum",
    "abs_sum",
    "square_sum",
    "max_abs",
    "min_abs_nonzero",
    "nan_count",
    "inf_count",
    "zero_count",
    "flush_count",
    "subnormal_count",
    "overflow_count",
)
ZERO_COUNT = COLUMNS.index("zero_count")
FLUSH = 2.0**-25  # half of float16's smallest number: rounds to zero, ties to even
OVERFLOW = 65504.0  # float16's largest number
_WIDE = (torch.float64, torch.complex128)
_DOT = 2**18  # entries from which on torch.dot saves more than the way through the recorder costs (measured)
_MKL: bool = torch.backends.mkl.is_available()  # type: ignore[no-untyped-call]
_CHUNK = 2**18  # entries reduced at a time on a CPU, so that the intermediate tensors stay in the cache
_LARGE_CHUNK = 2**21  # on an accelerator: some 60 MB of intermediate tensors, each kernel large enough to fill it


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


def without_gaps(value: Tensor) -> bool:
    """Whether the entries of a strided tensor are all of a stretch of memory, each once, in any order."""
    if value.is_contiguous():
        return True
    expected = 1
    for stride, size in sorted(zip(value.stride(), value.shape, strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """Dtype that norms of a gradient of ``dtype`` are accumulated in: float64 for doubles, else float32."""
    return torch.float64 if dtype in _WIDE else torch.float32


def scaled(dtype: torch.dtype) -> bool:
    """Whether squares are summed after division by the largest modulus, since they may leave float64."""
    return dtype in _WIDE


def write_norm(gradient: Tensor, slot: Tensor) -> None:
    """Write the l2 norm of ``gradient`` into the 0-d ``slot``: one reduction kernel, no new tensor.

    ``slot`` has the dtype ``accumulator(gradient.dtype)``; half precision is widened before squaring.
    """
    if gradient.dtype in (torch.float32, torch.float64, torch.complex64, torch.complex128):
        torch.linalg.vector_norm(gradient, out=slot)
    else:
        torch.linalg.vector_norm(gradient, dtype=slot.dtype, out=slot)


def dottable(gradient: Tensor) -> bool:
    """Whether ``write_square`` is faster and closer: large float32 on a CPU with MKL, whose dot uses all threads."""
    return (
        gradient.numel() >= _DOT
        and gradient.dtype is torch.float32
        and gradient.device.type == "cpu"
        and _MKL
        and gradient.is_contiguous()
    )


def write_square(gradient: Tensor, slot: Tensor) -> None:
    """Write the square of the l2 norm of a contiguous ``gradient`` into the 0-d ``slot`` of the same dtype."""
    flat = gradient.view(-1)
    torch.dot(flat, flat, out=slot)


def columns(values: Tensor, dtype: torch.dtype) -> Tensor:
    """The scalars of ``COLUMNS`` over the last dimension of ``values``, as float64 in the first dimension.

    Sums, norms and extrema are over the finite entries.  Squares are summed in float64, which holds the square of
    every float32; those of doubles after division by the largest modulus.  ``dtype`` is the gradient's own, for
    ``subnormal_count``; ``values`` may be wider.
    """
    wide = values.to(torch.promote_types(values.dtype, torch.float32))
    if not wide.shape[-1]:
        empty = wide.new_zeros((len(COLUMNS), *wide.shape[:-1]), dtype=torch.float64)
        empty[COLUMNS.index("min_abs_nonzero")] = math.inf
        return empty
    modulus = wide.abs()
    finite = torch.nan_to_num(modulus, nan=0.0, posinf=0.0)
    if wide.is_complex():
        real = torch.where(torch.isfinite(modulus), wide.real, 0)
    else:
        real = torch.nan_to_num(wide, nan=0.0, posinf=0.0, neginf=0.0)
    largest = finite.amax(-1)
    root = finite
    if scaled(dtype):
        root = finite / torch.where(largest > 0, largest, 1).unsqueeze(-1)
    vanished = finite == 0
    zero_or_nonfinite = _count(vanished)
    zero, nan = _count(modulus == 0), _count(torch.isnan(modulus))
    scalars = (
        real.sum(-1, dtype=torch.float64),
        finite.sum(-1, dtype=torch.float64),
        root.to(torch.float64).square_().sum(-1),
        largest,
        finite.masked_fill(vanished, math.inf).amin(-1),
        nan,
        zero_or_nonfinite - zero - nan,
        zero,
        _count(finite < FLUSH) - zero_or_nonfinite,
        _count(finite < torch.finfo(dtype).tiny) - zero_or_nonfinite,
        _count(finite > OVERFLOW),
    )
    return torch.stack([scalar.to(torch.float64) for scalar in scalars])


def _count(which: Tensor) -> Tensor:
    return torch.count_nonzero(which, dim=-1)


def whole(gradient: Tensor) -> Tensor:
    """The scalars of ``COLUMNS`` of a strided gradient, shape (11,), float64."""
    chunk = _CHUNK if gradient.device.type == "cpu" else _LARGE_CHUNK
    if gradient.numel() <= chunk or scaled(gradient.dtype) or not gradient.is_contiguous():
        return columns(gradient.reshape(-1), gradient.dtype)
    parts = [columns(part, gradient.dtype) for part in torch.split(gradient.view(-1), chunk)]
    return merged(torch.stack(parts, 1))


def merged(parts: Tensor) -> Tensor:
    """Columns of parts of one gradient, shape (11, parts), as those of the whole, shape (11,)."""
    return torch.cat([parts[:3].sum(1), parts[3:4].amax(1), parts[4:5].amin(1), parts[5:].sum(1)])


def merged_rows(rows: Sequence[Sequence[float]]) -> list[float]:
    """The same of rows on the host: each has the scalars of ``COLUMNS``."""
    by_column = list(zip(*rows, strict=True))
    sums = [sum(column) for column in by_column]
    return [*sums[:3], max(by_column[3]), min(by_column[4]), *sums[5:]]


def from_norm(value: float, numel: int) -> Statistics:
    """Statistics of level ``norm`` from a slot's value."""
    return Statistics("norm", numel, value)


def from_full(values: Sequence[float], numel: int, *, scaled: bool = False) -> Statistics:
    """Statistics of level ``full`` from a slot's values; ``scaled``: squares were divided by the largest squared."""
    row = dict(zip(COLUMNS, values, strict=True))
    counts: dict[str, Any] = {name: int(row[name]) for name in COLUMNS if name.endswith("_count")}
    smallest, root = row["min_abs_nonzero"], math.sqrt(row["square_sum"])
    return Statistics(
        level="full",
        numel=numel,
        l2_norm=row["max_abs"] * root if scaled else root,
        max_abs=row["max_abs"],
        min_abs_nonzero=smallest if 0 < smallest < math.inf else None,
        sum=row["sum"],
        abs_sum=row["abs_sum"],
        **counts,
    )
