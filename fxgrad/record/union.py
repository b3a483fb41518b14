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
from fxgrad.record.rows import Key, keys_of, merged, spreads, statistics_of
from fxgrad.schema import GradientFlow, Node, OtherCourse, Ranks, Spread, Statistics

__all__ = ["Part", "course_of", "together"]


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
    keys = keys_of(flow)
    rows = _stacked(parts, {course: keys_of(courses[course]) for course in ordered}, keys)
    ranks = [part.rank for part in parts]
    numbers = dict(zip(keys, map(statistics_of, merged(rows).tolist()), strict=True))
    apart = dict(zip(keys, spreads(rows, ranks), strict=True))
    flow = with_facts(_filled(flow, numbers, apart), parts, {course: courses[course] for course in ordered})
    others = tuple(
        _other(courses[ordered[0]], courses[course], [part.rank for part in by_course[course]])
        for course in ordered[1:]
    )
    events = {part.rank: part.facts.event.backward for part in everybody}
    failed = tuple(part.rank for part in everybody if part.facts.event.failed is not None)
    worst, worst_at = _worst(flow, rows, keys, ranks)
    told = Ranks(
        size, worst, worst_at, tuple(rank for rank in range(size) if rank not in events), failed, others,
        tuple(events.get(rank, -1) for rank in range(size)),
    )  # fmt: skip
    return replace(flow, ranks=told)


def _stacked(parts: Sequence[Part], own: Mapping[str, list[Key]], keys: list[Key]) -> Tensor:
    """The rows of all parts in the order of ``keys``; zeros where a part has none."""
    width = max(part.rows.shape[1] for part in parts)
    rows = torch.zeros(len(parts), len(keys), width, dtype=torch.float64)
    place = {key: number for number, key in enumerate(keys)}
    index = {course: torch.tensor([place[key] for key in named]) for course, named in own.items()}
    for number, part in enumerate(parts):
        rows[number, index[part.course], : part.rows.shape[1]] = part.rows
    return rows


def _filled(
    flow: GradientFlow, numbers: Mapping[Key, Statistics | None], apart: Mapping[Key, Spread | None]
) -> GradientFlow:
    """The flow with these statistics in place of its own."""
    sites = tuple(
        replace(
            site, statistics=numbers[Key("site", site.id)], spread=apart[Key("site", site.id)],
            value=numbers.get(Key("value", site.id)),
        )
        for site in flow.sites
    )  # fmt: skip
    edges = flow.edges
    if flow.event.sites == "edge":
        found = [numbers[key] for key in numbers if key.kind == "edge"]
        edges = tuple(replace(edge, statistics=one) for edge, one in zip(flow.edges, found, strict=True))
    parameters = tuple(
        replace(
            record, statistics=(one := numbers[Key("parameter", record.name)]),
            spread=apart[Key("parameter", record.name)], value=numbers.get(Key("state", record.name)),
            reason=None if one is not None else record.reason or "not_reached",
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
    flow: GradientFlow, rows: Tensor, keys: Sequence[Key], ranks: Sequence[int]
) -> tuple[int | None, str | None]:
    """The rank that stands out most, and where; of several with NaN or Inf, the nearest to the loss."""
    named = {Key("site", site.id): site.spread for site in flow.sites}
    named.update({Key("parameter", record.name): record.spread for record in flow.parameters})
    odd = [(key, spread) for key, spread in named.items() if spread is not None and spread.nonfinite]
    if odd:
        key, spread = next((one for one in reversed(odd) if one[0].kind == "site"), odd[-1])
        return spread.worst, key.name
    if len(ranks) < 2:  # noqa: PLR2004  # nobody to differ from
        return None, None
    norms = rows[..., 3] / rows[..., 2].clamp(min=1).sqrt()
    middle = norms.median(0).values
    out = torch.where(middle > 0, norms.amax(0) / middle, torch.where(norms.amax(0) > 0, torch.inf, 0.0)).tolist()
    best = max((n for n, key in enumerate(keys) if named.get(key) is not None), key=out.__getitem__, default=None)
    found = None if best is None else named[keys[best]]
    return (None, None) if best is None or found is None else (found.worst, keys[best].name)


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
