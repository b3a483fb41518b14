"""The scalars of one tensor: of a gradient, or of a value in the forward pass."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from fxgrad.schema.histogram import range_of, share_below
from fxgrad.schema.lines import in_a_line
from fxgrad.schema.ranks import Placement
from fxgrad.schema.words import Level, NormWord


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
