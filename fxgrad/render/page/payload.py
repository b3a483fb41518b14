"""A flow as the data of a page: tables of nodes, values, edges and parameters, what can be opened, the findings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from fxgrad.graph import module_flows
from fxgrad.render.findings import at, severity_counts, shown_source
from fxgrad.render.marks import nodes_blamed
from fxgrad.render.page.tables import Number, StatisticsTable, Words, number_of
from fxgrad.render.page.tree import tree_of
from fxgrad.render.palette import text_colour
from fxgrad.render.scale import COLOURS, DECADES, STRIPED
from fxgrad.render.verdict import verdict
from fxgrad.render.words import audit_lines, rule_words, tool_version, way_words
from fxgrad.schema import REASONS, Diagnosis, Edge, Finding, GradientFlow, Node, ParameterRecord, Rewritten, Site
from fxgrad.schema.histogram import LOWEST, RANGES

if TYPE_CHECKING:
    from fxgrad.render.page.options import PageOptions

__all__ = ["Data", "flow_data", "scale_data", "shown_files"]

Data = dict[str, object]
_UNITS = 64  # units of a finding that are told
_NAMES = 200  # parameters of a finding that are told


def scale_data() -> Data:
    """The fixed scale of colours, the same as in every picture."""
    return {"colours": COLOURS, "inks": [text_colour(one) for one in COLOURS], "decades": DECADES, "striped": STRIPED}


def flow_data(flow: GradientFlow, diagnosis: Diagnosis, options: PageOptions) -> Data:
    """All that the page shows of one flow, as JSON values."""
    return _Payload(flow, diagnosis, options).data()


class _Payload:
    def __init__(self, flow: GradientFlow, diagnosis: Diagnosis, options: PageOptions) -> None:
        self.flow, self.diagnosis, self.options = flow, diagnosis, options
        self.words, self.statistics = Words(), StatisticsTable()
        self.number = {node.key: place for place, node in enumerate(flow.nodes)}
        self.site = {site.id: place for place, site in enumerate(flow.sites)}

    def data(self) -> Data:
        flow = self.flow
        content: Data = {
            "about": self._about(),
            "nodes": self._nodes(flow.nodes),
            "sites": self._sites(flow.sites),
            "edges": self._edges(flow.edges),
            "parameters": self._parameters(flow.parameters),
            "spots": self._spots(),
            "modules": self._modules(),
            "tree": tree_of(flow),
            "findings": [self._finding(*pair) for pair in self._told(self.diagnosis.findings)],
            "not_checked": [[one.rule, one.reason, one.give] for one in self.diagnosis.not_checked if one.give != ""],
            "histogram": {"lowest": LOWEST, "ranges": {name: list(ends) for name, ends in RANGES.items()}},
        }
        return {**content, "statistics": self.statistics.columns(), "words": self.words.listed}

    def _about(self) -> Data:
        flow, event = self.flow, self.flow.event
        return {
            "model": flow.capture.model,
            "verdict": verdict(flow, self.diagnosis.findings, self.options.norm),
            "counts": severity_counts(self.diagnosis.findings),
            "loss": event.loss,
            "level": event.level,
            "sites": event.sites,
            "backward": event.backward,
            "training": flow.capture.training,
            "front_end": flow.capture.front_end,
            "torch": flow.capture.torch_version,
            "fxgrad": tool_version(),
            "loss_scale": number_of(event.loss_scale),
            "failed": None if event.failed is None else event.failed.detail,
            "reasons": dict(REASONS),
        }

    # ---- tables ------------------------------------------------------------------------------------------------

    def _nodes(self, nodes: Sequence[Node]) -> Data:
        places = self.words.places
        called = {record.name: place for place, record in enumerate(self.flow.parameters)}
        return {
            "key": [node.key for node in nodes],
            "op": places(node.op for node in nodes),
            "target": places(node.target for node in nodes),
            "path": places(node.module_path for node in nodes),
            "type": places(node.module_type for node in nodes),
            "source": [None if node.source is None else self._source(node.source) for node in nodes],
            "constants": [{c.argument: c.text for c in node.constants} or None for node in nodes],
            "parameters": [[called[n] for n in node.parameters if n in called] or None for node in nodes],
        }

    def _source(self, source: str) -> list[int]:
        """The file as a word, and the line."""
        line = source.rpartition(":")[2]
        return [self.words.place(_file(source)), int(line) if line.isdigit() else 0]

    def _sites(self, sites: Sequence[Site]) -> Data:
        places, row = self.words.places, self.statistics.place
        return {
            "node": [self.number[site.key] for site in sites],
            "position": places(site.output_position for site in sites),
            "shape": places("×".join(map(str, site.shape)) or "scalar" for site in sites),
            "dtype": places(site.dtype for site in sites),
            "device": places(site.device for site in sites),
            "statistics": [row(site.statistics) for site in sites],
            "value": [row(site.value) for site in sites],
            "derived": [self.site.get(site.derived_from or "", -1) for site in sites],
            "rewritten": [_rewritten(site.rewritten, self.options) for site in sites],
            "after": [row(site.rewritten.after if site.rewritten else None) for site in sites],
        }

    def _edges(self, edges: Sequence[Edge]) -> Data:
        blind = {(s.id, s.consumer): s for s in self.flow.blind_spots if s.consumer is not None}
        spots = [blind.get((edge.producer + edge.output_position, edge.consumer)) for edge in edges]
        return {
            "producer": [self.number[edge.producer] for edge in edges],
            "site": [self.site.get(edge.producer + edge.output_position, -1) for edge in edges],
            "consumer": [self.number[edge.consumer.key] for edge in edges],
            "argument": self.words.places(edge.consumer.argument for edge in edges),
            "statistics": [self.statistics.place(edge.statistics) for edge in edges],
            "reason": [-1 if spot is None else self.words.place(spot.reason) for spot in spots],
            "rewritten": [_rewritten(edge.rewritten, self.options) for edge in edges],
        }

    def _parameters(self, records: Sequence[ParameterRecord]) -> Data:
        place, row = self.words.place, self.statistics.place
        return {
            "name": [record.name for record in records],
            "shape": [place("×".join(map(str, record.shape)) or "scalar") for record in records],
            "dtype": [place(record.dtype) for record in records],
            "statistics": [row(record.statistics) for record in records],
            "value": [row(record.value) for record in records],
            "reason": [-1 if record.reason is None else place(record.reason) for record in records],
            "update": [None if r.update is None else number_of(r.update.l2_norm) for r in records],
        }

    def _spots(self) -> list[list[object]]:
        spots = (spot for spot in self.flow.blind_spots if spot.consumer is None)
        return [
            [self.number[s.key], s.output_position, self.words.place(s.reason), self.words.place(s.detail)]
            for s in spots
        ]

    def _modules(self) -> list[list[Number]]:
        """Path, call index, gradient in, gradient out and gain of each module call."""
        return [
            [one.path, one.call_index, *map(number_of, (one.gradient_in, one.gradient_out, one.gain))]
            for one in module_flows(self.flow)
        ]

    # ---- findings ----------------------------------------------------------------------------------------------

    def _told(self, findings: Sequence[Finding]) -> list[tuple[Finding, list[str]]]:
        return list(zip(findings, nodes_blamed(self.flow, findings), strict=True))

    def _finding(self, finding: Finding, blamed: Sequence[str]) -> Data:
        return {
            "rule": finding.rule,
            "severity": finding.severity,
            "message": finding.message,
            "suggestion": finding.suggestion,
            "at": at(finding),
            "source": None if finding.source is None else shown_source(finding.source),
            "nodes": [self.number[key] for key in blamed if key in self.number],
            "path": [self.number[key] for key in finding.path if key in self.number],
            "evidence": {name: number_of(value) for name, value in finding.evidence.items()},
            "confidence": finding.confidence,
            "affected": list(finding.affected[:_NAMES]),
            "units": list(finding.units[:_UNITS]),
            "explains": [f"{one.rule} {at(one)}" for one in finding.explained],
            "backward": finding.backward,
        }


def shown_files(flow: GradientFlow) -> list[str]:
    """The file of each node as the page shows it: as seen from the working folder."""
    return [_file(node.source or "") for node in flow.nodes]


def _file(source: str) -> str:
    shown = shown_source(source)
    return shown.rpartition(":")[0] or shown


def _rewritten(rewritten: Rewritten | None, options: PageOptions) -> Mapping[str, object] | None:
    if rewritten is None:
        return None
    return {"rules": rule_words(rewritten), "way": way_words(rewritten, options.norm), "audit": audit_lines(rewritten)}
