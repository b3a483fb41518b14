"""Low precision: gradients that become zero, numbers that come close to the largest."""

from __future__ import annotations

import math
from collections.abc import Iterator

from fxgrad.diagnosis.check import Draft, Evidence, number
from fxgrad.diagnosis.kinds import MAKES_ZEROS, SCALING
from fxgrad.diagnosis.view import FlowView
from fxgrad.diagnosis.weights import main_weight
from fxgrad.diagnosis.zeros import silent
from fxgrad.schema import Finding, Node, Severity, Site, Statistics

_LARGEST = {"float16": 65504.0, "float8_e4m3fn": 448.0, "float8_e5m2": 57344.0}
_ROWS = 0.05  # share of zeros by which a sum over many must exceed what it got, or padded rows would count
_SUBNORMAL = 0.3
_ROOM = 2.0**10  # what a scaled gradient should stay below in float16, as far from both ends as can be


def _low(view: FlowView, node: Node) -> str | None:
    """The low-precision dtype that a node works in: of its output, or of what it takes."""
    for site in view.sites[node.key]:
        if site.dtype in _LARGEST:
            return site.dtype
    for edge in view.takes[node.key]:
        producer = view.by_id.get(edge.producer + edge.output_position)
        if producer is not None and producer.dtype in _LARGEST:
            return producer.dtype
    return None


def new_zeros(view: FlowView, node: Node) -> float | None:
    """Share of the entries that a node sends back as zero although it cannot make zeros of its own; None: it can."""
    if view.kinds[node.key] in MAKES_ZEROS or not view.received(node.key):
        return None
    weight = main_weight(view, node)
    if weight is not None and weight.value is not None and (weight.value.zero_count or 0) > 0.5 * weight.value.numel:
        return None
    got = [site.passed_on for site in view.sites[node.key] if site.passed_on is not None]
    parts = [s for _, s in view.parts(node.key)]
    if not parts or any(s.zero_count is None for s in (*got, *parts)):
        return None
    share, before = _share(parts), _share(got)
    fresh = max(0.0, share - before)
    if view.kinds[node.key] in SCALING and fresh > _ROWS:  # a sum over many: the zeros that it got don't make any
        fresh = share
    return fresh if share == 1 or _subnormal(parts) > _SUBNORMAL else 0.0


def _subnormal(statistics: list[Statistics]) -> float:
    """Share of the non-zero entries that are subnormal: where none is, nothing was too small."""
    entries = sum(s.numel - (s.zero_count or 0) for s in statistics)
    return sum(s.subnormal_count or 0 for s in statistics) / entries if entries else 0.0


def _share(statistics: list[Statistics]) -> float:
    entries = sum(s.numel for s in statistics)
    return sum(s.zero_count or 0 for s in statistics) / entries if entries else 0.0


def underflow(evidence: Evidence) -> Iterator[Finding]:
    """Share of new zeros across an operation in float16 (or float8) that cannot make zeros by itself.

    Source: flushing to zero as in Micikevicius et al., "Mixed precision training" (2018).  False alarms: zeros of
    ReLU, dropout, padding and pooling are those operations' own.
    """
    evidence.need_counts()
    view = evidence.view
    found = []
    for node in reversed(view.flow.nodes):
        if node.op == "output" or _low(view, node) is None:
            continue
        shares = [
            s for v in evidence.recent if node.key in v.nodes and (s := new_zeros(v, v.nodes[node.key])) is not None
        ]
        if shares and sorted(shares)[len(shares) // 2] > evidence.thresholds.underflow_info:
            found.append((node, sorted(shares)[len(shares) // 2]))
    yield from _seed(evidence)
    worst = [(n, s) for n, s in found if s > evidence.thresholds.underflow] or found
    if worst:
        yield _underflow(evidence, *worst[0], others=len(found) - 1)


def _underflow(evidence: Evidence, node: Node, share: float, *, others: int) -> Finding:
    view = evidence.view
    dtype = _low(view, node) or ""
    severity: Severity = "warning" if share > evidence.thresholds.underflow else "info"
    largest = max((site.passed_on.max_abs or 0.0 for site in view.sites[node.key] if site.passed_on), default=0.0)
    power = math.floor(math.log2(_ROOM / largest)) if largest > 0 else 0
    scale = view.flow.event.loss_scale
    draft = Draft(
        evidence, "underflow", severity,
        f"{share:.0%} of the gradient that {view.source_words(node.key)} sends back became zero in {dtype}"
        + (f" at loss scale {number(scale)}" if scale else " without loss scaling")
        + (f", and at {others} more operations" if others else ""),
        f"use torch.amp.GradScaler (a factor of 2**{power} would keep the largest entry at about {number(_ROOM)}), "
        "bfloat16, or float32 for this operation",
        {"share": share, "largest_received": largest, "others": others},
    )  # fmt: skip
    path = view.way_back(node.key)
    return draft.at(node, path=path, affected=silent(view, node.key))


def _seed(evidence: Evidence) -> Iterator[Finding]:
    """The gradient that enters in low precision is zero all over: it underflowed in the loss."""
    view = evidence.view
    seeds = seeds_of(view)
    low = [s for s in seeds if s.dtype in _LARGEST and s.statistics is not None]
    if low and len(low) == len(seeds) and all(s.statistics is not None and s.statistics.all_zero for s in low):
        draft = Draft(
            evidence, "underflow", "warning",
            f"the gradient at the output {low[0].id} is zero all over in {low[0].dtype}: it underflowed in the loss",
            "use torch.amp.GradScaler, or compute the loss in float32", {"outputs": len(low)},
        )  # fmt: skip
        yield draft.at(
            None, affected=tuple(r.name for r in view.flow.parameters if r.statistics and r.statistics.all_zero)
        )


def seeds_of(view: FlowView) -> list[Site]:
    """The sites that the model returned and that got a gradient."""
    values = [e.producer + e.output_position for e in view.flow.edges if view.nodes[e.consumer.key].op == "output"]
    return [view.by_id[v] for v in dict.fromkeys(values) if v in view.by_id and view.by_id[v].statistics is not None]


def overflow_risk(evidence: Evidence) -> Iterator[Finding]:
    """Largest gradient or value over the largest number of its low-precision dtype; information."""
    evidence.need_counts()
    view = evidence.view
    close = [
        ((statistics.max_abs or 0.0) / _LARGEST[site.dtype], site)
        for site in view.flow.sites if site.dtype in _LARGEST
        for statistics in (site.statistics, site.value) if statistics is not None
    ]  # fmt: skip
    close = [(share, site) for share, site in close if share > evidence.thresholds.headroom]
    if close:
        share, site = max(close, key=lambda item: item[0])
        draft = Draft(
            evidence, "overflow_risk", "info",
            f"{view.source_words(site.key)} reaches {share:.0%} of the largest {site.dtype}",
            "use bfloat16 or float32 for this operation, or a lower loss scale", {"share": share, "places": len(close)},
        )  # fmt: skip
        yield draft.at(site.node)
