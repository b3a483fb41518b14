"""The scalars of one tensor: of a gradient, or of a value in the forward pass."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from typing import Literal

from fxgrad.errors import OptionError
from fxgrad.schema.histogram import LARGEST, range_of, share_below
from fxgrad.schema.lines import in_a_line
from fxgrad.schema.precision import Fit, Moments
from fxgrad.schema.ranks import Placement
from fxgrad.schema.words import Level, NormWord

_MORE = 1 + 1e-5  # a norm is rounded


@in_a_line("level", "numel", "l2_norm", "max_abs", "nan_count", "inf_count", "zero_count")
@dataclass(frozen=True, slots=True, eq=False)
class Statistics:
    """Scalars of one gradient (one tensor, one backward event), or of one value in the forward pass.

    ``level`` says which fields are filled: ``"norm"`` fills ``numel`` and ``l2_norm`` (and so ``rms``), ``"full"``
    fills all but the histogram, ``"histogram"`` that too.  A field that its level does not fill is None, never zero.
    At ``full`` every sum, norm and extremum is over the finite entries; the counts say what was left out.  Moduli
    are used for complex gradients.

    Attributes:
        level: ``"norm"``, ``"full"`` or ``"histogram"``.
        numel: number of entries, NaN and Inf included.
        l2_norm: at ``norm`` accumulated in float32 (float64 for a float64 gradient), at ``full`` in float64, with
            doubles scaled by the largest entry, so that no non-zero gradient has norm 0.
        max_abs: largest finite modulus, 0.0 for an empty gradient.
        min_abs_nonzero: smallest non-zero finite modulus, None where there is none.
        sum: sum of the finite entries (real part for complex).
        abs_sum: sum of their moduli.
        nan_count, inf_count, zero_count: entries that are NaN, infinite, exactly zero.
        flush_count: non-zero entries that would round to zero in float16 (modulus below 2**-25).
        subnormal_count: non-zero entries below the smallest normal number of the gradient's own dtype.
        overflow_count: finite entries beyond the range of float16 (65504).
        exponent_histogram: finite non-zero entries by exponent, 64 counts: below 2**-46, then one binade each from
            2**-46 to 2**16, then what is above; see ``underflow_share`` and ``overflow_share``.
        placement: how a tensor that is spread over ranks lies on them; scalars and ``numel`` are of this rank's part
            then.  None for a plain tensor, and in a reduced flow.
    """

    level: Level
    numel: int
    l2_norm: float
    max_abs: float | None = None
    min_abs_nonzero: float | None = None
    sum: float | None = None
    abs_sum: float | None = None
    nan_count: int | None = None
    inf_count: int | None = None
    zero_count: int | None = None
    flush_count: int | None = None
    subnormal_count: int | None = None
    overflow_count: int | None = None
    exponent_histogram: tuple[int, ...] | None = None
    placement: Placement | None = None

    @property
    def rms(self) -> float:
        """``l2_norm / sqrt(numel)``; 0.0 for an empty gradient."""
        return self.l2_norm / math.sqrt(self.numel) if self.numel else 0.0

    @property
    def nonfinite(self) -> bool | None:
        """Whether an entry is NaN or Inf; None where the level cannot tell (an Inf norm at ``norm``)."""
        if self.nan_count is not None and self.inf_count is not None:
            return self.nan_count + self.inf_count > 0
        if math.isnan(self.l2_norm):
            return True
        return None if math.isinf(self.l2_norm) else False

    @property
    def outside_range(self) -> bool:
        """True where a ``norm`` of 0 or Inf may be the accumulator's doing and not the gradient's."""
        return self.level == "norm" and self.numel > 0 and (self.l2_norm == 0.0 or math.isinf(self.l2_norm))

    @property
    def all_zero(self) -> bool | None:
        """Whether every entry is exactly zero; None where the level cannot tell."""
        if self.zero_count is not None:
            return self.numel > 0 and self.zero_count == self.numel
        return None if self.outside_range else False

    def norm(self, which: NormWord) -> float | None:
        """The norm named ``which``; None where this level does not fill it."""
        value: float | None = getattr(self, which)
        return value

    def underflow_share(self, dtype: str, scale: float = 1.0) -> tuple[float, float] | None:
        """Share of the finite non-zero entries that ``dtype`` would round to zero at loss scale ``scale``.

        The gradient is multiplied by ``scale`` first.  The answer is the least and the most that the histogram allows;
        they are equal where ``scale`` is a power of two and the limit lies within 2**-46 to 2**16.  None without a
        histogram.

        Raises:
            OptionError: the dtype is not known, or the scale is not a positive number.
        """
        low, _ = range_of(dtype, scale)
        return self._share_below(low)

    def overflow_share(self, dtype: str, scale: float = 1.0) -> tuple[float, float] | None:
        """Share of the finite non-zero entries that leave the range of ``dtype`` at ``scale``; as ``underflow_share``.

        The least and the most differ by the bin that the largest number of ``dtype`` lies in.

        Raises:
            OptionError: the dtype is not known, or the scale is not a positive number.
        """
        _, high = range_of(dtype, scale)
        below = self._share_below(high)
        if below is None or not any(self.exponent_histogram or ()):
            return below
        return 1.0 - below[1], 1.0 - below[0]

    def fits(self, dtype: str, scale: float | Literal["tensor"] = 1.0) -> Fit:
        """How many of the finite non-zero entries ``dtype`` would hold, multiplied by ``scale`` first.

        At ``histogram`` the shares are exact where a limit is a power of two, else off by one bin at most; at ``full``
        they are bounded by the extrema and sums (float16 without a scale is counted); at ``norm`` the norm alone may
        tell that nothing is lost, or all.  An entry of exactly half of the smallest number counts as held.

        Args:
            dtype: ``"float16"``, ``"bfloat16"``, ``"float8_e4m3fn"``, ``"float8_e5m2"`` or ``"float32"``.
            scale: a positive number; ``"tensor"``: what brings the largest entry to the largest number of ``dtype``,
                as float8 training scales each tensor.

        Raises:
            OptionError: the dtype is not known, or the scale is none of these; ``"tensor"`` needs ``full``.
        """
        factor = self._scale_to(dtype) if scale == "tensor" else scale
        low, high = range_of(dtype, factor)
        under, below = self._below(low), self._below(high)
        over = (1.0 - below[1], 1.0 - below[0]) if self._any_nonzero() else (0.0, 0.0)
        if scale == "tensor":
            over = (0.0, 0.0)
        if self.level == "full" and (dtype, factor) == ("float16", 1.0) and (count := self._nonzero()):
            under = ((self.flush_count or 0) / count,) * 2
            over = (over[0], min(over[1], (self.overflow_count or 0) / count))
        return Fit(dtype, factor, under, over)

    def _scale_to(self, dtype: str) -> float:
        range_of(dtype, 1.0)
        if self.max_abs is None:
            message = "scale='tensor' needs the largest entry, which statistics='full' measures and 'norm' does not"
            raise OptionError(message)
        return LARGEST[dtype] / self.max_abs if self.max_abs else 1.0

    def _nonzero(self) -> int | None:
        """How many finite entries are not zero; None where the level cannot tell."""
        if self.zero_count is None:
            return None
        return self.numel - self.zero_count - (self.nan_count or 0) - (self.inf_count or 0)

    def _any_nonzero(self) -> bool:
        count = self._nonzero()
        return self.l2_norm != 0 if count is None else count > 0

    def _below(self, limit: float) -> tuple[float, float]:
        known = self._share_below(limit)
        if known is not None:
            return known
        if self.level == "norm":
            if not math.isfinite(self.l2_norm) or self.outside_range:
                return 0.0, 1.0
            return Moments(self.numel, largest=self.l2_norm * _MORE).below(limit)
        smallest, largest = self.min_abs_nonzero or 0.0, self.max_abs or 0.0
        count = self._nonzero() or 0
        return Moments(count, smallest, largest, self.abs_sum or 0.0, self.l2_norm**2, counted=True).below(limit)

    def divided(self, by: float) -> Statistics:
        """Those of the tensor divided by ``by``: norms, sums and extrema.

        Counts against a dtype's range and the histogram are of what was measured, and are left out.
        """
        sizes = ("l2_norm", "max_abs", "min_abs_nonzero", "sum", "abs_sum")
        found = {name: None if (value := getattr(self, name)) is None else value / by for name in sizes}
        gone = dict.fromkeys(("flush_count", "subnormal_count", "overflow_count", "exponent_histogram"))
        return replace(self, **found, **gone)  # type: ignore[arg-type]  # the sizes stay floats

    def _share_below(self, limit: float) -> tuple[float, float] | None:
        if self.exponent_histogram is None:
            return None
        return share_below(self.exponent_histogram, limit, (self.min_abs_nonzero or 0.0, self.max_abs or 0.0))

    def _comparable(self) -> tuple[object, ...]:
        values = (getattr(self, f.name) for f in fields(self))
        return tuple("nan" if isinstance(v, float) and math.isnan(v) else v for v in values)

    def __eq__(self, other: object) -> bool:
        """Field by field, NaN equal to NaN, so that a flow equals its own copy read from a file."""
        return self._comparable() == other._comparable() if isinstance(other, Statistics) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._comparable())
