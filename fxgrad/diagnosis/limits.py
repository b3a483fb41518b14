"""A user's own alarms: gradients beyond an absolute limit, and whether the loss or a node made them so large."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fxgrad.errors import OptionError
from fxgrad.schema import Edge, Finding, GradientFlow, Level, Node, ParameterRecord, Site, Statistics

#: The statistics that can be limited, each with the level that fills it (``"histogram"`` fills all of ``"full"``).
WORDS: Mapping[str, Level] = {
    "l2_norm": "norm",
    "rms": "norm",
    "max_abs": "full",
    "abs_sum": "full",
    "nan_count": "full",
    "inf_count": "full",
    "zero_count": "full",
    "flush_count": "full",
    "subnormal_count": "full",
    "overflow_count": "full",
}
_SIZES = ("l2_norm", "rms", "max_abs", "abs_sum")  # in the gradient's unit, so that a loss scale is a part of them
_RULES = {
    "nan_count": "nonfinite",
    "inf_count": "nonfinite",
    "zero_count": "zero",
    "flush_count": "underflow",
    "subnormal_count": "underflow",
    "overflow_count": "overflow_risk",
}
_PAGE = "training-facts.md"


def checked_limits(limits: Any, level: Level) -> dict[str, float]:
    """The limits of ``watch(limits=...)``.

    Raises:
        OptionError: not a mapping of statistics words to numbers, or a statistic that ``level`` does not fill.
    """
    if not isinstance(limits, Mapping):
        message = f"limits= takes a dict such as {{'l2_norm': 1e3}}, but got {type(limits).__name__}"
        raise OptionError(message)
    for word, limit in limits.items():
        needed = WORDS.get(word)
        if needed is None:
            message = f"limits: {word!r} is no statistic that can be limited; these can: {', '.join(WORDS)}"
            raise OptionError(message)
        if level == "norm" != needed:
            message = f"limits: {word!r} is not measured at statistics='norm'; watch with statistics='full'"
            raise OptionError(message)
        if isinstance(limit, bool) or not isinstance(limit, (int, float)) or not limit >= 0:
            message = f"limits: the limit of {word!r} must be a number of at least 0, but is {limit!r}"
            raise OptionError(message)
    return {word: float(limit) for word, limit in limits.items()}


@dataclass(frozen=True, slots=True)
class Limit:
    """One limit.

    Attributes:
        word: a statistic of ``WORDS``.
        most: the largest value that is no alarm.
        scale: loss scale, divided out of sizes.
    """

    word: str
    most: float
    scale: float = 1.0

    def value(self, statistics: Statistics | None) -> float | None:
        """What is compared; None where it was not measured.  Of a gradient with NaN or Inf, sizes are that."""
        found: float | None = None if statistics is None else getattr(statistics, self.word)
        if statistics is None or found is None:
            return None
        if self.word not in _SIZES:
            return float(found)
        if statistics.nan_count:
            return math.nan
        return math.inf if statistics.inf_count else found / self.scale

    def exceeded(self, statistics: Statistics | None) -> bool:
        """Whether the value is above the limit; NaN is above every limit."""
        value = self.value(statistics)
        return value is not None and not value <= self.most


def beyond(flow: GradientFlow, limit: Limit) -> Finding | None:
    """The finding about one limit in one flow; None where nothing exceeds it.

    The culprit is the loss where the gradient at the model's outputs exceeds the limit already; else the node that sent
    the first gradient above it, in backward order, while what that node received was not; else a parameter.
    """
    sites = [site for site in reversed(flow.sites) if limit.exceeded(site.statistics)]
    parameters = [record for record in flow.parameters if limit.exceeded(record.statistics)]
    if not sites and not parameters:
        return None
    counts = {"sites": float(len(sites)), "parameters": float(len(parameters))}
    if limit.scale != 1.0 and limit.word in _SIZES:
        counts["loss_scale"] = limit.scale
    facts = _Facts(flow, limit, counts, tuple(record.name for record in parameters))
    if not sites:
        return facts.parameter(parameters)
    origins = [_Origin(flow, limit, site) for site in sites]
    outside = next((origin for origin in origins if origin.outside), None)
    if outside is not None:
        return facts.seed(outside)
    return facts.node(next(origin for origin in origins if not origin.came_so))


class _Origin:
    """Where the gradient of a site above the limit came from.

    Attributes:
        site: the site.
        parts: its uses inside of the model, with the node that makes each.
        received: what those nodes received, as measured.
        came_so: whether that exceeds the limit already.
        outside: whether the loss sent it.
    """

    def __init__(self, flow: GradientFlow, limit: Limit, site: Site) -> None:
        self.site = site
        nodes = {node.key: node for node in flow.nodes}
        by_node: dict[str, list[Site]] = {}
        for one in flow.sites:
            by_node.setdefault(one.key, []).append(one)
        uses: dict[str, list[Edge]] = {}
        for edge in flow.edges:
            uses.setdefault(edge.producer + edge.output_position, []).append(edge)
        here = [(edge, nodes[edge.consumer.key]) for edge in uses.get(site.id, ())]
        returned = any(node.op == "output" for _, node in here)
        self.parts = [(edge, node) for edge, node in here if node.op != "output"]
        self.received: list[Statistics] = []
        queue, seen = [node for _, node in self.parts], {node.key for _, node in self.parts}
        while queue:  # through nodes whose own gradient is not known
            outputs = by_node.get(queue.pop().key, [])
            known = [one.passed_on for one in outputs if one.passed_on is not None]
            self.received += known
            for edge in () if known else [edge for one in outputs for edge in uses.get(one.id, ())]:
                node = nodes[edge.consumer.key]
                returned = returned or node.op == "output"
                if node.op != "output" and node.key not in seen:
                    seen.add(node.key)
                    queue.append(node)
        self.came_so = any(map(limit.exceeded, self.received))
        within = [edge for edge, _ in self.parts if limit.exceeded(edge.statistics)]
        told = flow.event.sites == "edge" and not within and returned
        self.outside = not self.came_so and (not self.received or told)


@dataclass(frozen=True, slots=True)
class _Facts:
    """What a finding about a limit says, whoever is to blame."""

    flow: GradientFlow
    limit: Limit
    counts: Mapping[str, float]
    affected: tuple[str, ...]

    def seed(self, origin: _Origin) -> Finding:
        value = self._value(origin.site.statistics)
        return self._finding(
            "loss_seed", value, "when it enters the model: the loss sends it so",
            "Look at what multiplies the loss, at its reduction (sum or mean) and at the targets; no part of the model "
            "makes it so.",
        )  # fmt: skip

    def node(self, origin: _Origin) -> Finding:
        edge, node = max(origin.parts, key=lambda part: self._order(part[0].statistics))
        value = self._value(origin.site.statistics)
        others = {one.key for _, one in origin.parts} - {node.key}
        more = f" or another of its {len(others) + 1} uses (sites='edge' tells which)" if others else ""
        more = more if edge.statistics is None else ""
        source = f" ({node.source})" if node.source else ""
        received = [found for one in origin.received if (found := self.limit.value(one)) is not None]
        return self._finding(
            _RULES.get(self.limit.word, "exploding"), value,
            f"at {origin.site.id}, sent there by {node.key}{source}{more}, which received no such gradient",
            f"Look at the scale of what {node.key} computes with: weights, constants, the size of its inputs.",
            node=node, site=self._site_of(node), path=(node.key, origin.site.key),
            more={"received": max(received)} if received else {},
        )  # fmt: skip

    def parameter(self, over: list[ParameterRecord]) -> Finding:
        record = max(over, key=lambda record: self._order(record.statistics))
        return self._finding(
            _RULES.get(self.limit.word, "exploding"), self._value(record.statistics),
            f"at the parameter {record.name}, while no value between has such a gradient",
            "Look at how often the parameter is used, and at the size of what it is multiplied with.",
            parameter=record.name,
        )  # fmt: skip

    def _finding(self, rule: str, value: float, where: str, suggestion: str, **blame: Any) -> Finding:
        number = self.flow.event.backward
        word, most = self.limit.word, self.limit.most
        sites, parameters = int(self.counts["sites"]), int(self.counts["parameters"])
        message = (
            f"backward {number}: {word} of the gradient is {value:.3g}, above the limit of {most:g}, {where}; "
            f"{sites} site(s) and {parameters} parameter(s) exceed it"
        )
        evidence = {word: value, "limit": most, **self.counts, **blame.pop("more", {})}
        return Finding(
            rule, "error", message, suggestion, evidence=evidence, affected=self.affected, backward=number, docs=_PAGE,
            **blame,
        )  # fmt: skip

    def _value(self, statistics: Statistics | None) -> float:
        value = self.limit.value(statistics)
        return math.nan if value is None else value

    def _order(self, statistics: Statistics | None) -> float:
        """Larger values last, NaN behind all, what was not measured first."""
        value = self.limit.value(statistics)
        return -1.0 if value is None else math.inf if math.isnan(value) else value

    def _site_of(self, node: Node) -> str:
        return next((site.id for site in self.flow.sites if site.key == node.key), node.key)
