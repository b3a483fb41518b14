"""From flows to findings: what is wrong, where, and what to do.  Imports no torch."""

from __future__ import annotations

from fxgrad.diagnosis.engine import diagnose
from fxgrad.diagnosis.thresholds import Thresholds

__all__ = ["Thresholds", "diagnose"]
