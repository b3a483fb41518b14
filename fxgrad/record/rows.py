"""The statistics of a flow as rows of numbers, and the rows of many ranks as those of one: a pure function.

What ranks measured is merged as if their tensors were one, put together: squares and sums are added, extrema are
compared, counts are added as whole numbers.  Sums are rounded once, whatever the order of the ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fxgrad.schema import GradientFlow, Spread, Statistics
from fxgrad.schema.histogram import BINS

__all__ = ["L2", "NUMEL", "WIDTHS", "Key", "keys_of", "merged", "rows_of", "spreads", "statistics_of"]

#: A row: the level (0: not measured), which copy it is, then the scalars, as many as the level fills, then the bins.
_LEVELS = ("norm", "full", "histogram")
_SCALARS = (
    "numel", "l2_norm", "max_abs", "min_abs_nonzero", "sum", "abs_sum", "nan_count", "inf_count", "zero_count",
    "flush_count", "subnormal_count", "overflow_count",
)  # fmt: skip
_HEAD = 2
LEVEL, COPY, NUMEL, L2, MAX, MIN, SUM, ABS_SUM, COUNTS = range(9)
_END = _HEAD + len(_SCALARS)
WIDTHS = (L2 + 1, _END, _END + BINS)
_OWN = -1.0  # which copy: this rank's tensor is its own, and no part or copy of one that all ranks share


class Key(NamedTuple):
    """Whose row it is.

    ``kind``: ``"site"``, ``"edge"``, ``"parameter"``: gradients; ``"value"``, ``"state"``: values of sites and
    parameters.
    """

    kind: str
    name: str


def keys_of(flow: GradientFlow) -> list[Key]:
    """Whose rows ``rows_of`` gives, in its order."""
    return [key for key, _ in _entries(flow)]


def _entries(flow: GradientFlow) -> Iterator[tuple[Key, Statistics | None]]:
    for site in flow.sites:
        yield Key("site", site.id), site.statistics
    if flow.event.sites == "edge":
        for edge in flow.edges:
            use = f"{edge.producer}{edge.output_position} {edge.consumer.key} {edge.consumer.argument}"
            yield Key("edge", use), edge.statistics
    for parameter in flow.parameters:
        yield Key("parameter", parameter.name), parameter.statistics
    if flow.event.values:
        for site in flow.sites:
            yield Key("value", site.id), site.value
        for parameter in flow.parameters:
            yield Key("state", parameter.name), parameter.value


def rows_of(flow: GradientFlow, rank: int) -> Tensor:
    """The statistics of ``flow``, float64 of shape (rows, width); the width is one of ``WIDTHS``.

    A parameter that is no part of a larger one is taken to be the same on all ranks: its value is copy ``rank``.
    """
    entries = list(_entries(flow))
    deepest = max((_LEVELS.index(found.level) for _, found in entries if found is not None), default=0)
    width = WIDTHS[deepest]
    rows = [_row(found, width, float(rank) if key.kind == "state" else _OWN) for key, found in entries]
    return torch.tensor(rows, dtype=torch.float64).reshape(len(rows), width)


def _row(found: Statistics | None, width: int, copy: float) -> list[float]:
    if found is None:
        return [0.0] * width
    if found.placement is not None:
        copy = float(found.placement.copy)
    row = [1.0 + _LEVELS.index(found.level), copy]
    if found.level == "norm":
        row += [float(found.numel), found.l2_norm]
    else:
        row += [_number(getattr(found, name)) for name in _SCALARS]
        row += map(float, found.exponent_histogram or ())
    return row + [0.0] * (width - len(row))


def _number(scalar: float | None) -> float:
    return math.inf if scalar is None else float(scalar)  # None: no smallest non-zero modulus


def statistics_of(row: Sequence[float]) -> Statistics | None:
    """The statistics that a row holds; None where it holds none."""
    if not row[LEVEL]:
        return None
    level: Any = _LEVELS[int(row[LEVEL]) - 1]
    if level == "norm":
        return Statistics("norm", int(row[NUMEL]), row[L2])
    scalars: dict[str, Any] = dict(zip(_SCALARS, row[_HEAD:_END], strict=True))
    for name, scalar in scalars.items():
        if name == "numel" or name.endswith("_count"):
            scalars[name] = int(scalar)
    scalars["min_abs_nonzero"] = None if math.isinf(row[MIN]) else row[MIN]
    bins = tuple(map(int, row[_END:])) if level == "histogram" else None
    return Statistics(level, exponent_histogram=bins, **scalars)


def merged(rows: Tensor) -> Tensor:
    """The rows of the ranks, shape (ranks, rows, width), as those of all of them together, shape (rows, width).

    Of equal copies the first counts.  A row has the level that all have.
    """
    there = rows[..., LEVEL] > 0
    counted = there & (rows[..., COPY] == _first_copy(rows, there))
    parts = torch.where(counted.unsqueeze(-1), rows, 0.0)
    result = torch.zeros(rows.shape[1:], dtype=torch.float64)
    level = torch.where(counted, rows[..., LEVEL], math.inf).amin(0)
    result[:, LEVEL] = torch.where(counted.any(0), level, 0.0)
    result[:, COPY] = _first_copy(rows, there)
    result[:, NUMEL] = parts[..., NUMEL].sum(0)
    result[:, L2] = _joint(parts[..., L2])
    if rows.shape[-1] > WIDTHS[0]:
        full = counted & (rows[..., LEVEL] > 1)
        result[:, MAX] = parts[..., MAX].amax(0)
        result[:, MIN] = torch.where(full, rows[..., MIN], math.inf).amin(0)
        result[:, SUM], result[:, ABS_SUM] = _added(parts[..., SUM]), _added(parts[..., ABS_SUM])
        result[:, COUNTS:] = parts[..., COUNTS:].sum(0)  # whole numbers below 2**53: exact in any order
        result[level == 1, MAX:] = 0.0
    return result


def _first_copy(rows: Tensor, there: Tensor) -> Tensor:
    """By row, the copy that counts: the lowest that is there."""
    lowest = torch.where(there, rows[..., COPY], math.inf).amin(0)
    return torch.where(torch.isinf(lowest), 0.0, lowest)


def _joint(norms: Tensor) -> Tensor:
    """The root of the sum of squares over the first dimension, scaled by the largest so that no square is lost."""
    largest = norms.amax(0)
    usable = (largest > 0) & torch.isfinite(largest)
    scaled = torch.where(usable, norms / torch.where(usable, largest, 1.0), 0.0)
    return torch.where(usable, largest * _added(scaled.square()).sqrt(), largest)


def _added(parts: Tensor) -> Tensor:
    """The sums over the first dimension, each rounded once."""
    return torch.tensor([_sum(column) for column in parts.t().tolist()], dtype=torch.float64)


def _sum(parts: Sequence[float]) -> float:
    try:
        return math.fsum(parts)
    except (OverflowError, ValueError):  # beyond the largest number on the way, or Inf of both signs
        return sum(sorted(parts))


def spreads(rows: Tensor, ranks: Sequence[int]) -> list[Spread | None]:
    """By row, how the ranks differ; ``rows`` as for ``merged``, of these ranks.  None where no rank measured it."""
    there = rows[..., LEVEL] > 0
    rms = torch.where(there, rows[..., L2] / rows[..., NUMEL].clamp(min=1).sqrt(), -1.0)
    odd = there & ~torch.isfinite(rows[..., L2])
    zero = torch.zeros_like(odd)  # at ``norm`` nobody counted
    if rows.shape[-1] > WIDTHS[0]:
        odd = odd | (there & (rows[..., COUNTS : COUNTS + 2].sum(-1) > 0))
        zero = (rows[..., LEVEL] > 1) & (rows[..., COUNTS + 2] == rows[..., NUMEL]) & (rows[..., NUMEL] > 0)
    worst = torch.where(odd, math.inf, rms).argmax(0).tolist()
    largest, smallest = rms.amax(0).tolist(), torch.where(there, rms, math.inf).amin(0).tolist()
    sets = [_named(which, ranks) for which in (odd, zero, ~there)]
    return [
        Spread(ranks[worst[n]], largest[n], smallest[n], *(named[n] for named in sets)) if any_there else None
        for n, any_there in enumerate(there.any(0).tolist())
    ]


def _named(which: Tensor, ranks: Sequence[int]) -> list[tuple[int, ...]]:
    """By row, the ranks for which ``which`` of shape (ranks, rows) holds."""
    found: list[list[int]] = [[] for _ in range(which.shape[1])]
    for row, place in which.t().nonzero().tolist():
        found[row].append(ranks[place])
    return [tuple(one) for one in found]
