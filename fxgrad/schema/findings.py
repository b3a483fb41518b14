"""Findings: judgements over one flow or a series of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from fxgrad.presenting import presenter
from fxgrad.schema.lines import in_a_line
from fxgrad.schema.records import Node

if TYPE_CHECKING:
    from rich.console import Group

Severity = Literal["error", "warning", "info"]
_SEVERITIES = ("error", "warning", "info")
#: ``"exact"``: the measured facts allow no other reading.  ``"one step"``: judged by one forward and backward.
#: ``"several steps"``: judged by a series.
Confidence = Literal["exact", "one step", "several steps"]

#: The public names of the checks, each with what it says in a few words.
RULES: Mapping[str, str] = {
    "backward_failed": "the backward pass raised at this node",
    "nonfinite": "a finite gradient or value became NaN or Inf here",
    "vanishing": "the gradient loses many decades on its way through the model",
    "exploding": "the gradient gains many decades on its way through the model",
    "scale_break": "one operation multiplies the gradient by a factor out of all proportion",
    "dead": "units of an activation never fire",
    "zero": "a gradient that arrived is passed on as exact zeros",
    "cancelled": "the parts of a value's gradient cancel, so that nothing before it learns",
    "saturated": "an activation works at its flat end and passes next to nothing back",
    "starved": "one branch of a fan-out gets next to nothing of the gradient",
    "underflow": "gradients are too small for their dtype and become zero",
    "overflow_risk": "gradients or values come close to the largest number of their dtype",
    "spike": "a step's gradient stands out of its own history",
    "detached": "parameters get no gradient since an operation cuts it off",
    "frozen": "parameters do not require a gradient",
    "unused": "parameters take no part in the forward pass",
    "unregistered": "parameters get a gradient, but no registered module has them",
    "update_size": "a step moved a parameter by too much or too little",
    "optimizer_epsilon": "gradients are so small that the optimizer's epsilon swallows them",
    "optimizer_misses": "parameters with gradients are in no group of the optimizer",
    "optimizer_idle": "the optimizer moves nothing",
    "zero_grad_missing": "gradients are never cleared between steps",
    "update_lost": "steps are too small for the dtype of the parameters and get lost",
    "weight_decay": "weight decay eats the weights",
    "double_activation": "an activation is applied twice, as by softmax in front of cross_entropy",
    "target_range": "targets are far from what the outputs reach",
    "loss_seed": "the gradient was out of range already when it entered the model",
    "symmetry": "all units of a layer get the same gradient",
}


@in_a_line("rule", "severity", "place", "source")
@dataclass(frozen=True, slots=True)
class Finding:
    """One judgement.

    Attributes:
        rule: a word of ``RULES``, or the name of a check of the user's own.
        severity: ``"error"``: training cannot work; ``"warning"``: act; ``"info"``: good to know, no fault.
        message: what was measured, then the likely cause; one line.
        suggestion: what to try, in one or two sentences.
        node: the node to blame, None where the fault lies outside the model (loss, optimizer, data) or at a parameter.
        site: ``Site.id`` at that node, or its key where it returned no site.
        parameter: full name of the parameter to blame, if it is one.
        evidence: the numbers behind it, by name.
        confidence: see ``Confidence``.
        path: node keys from the culprit on, along what it did to values or gradients.
        affected: full names of the parameters whose gradient it changes or takes away.
        units: dead or otherwise guilty units, ascending.
        consequences: findings that this one explains.
        backward: number of the backward event that it is about.
        docs: the check's page, below ``docs/``; ``fxgrad explain RULE`` prints it.
        ranks: of a reduced flow, the ranks that it is about; empty where that is all of them or cannot be told.
    """

    rule: str
    severity: Severity
    message: str
    suggestion: str
    node: Node | None = None
    site: str | None = None
    parameter: str | None = None
    evidence: Mapping[str, float] = field(default_factory=dict, hash=False)
    confidence: Confidence = "one step"
    path: tuple[str, ...] = ()
    affected: tuple[str, ...] = ()
    units: tuple[int, ...] = ()
    consequences: tuple[Finding, ...] = ()
    backward: int | None = None
    docs: str | None = None
    ranks: tuple[int, ...] = ()

    @property
    def source(self) -> str | None:
        """``file:line`` of the user's code that is to blame; None where unknown."""
        return None if self.node is None else self.node.source

    @property
    def place(self) -> str:
        """Who is to blame, in a word: the site or node, else the parameter, else ``"outside the model"``."""
        return self.site or (self.node.key if self.node is not None else self.parameter) or "outside the model"

    @property
    def explained(self) -> Iterator[Finding]:
        """Its consequences, theirs, and so on."""
        for finding in self.consequences:
            yield finding
            yield from finding.explained

    def __str__(self) -> str:
        """One line: severity, check, place, source line and message."""
        return presenter().finding_line(self)


@in_a_line("rule", "reason")
@dataclass(frozen=True, slots=True)
class NotChecked:
    """A check that could not be judged, and what it lacks.

    ``give``: the option that the user could have given, such as ``"forward=True"``; None where there is none.  Printed
    findings tell of those with one only.  Empty where the check itself failed, which they tell as well.
    """

    rule: str
    reason: str
    give: str | None = None


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What the checks say of a flow, or of a series of flows.

    Attributes:
        findings: ranked: what is to be mended first comes first; consequences are inside of their cause.
        not_checked: the checks that lack a statistic.
        rules: names of all checks that were asked.
    """

    findings: tuple[Finding, ...]
    not_checked: tuple[NotChecked, ...] = ()
    rules: tuple[str, ...] = tuple(RULES)

    @property
    def healthy(self) -> bool:
        """Whether there is neither an error nor a warning."""
        return all(finding.severity == "info" for finding in self.findings)

    @property
    def checked(self) -> tuple[str, ...]:
        """The checks that were asked and did not lack anything."""
        lacking = {one.rule for one in self.not_checked}
        return tuple(rule for rule in self.rules if rule not in lacking)

    def __repr__(self) -> str:
        """How many findings there are, and how much was checked."""
        counts = ", ".join(f"{sum(f.severity == word for f in self.findings)} {word}" for word in _SEVERITIES)
        return f"Diagnosis({counts}; {len(self.checked)} of {len(self.rules)} checks ran)"

    def __str__(self) -> str:
        """The ranked findings, and what was not checked, as plain text."""
        return presenter().findings_text(self)

    def __rich__(self) -> Group:
        """The same for rich, which colours the severities and wraps the lines."""
        return presenter().findings_rich(self)

    def _repr_html_(self) -> str:
        """The same for a notebook."""
        return presenter().findings_html(self)
