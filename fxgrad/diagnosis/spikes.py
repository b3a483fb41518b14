"""Spikes: a step whose gradient stands out of its own history, and whether it is the batch that does it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median

from fxgrad.diagnosis.check import Draft, Evidence, LackingError, number
from fxgrad.diagnosis.precision import seeds_of
from fxgrad.diagnosis.updates import first_ruin
from fxgrad.diagnosis.view import FlowView, total_norm
from fxgrad.schema import Finding, Node, Severity, Site

_WINDOW = 100  # flows that a spike is compared with
_MAD = 1.4826  # makes the median absolute deviation a standard deviation for normal noise
_USUAL = 20  # steps over which the size of updates is judged
_FEW = 3  # flows that are history enough where the step behind the spike has done harm
_SUDDEN = 10.0  # times the median of them, and of the flow before, that the gradient must then be
_AS_USUAL = 2.0  # times their median that the outputs may be where the labels are what is odd


@dataclass(frozen=True, slots=True)
class _Spike:
    """Where a spike is, log of the gradient over its median, and that in robust deviations."""

    at: int
    rise: float
    score: float


@dataclass(frozen=True, slots=True)
class _Odd:
    """What is out of the usual in the batch of a spike, and by which factor."""

    words: str
    factor: float


def spike(evidence: Evidence) -> Iterator[Finding]:
    """Score z = (log g - median) / (1.4826 MAD) over the flows before, and g over their median.

    A batch that is odd, and whose step did harm, is one by ``_SUDDEN`` times the median of any history.

    Source: spike score of OLMo 2 (7 sigma), with robust estimates.  False alarms: a change of learning rate or data.
    """
    ruin = first_ruin(evidence)
    logs = [math.log(n) if (n := total_norm(view)) is not None else None for view in evidence.views]
    found = _standing_out(evidence, logs, len(logs) if ruin is None else ruin + 1)
    if found is None and ruin is not None:
        found = _before_ruin(evidence, logs, ruin)
    if found is not None:
        yield _finding(evidence, found)
    elif len(evidence.views) <= evidence.thresholds.spike_steps:
        message = f"a spike needs a series of more than {evidence.thresholds.spike_steps} flows"
        raise LackingError(message)


def _standing_out(evidence: Evidence, logs: Sequence[float | None], end: int) -> _Spike | None:
    """The highest spike before ``end``: what comes behind a ruinous step is its consequence."""
    limits = evidence.thresholds
    found: list[_Spike] = []
    for at in range(limits.spike_steps, end):
        here = logs[at]
        before = [v for v in logs[max(0, at - _WINDOW) : at] if v is not None]
        if here is None or len(before) < limits.spike_steps:
            continue
        middle = median(before)
        spread = _MAD * median(abs(v - middle) for v in before)
        one = _Spike(at, here - middle, (here - middle) / max(spread, 1e-3))
        sudden = here - max(before[-1], median(before[-limits.steps :]))  # a trend is no spike
        if one.score > limits.spike_sigma and min(one.rise, sudden) > math.log(limits.spike_factor):
            found.append(one)
    return max(found, key=lambda one: one.rise, default=None)


def _before_ruin(evidence: Evidence, logs: Sequence[float | None], at: int) -> _Spike | None:
    """The flow in front of a step that did harm, where its gradient came out of the blue and its batch is odd."""
    here, before = logs[at], [v for v in logs[:at] if v is not None]
    if here is None or len(before) < _FEW or logs[at - 1] is None:
        return None
    middle = max(median(before), before[-1])
    if here - middle < math.log(_SUDDEN) or _odd(evidence, at) is None:
        return None
    spread = _MAD * median(abs(v - median(before)) for v in before)
    return _Spike(at, here - median(before), (here - median(before)) / max(spread, 1e-3))


# ---- why -----------------------------------------------------------------------------------------------------------


def same_inputs(before: FlowView, view: FlowView) -> bool:
    """Whether the model was given the same values in two steps, as far as their statistics tell."""
    given = [[site.value for n in v.flow.nodes if n.op == "placeholder" for site in v.sites[n.key]]
             for v in (before, view)]  # fmt: skip
    return bool(given[0]) and all(value is not None for value in given[0]) and given[0] == given[1]


def _below_first(evidence: Evidence, at: int) -> bool:
    """Whether the gradient is smaller than in the first flow all the same: a fit that swings around its end."""
    first, now = total_norm(evidence.views[0]), total_norm(evidence.views[at])
    return first is not None and now is not None and now < first


def _odd(evidence: Evidence, at: int) -> _Odd | None:
    """An input that is much larger than before; or outputs as before, and a gradient at them as it never was."""
    if same_inputs(evidence.views[at - 1], evidence.views[at]):
        return None
    view, before = evidence.views[at], evidence.views[max(0, at - _USUAL) : at]
    limit = evidence.thresholds.spike_factor
    for node in view.flow.nodes:
        for site in view.sites[node.key] if node.op == "placeholder" else ():
            times = _times([_value(v, site) for v in (*before, view)])
            if times is not None and times > limit:
                now = site.value.rms if site.value is not None else 0.0
                words = f"the input {node.target} has rms {number(now)}, {number(times)} times what is usual"
                return _Odd(words, times)
    for site in seeds_of(view):
        came = _over_all([_gradient(v, site) for v in evidence.views[: at + 1]])
        gave = _times([_value(v, site) for v in (*before, view)])
        if came is not None and gave is not None and came > limit and gave < _AS_USUAL:
            words = f"the outputs are as usual, and the loss sends back {number(came)} times what it ever did"
            return _Odd(f"{words}: look at the labels", came)
    return None


def _times(sizes: Sequence[float | None]) -> float | None:
    """The last of these over the median of the others; None where it is unknown."""
    now, before = sizes[-1], [size for size in sizes[:-1] if size is not None]
    if now is None or not before or not median(before) > 0:
        return None
    return now / median(before)


def _over_all(sizes: Sequence[float | None]) -> float | None:
    """The last of these over the largest of the others: at the end of a fit the median is no measure."""
    now, most = sizes[-1], max((size for size in sizes[:-1] if size is not None), default=0.0)
    return now / most if now is not None and most > 0 else None


def _value(view: FlowView, site: Site) -> float | None:
    one = view.by_id.get(site.id)
    return one.value.rms if one is not None and one.value is not None and not one.value.nonfinite else None


def _gradient(view: FlowView, site: Site) -> float | None:
    one = view.by_id.get(site.id)
    if one is None or one.statistics is None or one.statistics.nonfinite:
        return None
    return one.statistics.rms / (view.flow.event.loss_scale or 1.0)


def _jumps(evidence: Evidence, at: int) -> list[tuple[float, Node]]:
    """The nodes whose gain rose as well, and by how much."""
    view, before = evidence.views[at], evidence.views[max(0, at - _USUAL) : at]
    found = []
    for node in view.flow.nodes:
        times = _times([v.gain(node.key) if node.key in v.nodes else None for v in (*before, view)])
        if times is not None and times > evidence.thresholds.spike_factor:
            found.append((times, node))
    return found


def _finding(evidence: Evidence, found: _Spike) -> Finding:
    at, view = found.at, evidence.views[found.at]
    odd, jumps = _odd(evidence, at), _jumps(evidence, at)
    factor = math.exp(found.rise)
    node: Node | None = None
    message = (
        f"in backward {view.flow.event.backward} the gradient was {number(factor)} times its median "
        f"(z = {found.score:.0f})"
    )
    numbers = {"factor": factor, "z": found.score}
    mend = "clip the gradient norm, skip or look at this batch, lower the learning rate or warm up longer"
    severity: Severity = "warning"
    if odd is not None:
        numbers["batch_factor"] = odd.factor
        message += f"; it is the batch: {odd.words}"
        mend = "look at this batch (outliers, no normalisation, wrong labels) and skip it; clip the gradient norm"
    elif jumps:
        jump, node = max(jumps, key=lambda item: item[0])
        message += f"; the gain of {view.source_words(node.key)} rose {number(jump)} times"
        numbers["gain_factor"] = jump
    elif same_inputs(evidence.views[at - 1], view):
        message += "; the inputs are those of the step before: it is the steps that overshoot, or the targets changed"
        mend = "lower the learning rate or clip the gradient norm; with Adam, a smaller beta2 follows faster"
        severity = "info" if _below_first(evidence, at) else "warning"
    else:
        message += "; no operation changed its gain: suspect the batch, the labels or the loss"
    draft = Draft(evidence, "spike", severity, message, mend, numbers)
    return draft.at(node, view=view, confidence="several steps")


__all__ = ["spike"]
