"""Findings as versioned, strict JSON: everything that a ``Finding`` holds, NaN and Inf spelled as in a flow's file."""

from __future__ import annotations

from fxgrad.render.words import tool_version
from fxgrad.schema import RULES, Diagnosis
from fxgrad.store import plain, strict_json

__all__ = ["FORMAT", "VERSION", "findings_json"]

FORMAT = "fxgrad-findings"
VERSION = 1


def findings_json(diagnosis: Diagnosis) -> str:
    """JSON text with ``healthy``, ``checked`` (rule names), ``findings`` in their order and ``not_checked``."""
    skipped = {one.rule for one in diagnosis.not_checked}
    content = {
        "format": FORMAT,
        "version": VERSION,
        "fxgrad": tool_version(),
        "healthy": diagnosis.healthy,
        "checked": [rule for rule in RULES if rule not in skipped],
        "findings": plain(diagnosis.findings),
        "not_checked": plain(diagnosis.not_checked),
    }
    return strict_json(content, indent=1)
