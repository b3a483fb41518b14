"""What several ranks measured in one backward event as one flow: a pure function of their records.

Most ranks' course is the frame; nodes that only others ran are put in where those ran them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from fxgrad.record.rank_facts import Facts, with_facts
from fxgrad.record.rows import L2, NUMEL, Key, keys_of, merged, spreads, statistics_of
from fxgrad.schema import GradientFlow, Node, OtherCourse, Ranks, Spread, Statistics

__all__ = ["Part", "course_of", "together"]


_ROWS = 256  # that are merged at a time


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """What one rank measured in one backward event.

    Attributes:
        rank: whose.
        course: names the course of operators and what there was to measure (``course_of``).
        facts: what is not a statistic.
        rows: the statistics, in the order of ``keys_of`` a flow of that course; float64, shape (rows, width).
    """

    rank: int
    course: str
    facts: Facts
    rows: Tensor


def course_of(flow: GradientFlow) -> str:
    """A short name of what a flow has places for: equal where rows of two flows mean the same."""
    calls = [(call.path, call.call_index, call.inputs, call.outputs) for call in flow.calls]
    edges = [(edge.producer, edge.output_position, edge.consumer.key, edge.consumer.argument) for edge in flow.edges]
    facts = ([tuple(key) for key in keys_of(flow)], [node.key for node in flow.nodes], calls, edges)
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:24]


def together(parts: Sequence[Part], courses: Mapping[str, GradientFlow], size: int) -> GradientFlow:
    """The flow of all ranks.

    Args:
        parts: of the ranks that took part, at least one, in any order.
        courses: a flow of each course among them; its numbers do not matter.
        size: how many ranks there are.
    """
    everybody = sorted(parts, key=lambda part: part.rank)
    parts = [part for part in everybody if part.facts.event.failed is None] or everybody
    by_course: dict[str, list[Part]] = {}
    for part in parts:
        by_course.setdefault(part.course, []).append(part)
    ordered = sorted(by_course, key=lambda course: (-len(by_course[course]), by_course[course][0].rank))
    flow = courses[ordered[0]]
    for course in ordered[1:]:
        flow = united(flow, courses[course])
    ranks = [part.rank for part in parts]
    measured = _measured(parts, {course: keys_of(courses[course]) for course in ordered}, keys_of(flow))
    flow = with_facts(_filled(flow, measured), parts, {course: courses[course] for course in ordered})
    others = tuple(
        _other(courses[ordered[0]], courses[course], [part.rank for part in by_course[course]])
        for course in ordered[1:]
    )
    events = {part.rank: part.facts.event.backward for part in everybody}
    failed = tuple(part.rank for part in everybody if part.facts.event.failed is not None)
    worst, worst_at = _worst(flow, measured, several=len(ranks) > 1)
    told = Ranks(
        size, worst, worst_at, tuple(rank for rank in range(size) if rank not in events), failed, others,
        tuple(events.get(rank, -1) for rank in range(size)),
    )  # fmt: skip
    return replace(flow, ranks=told)


@dataclass(frozen=True, slots=True)
class _Measured:
    """Of one value or parameter: the statistics of all ranks, how they differ, and how far the worst stands out."""

    statistics: Statistics | None
    spread: Spread | None
    apart: float


def _measured(parts: Sequence[Part], own: Mapping[str, list[Key]], keys: list[Key]) -> dict[Key, _Measured]:
    """What all ranks measured, by key; some rows at a time, since those of a thousand ranks are many."""
    width = max(part.rows.shape[1] for part in parts)
    place = {course: {key: number for number, key in enumerate(named)} for course, named in own.items()}
    index = {course: torch.tensor([known.get(key, -1) for key in keys]) for course, known in place.items()}
    ranks = [part.rank for part in parts]
    found: list[_Measured] = []
    for first in range(0, len(keys), _ROWS):
        rows = torch.zeros(len(parts), min(_ROWS, len(keys) - first), width, dtype=torch.float64)
        for number, part in enumerate(parts):
            where = index[part.course][first : first + _ROWS]
            rows[number, where >= 0, : part.rows.shape[1]] = part.rows[where[where >= 0]]
        statistics = map(statistics_of, merged(rows).tolist())
        found += map(_Measured, statistics, spreads(rows, ranks), _apart(rows))
    return dict(zip(keys, found, strict=True))


def _apart(rows: Tensor) -> list[float]:
    """By row, the largest rms over the ranks' median."""
    rms = rows[..., L2] / rows[..., NUMEL].clamp(min=1).sqrt()
    largest, middle = rms.amax(0), rms.median(0).values
    ratio: list[float] = torch.where(middle > 0, largest / middle, torch.where(largest > 0, torch.inf, 0.0)).tolist()
    return ratio


