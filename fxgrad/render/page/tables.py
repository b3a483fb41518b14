"""Columns of a page's JSON: words once each, numbers in few digits, statistics that are alike only once."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import fields

from fxgrad.schema import Statistics

__all__ = ["Number", "StatisticsTable", "Words", "number_of"]

_DIGITS = 6
_HISTOGRAM = "exponent_histogram"
#: JSON knows no NaN and Inf, so they are spelled.
Number = int | float | str | None


def number_of(value: float | None) -> Number:
    """A number with six digits, ``"NaN"``, ``"Infinity"``, ``"-Infinity"``, or None."""
    if value is None or isinstance(value, int):
        return value
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "Infinity" if value > 0 else "-Infinity"
    short = float(f"{value:.{_DIGITS}g}")
    return int(short) if short.is_integer() and abs(short) < 10**_DIGITS else short


class Words:
    """Words that are written once and meant by their number."""

    def __init__(self) -> None:
        self.listed: list[str] = []
        self._places: dict[str, int] = {}

    def place(self, word: str) -> int:
        """The number of a word."""
        if word not in self._places:
            self._places[word] = len(self.listed)
            self.listed.append(word)
        return self._places[word]

    def places(self, words: Iterable[str]) -> list[int]:
        """The numbers of several."""
        return [self.place(word) for word in words]


class StatisticsTable:
    """The statistics of values, edges and parameters, a column for each field."""

    _NAMES = tuple(f.name for f in fields(Statistics) if f.name != _HISTOGRAM)

    def __init__(self) -> None:
        self._places: dict[Statistics, int] = {}

    def place(self, statistics: Statistics | None) -> int:
        """The row of some statistics; -1 for none."""
        return -1 if statistics is None else self._places.setdefault(statistics, len(self._places))

    def columns(self) -> dict[str, list[object]]:
        """The columns by name; a histogram as its first bin that counts, and the counts from there on."""
        rows = list(self._places)
        found: dict[str, list[object]] = {}
        for name in self._NAMES:
            column = [getattr(row, name) for row in rows]
            if any(value is not None for value in column):
                found[name] = [value if isinstance(value, str) else number_of(value) for value in column]
        if any(row.exponent_histogram for row in rows):
            found["histogram"] = [_sparse(row.exponent_histogram) for row in rows]
        return found


def _sparse(histogram: Sequence[int] | None) -> list[int] | None:
    if histogram is None:
        return None
    counted = [place for place, count in enumerate(histogram) if count]
    return [counted[0], *histogram[counted[0] : counted[-1] + 1]] if counted else []
