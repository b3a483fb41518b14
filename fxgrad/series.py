"""One step, or one number over the steps, of flows of one model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Literal

from fxgrad.errors import NoFlowError, OptionError, SiteNotFoundError
from fxgrad.graph import find_site
from fxgrad.schema import GradientFlow, Series, Statistics

__all__ = ["STATISTICS", "check_statistic", "evenly", "flow_at", "no_flow", "place_of", "sampled", "series_of"]

#: The numbers of a value that can be followed over the steps.
STATISTICS = ("rms", *(f.name for f in fields(Statistics) if f.name not in ("level", "exponent_histogram")))
Part = Literal["sites", "parameters"]


def flow_at(flows: Sequence[GradientFlow], step: int) -> GradientFlow:
    """The latest flow of this step.

    Raises:
        NoFlowError: there is none.
    """
    for flow in reversed(flows):
        if flow.event.backward == step:
            return flow
    raise no_flow(step, [flow.event.backward for flow in flows])


def no_flow(step: object, steps: Sequence[int]) -> NoFlowError:
    """What to raise where there is no flow of this step."""
    if not steps:
        return NoFlowError(f"there is no flow of step {step}, nor of any other: no backward pass was recorded yet")
    near = min(steps, key=lambda one: abs(one - step)) if isinstance(step, int) else steps[-1]
    return NoFlowError(
        f"there is no flow of step {step}: {len(steps)} steps from {steps[0]} to {steps[-1]} are there, "
        f"and the nearest is {near}"
    )


def series_of(flows: Sequence[GradientFlow], key: str, statistic: str = "l2_norm") -> Series:
    """One statistic of one value or parameter over all flows.

    Raises:
        SiteNotFoundError: the latest flow has no value or parameter of that name.
        OptionError: there is no such statistic.
    """
    check_statistic(statistic)
    if not flows:
        return Series(key, statistic, (), ())
    part, name = place_of(flows[-1], key)
    values: list[float | None] = []
    for flow in flows:
        found = (site.statistics for site in flow.sites if site.id == name)
        if part == "parameters":
            found = (record.statistics for record in flow.parameters if record.name == name)
        values.append(getattr(next(found, None), statistic, None))
    return Series(name, statistic, tuple(flow.event.backward for flow in flows), tuple(values))


def place_of(flow: GradientFlow, key: str) -> tuple[Part, str]:
    """Whether ``key`` names a value or a parameter of the flow, and its full name.

    Raises:
        SiteNotFoundError: neither.
    """
    try:
        return "sites", find_site(flow, key).id
    except SiteNotFoundError:
        for record in flow.parameters:
            if key == record.name or key in record.aliases:
                return "parameters", record.name
        raise


def check_statistic(statistic: str) -> None:
    """Raise where there is no such statistic.

    Raises:
        OptionError: it is none of ``STATISTICS``.
    """
    if statistic not in STATISTICS:
        message = f"statistic={statistic!r} is not known; it is one of {', '.join(map(repr, STATISTICS))}"
        raise OptionError(message)


def sampled(flows: Sequence[GradientFlow], most: int) -> Sequence[GradientFlow]:
    """At most so many of the flows, evenly spread."""
    return flows if len(flows) <= most else [flows[place] for place in evenly(len(flows), most)]


def evenly(count: int, most: int) -> list[int]:
    """At most so many of the numbers below ``count``, evenly spread, the first and the last among them."""
    if count <= most:
        return list(range(count))
    if most == 1:
        return [count - 1]
    return [round(place * (count - 1) / (most - 1)) for place in range(most)]
