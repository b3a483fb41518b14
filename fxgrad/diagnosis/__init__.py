"""From flows to findings: what is wrong, where, and what to do.  Imports no torch."""

from __future__ import annotations

from fxgrad.diagnosis.engine import DEFAULT_RULES, diagnose
from fxgrad.diagnosis.rule import Draft, Evidence, LackingError, Rule
from fxgrad.diagnosis.thresholds import Thresholds
from fxgrad.diagnosis.view import FlowView

__all__ = ["DEFAULT_RULES", "Draft", "Evidence", "FlowView", "LackingError", "Rule", "Thresholds", "diagnose"]
