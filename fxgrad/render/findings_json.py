"""Findings as versioned, strict JSON: everything that a ``Finding`` holds, NaN and Inf spelled as in a flow's file."""

from __future__ import annotations

from fxgrad.plain import plain
from fxgrad.render.words import tool_version
from fxgrad.schema import Diagnosis
from fxgrad.store import strict_json

__all__ = ["FORMAT", "VERSION", "findings_json"]

FORMAT = "fxgrad-findings"
VERSION = 1


def findings_json(diagnosis: Diagnosis) -> str:
    """JSON text with ``healthy``, ``checked`` (rule names), ``findings`` in their order and ``not_checked``."""
    content = {
        "format": FORMAT,
        "version": VERSION,
        "fxgrad": tool_version(),
        "healthy": diagnosis.healthy,
        "checked": plain(diagnosis.checked),
        "findings": plain(diagnosis.findings),
        "not_checked": plain(diagnosis.not_checked),
    }
    return strict_json(content, indent=1)
