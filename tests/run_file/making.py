"""Flows of a run, made by hand."""

from __future__ import annotations

import dataclasses
import random

from fxgrad.schema import GradientFlow, Site, Statistics
from tests import flows


def at(flow: GradientFlow, step: int, forward: int | None = None) -> GradientFlow:
    """The flow as that of another step."""
    event = dataclasses.replace(flow.event, backward=step, forward=step if forward is None else forward)
    return dataclasses.replace(flow, event=event)


def step_of(number: int, *, values: int = 6, level: str = "norm", width: int = 4) -> GradientFlow:
    """A flow whose norms are random, the same for one number at every call."""
    numbers = random.Random(number)  # noqa: S311  # nothing secret
    base = flows.chain(values, level=level)

    def made(site: Site) -> Site:
        norm = numbers.random()
        found = Statistics("norm", 2 * width, norm) if level == "norm" else flows.full(norm, numel=2 * width)
        return dataclasses.replace(site, shape=(2, width), statistics=found if site.measured else None)

    return at(dataclasses.replace(base, sites=tuple(map(made, base.sites))), number)
