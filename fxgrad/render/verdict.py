"""The answer in a line."""

from __future__ import annotations

from collections.abc import Sequence

from fxgrad.graph import backward_order
from fxgrad.render.findings import at, severity_counts
from fxgrad.render.scale import scale_of
from fxgrad.render.words import look_of, number
from fxgrad.schema import Finding, GradientFlow, NormWord

__all__ = ["verdict"]


def verdict(flow: GradientFlow, findings: Sequence[Finding], norm: NormWord = "l2_norm") -> str:
    """``1 error: vanishing at hidden.0``; where nothing is wrong, how much of the gradient arrives at the inputs."""
    bad = [finding for finding in findings if finding.severity != "info"]
    if bad:
        more = f", and {len(bad) - 1} more" if len(bad) > 1 else ""
        return f"{severity_counts(bad)}: {bad[0].rule} {at(bad[0])}{more}"
    size = scale_of(flow, norm)
    measured = [site for site in backward_order(flow) if look_of(site.statistics) == "measured"]
    if not measured:
        return "nothing wrong found, but no gradient was measured"
    last = measured[-1]
    value = None if last.statistics is None else last.statistics.norm(norm)
    if value is None or not size.relative:
        return "nothing wrong found"
    return (
        f"nothing wrong found; the gradient is {number(size.reference)} at the loss side "
        f"and {number(value)} at {last.id} ({size.words(value)})"
    )