def _filled(flow: GradientFlow, measured: Mapping[Key, _Measured]) -> GradientFlow:
    """The flow with these statistics in place of its own."""
    nothing = _Measured(None, None, 0.0)
    sites = tuple(
        replace(
            site, statistics=(one := measured[Key("site", site.id)]).statistics, spread=one.spread,
            value=measured.get(Key("value", site.id), nothing).statistics,
        )
        for site in flow.sites
    )  # fmt: skip
    edges = flow.edges
    if flow.event.sites == "edge":
        found = [one.statistics for key, one in measured.items() if key.kind == "edge"]
        edges = tuple(replace(edge, statistics=one) for edge, one in zip(flow.edges, found, strict=True))
    parameters = tuple(
        replace(
            record, statistics=(one := measured[Key("parameter", record.name)]).statistics, spread=one.spread,
            value=measured.get(Key("state", record.name), nothing).statistics,
            reason=None if one.statistics is not None else record.reason or "not_reached",
        )
        for record in flow.parameters
    )  # fmt: skip
    seen = {site.id for site in sites if site.statistics is not None}
    used = {(e.producer + e.output_position, e.consumer) for e in edges if e.statistics is not None}
    spots = tuple(
        spot for spot in flow.blind_spots
        if (spot.id not in seen if spot.consumer is None else (spot.id, spot.consumer) not in used)
    )  # fmt: skip
    return replace(flow, sites=sites, edges=edges, parameters=parameters, blind_spots=spots)


def _worst(
    flow: GradientFlow, measured: Mapping[Key, _Measured], *, several: bool
) -> tuple[int | None, str | None]:  # fmt: skip
    """The rank that stands out most, and where; of several with NaN or Inf, the nearest to the loss."""
    named = [Key("site", site.id) for site in flow.sites] + [Key("parameter", one.name) for one in flow.parameters]
    there = [(key, one, one.spread) for key in named if (one := measured[key]).spread is not None]
    odd = [(key, spread) for key, _, spread in there if spread is not None and spread.nonfinite]
    if odd:
        key, spread = next((one for one in reversed(odd) if one[0].kind == "site"), odd[-1])
        return spread.worst, key.name
    if not several or not there:
        return None, None
    key, _, most = max(there, key=lambda one: one[1].apart)
    return (None, None) if most is None else (most.worst, key.name)


def _other(most: GradientFlow, flow: GradientFlow, ranks: Sequence[int]) -> OtherCourse:
    here, there = (dict.fromkeys(node.key for node in one.nodes) for one in (flow, most))
    return OtherCourse(
        tuple(ranks), tuple(key for key in there if key not in here), tuple(key for key in here if key not in there)
    )


# ---- the graphs of several courses --------------------------------------------------------------------------------

Record = TypeVar("Record")


def united(first: GradientFlow, second: GradientFlow) -> GradientFlow:
    """The first flow with what only the second has, in the order in which it ran there; numbers are those of either."""
    nodes = _woven(first.nodes, second.nodes, lambda node: node.key)
    sites = _woven(first.sites, second.sites, lambda site: site.id)
    nodes = _named_apart(nodes)
    known = {node.key: node for node in nodes}
    return replace(
        first,
        nodes=nodes,
        sites=tuple(replace(site, node=known[site.key]) for site in sites),
        edges=_woven(first.edges, second.edges, lambda e: (e.producer, e.output_position, e.consumer)),
        parameters=_woven(first.parameters, second.parameters, lambda record: record.name),
        blind_spots=_woven(first.blind_spots, second.blind_spots, lambda spot: (spot.id, spot.consumer)),
        calls=_woven(first.calls, second.calls, lambda call: (call.path, call.call_index)),
        buffers=_woven(first.buffers, second.buffers, lambda buffer: buffer.name),
    )


def _woven(first: Sequence[Record], second: Sequence[Record], key: Any) -> tuple[Record, ...]:
    """Both, in the order of each; what only the second has stands behind what is before it there."""
    known = {key(one) for one in first}
    behind: dict[Any, list[Record]] = {}
    last = None
    for one in second:
        name = key(one)
        if name in known:
            last = name
        else:
            behind.setdefault(last, []).append(one)
    woven = list(behind.get(None, ()))
    for one in first:
        woven.append(one)
        woven += behind.get(key(one), ())
    return tuple(woven)


def _named_apart(nodes: Sequence[Node]) -> tuple[Node, ...]:
    """torch.fx names are unique within one graph, not within two."""
    seen: set[str] = set()
    found = []
    for node in nodes:
        name, count = node.name, 0
        while name in seen:
            count += 1
            name = f"{node.name}_{count}"
        seen.add(name)
        found.append(node if name == node.name else replace(node, name=name))
    return tuple(found)
