"""How long each row is measured where the whole has to fit into some minutes."""

from __future__ import annotations

from benchmarks.models import Case
from benchmarks.pairs import Effort
from benchmarks.runners import Configuration

#: Seconds of a row that a goal depends on, in a run of twelve minutes: enough for thirty pairs.
_JUDGED = {"mlp33": 7.0, "resnet18": 10.0, "vit_tiny_1": 10.0, "vit_tiny_4": 20.0, "gpt2": 45.0}
_MINUTES = 12.0
_EVERY = ("mlp33", "resnet18")  # ten steps a side are a pair: too many for a larger model


def effort(case: Case, configuration: Configuration, *, judged: bool, minutes: float) -> Effort:
    """Of one row in a run of so many minutes.

    ``judged``: whether a goal depends on it.
    """
    share = minutes / _MINUTES
    if configuration.kind == "peer":
        least, seconds = 3, 2.0
    elif judged:
        least, seconds = 4, _JUDGED.get(case.name, 5.0)
        seconds = min(seconds, 8.0) if configuration.kind == "A/A" and not configuration.compiled else seconds
    else:
        least, seconds = 4, 3.0
    return Effort(1000, 1 if share < 0.5 else least, max(seconds * share, 0.1), 2 if case.large else 3)  # noqa: PLR2004


def fits(case: Case, configuration: Configuration) -> bool:
    """Whether a row is measured at all."""
    if configuration.steps > 1:
        return case.name in _EVERY
    return (
        not case.large
        or configuration.name in ("aa", "norm")
        or (case.name, configuration.name) == ("resnet50", "full")
    )
