"""What checks ask of a flow: kinds, parts, levels, who comes before whom.  Worked out once per flow."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from functools import cached_property
from typing import Any

from fxgrad.diagnosis.kinds import kind_of
from fxgrad.schema import Edge, GradientFlow, Node, ParameterRecord, Site, Statistics


def joint(statistics: Iterable[Statistics | None]) -> float | None:
    """l2 norm over several tensors together; None where one of them was not measured, or there is none."""
    found = list(statistics)
    if not found or any(one is None for one in found):
        return None
    return math.hypot(*(one.l2_norm for one in found if one is not None))


def decades(ratio: float) -> float:
    """log10 of a positive ratio; -inf for 0."""
    return math.log10(ratio) if ratio > 0 else -math.inf


def total_norm(view: FlowView) -> float | None:
    """l2 norm over all parameters' gradients, the loss scale divided out; None where none is finite and positive."""
    norms = [r.statistics.l2_norm for r in view.flow.parameters if r.statistics is not None]
    if not norms or any(r.statistics is not None and r.statistics.nonfinite for r in view.flow.parameters):
        return None
    norm = math.hypot(*norms) / (view.flow.event.loss_scale or 1.0)
    return norm if math.isfinite(norm) and norm > 0 else None


class FlowView:
    """A flow with what can be looked up in it."""

    def __init__(self, flow: GradientFlow) -> None:
        self.flow = flow
        self.nodes = {node.key: node for node in flow.nodes}
        self.order = {node.key: number for number, node in enumerate(flow.nodes)}
        self.kinds = {node.key: kind_of(node) for node in flow.nodes}
        self.sites: dict[str, list[Site]] = {node.key: [] for node in flow.nodes}
        for site in flow.sites:
            self.sites[site.key].append(site)
        self.by_id = {site.id: site for site in flow.sites}
        self.takes: dict[str, list[Edge]] = {node.key: [] for node in flow.nodes}
        self.users: dict[str, list[Edge]] = {node.key: [] for node in flow.nodes}
        self.uses: dict[str, list[Edge]] = {}
        for edge in flow.edges:
            self.takes[edge.consumer.key].append(edge)
            self.users[edge.producer].append(edge)
            self.uses.setdefault(edge.producer + edge.output_position, []).append(edge)
        self.memo: dict[Any, Any] = {}  # of checks: what two of them ask for
        self._parts: dict[str, list[tuple[Edge, Statistics]]] = {}
        self.parameters = {name: record for record in flow.parameters for name in (record.name, *record.aliases)}

    # ---- gradients -------------------------------------------------------------------------------------------

    @cached_property
    def _received(self) -> dict[str, float]:
        found = {}
        for key, sites in self.sites.items():
            norms = [site.passed_on.l2_norm for site in sites if site.passed_on is not None]
            if norms:
                found[key] = math.nan if any(map(math.isnan, norms)) else math.hypot(*norms)
        return found

    def received(self, key: str) -> float | None:
        """l2 norm of what a node's outputs got, all measured ones together; None where none was measured."""
        return self._received.get(key)

    def part(self, edge: Edge) -> Statistics | None:
        """Statistics of what a use sends back: its own, or the value's where this is the only use."""
        if edge.statistics is not None:
            return edge.statistics
        value = edge.producer + edge.output_position
        site = self.by_id.get(value)
        return site.statistics if site is not None and len(self.uses[value]) == 1 else None

    def parts(self, key: str) -> list[tuple[Edge, Statistics]]:
        """What a node sends back, by measured use."""
        known = self._parts.get(key)
        if known is None:
            found = ((edge, self.part(edge)) for edge in self.takes[key])
            known = [(edge, statistics) for edge, statistics in found if statistics is not None]
            self._parts[key] = known = known or list(self._parts_of_function(key))
        return known

    def _parts_of_function(self, key: str) -> Iterator[tuple[Edge, Statistics]]:
        """What an autograd function sends back to the values that only calls inside of its forward take."""
        if key not in self._functions:
            return
        inside = {k for k in self.before(key) if self.function_around(k) == key}
        for edge in (edge for k in inside for edge in self.takes[k] if edge.producer not in inside):
            value = edge.producer + edge.output_position
            site = self.by_id.get(value)
            if (
                site is not None
                and site.statistics is not None
                and {e.consumer.key for e in self.uses[value]} <= inside
            ):
                yield edge, site.statistics

    def sent(self, key: str) -> float | None:
        """l2 norm of all that a node sends back to values; None where some of it was not measured, or it is nothing."""
        if key in self._functions:
            return math.hypot(*(part.l2_norm for _, part in self.parts(key))) if self.parts(key) else None
        norms = []
        for edge in self.takes[key]:
            site = self.by_id.get(edge.producer + edge.output_position)
            if site is None or (site.statistics is None and self.part(edge) is None and not self._gets(site)):
                continue  # what requires no gradient takes none
            part = self.part(edge)
            if part is None:
                return None
            norms.append(part.l2_norm)
        return math.hypot(*norms) if norms else None

    def _gets(self, site: Site) -> bool:
        return self.blind.get(site.id) not in (
            None,
            "no_grad_required",
            "no_grad_region",
            "reentrant_checkpoint",
            "detached",
            "frozen",
            "integer",
        )

    @cached_property
    def blind(self) -> dict[str, str]:
        """Reason by site id, for what has no gradient."""
        return {spot.id: spot.reason for spot in self.flow.blind_spots if spot.consumer is None}

    def shared(self, edge: Edge) -> bool:
        """Whether the value that an edge carries got a gradient from several uses."""
        value = edge.producer + edge.output_position
        site = self.by_id.get(value)
        return site is not None and site.statistics is not None and len(self.uses[value]) > 1

    def gain(self, key: str) -> float | None:
        """What a node sends back over what it received, l2 norms; None where either is unknown or nothing arrived."""
        received, sent = self.received(key), self.sent(key)
        if not received or sent is None or not math.isfinite(received) or not math.isfinite(sent):
            return None
        return sent / received

    def records(self, node: Node) -> list[ParameterRecord]:
        """The parameters that a node takes, buffers left out."""
        return [self.parameters[name] for name in node.parameters if name in self.parameters]

    # ---- the graph -------------------------------------------------------------------------------------------

    def producers(self, key: str) -> Iterator[str]:
        """Keys of the nodes whose values a node takes."""
        return (edge.producer for edge in self.takes[key])

    @cached_property
    def _ancestors(self) -> dict[str, int]:
        """The nodes that each node depends on, as bits by their order."""
        found: dict[str, int] = {}
        for node in self.flow.nodes:
            bits = 0
            for producer in self.producers(node.key):
                bits |= found.get(producer, 0) | 1 << self.order[producer]
            found[node.key] = bits
        return found

    @cached_property
    def _descendants(self) -> dict[str, int]:
        found: dict[str, int] = {}
        for node in reversed(self.flow.nodes):
            bits = 0
            for edge in self.users[node.key]:
                bits |= found.get(edge.consumer.key, 0) | 1 << self.order[edge.consumer.key]
            found[node.key] = bits
        return found

    def depends(self, key: str, on: str) -> bool:
        """Whether a node depends on another one."""
        return bool(self._ancestors[key] >> self.order[on] & 1)

    def before(self, key: str) -> list[str]:
        """The nodes that a node depends on, itself left out, nearest to the loss first."""
        return self._listed(self._ancestors[key])[::-1]

    def behind(self, key: str) -> list[str]:
        """The nodes that depend on a node, itself left out, in forward order."""
        return self._listed(self._descendants[key])

    def _listed(self, bits: int) -> list[str]:
        digits = bin(bits)[:1:-1]
        return [node.key for node, digit in zip(self.flow.nodes, digits, strict=False) if digit == "1"]

    def bits(self, keys: Iterable[str]) -> int:
        """These nodes as bits by their order: many sets of nodes are compared at once that way."""
        return sum(1 << self.order[key] for key in set(keys))

    def bits_back(self, key: str) -> int:
        """``way_back`` as bits."""
        return self._ancestors[key] | 1 << self.order[key]

    def way_back(self, key: str) -> tuple[str, ...]:
        """A node and all that it depends on, nearest to the loss first."""
        return (key, *self.before(key))

    def separates(self, key: str) -> bool:
        """Whether every way from the model's inputs to its output leads through a node."""
        reached = {n.key for n in self.flow.nodes if n.op == "placeholder" and n.key != key}
        for node in self.flow.nodes:
            if node.key != key and any(producer in reached for producer in self.producers(node.key)):
                reached.add(node.key)
                if node.op == "output":
                    return False
        return True

    def function_around(self, key: str) -> str | None:
        """The result of the user's own autograd function inside of which a node ran, without gradients; else None."""
        if not self._functions or self.received(key) is not None or not self._without_gradient(key):
            return None
        return next((k for k in self._functions if self.depends(k, on=key)), None)

    @cached_property
    def _functions(self) -> list[str]:
        """The results of autograd functions that got a gradient, in forward order."""
        return [n.key for n in self.flow.nodes if n.op == "external" and self.received(n.key) is not None]

    def _without_gradient(self, key: str) -> bool:
        """Whether a node returned integers only, or ran where gradients are switched off."""
        return all(self.blind.get(site.id) in {"no_grad_region", "reentrant_checkpoint"} for site in self.sites[key])

    @cached_property
    def owners(self) -> dict[str, list[str]]:
        """Keys of the nodes that take each parameter, by its first name."""
        found: dict[str, list[str]] = {}
        for node in self.flow.nodes:
            for record in self.records(node):
                found.setdefault(record.name, []).append(node.key)
        return found

    def source_words(self, key: str) -> str:
        """``key (file:line)``, for messages."""
        source = self.nodes[key].source
        if not source:
            return key
        return f"{key} ({source.replace(chr(92), '/').rpartition('/')[2]})"
