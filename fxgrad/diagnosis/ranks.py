"""Which ranks of a distributed run a finding of a reduced flow is about."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from fxgrad.diagnosis.check import Evidence
from fxgrad.schema import Finding, GradientFlow, Spread

__all__ = ["with_ranks"]

_LARGE = frozenset({"exploding", "scale_break", "spike", "overflow_risk", "loss_seed"})
_NOTHING = frozenset({"zero", "dead", "detached", "unused", "always_zero", "cancelled"})
_APART = 10.0  # times the smallest rms from which on one rank is said to be larger


def with_ranks(evidence: Evidence, findings: Iterable[Finding]) -> list[Finding]:
    """The findings, each with its ranks where it is about some of them only."""
    flows = {view.flow.event.backward: view.flow for view in evidence.views}
    return [_told(flows.get(one.backward, evidence.view.flow), one) for one in findings]  # type: ignore[arg-type]


def _told(flow: GradientFlow, finding: Finding) -> Finding:
    if flow.ranks is None or flow.ranks.size == 1:
        return finding
    if finding.consequences:
        finding = replace(finding, consequences=tuple(_told(flow, one) for one in finding.consequences))
    found = _ranks(flow, finding)
    if not found or len(found) == flow.ranks.size:
        return finding
    who = f"rank{'s' if len(found) > 1 else ''} {', '.join(map(str, found))}"
    return replace(finding, ranks=found, message=f"{finding.message} (on {who} of {flow.ranks.size})")


def _ranks(flow: GradientFlow, finding: Finding) -> tuple[int, ...]:
    spread = _spread(flow, finding)
    if finding.rule == "nonfinite":
        own = () if spread is None else spread.nonfinite
        return own or _union(site.spread.nonfinite for site in flow.sites if site.spread is not None)
    if spread is None:
        return ()
    if finding.rule in _NOTHING:
        return spread.zero or spread.missing
    apart = spread.largest > _APART * spread.smallest
    return (spread.worst,) if finding.rule in _LARGE and apart else ()


def _spread(flow: GradientFlow, finding: Finding) -> Spread | None:
    """How the ranks differ at the place that is to blame."""
    if finding.parameter is not None:
        return next((record.spread for record in flow.parameters if record.name == finding.parameter), None)
    key = None if finding.node is None else finding.node.key
    return next((site.spread for site in flow.sites if finding.site == site.id or site.key == key), None)


def _union(parts: Iterable[tuple[int, ...]]) -> tuple[int, ...]:
    return tuple(sorted({rank for part in parts for rank in part}))
