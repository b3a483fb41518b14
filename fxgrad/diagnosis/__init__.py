"""From flows to findings: what is wrong, where, and what to do.  Imports no torch."""

from __future__ import annotations

from fxgrad.diagnosis.check import Check, Draft, Evidence, LackingError
from fxgrad.diagnosis.engine import DEFAULT_CHECKS, diagnose
from fxgrad.diagnosis.thresholds import Thresholds
from fxgrad.diagnosis.view import FlowView

__all__ = ["DEFAULT_CHECKS", "Check", "Draft", "Evidence", "FlowView", "LackingError", "Thresholds", "diagnose"]
