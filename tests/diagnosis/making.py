"""Flows made by hand for the rules, without torch: a chain of nodes from the input to the output."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from fxgrad.diagnosis import DEFAULT_CHECKS, Thresholds, diagnose
from fxgrad.schema import (
    Activity,
    CaptureReport,
    Constant,
    Consumer,
    Edge,
    EventInfo,
    Finding,
    GradientFlow,
    Node,
    ParameterRecord,
    Site,
    Statistics,
)


def of_entries(entries: Sequence[float]) -> Statistics:
    """Statistics of level ``full`` of these numbers, counted the naive way."""
    finite = [x for x in entries if math.isfinite(x)]
    sizes = [abs(x) for x in finite]
    return Statistics(
        "full", len(entries), math.hypot(*finite), max(sizes, default=0.0),
        min((s for s in sizes if s), default=None), math.fsum(finite), math.fsum(sizes),
        sum(map(math.isnan, entries)), sum(map(math.isinf, entries)), sizes.count(0.0), 0, 0, 0,
    )  # fmt: skip


def gradient(norm: float, numel: int = 16, **counts: int) -> Statistics:
    """Statistics of level ``full`` with this l2 norm, all entries alike."""
    made = of_entries([norm / math.sqrt(numel)] * numel)
    return replace(made, l2_norm=norm, **counts)  # type: ignore[arg-type]


def norm_only(norm: float, numel: int = 16) -> Statistics:
    """Statistics of level ``norm``."""
    return Statistics("norm", numel, norm)


@dataclass(frozen=True)
class Link:
    """A node of a chain: what its output got, and what it was."""

    key: str
    got: Statistics | None
    kind: str = "Linear"
    value: Statistics | None = None
    activity: Activity | None = None
    parameters: tuple[str, ...] = ()
    constants: tuple[Constant, ...] = ()
    dtype: str = "float32"

    @property
    def node(self) -> Node:
        """A module where the key is a path, a function where it has a slash."""
        op = "call_function" if "/" in self.key else "call_module"
        kind = "Net" if "/" in self.key else self.kind
        return Node(self.key, self.key, op, self.key, self.key, kind, 0, f"net.py:{len(self.key)}",
                    self.constants, self.parameters)  # fmt: skip


@dataclass(frozen=True)
class Setting:
    """What belongs to a flow as a whole."""

    level: Any = "full"
    sites: Any = "edge"
    values: bool = True
    backward: int = 0
    more: dict[str, Any] = field(default_factory=dict)


def parameter(
    name: str, got: float | Statistics | None, *, shape: tuple[int, ...] = (4, 4), rms: float | None = 0.5, **more: Any
) -> ParameterRecord:
    """A trained parameter whose entries are half positive, half negative, of this rms."""
    statistics = gradient(got) if isinstance(got, float) else got
    numel = math.prod(shape)
    value = None if rms is None else of_entries([rms, -rms] * (numel // 2))
    given: dict[str, Any] = {"requires_grad": True, "value": value, **more}
    return ParameterRecord(name, shape, "float32", "cpu", statistics=statistics, **given)


def chain(
    *links: Link, parameters: Sequence[ParameterRecord] = (), setting: Setting | None = None, first: Link | None = None
) -> GradientFlow:
    """``links`` in forward order between an input and the output."""
    setting = setting or Setting()
    given = first or Link("input:x", None, value=of_entries([1.0, -1.0] * 8))
    start = Node(given.key, "x", "placeholder", "x", "", "Net", 0, None)
    nodes = [start, *(link.node for link in links), Node("output", "output", "output", "output", "", "Net", 0, None)]
    sites = [
        Site(node, "", (4, 4), link.dtype, "cpu", link.got, value=link.value, activity=link.activity)
        for node, link in zip(nodes, (given, *links), strict=False)
    ]
    edges = [Edge(one.key, "", Consumer(two.key, "args[0]")) for one, two in itertools.pairwise(nodes)]
    event = EventInfo(setting.backward, setting.backward, "mse", setting.level, setting.sites, setting.values)
    return GradientFlow(
        tuple(nodes), tuple(sites), tuple(edges), tuple(parameters), (),
        CaptureReport("eager", "asked for", "Net", True, "2.14.1"), replace(event, **setting.more),
    )  # fmt: skip


def linears(levels: Sequence[float], *, rms: float = 0.5, setting: Setting | None = None) -> GradientFlow:
    """Linear layers whose outputs got gradients of these l2 norms, the last nearest to the loss."""
    links = [Link(f"fc{n}", gradient(level), value=of_entries([1.0, -1.0] * 8), parameters=(f"fc{n}.weight",))
             for n, level in enumerate(levels)]  # fmt: skip
    records = [parameter(f"fc{n}.weight", level, rms=rms) for n, level in enumerate(levels)]
    return chain(*links, parameters=records, setting=setting)


def found(
    flows: GradientFlow | Sequence[GradientFlow], rule: str, thresholds: Thresholds | None = None
) -> tuple[Finding, ...]:
    """What one of the default rules finds by itself; it must have been checked."""
    diagnosis = diagnose(flows, thresholds, checks=[one for one in DEFAULT_CHECKS if one.name == rule])
    assert not diagnosis.not_checked
    return diagnosis.findings


def lacking(flows: GradientFlow | Sequence[GradientFlow]) -> dict[str, str]:
    """The rules that were not checked, with what they lack."""
    return {one.rule: one.reason for one in diagnose(flows).not_checked}
