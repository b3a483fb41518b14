"""Runs the checks over a flow or a series of flows, joins consequences to their cause, and ranks what is left."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from fxgrad.diagnosis import (
    always_zero,
    cancelled,
    dead,
    local,
    losses,
    missing,
    optimizers,
    origin,
    paths,
    precision,
    spikes,
    steps,
    unregistered,
    updates,
    zeros,
)
from fxgrad.diagnosis.backward_failed import backward_failed
from fxgrad.diagnosis.causality import joined
from fxgrad.diagnosis.check import Check, Evidence, LackingError
from fxgrad.diagnosis.ranks import with_ranks
from fxgrad.diagnosis.ruin import before_the_ruin
from fxgrad.diagnosis.thresholds import Thresholds
from fxgrad.diagnosis.view import FlowView
from fxgrad.errors import OptionError
from fxgrad.schema import Diagnosis, Finding, GradientFlow, History, NotChecked

#: The checks that ``diagnose`` runs, in the order in which they are asked.
DEFAULT_CHECKS = (
    Check("backward_failed", backward_failed),
    Check("nonfinite", origin.nonfinite),
    Check("optimizer_misses", optimizers.optimizer_misses),
    Check("optimizer_idle", optimizers.optimizer_idle),
    Check("zero_grad_missing", optimizers.zero_grad_missing),
    Check("weight_decay", updates.weight_decay),
    Check("update_size", updates.update_size),
    Check("detached", missing.detached),
    Check("underflow", precision.underflow),
    Check("double_activation", losses.double_activation),
    Check("target_range", losses.target_range),
    Check("scale_break", local.scale_break),
    Check("dead", dead.dead),
    Check("zero", zeros.zero),
    Check("cancelled", cancelled.cancelled),
    Check("saturated", local.saturated),
    Check("vanishing", paths.vanishing),
    Check("exploding", paths.exploding),
    Check("spike", spikes.spike),
    Check("update_lost", updates.update_lost),
    Check("optimizer_epsilon", updates.optimizer_epsilon),
    Check("unused", missing.unused),
    Check("unregistered", unregistered.unregistered),
    Check("starved", local.starved),
    Check("symmetry", steps.symmetry),
    Check("loss_seed", steps.loss_seed),
    Check("overflow_risk", precision.overflow_risk),
    Check("frozen", missing.frozen),
)
_SEVERITIES = {"error": 0, "warning": 1, "info": 2}


def diagnose(
    flows: GradientFlow | Sequence[GradientFlow], thresholds: Thresholds | None = None, *,
    checks: Sequence[Check] = DEFAULT_CHECKS,
) -> Diagnosis:  # fmt: skip
    """What the checks say of one flow, or of a series of flows of one model.

    Args:
        flows: one flow, judged by itself ("one step"), or a series of them, oldest first.  A series of fewer than
            ``thresholds.steps`` flows is judged by its last flow, except for what is non-finite in any of them.
        thresholds: what the checks compare with; None for the defaults.
        checks: the checks to run, e.g. ``(*DEFAULT_CHECKS, Check("mine", check))``, where ``check(evidence)`` gives
            findings.

    Returns:
        The findings, those that another explains inside of it, and the checks that lack a statistic.

    Raises:
        OptionError: an empty series, flows of different models, what holds no flows, no ``Thresholds``, or no checks.
    """
    given = _given_checks(checks)
    if isinstance(flows, History) and flows.unreached is not None:
        return _unreached(flows.unreached, given)
    series = _checked_series(flows)
    if thresholds is not None and not isinstance(thresholds, Thresholds):
        message = f"thresholds= takes fxgrad.Thresholds(name=value, ...), but got {type(thresholds).__name__}"
        raise OptionError(message)
    views = [FlowView(flow) for flow in series if flow.event.failed is None]
    failed = [FlowView(flow) for flow in series if flow.event.failed is not None]
    evidence = Evidence(views, thresholds or Thresholds(), failed)
    if not views:
        return _only_failed(evidence, given)
    found: list[Finding] = []
    lacking: list[NotChecked] = []
    for check in given:
        try:
            found += _findings_of(check, evidence)
        except LackingError as error:
            lacking.append(NotChecked(check.name, str(error), error.give))
        except Exception as error:  # noqa: BLE001  # a fault in a check must not take the picture with it
            lacking.append(NotChecked(check.name, f"the check raised {type(error).__name__}: {error}", give=""))
    if any(check.name == "update_size" for check in given):
        found += before_the_ruin(evidence, found)
    if any(check.name == "zero" for check in given):
        if all(finding.severity == "info" for finding in found):
            found += zeros.nothing_learnt(evidence)
        found = always_zero.completed(evidence, found)
    order = {check.name: number for number, check in enumerate(given)}
    told = with_ranks(evidence, joined(evidence, found))
    ranked = sorted(told, key=lambda f: (_SEVERITIES[f.severity], order.get(f.rule, len(order))))
    return Diagnosis(tuple(ranked), tuple(lacking), tuple(check.name for check in given))


def _only_failed(evidence: Evidence, given: Sequence[Check]) -> Diagnosis:
    """No backward pass ended: what was not reached says nothing, so that no other check is asked."""
    own = [check for check in given if check.check is backward_failed]
    others = tuple(NotChecked(check.name, "the backward pass raised") for check in given if check not in own)
    found = tuple(finding for check in own for finding in _findings_of(check, evidence))
    return Diagnosis(found, others, tuple(check.name for check in given))


def _unreached(why: str, given: Sequence[Check]) -> Diagnosis:
    """No backward pass came to the model, though the optimizer was stepped."""
    asked = tuple(check.name for check in given)
    found = (missing.unreached(why),) if "detached" in asked else ()
    others = tuple(NotChecked(name, "no backward pass came to the model") for name in asked if name != "detached")
    return Diagnosis(found, others, asked)


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


def _given_checks(checks: Any) -> tuple[Check, ...]:
    found = tuple(checks) if isinstance(checks, Iterable) else (checks,)
    for check in found:
        if not isinstance(check, Check):
            message = f"checks= takes a series of fxgrad.diagnosis.Check(name, check), but got {type(check).__name__}"
            raise OptionError(message)
    return found


def _findings_of(check: Check, evidence: Evidence) -> Iterator[Finding]:
    """What a check says, once that is seen to be findings: a check of the user's own may give anything."""
    for finding in check.check(evidence):
        if not isinstance(finding, Finding):
            message = f"a check gives findings, and no {type(finding).__name__}"
            raise TypeError(message)
        if finding.severity not in _SEVERITIES:
            message = f"the severity of a finding is one of {', '.join(_SEVERITIES)}, and not {finding.severity!r}"
            raise ValueError(message)
        yield finding


__all__ = ["DEFAULT_CHECKS", "diagnose"]
