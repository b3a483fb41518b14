"""A run as the data of a page: the norm of each value at each recorded event, in two bytes each."""

from __future__ import annotations

import base64
import gzip
import math
import sys
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from fxgrad.render.boxes import boxes_of
from fxgrad.render.page.payload import Data
from fxgrad.schema import FlowSeries, GradientFlow, History, Statistics
from fxgrad.series import evenly

__all__ = ["STEP", "Run", "course_data", "run_of"]

#: Parts of a decade: norms are told to 0.2 %.
STEP = 700
#: What is no ordinary number has a code of its own; the codes of norms begin above.
_NAN, _ZERO, _MISSING, _BELOW, _ABOVE, _INF = -32768, -32767, -32766, -32765, -32764, 32767
_LEAST = -32760
_VALUES = 2_000_000  # that one page holds
_EVENTS = 20_000  # of a longer run an even sample is shown
_BLOCKS = 40  # lines of the heat map


@dataclass(frozen=True, slots=True)
class Run:
    """A run on its way to the page.

    Attributes:
        shown: the flow that is kept with all its statistics.
        at: its place among the events.
        steps: numbers of the backward passes.
        rows: places of the sites whose course is told, in ``shown``.
        l2_norm, max_abs: a code for each row and event, row by row; ``max_abs`` None where it was not measured, or
            where there is no room for it.
        failed: events whose backward pass raised.
        left_out: how many events are left out.
    """

    shown: GradientFlow
    at: int
    steps: tuple[int, ...]
    rows: tuple[int, ...]
    l2_norm: array[int]
    max_abs: array[int] | None
    failed: tuple[int, ...]
    left_out: int

    @property
    def bad(self) -> tuple[int, ...]:
        """The events with NaN or Inf somewhere, or whose backward pass raised."""
        count = len(self.l2_norm) // max(1, len(self.rows))
        found = {place % count for place, code in enumerate(self.l2_norm) if code in (_NAN, _INF)}
        return tuple(sorted(found.union(self.failed)))


