"""Runs the rules over a flow or a series of flows, joins consequences to their cause, and ranks what is left."""

from __future__ import annotations

from collections.abc import Sequence

from fxgrad.diagnosis.thresholds import Thresholds
from fxgrad.schema import RULES, Diagnosis, GradientFlow, NotChecked


def diagnose(flows: GradientFlow | Sequence[GradientFlow], thresholds: Thresholds | None = None) -> Diagnosis:
    """What the rules say of one flow, or of a series of flows of one model, oldest first."""
    del flows, thresholds
    return Diagnosis((), tuple(NotChecked(rule, "not written yet") for rule in RULES))
