"""The histogram of exponents: which share of a gradient another dtype would lose at another loss scale."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from fxgrad.errors import OptionError

BINS = 64
#: Bin 0 has moduli below ``2**LOWEST``, bin i those from ``2**(LOWEST + i - 1)`` up to twice that, the last all above.
LOWEST = -46
#: Moduli below the first number round to zero (half of the smallest), those from the second on leave the range.
RANGES: Mapping[str, tuple[float, float]] = {
    "float8_e4m3fn": (2.0**-10, 464.0),
    "float8_e5m2": (2.0**-17, 61440.0),
    "float16": (2.0**-25, 65520.0),
    "bfloat16": (2.0**-134, 2.0**128),
    "float32": (2.0**-150, 2.0**128),
}

#: The largest number of each.
LARGEST: Mapping[str, float] = {
    "float8_e4m3fn": 448.0,
    "float8_e5m2": 57344.0,
    "float16": 65504.0,
    "bfloat16": (2.0 - 2.0**-7) * 2.0**127,
    "float32": (2.0 - 2.0**-23) * 2.0**127,
}


def range_of(dtype: str, scale: float) -> tuple[float, float]:
    """The moduli between which ``dtype`` holds a gradient that is multiplied by ``scale`` first.

    Raises:
        OptionError: the dtype is not known, or the scale is not a positive number.
    """
    if dtype not in RANGES:
        message = f"dtype={dtype!r} is not known; it is one of {', '.join(map(repr, RANGES))}"
        raise OptionError(message)
    if not (math.isfinite(scale) and scale > 0):
        message = f"scale must be a positive number, the loss scale, but is {scale!r}"
        raise OptionError(message)
    low, high = RANGES[dtype]
    return low / scale, high / scale


def share_below(histogram: Sequence[int], limit: float, extrema: tuple[float, float]) -> tuple[float, float]:
    """Least and most share of the entries with a modulus below ``limit``: equal where ``limit`` is the edge of a bin.

    ``extrema`` are the smallest and the largest modulus.
    """
    total = sum(histogram)
    if not total or limit <= extrema[0]:
        return 0.0, 0.0
    if limit > extrema[1]:
        return 1.0, 1.0
    exact = math.log2(limit) - LOWEST
    split = min(max(math.floor(exact) + 1, 0), BINS - 1)  # the bin that ``limit`` lies in
    least = sum(histogram[:split])
    on_edge = exact.is_integer() and 0 <= exact <= BINS - 2
    return least / total, (least if on_edge else least + histogram[split]) / total