def run_of(flows: FlowSeries, steps: Sequence[int] | None = None, like: GradientFlow | None = None) -> Run:
    """The norms of a run, or of these ``steps`` of it; of the sites that ``like`` has, or else the flow that is shown.

    That is the first with NaN or Inf, or whose backward pass raised; without any, the latest.
    """
    count = len(flows) if steps is None else len(steps)
    kept = evenly(count, _EVENTS)
    base = like or (flows[len(flows) - 1] if steps is None else flows.flow(steps[-1]))
    most = max(1, _VALUES // len(kept))
    rows = _rows(base, most)
    largest = base.event.level != "norm" and 2 * len(rows) <= most
    table = _Table(base, rows, len(kept), largest=largest)
    if steps is None and not isinstance(flows, History):
        numbers = table.filled_by_column(flows, kept)
    else:
        numbers = tuple(table.filled(_chosen(flows, steps, kept)))
    made = Run(
        base, len(numbers) - 1, numbers, rows, table.l2_norm, table.max_abs, tuple(table.failed), count - len(kept)
    )  # fmt: skip
    if steps is not None or not made.bad:
        return made
    first = made.bad[0]
    shown = flows[kept[first]]
    same = [site.id for site in shown.sites] == [site.id for site in base.sites]
    return replace(made, shown=shown, at=first) if same else made


def _chosen(flows: FlowSeries, steps: Sequence[int] | None, kept: Sequence[int]) -> Iterator[GradientFlow]:
    if steps is None:
        yield from flows if len(kept) == len(flows) else (flows[place] for place in kept)
        return
    wanted = [steps[place] for place in kept]
    if isinstance(flows, History):
        known = {flow.event.backward: flow for flow in flows}
        yield from (known[step] for step in wanted)
    else:
        yield from map(flows.flow, wanted)


def _rows(flow: GradientFlow, most: int) -> tuple[int, ...]:
    """The sites to tell of: all that have a gradient, or the boundaries of blocks first where these are too many."""
    need_none = ("integer", "no_grad_required", "no_grad_region")
    blind = {spot.id for spot in flow.blind_spots if spot.consumer is None and spot.reason in need_none}
    every = [place for place, site in enumerate(flow.sites) if site.id not in blind]
    if len(every) <= most:
        return tuple(every)
    number = {site.id: place for place, site in enumerate(flow.sites)}
    first = [number[site.id] for box in boxes_of(flow, None, fold=True, readable=most)[0] for site in box.outputs]
    first += [number[name] for call in flow.calls for name in call.outputs if name in number]
    first += [every[n] for n in evenly(len(every), most)]
    return tuple(sorted(list(dict.fromkeys(first))[:most]))


class _Table:
    """Codes that are filled event by event."""

    def __init__(self, base: GradientFlow, rows: Sequence[int], events: int, *, largest: bool) -> None:
        self._level = base.event.level
        self._ids = [base.sites[place].id for place in rows]
        self._events = events
        blank = array("h", [_MISSING]) * (events * len(rows))
        self.l2_norm, self.max_abs = blank, blank[:] if largest else None
        self.failed: list[int] = []

    def filled(self, flows: Iterable[GradientFlow]) -> Iterator[int]:
        """Fill in the flows, and give the number of each."""
        for event, flow in enumerate(flows):
            if event >= self._events:  # written since it was counted
                return
            if flow.event.failed is not None:
                self.failed.append(event)
            found = {site.id: site.statistics for site in flow.sites}
            for row, name in enumerate(self._ids):
                statistics = found.get(name)
                if statistics is not None:
                    self._put(row * self._events + event, statistics)
            yield flow.event.backward

    def filled_by_column(self, flows: FlowSeries, kept: Sequence[int]) -> tuple[int, ...]:
        """The same for a run file, which gives one number over all flows much faster than flow by flow.

        It does not tell of backward passes that raised.
        """
        steps: tuple[int, ...] = ()
        for row, name in enumerate(self._ids):
            norms = flows.series(name)
            steps = norms.steps
            most = [None] * len(steps) if self.max_abs is None else flows.series(name, "max_abs").values
            bad: set[int] = set()
            if self._level != "norm":
                for word in ("nan_count", "inf_count"):
                    bad.update(n for n, count in enumerate(flows.series(name, word).values) if count)
            for event, n in enumerate(place for place in kept if place < len(steps)):
                place, norm, largest = row * self._events + event, norms.values[n], most[n]
                if norm is not None:
                    self.l2_norm[place] = self._single(norm, bad=n in bad)
                if self.max_abs is not None and largest is not None:
                    self.max_abs[place] = self._single(largest, bad=n in bad)
        return tuple(steps[place] for place in kept if place < len(steps))

    def _single(self, value: float, *, bad: bool) -> int:
        statistics = Statistics(self._level, 1, value, nan_count=int(bad), inf_count=0)
        return _code(Statistics("norm", 1, value) if self._level == "norm" else statistics, value)

    def _put(self, place: int, statistics: Statistics) -> None:
        self.l2_norm[place] = _code(statistics, statistics.l2_norm)
        if self.max_abs is not None and statistics.max_abs is not None:
            self.max_abs[place] = _code(statistics, statistics.max_abs)


def _code(statistics: Statistics, value: float) -> int:
    if statistics.nonfinite:
        return _NAN
    if statistics.outside_range:
        return _BELOW if statistics.l2_norm == 0 else _ABOVE
    if value == 0:
        return _ZERO
    return min(max(round(math.log10(value) * STEP), _LEAST), _INF - 1) if math.isfinite(value) else _INF


def course_data(run: Run) -> Data:
    """The run as JSON values."""
    sites = {site.id: place for place, site in enumerate(run.shown.sites)}
    boxes, _ = boxes_of(run.shown, None, fold=True, readable=_BLOCKS)
    blocks = [one for box in boxes for one in (box.blocks if 0 < len(box.blocks) <= _BLOCKS - len(boxes) else [box])]
    told = set(run.rows)
    lines = [(box.name, [sites[site.id] for site in box.outputs if sites[site.id] in told]) for box in blocks]
    bad = run.bad
    return {
        "backward": list(run.steps),
        "events": len(run.l2_norm) // max(1, len(run.rows)),
        "rows": list(run.rows),
        "step": STEP,
        "l2_norm": _packed(run.l2_norm),
        "max_abs": None if run.max_abs is None else _packed(run.max_abs),
        "bad": list(bad[:1000]),
        "shown": run.at,
        "left_out": run.left_out,
        "blocks": [{"name": name, "sites": places} for name, places in lines if places][: 2 * _BLOCKS],
    }


def _packed(codes: array[int]) -> str:
    """Little-endian, the lower bytes first and then the upper ones, which are much alike, so that they pack well."""
    plain = codes[:]
    if sys.byteorder == "big":
        plain.byteswap()
    content = plain.tobytes()
    return base64.b64encode(gzip.compress(content[::2] + content[1::2], 6, mtime=0)).decode("ascii")
