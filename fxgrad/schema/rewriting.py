"""What rewrite rules did: the report of a rewrite."""

from __future__ import annotations

from dataclasses import dataclass

from fxgrad.schema.flow import CaptureReport
from fxgrad.schema.lines import in_a_line


@in_a_line("rule", "place", "ran", "fired", "changed")
@dataclass(frozen=True, slots=True)
class RuleRecord:
    """What one rule did at one place since the rewrite began.

    Attributes:
        rule: its name.
        place: id of the site, or name of the parameter, layer or group.
        ran: how often the rule ran there.
        fired: how often it changed at least one entry; None without ``audit="full"``.
        changed: how many entries it changed, over all runs (NaN to NaN is no change); None without ``audit="full"``.
        norm_before, norm_after: l2 norm (joint for a layer or group) before and after the rule, at its latest run;
            None without ``audit="full"`` or where it never ran.
    """

    rule: str
    place: str
    ran: int
    fired: int | None = None
    changed: int | None = None
    norm_before: float | None = None
    norm_after: float | None = None


@in_a_line("rule", "place", "reason")
@dataclass(frozen=True, slots=True)
class NotRewritten:
    """A place that a rule selects but cannot act on, and why."""

    rule: str
    place: str
    reason: str


@dataclass(frozen=True, slots=True)
class RewriteReport:
    """What all rules of a rewrite did.

    Attributes:
        step: steps that the model's optimizer has taken since the rewrite began.
        records: one per rule and place, in the order of the rules; places that a rule selects but that no gradient has
            come to yet have ``ran`` 0.
        not_rewritten: where rules cannot act.
        capture: which recorder ran the latest forward call that had rules at nodes or edges, and why; None before one.
    """

    step: int
    records: tuple[RuleRecord, ...]
    not_rewritten: tuple[NotRewritten, ...] = ()
    capture: CaptureReport | None = None

    def of(self, rule: str) -> tuple[RuleRecord, ...]:
        """The records of one rule."""
        return tuple(record for record in self.records if record.rule == rule)

    def __repr__(self) -> str:
        """The step, and how many rules stand at how many places."""
        rules = len({record.rule for record in self.records})
        return f"RewriteReport(step {self.step}: {rules} rules at {len(self.records)} places)"

    def __str__(self) -> str:
        """A line per rule and place."""
        lines = [f"step {self.step}"]
        for record in self.records:
            line = f"{record.rule} at {record.place or '(model)'}: ran {record.ran}"
            if record.fired is not None:
                line += f", fired {record.fired}, changed {record.changed} entries"
            if record.norm_before is not None and record.norm_after is not None:
                line += f", l2_norm {record.norm_before:.3g} -> {record.norm_after:.3g}"
            lines.append(line)
        lines += [f"{one.rule} at {one.place}: not rewritten: {one.reason}" for one in self.not_rewritten]
        return "\n".join(lines)
