"""What a check is: a name and a function over flows; and what it says where it lacks a statistic."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from fxgrad.diagnosis.thresholds import Thresholds
from fxgrad.diagnosis.view import FlowView
from fxgrad.schema import Confidence, Finding, Node, Severity


class LackingError(Exception):
    """A check cannot be judged; the message says what it lacks.

    ``give``: the option that the user could have given, such as ``"forward=True"``; None where there is none.
    """

    def __init__(self, message: str, *, give: str | None = None) -> None:
        super().__init__(message)
        self.give = give


@dataclass(frozen=True, slots=True)
class Evidence:
    """What checks look at.

    Attributes:
        views: the flows, oldest first.
        thresholds: what they compare with.
        failed: the flows whose backward pass raised, oldest first; they are not among ``views``.
    """

    views: Sequence[FlowView]
    thresholds: Thresholds
    failed: Sequence[FlowView] = ()

    @property
    def view(self) -> FlowView:
        """The latest flow."""
        return self.views[-1]

    @property
    def several(self) -> bool:
        """Whether there are steps enough for the history form of a check."""
        return len(self.views) >= self.thresholds.steps

    @property
    def recent(self) -> Sequence[FlowView]:
        """The flows that the history form looks at: the latest ones; of a short series the last only."""
        return self.views[-self.thresholds.steps :] if self.several else self.views[-1:]

    def at_most(self, severity: Severity) -> Severity:
        """The severity that exact zeros deserve here: information in a backward pass through a gradient.

        What enters a gradient penalty linearly has no second derivative.
        """
        return "info" if self.view.flow.event.differentiated else severity

    @property
    def confidence(self) -> Confidence:
        """How sure a judgement over ``recent`` can be."""
        return "several steps" if self.several else "one step"

    def need_values(self) -> None:
        """Raise where no forward statistics were taken.

        Raises:
            LackingError: the flow has none.
        """
        if not self.view.flow.event.values:
            message = "forward statistics were not taken (forward=True)"
            raise LackingError(message, give="forward=True")

    def need_parts(self, kinds: Collection[str]) -> None:
        """Raise where nodes of these kinds take values with several uses, and the parts were not measured.

        To be called last: what was found before stands.

        Raises:
            LackingError: some of them cannot be judged.
        """
        view = self.view
        if view.flow.event.sites == "edge":
            return
        known = (n.key for n in view.flow.nodes if view.kinds[n.key] in kinds and view.received(n.key))
        unknown = [key for key in known if view.gain(key) is None and any(map(view.shared, view.takes[key]))]
        if unknown:
            message = (
                f"{len(unknown)} operations take values with several uses, whose parts were not measured (sites='edge')"
            )
            raise LackingError(message, give="sites='edge'")

    def need_counts(self) -> None:
        """Raise where gradients were not counted.

        Raises:
            LackingError: the level is ``norm``.
        """
        if self.view.flow.event.level == "norm":
            message = "counts of entries need statistics='full'"
            raise LackingError(message, give="statistics='full'")


@dataclass(frozen=True, slots=True)
class Check:
    """A check: gives its findings over the evidence, or raises ``LackingError``."""

    name: str
    check: Callable[[Evidence], Iterable[Finding]]


@dataclass(slots=True)
class Draft:
    """A finding in the making: facts that most checks fill the same way."""

    evidence: Evidence
    rule: str
    severity: Severity
    message: str
    suggestion: str
    numbers: dict[str, float] = field(default_factory=dict)

    def at(self, node: Node | None, *, view: FlowView | None = None, **more: Any) -> Finding:
        """The finding at a node, or outside of the model."""
        view = view or self.evidence.view
        site = None
        if node is not None:
            sites = view.sites[node.key]
            site = sites[0].id if sites else node.key
        more.setdefault("confidence", self.evidence.confidence)
        return Finding(
            rule=self.rule, severity=self.severity, message=self.message, suggestion=self.suggestion, node=node,
            site=site, evidence=self.numbers, backward=view.flow.event.backward,
            docs=f"findings/{self.rule}.md", **more,
        )  # fmt: skip


def number(value: float) -> str:
    """A number as messages show it."""
    return f"{value:.3g}"


def listed(names: Sequence[str], limit: int = 3) -> str:
    """A few of the names, and how many there are more."""
    shown = ", ".join(names[:limit])
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit} more"
