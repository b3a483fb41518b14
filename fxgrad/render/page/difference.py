"""A comparison as the data of a page: what the gradient of each value was before, and what became of the findings."""

from __future__ import annotations

from fxgrad.render.findings import at
from fxgrad.render.page.payload import Data
from fxgrad.render.page.tables import number_of
from fxgrad.render.words import Look, look_of
from fxgrad.schema import Comparison, Finding

__all__ = ["before_data", "told"]

_LOOKS: tuple[Look, ...] = (
    "measured",
    "zero",
    "nonfinite",
    "outside_range",
    "not_measured",
)  # as the script numbers them


def before_data(comparison: Comparison) -> Data:
    """The first flow, for each site of the second."""
    known = {site.id: site.statistics for site in comparison.before.sites}
    rows = [known.get(site.id) for site in comparison.after.sites]
    new = {(one.rule, one.place) for one in comparison.new}
    return {
        "l2_norm": [None if row is None else number_of(row.l2_norm) for row in rows],
        "max_abs": [None if row is None else number_of(row.max_abs) for row in rows],
        "numel": [0 if row is None else row.numel for row in rows],
        "look": [_LOOKS.index(look_of(row)) for row in rows],
        "gone": [_line(one) for one in comparison.gone],
        "new": [place for place, one in enumerate(comparison.after.findings) if (one.rule, one.place) in new],
        "removed": list(comparison.removed),
        "added": list(comparison.added),
    }


def told(comparison: Comparison) -> str:
    """What became of the findings, in a line."""
    counts = {"gone": comparison.gone, "new": comparison.new, "still there": comparison.left}
    return "Findings: " + ", ".join(f"{len(found)} {word}" for word, found in counts.items())


def _line(finding: Finding) -> str:
    return f"{finding.severity} {finding.rule} {at(finding)}"
