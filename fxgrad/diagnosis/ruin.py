"""What stands in front of the step that ruined a run: an explosion that was there from the first flow on."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from fxgrad.diagnosis.check import Evidence, LackingError
from fxgrad.diagnosis.local import scale_break
from fxgrad.diagnosis.paths import exploding
from fxgrad.diagnosis.updates import first_ruin
from fxgrad.schema import Finding


def before_the_ruin(evidence: Evidence, found: Sequence[Finding]) -> list[Finding]:
    """Where a step did harm: the explosion that the first flow shows by itself, with the weights as they were made.

    The flows behind such a step show what it left of the model, so that the checks over the recent ones miss it.
    """
    if len(evidence.views) < 2 or first_ruin(evidence) is None:  # noqa: PLR2004  # a first flow, and one behind the step
        return []
    known = {finding.rule for finding in found}
    first = Evidence(evidence.views[:1], evidence.thresholds)
    exploded: list[Finding] = []
    for name, check in (("exploding", exploding), ("scale_break", scale_break)):
        with suppress(LackingError):  # the check has told itself what it lacks
            exploded += [
                finding for finding in check(first)
                if name not in known and finding.severity != "info" and finding.evidence["decades"] > 0
            ]  # fmt: skip
    return exploded


__all__ = ["before_the_ruin"]
