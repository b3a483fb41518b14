"""What a rank tells of a backward event besides statistics, and what all of them tell together."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from fxgrad.schema import (
    Activity,
    CaptureReport,
    ChannelSums,
    EventInfo,
    GradientFlow,
    OptimizerFacts,
    ParameterRecord,
    StepFacts,
    Update,
)

__all__ = ["Facts", "facts_of", "with_facts"]


@dataclass(frozen=True, slots=True)
class Facts:
    """Of one rank and backward event; numbers are those of sites and parameters in the flow of its course.

    Attributes:
        event, capture, optimizer: as of the flow.
        activity, channels, updates: with the number of the site or parameter.
        shards: numbers of the parameters of which it has a part, and no second copy of one.
    """

    event: EventInfo
    capture: CaptureReport
    activity: tuple[tuple[int, Activity], ...]
    channels: tuple[tuple[int, ChannelSums], ...]
    updates: tuple[tuple[int, Update], ...]
    optimizer: OptimizerFacts | None
    shards: tuple[int, ...] = ()


class Told(Protocol):
    """What a rank told."""

    @property
    def course(self) -> str:
        """Of its flow."""
        ...

    @property
    def facts(self) -> Facts:
        """Its facts."""
        ...


def facts_of(flow: GradientFlow) -> Facts:
    """The facts of a flow."""
    return Facts(
        flow.event, flow.capture,
        tuple((n, site.activity) for n, site in enumerate(flow.sites) if site.activity is not None),
        tuple((n, site.channels) for n, site in enumerate(flow.sites) if site.channels is not None),
        tuple((n, record.update) for n, record in enumerate(flow.parameters) if record.update is not None),
        flow.optimizer,
        tuple(n for n, record in enumerate(flow.parameters) if _is_shard(record)),
    )  # fmt: skip


def _is_shard(record: ParameterRecord) -> bool:
    placement = None if record.statistics is None else record.statistics.placement
    return placement is not None and "Shard" in placement.words and placement.copy == 0


def with_facts(flow: GradientFlow, told: Sequence[Told], courses: Mapping[str, GradientFlow]) -> GradientFlow:
    """``flow`` with what the ranks told, the lowest rank first; ``courses``: a flow of each course."""
    activity: dict[str, list[Activity]] = {}
    channels: dict[str, list[ChannelSums]] = {}
    updates: dict[str, list[tuple[Update, bool]]] = {}
    for one in told:
        course, shards = courses[one.course], set(one.facts.shards)
        for number, active in one.facts.activity:
            activity.setdefault(course.sites[number].id, []).append(active)
        for number, sums in one.facts.channels:
            channels.setdefault(course.sites[number].id, []).append(sums)
        for number, update in one.facts.updates:
            updates.setdefault(course.parameters[number].name, []).append((update, number in shards))
    facts = [one.facts for one in told]
    events = [one.event for one in facts]
    accumulating = [one.accumulating for one in events if one.accumulating is not None]
    return replace(
        flow,
        sites=tuple(
            replace(site, activity=_active(activity.get(site.id, ())), channels=_added(channels.get(site.id, ())))
            for site in flow.sites
        ),
        parameters=tuple(replace(record, update=_moved(updates.get(record.name, ()))) for record in flow.parameters),
        event=replace(
            events[0], accumulating=any(accumulating) if accumulating else None,
            differentiated=any(one.differentiated for one in events),
            margins_met=all(one.margins_met for one in events),
        ),
        capture=facts[0].capture,
        optimizer=_optimizer(facts),
    )  # fmt: skip


def _active(found: Sequence[Activity]) -> Activity | None:
    """Units that fired nowhere; None where the ranks' units are not the same."""
    if len({(one.axis, one.units) for one in found}) != 1:
        return None
    never = set(found[0].never).intersection(*(one.never for one in found))
    samples, active = sum(one.samples for one in found), sum(one.active for one in found)
    return replace(found[0], samples=samples, never=tuple(sorted(never)), active=active)


def _added(found: Sequence[ChannelSums]) -> ChannelSums | None:
    if len({(one.axis, len(one.square_sums)) for one in found}) != 1:
        return None
    columns = zip(*(one.square_sums for one in found), strict=True)
    return replace(found[0], square_sums=tuple(sum(sorted(column)) for column in columns))


def _moved(found: Sequence[tuple[Update, bool]]) -> Update | None:
    """What a step did to a parameter: the same on all ranks that have it whole, else that of the shards together."""
    shards = [update for update, shard in found if shard]
    if not shards:
        return found[0][0] if found else None
    return replace(
        shards[0], l2_norm=math.hypot(*(one.l2_norm for one in shards)),
        weight_norm=math.hypot(*(one.weight_norm for one in shards)), shrink=None, lost=None,
    )  # fmt: skip


def _optimizer(facts: Sequence[Facts]) -> OptimizerFacts | None:
    """That of the lowest rank; the norms of its steps over the shards of all ranks, where every parameter is one."""
    told = [one.optimizer for one in facts if one.optimizer is not None]
    if not told or not any(one.shards for one in facts):
        return told[0] if told else None
    whole = all(len(one.shards) == len(one.updates) for one in facts)
    steps = tuple(_step([one.steps[n] for one in told if n < len(one.steps)], whole) for n in range(len(told[0].steps)))
    return replace(told[0], steps=steps)


def _step(found: Sequence[StepFacts], whole: bool) -> StepFacts:  # noqa: FBT001
    gradients = [one.gradient_norm for one in found]
    carried = [one.carried_norm for one in found]
    return replace(
        found[0], gradient_norm=_hypot(gradients) if whole else None, carried_norm=_hypot(carried) if whole else None
    )


def _hypot(norms: Iterable[float | None]) -> float | None:
    known = [norm for norm in norms if norm is not None]
    return math.hypot(*known) if known else None
