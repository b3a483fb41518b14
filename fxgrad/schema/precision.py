"""Which share of a gradient, or of a value, another dtype would hold: exact where the statistics say, else bounds."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fxgrad.schema.lines import in_a_line

if TYPE_CHECKING:
    from fxgrad.schema.statistics import Statistics

#: What ``GradientFlow.precision`` asks about unless it is told otherwise.
DTYPES = ("float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")
Share = tuple[float, float]


@in_a_line("dtype", "scale", "share", "underflow", "overflow")
@dataclass(frozen=True, slots=True)
class Fit:
    """How many of the finite non-zero entries a dtype would hold.

    Each share is the least and the most that the statistics allow; they are equal where these tell it exactly.

    Attributes:
        dtype: the dtype that was asked about.
        scale: what the entries are multiplied by first.
        underflow: share of them that would round to zero.
        overflow: share of them that would leave the range.
    """

    dtype: str
    scale: float
    underflow: Share
    overflow: Share

    @property
    def share(self) -> Share:
        """Share of them that would do neither."""
        least = 1.0 - self.underflow[1] - self.overflow[1]
        return max(0.0, least), max(0.0, 1.0 - self.underflow[0] - self.overflow[0])

    @property
    def exact(self) -> bool:
        """Whether the statistics tell both shares exactly."""
        return self.underflow[0] == self.underflow[1] and self.overflow[0] == self.overflow[1]

    def __str__(self) -> str:
        """``fits float8_e4m3fn: 99.2 %``, and what does not."""
        lost = [
            f"{percent(share)} {word}" for share, word in ((self.underflow, "underflow"), (self.overflow, "overflow"))
            if share[1] > 0
        ]  # fmt: skip
        return f"fits {self.dtype}: {percent(self.share)}" + (f" ({', '.join(lost)})" if lost else "")


@in_a_line("name", "dtype", "zero", "subnormal", "nonfinite")
@dataclass(frozen=True, slots=True)
class PrecisionRow:
    """One gradient (or value, or parameter's gradient) against the dtype that it has, and those that it could have.

    Attributes:
        name: ``Site.id``, or the parameter's name.
        dtype: that it has.
        zero: share of its entries that are exactly zero, underflow in its own dtype included; None at ``norm``.
        subnormal: share of its entries that are below the smallest normal number of its dtype; None at ``norm``.
        nonfinite: share of its entries that are NaN or Inf, overflow in its own dtype included; None at ``norm``.
        fits: one per dtype that was asked about.
    """

    name: str
    dtype: str
    zero: float | None
    subnormal: float | None
    nonfinite: float | None
    fits: tuple[Fit, ...]


class Precision(tuple[PrecisionRow, ...]):
    """The rows of ``GradientFlow.precision``, in forward order; prints as a table."""

    __slots__ = ()

    def __str__(self) -> str:
        """A line for each, with what would be lost."""
        return "\n".join(line.rstrip() for line in _aligned(list(self._cells())))

    def _cells(self) -> Iterator[tuple[str, ...]]:
        dtypes = [fit.dtype for fit in self[0].fits] if self else []
        yield ("", "dtype", "zero", "subnormal", "NaN, Inf", *dtypes)
        for row in self:
            own = (_one(row.zero), _one(row.subnormal), _one(row.nonfinite))
            yield (row.name, row.dtype, *own, *(percent(fit.share) for fit in row.fits))


def _aligned(cells: Sequence[tuple[str, ...]]) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for row in cells:
        yield "  ".join(
            cell.ljust(width) if at < 2 else cell.rjust(width)  # noqa: PLR2004  # two columns of words
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        )


def percent(share: Share) -> str:
    """Such as ``99.2 %``, ``> 99.9 %``, ``12.0 to 50.0 %``; all and nothing are said only of all and nothing."""
    least, most = share
    return _one(least) if least == most else f"{100 * least:.1f} to {100 * most:.1f} %"


def _one(share: float | None) -> str:
    if share is None:
        return "-"
    if 0 < share < 0.001:  # noqa: PLR2004  # what would be printed as 0.0
        return "< 0.1 %"
    if 0.999 < share < 1:  # noqa: PLR2004  # what would be printed as 100.0
        return "> 99.9 %"
    return f"{100 * share:.0f} %" if share in (0, 1) else f"{100 * share:.1f} %"


@dataclass(frozen=True, slots=True)
class Moments:
    """What ``full`` and ``norm`` know of the moduli of the finite entries; bounds of shares come from them.

    Attributes:
        count: non-zero entries; where that is not known, the most there can be.
        smallest, largest: moduli of non-zero entries, or the nearest that is known of them.
        abs_sum, square_sum: over the entries.
        counted: whether ``count`` is known, and the sums.
    """

    count: int
    smallest: float = 0.0
    largest: float = 0.0
    abs_sum: float = 0.0
    square_sum: float = 0.0
    counted: bool = False

    def below(self, limit: float) -> Share:
        """Least and most share of the non-zero entries with a modulus below ``limit``."""
        if not self.count or limit <= self.smallest:
            return 0.0, 0.0
        if limit > self.largest:
            return 1.0, 1.0
        if not self.counted:
            return 0.0, 1.0
        n, square = self.count, limit * limit
        most = min(n, math.floor(_MORE * self.abs_sum / limit), math.floor(_MORE * self.square_sum / square))
        # What they add up to needs so many of the largest.
        least = 1
        if self.largest > limit:
            least = max(least, math.ceil((self.abs_sum / _MORE - n * limit) / (self.largest - limit)))
            least = max(least, math.ceil((self.square_sum / _MORE - n * square) / (self.largest**2 - square)))
        at_least_one_below = n - 1
        return 1.0 - max(min(most, at_least_one_below), least) / n, 1.0 - min(least, n) / n


_MORE = 1 + 1e-5  # sums are rounded


def precision_row(name: str, dtype: str, statistics: Statistics, dtypes: Sequence[str], scale: float) -> PrecisionRow:
    """One row of the table."""
    total = statistics.numel or 1
    zero, subnormal = statistics.zero_count, statistics.subnormal_count
    bad = None if statistics.nan_count is None else statistics.nan_count + (statistics.inf_count or 0)
    own = [None if count is None else count / total for count in (zero, subnormal, bad)]
    return PrecisionRow(name, dtype, own[0], own[1], own[2], tuple(statistics.fits(one, scale) for one in dtypes))


__all__ = ["DTYPES", "Fit", "Moments", "Precision", "PrecisionRow", "percent", "precision_row"]
