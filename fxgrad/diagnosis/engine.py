"""Runs the rules over a flow or a series of flows, joins consequences to their cause, and ranks what is left."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from fxgrad.diagnosis import dead, local, missing, origin, paths, precision, steps, zeros
from fxgrad.diagnosis.causality import joined
from fxgrad.diagnosis.rule import Evidence, LackingError, Rule
from fxgrad.diagnosis.thresholds import Thresholds
from fxgrad.diagnosis.view import FlowView
from fxgrad.errors import OptionError
from fxgrad.schema import Diagnosis, Finding, GradientFlow, NotChecked

#: The rules that ``diagnose`` runs, in the order in which they are asked.
DEFAULT_RULES = (
    Rule("nonfinite", origin.nonfinite),
    Rule("update_size", steps.update_size),
    Rule("detached", missing.detached),
    Rule("underflow", precision.underflow),
    Rule("scale_break", local.scale_break),
    Rule("dead", dead.dead),
    Rule("zero", zeros.zero),
    Rule("saturated", local.saturated),
    Rule("vanishing", paths.vanishing),
    Rule("exploding", paths.exploding),
    Rule("spike", steps.spike),
    Rule("optimizer_epsilon", steps.optimizer_epsilon),
    Rule("unused", missing.unused),
    Rule("starved", local.starved),
    Rule("symmetry", steps.symmetry),
    Rule("loss_seed", steps.loss_seed),
    Rule("overflow_risk", precision.overflow_risk),
    Rule("frozen", missing.frozen),
)
_SEVERITIES = {"error": 0, "warning": 1, "info": 2}


def diagnose(
    flows: GradientFlow | Sequence[GradientFlow], thresholds: Thresholds | None = None, *,
    rules: Sequence[Rule] = DEFAULT_RULES,
) -> Diagnosis:  # fmt: skip
    """What the rules say of one flow, or of a series of flows of one model.

    Args:
        flows: one flow, judged by itself ("one step"), or a series of them, oldest first.  A series of fewer than
            ``thresholds.steps`` flows is judged by its last flow, except for what is non-finite in any of them.
        thresholds: what the rules compare with; None for the defaults.
        rules: the rules to run, e.g. ``(*DEFAULT_RULES, Rule("mine", check))``, where ``check(evidence)`` gives
            findings.

    Returns:
        The findings, those that another explains inside of it, and the rules that lack a statistic.

    Raises:
        OptionError: an empty series, flows of different models, what holds no flows, no ``Thresholds``, or no rules.
    """
    series = _checked_series(flows)
    rules = _checked_rules(rules)
    if thresholds is not None and not isinstance(thresholds, Thresholds):
        message = f"thresholds= takes fxgrad.Thresholds(name=value, ...), but got {type(thresholds).__name__}"
        raise OptionError(message)
    evidence = Evidence([FlowView(flow) for flow in series], thresholds or Thresholds())
    found: list[Finding] = []
    lacking: list[NotChecked] = []
    for rule in rules:
        try:
            found += _findings_of(rule, evidence)
        except LackingError as error:
            lacking.append(NotChecked(rule.name, str(error)))
        except Exception as error:  # noqa: BLE001  # a fault in a rule must not take the picture with it
            lacking.append(NotChecked(rule.name, f"the rule raised {type(error).__name__}: {error}"))
    if any(rule.name == "zero" for rule in rules) and all(finding.severity == "info" for finding in found):
        found += zeros.nothing_learnt(evidence)
    order = {rule.name: number for number, rule in enumerate(rules)}
    ranked = sorted(joined(evidence, found), key=lambda f: (_SEVERITIES[f.severity], order.get(f.rule, len(order))))
    return Diagnosis(tuple(ranked), tuple(lacking), tuple(rule.name for rule in rules))


def _checked_series(flows: Any) -> tuple[GradientFlow, ...]:
    if isinstance(flows, GradientFlow):
        return (flows,)
    series = tuple(flows) if isinstance(flows, Iterable) else (flows,)
    if not series or not all(isinstance(flow, GradientFlow) for flow in series):
        kinds = ", ".join(sorted({type(flow).__name__ for flow in series})) or "nothing"
        message = f"diagnose wants a GradientFlow or a series of them, such as watch.history, but was given {kinds}"
        raise OptionError(message)
    models = list(dict.fromkeys(flow.capture.model for flow in series))
    if len(models) > 1:
        message = f"diagnose wants a series of one model, but was given flows of {', '.join(models)}: judge each alone"
        raise OptionError(message)
    return series


def _checked_rules(rules: Any) -> tuple[Rule, ...]:
    found = tuple(rules) if isinstance(rules, Iterable) else (rules,)
    for rule in found:
        if not isinstance(rule, Rule):
            message = f"rules= takes a series of fxgrad.diagnosis.Rule(name, check), but got {type(rule).__name__}"
            raise OptionError(message)
    return found


def _findings_of(rule: Rule, evidence: Evidence) -> Iterator[Finding]:
    """What a rule says, once that is seen to be findings: a rule of the user's own may give anything."""
    for finding in rule.check(evidence):
        if not isinstance(finding, Finding):
            message = f"a rule gives findings, and no {type(finding).__name__}"
            raise TypeError(message)
        if finding.severity not in _SEVERITIES:
            message = f"the severity of a finding is one of {', '.join(_SEVERITIES)}, and not {finding.severity!r}"
            raise ValueError(message)
        yield finding


__all__ = ["DEFAULT_RULES", "diagnose"]
