"""Parts of one gradient that take each other away, so that what lies before gets next to nothing."""

from __future__ import annotations

from collections.abc import Iterator

from fxgrad.diagnosis.check import Draft, Evidence, LackingError, listed, number
from fxgrad.diagnosis.view import FlowView
from fxgrad.diagnosis.zeros import meeting
from fxgrad.schema import Finding, Site

_SHARE = 1e-3  # of the largest part, over the parameters before: above it they learn by another way


def cancelled(evidence: Evidence) -> Iterator[Finding]:
    """l2 norm of a value's gradient over that of the largest part of it, as its uses send them back.

    Two parts that are not zero and whose sum is, up to rounding, mean that what is computed doesn't depend on the
    value: it is divided by itself, or subtracted from itself.  Exact zeros are told by ``zero``.  It must be so in each
    flow of the series: at the end of a fit parts may come to cancel.
    """
    view = evidence.view
    if view.flow.event.sites != "edge":
        message = "the parts of a fan-out were not measured (sites='edge')"
        raise LackingError(message, give="sites='edge'")
    limit = evidence.thresholds.cancelled
    for site in reversed(view.flow.sites):
        if not _cancels(view, site, limit) or not all(_always(one, site.id, limit) for one in evidence.views):
            continue
        parts = {e.consumer.key: e.statistics.l2_norm for e in view.uses[site.id] if e.statistics is not None}
        largest, norm = max(parts.values()), 0.0 if site.statistics is None else site.statistics.l2_norm
        hit = _starving(view, site.key, largest)
        if not hit:
            continue
        last = meeting(view, set(parts))
        draft = Draft(
            evidence, "cancelled", "warning",
            f"the {len(parts)} parts that come back to {view.source_words(site.key)}, of up to {number(largest)}, "
            f"cancel to {number(norm)}: what {view.source_words(last)} makes of it doesn't depend on it, so "
            f"{listed(hit)} can't learn",
            "the value is divided by, or subtracted from, itself (the weight of a single chosen expert that is "
            "normalised by its own sum, a mean over one entry): leave that out, or normalise over more than one",
            {"largest_part": largest, "sum": norm, "share": norm / largest, "parameters": len(hit)},
        )  # fmt: skip
        yield draft.at(view.nodes[last], path=(last, site.key, *view.before(site.key)), affected=hit)
        return


def _cancels(view: FlowView, site: Site, limit: float) -> bool:
    parts = [e.statistics.l2_norm for e in view.uses.get(site.id, ()) if e.statistics is not None]
    if len(parts) < 2 or site.statistics is None or site.statistics.nonfinite is not False:  # noqa: PLR2004  # one can't
        return False
    largest = max(parts)
    return sum(part > 0 for part in parts) > 1 and 0 < site.statistics.l2_norm < limit * largest < float("inf")


def _always(view: FlowView, name: str, limit: float) -> bool:
    """Whether it was so in a flow too; one without the value, or without a gradient there, says nothing against it."""
    site = view.by_id.get(name)
    if site is None or site.statistics is None or site.statistics.all_zero:
        return True
    return _cancels(view, site, limit)


def _starving(view: FlowView, key: str, largest: float) -> tuple[str, ...]:
    """The parameters before a node of which none gets more than a trace."""
    back = view.bits_back(key)
    found = [
        record for record in view.flow.parameters
        if record.statistics is not None and view.bits(view.owners.get(record.name, ())) & back
    ]  # fmt: skip
    return tuple(r.name for r in found if r.statistics is not None and r.statistics.l2_norm < _SHARE * largest)


__all__ = ["cancelled"]
